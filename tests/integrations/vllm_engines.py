"""Starts `vllm_worker.py` with jobs, and reads the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("vllm_worker.py")
# One process and one thread: what two engines compute can then be compared, and a small machine is not flooded.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,  # less than most prompts, so prefill comes in chunks, beside others' decode steps
    "kv_cache_memory_bytes": 32 << 20,
    "skip_tokenizer_init": True,
    "seed": 0,
}
PROMPTS = [[(i * 37 + j * j + j * 5) % 250 + 1 for j in range(n)] for i, n in enumerate((20, 29, 75, 131, 7))]


def job(
    model: Path,
    backend: str | None,
    *,
    task: str = "generate",
    env: dict[str, str] | None = None,
    prompts: list[list[int]] = PROMPTS,
    max_tokens: int = 12,
    logprobs: int = 0,
    alone: bool = False,
    constants: dict[str, dict[str, Any]] | None = None,
    counted: tuple[str, ...] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Describe one engine's run. Without a `backend` vLLM chooses; `alone`: the second pass is prompt by prompt."""
    arguments = {**ARGUMENTS, "attention_backend": backend, **arguments}
    return {
        "model": str(model),
        "task": task,
        "prompts": [prompt[: arguments["max_model_len"] - max_tokens - 8] for prompt in prompts],
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "alone": alone,
        "env": env or {},
        "constants": constants or {},
        "counted": counted,
        "args": arguments,
    }


def run(jobs: list[dict[str, Any]], directory: Path, timeout: float = 600, **env: str) -> dict[str, Any]:
    """Run `jobs` in a new process; return its ``answers``, and the lines of its ``log``."""
    result = directory / "answers.json"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(result)],
        input=json.dumps(jobs),
        text=True,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **ENVIRONMENT, **env},
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-4000:]}"
    return {"answers": json.loads(result.read_text()), "log": done.stdout.splitlines()}
