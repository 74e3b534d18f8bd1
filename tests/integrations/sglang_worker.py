"""Runs SGLang engines one after another, and writes what they answered.

A script: a JSON list of jobs on standard input, answers into the JSON file that the argument names. When an engine
fails, SGLang kills the process that started it, so no pytest process does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # in which two right computations agree on every token
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "skip_server_warmup": True,
    "log_level": "info",
}


def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Answer all prompts at once, twice: the second time they are in the prefix cache."""
    import sglang

    os.environ.update(job["env"])
    engine = sglang.Engine(model_path=job["model"], **{**ARGUMENTS, **job["args"]})
    try:
        sampling = {"temperature": 0, "max_new_tokens": job["max_tokens"], "ignore_eos": True}
        prompts = {"prompt" if isinstance(job["prompts"][0], str) else "input_ids": job["prompts"]}
        passes = []
        for _ in range(2):
            answers = engine.generate(**prompts, sampling_params=sampling)
            passes.append([{"tokens": a["output_ids"], "cached": a["meta_info"]["cached_tokens"]} for a in answers])
        return passes
    finally:
        engine.shutdown()
        for name in job["env"]:
            del os.environ[name]


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    Path(sys.argv[1]).write_text(json.dumps([run(job) for job in jobs]))
