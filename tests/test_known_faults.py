"""Faults that users of such libraries reported, with the right values, as far as no other file has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from op_calls import CALLS, Outputs
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer_core
from flashinfer_core.testing import AttentionCase, workspace


class Recorded(TorchDispatchMode):
    """The namespaces of the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_eager_calls_pass_by_the_dispatcher(function: Callable[..., Outputs], device: str) -> None:
    """flashinfer-ai/flashinfer#727: what torch.compile needs costs eager calls nothing."""
    arguments = CALLS[function](device)
    with Recorded() as recorded:
        function(*arguments)
    assert "aten" in recorded.namespaces
    assert "flashinfer_core" not in recorded.namespaces


def test_eager_attention_passes_by_the_dispatcher(device: str) -> None:
    """flashinfer-ai/flashinfer#727."""
    case = AttentionCase(((3, 30), (2, 7))).on(device)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(wrapper)
    q, cache = case.q, case.cache
    with Recorded() as recorded:
        wrapper.run(q, cache, return_lse=True)
    assert "aten" in recorded.namespaces  # the results' memory
    assert "flashinfer_core" not in recorded.namespaces
