"""The operators and kernels that merge states, behind `flashinfer_core.cascade`, which has checked the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES
from flashinfer_core._launch import COMMON_DTYPES, DTYPE_NAMES, Spec, cuda_call, fits_vectors
from flashinfer_core._ops import native_op

_State: TypeAlias = tuple[int, int, int, int, int, int]  # v, s with their strides of token and head


@native_op("Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor(a!) v, Tensor(b!) s, Tensor? mask")
def run_merge_state(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Merge two states ``[tokens, heads, ..]`` into a third, which may be the first."""
    _merge(2, _state(v_a, s_a), _state(v_b, s_b), (0, 0), v, s, 0 if mask is None else mask.data_ptr())


@native_op("Tensor v, Tensor s, Tensor(a!) v_out, Tensor(b!) s_out")
def run_merge_states(v: torch.Tensor, s: torch.Tensor, v_out: torch.Tensor, s_out: torch.Tensor) -> None:
    """Merge states ``[tokens, states, heads, ..]`` over their dimension 1."""
    states = v.shape[1]
    v_token, v_state, v_head, _ = v.stride()
    s_token, s_state, s_head = s.stride()
    v_address, s_address = v.data_ptr(), s.data_ptr()
    first = (v_address, v_token, v_head, s_address, s_token, s_head)
    second = (v_address + v_state * v.itemsize, v_token, v_head, s_address + s_state * s.itemsize, s_token, s_head)
    _merge(states, first, second, (v_state, s_state), v_out, s_out, 0)


def _merge(
    states: int,
    first: _State,
    second: _State,
    state_strides: tuple[int, int],
    v: torch.Tensor,
    s: torch.Tensor,
    mask: int,
) -> None:
    """Merge state 0, which is `first`, and states i, which are `second` moved on by i - 1 strides."""
    tokens, heads, head_dim = v.shape
    out = _state(v, s)
    addresses = first[0] | second[0] | out[0]
    strides = first[1] | first[2] | second[1] | second[2] | out[1] | out[2] | state_strides[0]
    vectors = fits_vectors(addresses, strides | head_dim, v.itemsize)
    call = cuda_call(v, _spec, v.dtype, states == 2, vectors=vectors)
    _native.merge_states(
        call, DTYPE_CODES[v.dtype], tokens, heads, head_dim, states, first, second, *state_strides, out, mask
    )


def _state(v: torch.Tensor, s: torch.Tensor) -> _State:
    v_token, v_head, _ = v.stride()
    s_token, s_head = s.stride()
    return v.data_ptr(), v_token, v_head, s.data_ptr(), s_token, s_head


def _spec(dtype: torch.dtype, pair: bool, vectors: bool) -> Spec:
    return Spec(
        f"merge_{'pair' if pair else 'states'}_{DTYPE_NAMES[dtype]}{'' if vectors else '_scalar'}",
        "cascade/merge_states.cuh",
        (("FIC_DTYPE", DTYPE_CODES[dtype]), ("FIC_PAIR", int(pair)), ("FIC_VECTORS", int(vectors))),
    )


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    for dtype in COMMON_DTYPES:
        for pair in (True, False):
            yield _spec(dtype, pair, True)
