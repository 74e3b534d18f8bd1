"""The arrays that describe a batch: checked for shape and dtype, and in the one form that native code takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashinfer_core._checks import check_tensor

NativeBatch = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ArgumentNames:
    """What a public function calls the arrays that it hands on, for error messages."""

    qo_indptr: str = "qo_indptr"
    kv_indptr: str = "kv_indptr"
    kv_indices: str = "kv_indices"
    kv_last_page_len: str = "kv_last_page_len"
    kv_lens: str = "kv_lens"
    block_table: str = "block_table"
    rows: str = "rows"

    def as_tuple(self) -> tuple[str, str, str, str, str, str, str]:
        """Return the names in the order of native code."""
        return (
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.kv_last_page_len,
            self.kv_lens,
            self.block_table,
            self.rows,
        )


DEFAULT_NAMES = ArgumentNames()


class Buffer(NamedTuple):
    """A tensor of the caller's that holds an array of each plan in turn, so that captured CUDA graphs find it there."""

    name: str
    tensor: torch.Tensor | None
    exact: bool = True  # whether it must have exactly as many elements as the array

    def part(self, size: int) -> torch.Tensor:
        """Return the part that an array of so many elements takes."""
        if self.tensor is None:
            raise ValueError(f"{self.name}: expected a tensor, since use_cuda_graph is set, got None")
        space = self.tensor.numel()
        if space < size or (self.exact and space != size):
            what = f"{size} elements" if self.exact else f"at least {size} elements"
            raise ValueError(f"{self.name}: expected {what}, got {space}; the batch is fixed with use_cuda_graph")
        return self.tensor[:size]

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """Copy an array that is on the buffer's device into it and return the part in use."""
        part = self.part(values.numel())
        if part.data_ptr() != values.data_ptr():
            part.copy_(values, non_blocking=True)
        return part


