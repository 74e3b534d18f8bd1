"""Runs vLLM engines one after another, and writes what they answered.

A script: a JSON list of jobs on standard input, answers into the JSON file that the argument names. Engines leave state
behind (threads bound to cores, process groups, remembered settings), so no pytest process runs one itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np


def generate(llm: Any, prompts: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    """Generate twice: the second pass finds the prompts in the prefix cache, and may have them one by one."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], detokenize=False, logprobs=job["logprobs"], ignore_eos=True
    )
    passes = []
    for batches in ([prompts], [[prompt] for prompt in prompts] if job["alone"] else [prompts]):
        answers = [answer for batch in batches for answer in llm.generate(batch, sampling, use_tqdm=False)]
        outputs = [answer.outputs[0] for answer in answers]
        passes.append(
            {
                "tokens": [list(o.token_ids) for o in outputs],
                "logprobs": [
                    [at[token].logprob for token, at in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
                ],
                "margins": [[_margin(at) for at in o.logprobs] for o in outputs],
                "cached": [answer.num_cached_tokens for answer in answers],
            }
        )
    return {"passes": passes}


def _margin(at: dict[int, Any]) -> float:
    """Return by how much the best token is ahead of the next, if the job asked for both."""
    best, *others = sorted((token.logprob for token in at.values()), reverse=True)
    return float(best - others[0]) if others else float("inf")


def answer(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    if job["task"] == "embed":
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        return {"vectors": [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]}
    if job["task"] == "transcribe":
        noise = [np.random.default_rng(seed).standard_normal(6000 + 2000 * seed) for seed in range(len(job["prompts"]))]
        prompts = [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (audio.astype(np.float32), 16000)}},
                "decoder_prompt": {"prompt_token_ids": prompt},
            }
            for audio, prompt in zip(noise, job["prompts"], strict=True)
        ]
    else:
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    return generate(llm, prompts, job)


def count(path: str, calls: dict[str, int]) -> None:
    """Count the calls of a method, given as module:class.method."""
    module, _, attribute = path.partition(":")
    owner = getattr(importlib.import_module(module), attribute.partition(".")[0])
    name = attribute.partition(".")[2]
    method = getattr(owner, name)
    calls[path] = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[path] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counted)


def backends(llm: Any) -> list[str]:
    """Return the names of the backends that the model's layers really have."""
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    names = {
        m.attn_backend.get_name() for m in model.modules() if hasattr(getattr(m, "attn_backend", None), "get_name")
    }
    return sorted(names)


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, envs
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.freeze()  # vLLM collects garbage often; without the modules' many objects that takes a third of the time
    envs.disable_envs_cache()
    os.environ.update(job["env"])
    for module, values in job["constants"].items():
        for name, value in values.items():
            setattr(importlib.import_module(module), name, value)
    calls: dict[str, int] = {}
    for path in job["counted"]:
        count(path, calls)
    llm = None
    try:
        llm = LLM(job["model"], **job["args"])
        layout = getattr(llm.llm_engine.vllm_config.cache_config, "kv_cache_layout", None)
        return {**answer(llm, job), "backends": backends(llm), "layout": layout, "calls": calls}
    except Exception:  # it is the answer, and no reason to lose those of the other jobs
        return {"error": traceback.format_exc()}
    finally:
        for name in job["env"]:
            del os.environ[name]
        del llm
        cleanup_dist_env_and_memory()


def main() -> None:
    jobs = json.load(sys.stdin)
    for name in os.environ.get("TEST_MISSING_MODULES", "").split():
        sys.modules[name] = None  # type: ignore[assignment]
    Path(sys.argv[1]).write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main()
