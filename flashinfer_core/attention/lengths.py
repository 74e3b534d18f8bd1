"""Lengths that callers state beside the arrays of a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer_core._checks import check_int, check_tensor
from flashinfer_core.attention.plan import AttentionPlan


class Lengths(NamedTuple):
    """What the caller said of lengths beside the arrays that give them; checked where those are in host memory."""

    seq_lens: torch.Tensor | None = None
    max_sequence_kv: int | None = None
    seq_lens_q: torch.Tensor | None = None
    max_token_per_sequence: int | None = None
    uniform_q_len: int | None = None

    def check(self, plan: AttentionPlan) -> None:
        """Raise where the statements differ."""
        if self.seq_lens is not None:
            _check_lens("seq_lens", self.seq_lens, plan.kv_lens)
        if self.max_sequence_kv is not None:
            check_bound("max_sequence_kv", self.max_sequence_kv, plan.kv_lens or [])
        if self.seq_lens_q is None and self.max_token_per_sequence is None and self.uniform_q_len is None:
            return
        indptr = plan.arrays.qo_indptr
        known = indptr is not None and indptr.is_cpu
        lens: list[int] = indptr.diff().tolist() if known and indptr is not None else []
        _check_lens("seq_lens_q", self.seq_lens_q, lens if known else None)
        check_bound("max_token_per_sequence", self.max_token_per_sequence, lens)
        if self.uniform_q_len is not None:
            check_int("uniform_q_len", self.uniform_q_len, 0)
            if any(length != self.uniform_q_len for length in lens):
                raise ValueError(
                    f"uniform_q_len: expected the length of every request, {_short(lens)}, got {self.uniform_q_len}"
                )

    @property
    def q_len_hint(self) -> int | None:
        """About the query rows of a request, if anything was said of them."""
        return self.max_token_per_sequence if self.uniform_q_len is None else self.uniform_q_len


def check_bound(name: str, bound: int | None, lens: list[int]) -> None:
    """Raise unless an upper bound given beside the lengths holds."""
    if bound is not None and check_int(name, bound, 0) < max(lens, default=0):
        raise ValueError(f"{name}: expected at least {max(lens)}, the longest request's, got {bound}")


def _check_lens(name: str, lens: torch.Tensor | None, planned: list[int] | None) -> None:
    """Raise unless lengths given beside a page table agree with it, as far as both are in host memory."""
    if lens is None:
        return
    check_tensor(name, lens, dtypes=(torch.int32, torch.int64), ndim=1)
    if planned is not None and lens.is_cpu and lens.tolist() != planned:
        raise ValueError(f"{name}: expected {_short(planned)} as in the plan's arrays, got {_short(lens.tolist())}")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
