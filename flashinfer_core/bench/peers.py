"""Other implementations: their recorded times, and those that torch has, to be measured in the same run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch": SDPBackend.FLASH_ATTENTION}


@functools.cache
def recorded() -> dict[str, Any]:
    """Return the recorded figures: where they come from, ceilings, and for each row microseconds by peer."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "h200.json").read_text())
    return content


def recorded_us(row: str) -> dict[str, float]:
    """Return the recorded microseconds of each peer, the fastest first; none for a row that is not recorded."""
    found: dict[str, float] = recorded()["rows"].get(row, {})
    return dict(sorted(found.items(), key=lambda item: item[1]))


def sdpa(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Callable[[], torch.Tensor] | str:
    """Return a call of torch's attention on contiguous requests of one length, or why there is none.

    Parameters
    ----------
    name
        ``"cudnn"`` or ``"torch"``, which is FlashAttention-2.
    q, k, v
        ``[batch, tokens, heads, dim]``.
    causal
        For as many queries as keys.
    """
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            ).transpose(1, 2)

    try:
        call()
    except RuntimeError as error:  # torch's way to say that a backend has no kernel for these tensors
        return str(error).partition("\n")[0]
    return call
