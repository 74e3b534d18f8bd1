"""What the tests of attention on a GPU share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer_core
from flashinfer_core.testing import AttentionCase, workspace

HEADS = (8, 2, 128)
DECODE = ((1, 3000), (1, 17), (1, 0), (1, 256))
PREFILL = ((5, 900), (300, 300), (1, 40))


@pytest.fixture(autouse=True)
def on_a_gpu(device: str) -> None:
    if not device.startswith("cuda"):
        pytest.skip("for a GPU")


def bf16(lens: tuple[tuple[int, int], ...], device: str, **options: Any) -> AttentionCase:
    return AttentionCase(lens, *HEADS, dtype=torch.bfloat16, device=device, **options)


def decode_wrapper(case: AttentionCase) -> Any:
    return flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(case.device), case.kv_layout)


def prefill_wrapper(case: AttentionCase) -> Any:
    return flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(case.device), case.kv_layout)


def made(*cases: AttentionCase) -> None:
    """Make all tensors of some cases, which is done when they are first used, and wait for them."""
    for case in cases:
        _ = (case.q, case.cache, case.ragged, case.placed, case.sink_logits, case.flat_masks)
    torch.cuda.synchronize()
