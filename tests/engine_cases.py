"""What the tests of the core of the adapters share: batches as engines have them, and layers for them."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer_core.reference
from flashinfer_core import engine
from flashinfer_core.testing import AttentionCase
from flashinfer_core.testing.attention import TOLERANCE

MIXED = ((1, 700), (40, 90), (1, 3), (5, 260))
DECODE = ((1, 1500), (1, 17), (1, 256), (1, 80))


def case_of(
    lens: tuple[tuple[int, int], ...], device: str, heads: tuple[int, int] = (8, 2), dim: int = 64, **options: Any
):
    return AttentionCase(lens, *heads, dim, packed_kv=True, **options).on(device)


class Arrays:
    """The arrays of a batch as engines keep them: in the same place for every batch of so many requests."""

    def __init__(self, device: str, requests: int, pages: int) -> None:
        self.qo_indptr, self.kv_lens = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (requests + 1, requests)
        )
        self.table = torch.zeros(requests, pages, dtype=torch.int32, device=device)

    @staticmethod
    def of(case: AttentionCase) -> Arrays:
        arrays = Arrays(case.device, len(case.lens), max(1, *(-(-kv // case.page_size) for _, kv in case.lens)))
        arrays.load(case)
        return arrays

    def load(self, case: AttentionCase) -> None:
        """Take over a case of at most as many requests; the others get no query row."""
        n = len(case.lens)
        self.qo_indptr.fill_(int(case.qo_indptr[-1]))
        self.qo_indptr[: n + 1] = case.qo_indptr.to(case.device)
        self.kv_lens.zero_()
        self.kv_lens[:n] = torch.tensor([kv for _, kv in case.lens], dtype=torch.int32).to(case.device)
        self.table.zero_()
        for r in range(n):
            begin, end = case.paged.indptr[r : r + 2].tolist()
            self.table[r, : end - begin] = case.paged.indices[begin:end].to(case.device)

    def as_tuple(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qo_indptr, self.kv_lens, self.table


def layer_of(case: AttentionCase, **changes: Any) -> engine.Layer:
    slopes = flashinfer_core.reference.alibi_slopes(case.num_qo_heads).tolist()
    settings: dict[str, Any] = {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "sm_scale": case.head_dim_qk**-0.5,
        "logits_soft_cap": case.logits_soft_cap,
        "window_left": case.window_left,
        "alibi_slopes": slopes if case.pos_encoding_mode == "ALIBI" else None,
        "sinks": case.sink_logits,
    }
    return engine.Layer(**{**settings, **changes})


def group_of(case: AttentionCase, layers: list[engine.Layer], **options: Any) -> engine.LayerGroup:
    return engine.LayerGroup.of(
        layers, head_dim_qk=case.head_dim_qk, head_dim_vo=case.dim_vo, kv_dtype=case.cache_dtype, **options
    )


def attend(
    case: AttentionCase,
    group: engine.LayerGroup,
    layer: engine.Layer,
    arrays: Arrays | None = None,
    q_len: float | None = None,
    **scales: Any,
) -> torch.Tensor:
    arrays = Arrays.of(case) if arrays is None else arrays
    plan = group.plan_paged(*arrays.as_tuple(), page_size=case.page_size, causal=case.causal, q_len=q_len)
    out = torch.full((*case.q.shape[:2], case.dim_vo), torch.nan, dtype=case.dtype, device=case.device)
    layer.run(plan, case.q, *case.cache, out, **scales)
    return out


def assert_right(case: AttentionCase, out: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    expected = case.expected()[0] if expected is None else expected
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=tolerance, atol=tolerance)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 50},
    "soft_cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "everything": {"window_left": 30, "logits_soft_cap": 8.0, "sinks": True, "pos_encoding_mode": "ALIBI"},
    "encoder": {"causal": False},
    "head_dim_256": {"dim": 256},
    "one_kv_head": {"heads": (8, 1), "dim": 128},
    "heads_first": {"kv_layout": "HND"},
}
