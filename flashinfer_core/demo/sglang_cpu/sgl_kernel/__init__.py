"""Stands in for SGLang's native kernels, which have no build for CPUs without AMX.

SGLang imports a few of their names whatever it then uses. One is used: the others refuse to be called.
"""

from collections.abc import Callable

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _pool_len: int,
) -> None:
    """Write the slots of each request's new tokens into its row."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[done : done + end - start]
        done += end - start


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there without a GPU")

    return refuse
