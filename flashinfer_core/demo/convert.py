"""``python -m flashinfer_core.demo.convert GGUF FOLDER``: a quantized Llama as a bfloat16 Hugging Face folder."""

import sys
from pathlib import Path

import torch


def convert(gguf: Path, folder: Path) -> None:
    """Write configuration, weights, tokenizer and chat template of `gguf` to `folder`."""
    # transformers loads torchvision if there is one, and a build of it for CUDA cannot be loaded beside torch for CPUs.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    # A model read from GGUF counts as quantized and refuses to be saved; a fresh one takes over its weights.
    del settings["quantization_config"]
    config = LlamaConfig(**settings | {"architectures": ["LlamaForCausalLM"], "dtype": torch.bfloat16})
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
