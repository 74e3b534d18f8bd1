from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused, transposed

from flashinfer_core import norm, reference
from flashinfer_core.testing import NormCase, assert_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm", "layernorm")


# Whole vectors of 16 bytes (a GPU then takes another way), and not.
HIDDEN = st.sampled_from([16, 64, 128, 192, 1024, 2000, 3584, 111, 500, 1001])


@st.composite
def cases(draw: st.DrawFn) -> NormCase:
    leading = draw(st.lists(st.integers(0, 5), max_size=3))
    return NormCase(
        op=draw(st.sampled_from(OPS)),
        shape=(*leading, draw(st.one_of(st.integers(1, 140), HIDDEN))),
        dtype=draw(st.sampled_from(DTYPES)),
        weight_dtype=draw(st.sampled_from([None, torch.float32])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.5])),
        gap=draw(st.sampled_from([0, 0, 1, 3, 8, 16])) if len(leading) < 3 else 0,
        out=draw(st.sampled_from(["new", "given", "input"])),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=cases())
def test_equals_reference(case: NormCase, device: str) -> None:
    case.check(device)


# 3584, 111, 500: flashinfer-ai/flashinfer#634 (alignment); 16384, 32768: #718 (rows larger than shared memory).
@pytest.mark.parametrize("hidden", [3584, 111, 500, 16384, 32768])
@pytest.mark.parametrize("op", OPS)
def test_hidden_sizes_without_limit(op: str, hidden: int, device: str) -> None:
    NormCase(op, (3, hidden)).check(device)


def test_long_rows_that_are_not_whole_vectors(device: str) -> None:
    for op in OPS:
        NormCase(op, (2, 9001), torch.float16, gap=1).check(device)


