"""SGLang with the attention of this library, offline: python examples/serve_sglang.py [MODEL]."""

import sys

import sglang
import torch
from transformers import AutoTokenizer

from flashinfer_core.demo.model import prepare_model

ON_CPU = {"device": "cpu", "sampling_backend": "pytorch", "grammar_backend": "none", "max_total_tokens": 4096}


def main() -> None:
    """Answer two questions with the model given, or with the demo model."""
    model = sys.argv[1] if len(sys.argv) > 1 else str(prepare_model())
    engine = sglang.Engine(
        model_path=model,
        attention_backend="flashinfer_core",
        context_length=2048,
        log_level="info",  # the log then names the backend
        **({} if torch.cuda.is_available() else ON_CPU),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = ["What is the capital of France?", "Name three primary colours."]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    answers = engine.generate(chats, {"temperature": 0, "max_new_tokens": 64})
    for question, answer in zip(questions, answers, strict=True):
        print(f"{question}\n    {answer['text'].strip()}")
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes that import this file
    main()
