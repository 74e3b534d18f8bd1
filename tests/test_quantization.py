from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused

from flashinfer_core import quantization, reference

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ORDERS = ("big", "little")


def random_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return zeros and, as often, nonzero numbers of any size and sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 127, (n,), generator=generator) * (2 * torch.randint(2, (n,), generator=generator) - 1)
    values = values << (torch.iinfo(dtype).bits - 8 if dtype in (torch.int16, torch.int32, torch.int64) else 0)
    return (values * torch.randint(2, (n,), generator=generator)).to(dtype)


@given(
    lens=st.lists(st.integers(0, 40), max_size=5),
    dtype=st.sampled_from(DTYPES),
    bitorder=st.sampled_from(ORDERS),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_equals_reference(
    lens: list[int], dtype: torch.dtype, bitorder: str, index_dtype: torch.dtype, seed: int, device: str
) -> None:
    x = random_bits(sum(lens), dtype, seed).to(device)
    indptr = torch.tensor([0, *lens]).cumsum(0).to(index_dtype).to(device)
    packed = quantization.packbits(x, bitorder)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, reference.packbits(x, bitorder))
    segments, starts = quantization.segment_packbits(x, indptr, bitorder)
    expected, expected_starts = reference.segment_packbits(x, indptr, bitorder)
    assert torch.equal(segments, expected)
    assert torch.equal(starts, expected_starts)
    assert starts.dtype == index_dtype
    assert torch.equal(quantization.packbits(x.repeat_interleave(2)[::2], bitorder), packed)
    bound, bound_starts = quantization.pack_segments(x, indptr, bitorder == "little")
    assert len(bound) >= len(segments)
    assert torch.equal(bound[: len(segments)], segments)
    assert torch.equal(bound_starts, starts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_dtype(dtype: torch.dtype, device: str) -> None:
    """flashinfer-ai/flashinfer#5054."""
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], device=device).to(dtype)
    assert quantization.segment_packbits(x, torch.tensor([0, 8], device=device), "big")[0].tolist() == [0b10110011]
    assert quantization.packbits(x, "little").tolist() == [0b11001101]


def test_default_is_big(device: str) -> None:
    x = torch.tensor([True, False, False], device=device)
    assert quantization.packbits(x).tolist() == [0b10000000]
    assert quantization.segment_packbits(x, torch.tensor([0, 3], device=device))[0].tolist() == [0b10000000]


def test_segments_begin_at_bytes(device: str) -> None:
    """flashinfer-ai/flashinfer#2201: segments whose lengths are not multiples of 8."""
    x = torch.ones(14, dtype=torch.int32, device=device)
    packed, starts = quantization.segment_packbits(x, torch.tensor([0, 3, 3, 14], device=device), "little")
    assert packed.tolist() == [0b111, 0xFF, 0b111]
    assert starts.tolist() == [0, 1, 1, 3]


X, INDPTR = torch.ones(10, dtype=torch.bool), torch.tensor([0, 3, 10])


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"x": [True]}, TypeError, "x"),
        ({"x": torch.ones(10)}, ValueError, "x"),
        ({"x": X[None]}, ValueError, "x"),
        ({"x": meta(X)}, NotImplementedError, "x"),
        ({"bitorder": "BIG"}, ValueError, "bitorder"),
    ],
)
def test_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    refused(quantization.packbits, {"x": X}, bad, error, name)
    refused(quantization.segment_packbits, {"x": X, "indptr": INDPTR}, bad, error, name)


@pytest.mark.parametrize(
    ("indptr", "error"),
    [
        (torch.tensor([0, 11]), ValueError),
        (torch.tensor([0, 9]), ValueError),
        (torch.tensor([1, 10]), ValueError),
        (torch.tensor([0, 5, 3, 10]), ValueError),
        (torch.tensor([], dtype=torch.int64), ValueError),
        (torch.tensor([[0, 10]]), ValueError),
        (torch.tensor([0.0, 10.0]), ValueError),
        (meta(INDPTR), NotImplementedError),
    ],
)
def test_indptr_refusals(indptr: torch.Tensor, error: type[Exception]) -> None:
    refused(quantization.segment_packbits, {"x": X, "indptr": INDPTR}, {"indptr": indptr}, error, "indptr")
