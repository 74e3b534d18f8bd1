"""vLLM with the attention of this library, offline: python examples/serve_vllm.py [MODEL]."""

import sys

from vllm import LLM, SamplingParams

from flashinfer_core.demo.model import prepare_model


def main() -> None:
    """Answer two questions with the model given, or with the demo model."""
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else str(prepare_model()),
        attention_backend="FLASHINFER_CORE",
        max_model_len=2048,
        enforce_eager=True,  # starts at once instead of compiling the model first
    )
    questions = ["What is the capital of France?", "Name three primary colours."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    for question, result in zip(questions, llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)), strict=True):
        print(f"{question}\n    {result.outputs[0].text.strip()}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
