"""The small operations inside `torch.compile`: one graph, and the same numbers as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_calls import CALLS, Outputs

from flashinfer_core import norm


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_compiled_equals_eager(function: Callable[..., Outputs], device: str) -> None:
    """flashinfer-ai/flashinfer#2733 and #482."""
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second call runs the graph with other tensors
        arguments = CALLS[function](device)
        copies = tuple(t.clone() for t in arguments)
        expected = function(*arguments)
        actual = compiled(*copies)
        for got, want in zip((*actual, *copies), (*expected, *arguments), strict=True):
            assert torch.equal(got, want)


def test_refusals_inside_a_graph(device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: norm.rmsnorm(x, w), backend="aot_eager")
    with pytest.raises(ValueError, match=r"^weight: expected shape \[8\], got \[7\]"):
        compiled(torch.randn(2, 8, device=device), torch.randn(7, device=device))
