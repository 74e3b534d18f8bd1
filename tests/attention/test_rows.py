"""A table with a row for each slot of an engine, of which a batch names the rows it has."""

from __future__ import annotations

import pytest
import torch

from flashinfer_core.attention.plan import AttentionPlan

HEADS, DIM, PAGE = 2, 32, 4
LENS = [9, 1, 14]


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return lengths, the rows of the table in use, a table of more rows, and a cache."""
    torch.manual_seed(0)
    table = torch.randint(100, 200, (7, 5), dtype=torch.int32)  # pages that are not in the cache
    rows = torch.tensor([4, 0, 6], dtype=torch.int32)
    table[rows.long(), :4] = torch.randperm(12, dtype=torch.int32).view(3, 4)
    cache = torch.randn(12, 2, PAGE, HEADS, DIM, dtype=torch.float16)
    return tuple(t.to(device) for t in (torch.tensor(LENS, dtype=torch.int32), rows, table, cache))


def attend(device: str, table: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    lens, _, _, cache = batch(device)
    plan = AttentionPlan(
        1, lens, num_qo_heads=HEADS, num_kv_heads=HEADS, head_dim_qk=DIM, page_size=PAGE, block_table=table, rows=rows
    )
    torch.manual_seed(1)
    q = torch.randn(len(LENS), HEADS, DIM, dtype=torch.float16).to(device)
    out = torch.empty_like(q)
    for _ in range(2):  # what the GPU finds wrong in the rows is raised by the call after
        plan.run(q, cache[:, 0], cache[:, 1], out, sm_scale=0.2)
        if device != "cpu":
            torch.cuda.synchronize()
    return out


def test_rows_of_a_table(device: str) -> None:
    _, rows, table, _ = batch(device)
    # The second request has one key, and every row of the table past its last page names pages that do not exist.
    assert torch.equal(attend(device, table, rows), attend(device, table[rows.long()].contiguous(), None))


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_that_the_table_lacks(device: str, row: int) -> None:
    _, rows, table, _ = batch(device)
    rows[1] = row
    words = f"rows: expected rows of block_table.* got {row} for request 1"
    with pytest.raises((ValueError, RuntimeError), match=words):
        attend(device, table, rows)


def test_rows_without_a_table(device: str) -> None:
    lens, rows, _, _ = batch(device)
    with pytest.raises(ValueError, match="block_table: expected a table, of which rows has rows"):
        AttentionPlan(1, lens, num_qo_heads=1, num_kv_heads=1, head_dim_qk=8, rows=rows)


def test_one_row_for_each_request(device: str) -> None:
    _, rows, table, _ = batch(device)
    with pytest.raises(ValueError, match="rows: expected"):
        attend(device, table, rows[:2])
