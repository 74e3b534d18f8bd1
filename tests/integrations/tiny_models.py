"""Random models of a few layers, one for each kind of attention, written as ordinary model directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

VOCABULARY = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention decides which token comes next
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **changes})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama_gqa": llama,
    "llama_mqa": lambda: llama(num_key_value_heads=1, head_dim=64),
    "llama_d128": lambda: llama(num_attention_heads=2, num_key_value_heads=1, head_dim=128),
    "llama_d256": lambda: llama(num_attention_heads=2, num_key_value_heads=2, head_dim=256),
    "llama_d40": lambda: llama(head_dim=40),
    "mistral_window": lambda: MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=24),
    "gemma2_window_cap": lambda: Gemma2Config(
        **{**SIZES, "num_hidden_layers": 4},
        query_pre_attn_scalar=8,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    ),
    "llama4_chunks": lambda: Llama4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        intermediate_size_mlp=96,
        moe_layers=[],
        interleave_moe_layer_step=0,
        attention_chunk_size=32,
        tie_word_embeddings=False,
    ),
    "gpt_oss_sinks": lambda: GptOssConfig(
        # All experts for each token: a choice between them would turn a difference of rounding into a large one.
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=4,
        sliding_window=16,
        rope_scaling=None,
    ),
    "bloom_alibi": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.2, seq_length=512
    ),
    "gemma3n_shared_kv": lambda: Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 6, "initializer_range": 0.1},
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        sliding_window=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 6,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "bert_encoder": lambda: BertConfig(
        **{**SIZES, "hidden_size": 128, "max_position_embeddings": 256},
    ),
    "whisper_cross": lambda: WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=64,
        max_source_positions=50,
        max_target_positions=64,
        init_std=0.2,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
    ),
}


def build(kind: str, directory: Path) -> PreTrainedModel:
    """Make the model `kind`, write it to `directory`, and return it in float32."""
    torch.manual_seed(7)
    config = CONFIGS[kind]()
    config.dtype = torch.float32
    make = {"bert_encoder": BertModel, "whisper_cross": WhisperForConditionalGeneration}.get(
        kind, lambda config: AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    )
    model = make(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) * 2)
    model.eval().save_pretrained(directory)
    if kind == "bert_encoder":  # vLLM wants a tokenizer of a model for embeddings, even for prompts of token ids
        _word_tokenizer().save_pretrained(directory)
    if kind == "whisper_cross":
        tokenizer = WhisperTokenizer(
            vocab={f"t{i}": i for i in range(VOCABULARY)},
            merges=[],
            unk_token="t0",
            bos_token="t1",
            eos_token="t1",
            pad_token="t1",
        )
        features = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        WhisperProcessor(features, tokenizer).save_pretrained(directory)
    return model


def write_config(directory: Path, **settings: Any) -> Path:
    """Write a model directory of a configuration only, for engines that load random weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**SIZES, **settings}))
    return directory


def _word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", pad_token="t1", cls_token="t2", sep_token="t3"
    )