def test_one_rounding(device: str) -> None:
    """sgl-project/sglang#2258: the result is the float32 one, rounded; not rounded before the weight as well."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 512, generator=generator).bfloat16().to(device)
    weight = torch.randn(512, generator=generator).bfloat16().to(device)
    exact = reference.rmsnorm(x.double(), weight.double())
    difference = norm.rmsnorm(x, weight).float() - exact
    assert bool((difference.abs() <= exact.abs() * (2**-8 + 1e-6)).all())


def test_residual_is_normed_before_it_is_rounded(device: str) -> None:
    x = torch.full((1, 8), 2.0**-9, dtype=torch.bfloat16, device=device)
    residual = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    residual[0, :4] = -1.0
    weight = torch.ones(8, dtype=torch.float32, device=device)
    total = x.float() + residual.float()
    norm.fused_add_rmsnorm(x, residual, weight, eps=0.0)
    assert_close(x, reference.rmsnorm(total, weight, 0.0))
    assert bool((residual.abs() == 1).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_special_values_stay_in_their_row(value: float, device: str) -> None:
    x = torch.randn(3, 40, device=device)
    x[1, 7] = value
    weight, bias = torch.randn(40, device=device), torch.randn(40, device=device)
    for actual, expected in (
        (norm.rmsnorm(x, weight), reference.rmsnorm(x, weight)),
        (norm.layernorm(x, weight, bias), reference.layernorm(x, weight, bias)),
    ):
        assert_close(actual, expected)
        assert bool(actual[[0, 2]].isfinite().all())


def test_zero_rows(device: str) -> None:
    weight = torch.ones(16, device=device)
    assert torch.equal(norm.rmsnorm(torch.zeros(2, 16, device=device), weight), torch.zeros(2, 16, device=device))


def test_rows_past_2_to_31_elements(device: str) -> None:
    """flashinfer-ai/flashinfer#3007."""
    try:
        buffer = torch.empty(2**31 + 128 + 64, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("not enough memory")
    rows = buffer.as_strided((2, 64), (2**31 + 128, 1))
    rows.copy_(torch.randn(2, 64))
    weight = torch.randn(64, device=device).half()
    expected = reference.rmsnorm(rows, weight)
    assert_close(norm.rmsnorm(rows, weight), expected)
    norm.rmsnorm(rows, weight, out=rows)
    assert_close(rows, expected)


def test_singleton_dimensions_have_no_stride(device: str) -> None:
    """vllm-project/vllm#32452: a stride of a dimension of size 1 says nothing."""
    x = torch.randn(4, device=device).as_strided((4, 1), (1, 77))
    one = torch.ones(1, device=device)
    assert_close(norm.rmsnorm(x, one), reference.rmsnorm(x, one))


def test_enable_pdl_changes_nothing(device: str) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    assert torch.equal(norm.rmsnorm(x, weight, enable_pdl=True), norm.rmsnorm(x, weight, enable_pdl=False))


X = torch.randn(4, 6, 24)
W = torch.randn(24)
REFUSALS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rmsnorm", {"input": None}, TypeError, "input"),
    ("rmsnorm", {"input": torch.tensor(1.0)}, ValueError, "input"),
    ("rmsnorm", {"input": X.double()}, ValueError, "input"),
    ("rmsnorm", {"input": meta(X)}, NotImplementedError, "input"),
    ("rmsnorm", {"input": transposed(X)}, ValueError, "input"),
    ("rmsnorm", {"input": X[None].expand(2, -1, -1, -1)[:, ::2, ::2]}, ValueError, "input"),
    ("rmsnorm", {"weight": [1.0]}, TypeError, "weight"),
    ("rmsnorm", {"weight": torch.randn(23)}, ValueError, "weight"),
    ("rmsnorm", {"weight": torch.randn(1, 24)}, ValueError, "weight"),
    ("rmsnorm", {"weight": W.half()}, ValueError, "weight"),
    ("rmsnorm", {"weight": transposed(W)}, ValueError, "weight"),
    ("rmsnorm", {"weight": meta(W)}, NotImplementedError, "weight"),
    ("rmsnorm", {"out": X[:3].clone()}, ValueError, "out"),
    ("rmsnorm", {"out": X.half()}, ValueError, "out"),
    ("rmsnorm", {"out": transposed(X)}, ValueError, "out"),
    ("rmsnorm", {"out": torch.zeros(1, 1, 24).expand(4, 6, 24)}, ValueError, "out"),
    ("gemma_rmsnorm", {"weight": torch.randn(25)}, ValueError, "weight"),
    ("fused_add_rmsnorm", {"residual": X[:3].clone()}, ValueError, "residual"),
    ("fused_add_rmsnorm", {"residual": X.half()}, ValueError, "residual"),
    ("fused_add_rmsnorm", {"residual": transposed(X)}, ValueError, "residual"),
    ("fused_add_rmsnorm", {"residual": meta(X)}, NotImplementedError, "residual"),
    ("fused_add_rmsnorm", {"residual": X}, ValueError, "residual"),
    ("fused_add_rmsnorm", {"input": torch.zeros(1, 24).expand(4, 6, 24)}, ValueError, "input"),
    ("gemma_fused_add_rmsnorm", {"weight": W.bfloat16()}, ValueError, "weight"),
    ("layernorm", {"gemma": torch.randn(2)}, ValueError, "gemma"),
    ("layernorm", {"beta": torch.randn(2)}, ValueError, "beta"),
    ("layernorm", {"beta": W.half()}, ValueError, "beta"),
    ("layernorm", {"input": X.half(), "beta": W.half()}, ValueError, "beta"),
    ("layernorm", {"beta": meta(W)}, NotImplementedError, "beta"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "bad", "error", "name"), REFUSALS)
def test_refusals(op: str, bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good: dict[str, Any] = {"input": X, "weight": W}
    if "fused_add" in op:
        good["residual"] = X.clone()
    elif op == "layernorm":
        good = {"input": X, "gemma": W, "beta": W}
    refused(getattr(norm, op), good, bad, error, name)