class BatchArrays(NamedTuple):
    """Where the query rows and the keys of each request are, see `AttentionPlan`."""

    num_requests: int
    qo_indptr: torch.Tensor | None  # None: every request has `q_len` query rows
    q_len: int
    page_size: int  # 0: no pages
    table: torch.Tensor | None
    table_size: int  # entries in all, of a dense table those of a row
    row_stride: int
    kv_indptr: torch.Tensor | None
    kv_last_page_len: torch.Tensor | None
    kv_lens: torch.Tensor | None
    rows: torch.Tensor | None
    num_rows: int  # of a dense table with `rows`

    @staticmethod
    def check(
        names: ArgumentNames,
        qo_indptr: torch.Tensor | int,
        kv_lens: torch.Tensor | None,
        page_size: int | None,
        block_table: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        kv_last_page_len: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> BatchArrays:
        """Check the arguments of `AttentionPlan`, whose values are native code's to check."""
        if isinstance(qo_indptr, int):
            sized = (names.kv_lens, kv_lens) if kv_indptr is None else (names.kv_indptr, kv_indptr)
        else:
            sized = (names.qo_indptr, qo_indptr)
        name, array = sized
        _check_index(name, array)
        assert array is not None
        num_requests = array.numel() - (array is not kv_lens)
        if num_requests < 0:
            raise ValueError(f"{name}: expected at least one entry, got none")
        if kv_lens is not None:
            _check_index(names.kv_lens, kv_lens, num_requests)
        table, table_size, row_stride, num_rows = None, _INT32_MAX, 0, 0
        if rows is not None:
            _check_index(names.rows, rows, num_requests)
            if block_table is None:
                raise ValueError(f"{names.block_table}: expected a table, of which {names.rows} has rows, got None")
            num_rows = block_table.shape[0]
        if block_table is not None:
            _check_index(names.block_table, block_table, num_requests if rows is None else None, None)
            table, table_size, row_stride = block_table, block_table.shape[1], block_table.stride(0)
            kv_indptr = kv_last_page_len = None
        elif kv_indptr is not None:
            _check_index(names.kv_indptr, kv_indptr, num_requests + 1)
            if page_size is not None:
                _check_index(names.kv_indices, kv_indices, None)
                assert kv_indices is not None
                table, table_size = kv_indices, kv_indices.numel()
                if kv_lens is None:
                    _check_index(names.kv_last_page_len, kv_last_page_len, num_requests)
        elif page_size is not None or num_requests != 1:
            raise ValueError(f"{names.kv_indptr}: expected where each request's keys begin, got None")
        return BatchArrays(
            num_requests,
            None if isinstance(qo_indptr, int) else qo_indptr,
            qo_indptr if isinstance(qo_indptr, int) else 0,
            page_size or 0,
            table,
            table_size,
            row_stride,
            kv_indptr,
            kv_last_page_len,
            kv_lens,
            rows,
            num_rows,
        )

    def device(self, names: ArgumentNames, wanted: torch.device | None) -> torch.device:
        """Return where to plan: as wanted, else on the GPU that has one of the arrays, else on the CPU.

        Raises `ValueError` for an array that is neither there nor, for a plan on a GPU, in host memory.
        """
        arrays = self.tensors()
        if wanted is None:
            device = next((t.device for t in arrays.values() if not t.is_cpu), torch.device("cpu"))
        else:
            device = wanted
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        for member, t in arrays.items():
            if not t.is_cpu and t.device != device:
                name = getattr(names, member)
                raise ValueError(f"{name}: expected a tensor on {device}, where the plan is, got one on {t.device}")
        return device

    @property
    def capacity(self) -> int:
        """Keys that a request has at most, by the size of the page table."""
        return min(self.table_size * max(self.page_size, 1), _INT32_MAX)

    @property
    def table_name(self) -> str:
        """The member of `ArgumentNames` that names the page table."""
        return "block_table" if self.kv_indptr is None else "kv_indices"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the arrays that there are, by the members of `ArgumentNames`."""
        found = {}
        if self.qo_indptr is not None:
            found["qo_indptr"] = self.qo_indptr
        if self.table is not None:
            found[self.table_name] = self.table
        if self.kv_indptr is not None:
            found["kv_indptr"] = self.kv_indptr
        if self.kv_last_page_len is not None:
            found["kv_last_page_len"] = self.kv_last_page_len
        if self.kv_lens is not None:
            found["kv_lens"] = self.kv_lens
        if self.rows is not None:
            found["rows"] = self.rows
        return found

    def moved(self, arrays: Mapping[str, torch.Tensor]) -> BatchArrays:
        """Return the same batch with copies of some of `tensors`; the copy of a dense table has no gaps."""
        fields: dict[str, Any] = {
            "table" if member in ("block_table", "kv_indices") else member: t for member, t in arrays.items()
        }
        if "block_table" in arrays:
            fields["row_stride"] = self.table_size
        return self._replace(**fields)

    def in_buffers(self, buffers: Mapping[str, Buffer]) -> BatchArrays:
        """Return the batch with its arrays copied into those buffers that there are."""
        return self.moved({name: buffers[name].fill(t) for name, t in self.tensors().items() if name in buffers})

    def native(self, addresses: Mapping[str, int] | None = None) -> NativeBatch:
        """Return the members of BatchArrays in core_kernels/host/batch.h.

        `addresses` are those of the arrays, by the members of `ArgumentNames`, 0 for one that is not there; the default
        is where they are.
        """
        if addresses is None:
            addresses = {member: t.data_ptr() for member, t in self.tensors().items()}
        of = addresses.get
        return (
            self.num_requests,
            of("qo_indptr", 0),
            self.q_len,
            self.page_size,
            of(self.table_name, 0),
            self.table_size,
            self.row_stride,
            of("kv_indptr", 0),
            of("kv_last_page_len", 0),
            of("kv_lens", 0),
            of("rows", 0),
            self.num_rows,
        )


def _check_index(name: str, t: torch.Tensor | None, *shape: int | None) -> None:
    if type(t) is torch.Tensor and t.dtype is torch.int32 and t.dim() == 1 and t.is_contiguous() and len(shape) < 2:
        size = shape[0] if shape else None  # a vector as it should be: a plan checks several, and this is cheaper
        if (size is None or t.numel() == size) and (t.is_cpu or t.is_cuda):
            return
    check_tensor(name, t, dtypes=(torch.int32,), shape=shape or (None,), last_dim_contiguous=True)
