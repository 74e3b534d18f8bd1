from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused, transposed

from flashinfer_core import activation, reference
from flashinfer_core.testing import ActivationCase, assert_close

OPS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


@st.composite
def cases(draw: st.DrawFn) -> ActivationCase:
    leading = draw(st.lists(st.integers(0, 5), max_size=3))
    return ActivationCase(
        op=draw(st.sampled_from(OPS)),
        shape=(*leading, draw(st.one_of(st.integers(0, 140), st.sampled_from([8, 64, 128, 1000, 1001, 3584])))),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        gap=draw(st.sampled_from([0, 0, 1, 3, 8, 16])) if len(leading) < 3 else 0,
        out=draw(st.sampled_from(["new", "given"])),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=cases())
def test_equals_reference(case: ActivationCase, device: str) -> None:
    case.check(device)


def test_many_rows_are_shared_between_threads(device: str) -> None:
    ActivationCase("silu_and_mul", (300, 1000), gap=4).check(device)


@pytest.mark.parametrize("op", OPS)
def test_relative_accuracy(op: str, device: str) -> None:
    """Small results in the negative tail keep their digits, which x / 2 * (1 + erf) in float32 loses."""
    x = torch.linspace(-11, 11, 4001, dtype=torch.float32)
    wide = x.double()
    u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    gate = {
        "silu_and_mul": torch.sigmoid(wide),
        "gelu_and_mul": 0.5 * torch.special.erfc(-wide / 2**0.5),
        "gelu_tanh_and_mul": torch.sigmoid(2 * u),
    }[op]
    actual = getattr(activation, op)(torch.cat([x, torch.ones_like(x)]).to(device)).cpu().double()
    expected = wide * gate
    # The exponent carries the rounding of u or x^2, so the relative error grows with it.
    bound = expected.abs() * (1e-6 + 2e-7 * expected.abs().clamp(min=1e-38).log().abs()) + 2e-37
    assert bool(((actual - expected).abs() <= bound).all())


@pytest.mark.parametrize("op", OPS)
def test_special_values(op: str, device: str) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, -inf, nan, 0.0, 1e30, -1e30, 90.0, -90.0, 3e38, 1.0, 1.0, 0.0], device=device)
    up = torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, inf, nan, inf], device=device)
    both = torch.cat([gate, up])
    assert_close(getattr(activation, op)(both), getattr(reference, op)(both))


X = torch.randn(4, 6, 24)
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": 3}, TypeError, "input"),
    ({"input": torch.tensor(1.0)}, ValueError, "input"),
    ({"input": torch.randn(4, 7)}, ValueError, "input"),
    ({"input": X.long()}, ValueError, "input"),
    ({"input": transposed(X)}, ValueError, "input"),
    ({"input": meta(X)}, NotImplementedError, "input"),
    ({"out": torch.zeros(4, 6, 24)}, ValueError, "out"),
    ({"out": torch.zeros(24, 12)}, ValueError, "out"),
    ({"out": torch.zeros(4, 6, 12).half()}, ValueError, "out"),
    ({"out": transposed(torch.zeros(4, 6, 12))}, ValueError, "out"),
    ({"out": torch.zeros(1, 12).expand(4, 6, 12)}, ValueError, "out"),
    ({"out": meta(torch.zeros(4, 6, 12))}, NotImplementedError, "out"),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("bad", "error", "name"), REFUSALS)
def test_refusals(op: str, bad: dict[str, Any], error: type[Exception], name: str) -> None:
    refused(getattr(activation, op), {"input": X}, bad, error, name)
