"""The memory of plans on a GPU, and how arrays of a batch get there without waiting for the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from flashinfer_core import _native
from flashinfer_core._cuda import current_stream
from flashinfer_core.attention.arrays import DEFAULT_NAMES, ArgumentNames, BatchArrays, Buffer, NativeBatch


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured from torch's stream on a device."""
    return _native.is_capturing(current_stream(device.index), device.index)


class Pool:
    """Tensors of one device by name, each replaced when a larger one is asked for.

    Parameters
    ----------
    device
        Where they are.
    fixed
        Never replace one: captured CUDA graphs read them.
    """

    def __init__(self, device: torch.device, fixed: bool = False) -> None:
        self._device = device
        self._fixed = fixed
        self._tensors: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, size: int, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        """Return a tensor of at least `size` elements, which were zero when it was made if `zero` is set."""
        held = self._tensors.get(name)
        if held is not None and held.numel() >= size:
            return held
        if self._fixed:
            if held is not None:
                raise ValueError(
                    f"plan: expected a batch that needs no more memory than the first, since use_cuda_graph is set: "
                    f"{held.numel()} elements of {name}, got {size}; make the first plan with the largest batch"
                )
            if is_capturing(self._device):
                raise RuntimeError(
                    "plan: expected a first plan before the capture of a CUDA graph, which makes the memory that the "
                    "graph uses, got one during the capture"
                )
        make = torch.zeros if zero else torch.empty
        held = self._tensors[name] = make(size, dtype=dtype, device=self._device)
        return held

    def bytes(self) -> dict[str, int]:
        """Return the size of each tensor."""
        return {name: t.numel() * t.element_size() for name, t in self._tensors.items()}


class PlacedArrays(NamedTuple):
    """The arrays of a batch on a GPU."""

    native: NativeBatch
    page_table_size: int  # entries that a run may read, now or in a replay
    held: tuple[torch.Tensor, ...]  # what `native` has the addresses of


class PlanMemory:
    """What the plans of one wrapper use on a GPU, one after the other; at any time the last of them may run.

    Parameters
    ----------
    device
        The GPU.
    buffers
        The caller's tensors for arrays of a batch, by the members of `ArgumentNames`. They make the memory a fixed one:
        it and the kind of tile stay as the first plan made them, so that a captured run replays with what a later plan
        wrote.
    workspace
        The caller's memory for partial results, used where it is large enough.
    scratch
        Memory for partial results in place of this one's own. They live during a run only, so plans that run on one
        stream may share it.
    max_requests
        The most requests of a batch. It makes the memory a fixed one without buffers: the arrays of a batch are read
        where the caller has them, and a captured run replays with what a later plan of as many requests wrote.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Mapping[str, Buffer] | None = None,
        workspace: torch.Tensor | None = None,
        scratch: Pool | None = None,
        max_requests: int = 0,
    ) -> None:
        self.device = device
        self.buffers = buffers
        self.workspace = workspace
        self.tile: str | None = None
        self._slots: int | None = None
        self.max_requests = max_requests
        self.pool = Pool(device, buffers is not None or max_requests > 0)
        self.status = _native.AttentionStatus()
        self._scratch = self.pool if scratch is None else scratch
        self._table: int | None = None
        self._names, self._page_size, self._table_name = DEFAULT_NAMES, 0, ""

    def place(self, arrays: BatchArrays, names: ArgumentNames) -> PlacedArrays:
        """Bring every array to the GPU, into the caller's buffers if there are some."""
        tensors = arrays.tensors()
        on_host = [member for member, t in tensors.items() if t.is_cpu]
        stream, device = current_stream(self.device.index), self.device.index
        if on_host and _native.is_capturing(stream, device):
            listed = ", ".join(getattr(names, member) for member in on_host)
            raise RuntimeError(
                f"{listed}: expected tensors on {self.device} while a CUDA graph is captured, since the graph would "
                "replay with the numbers of now, got CPU tensors"
            )
        held = {member: t for member, t in tensors.items() if not t.is_cpu}
        if self.buffers is not None:
            held = {member: self.buffers[member].fill(t) if member in self.buffers else t for member, t in held.items()}
        addresses = {member: t.data_ptr() for member, t in held.items()}
        if on_host:
            if self.buffers is None:
                sizes = [4 * tensors[member].numel() for member in on_host]
                held["arrays"] = space = self.pool.reserve("arrays", sum(sizes) // 4, torch.int32)
                starts = itertools.accumulate(sizes, initial=space.data_ptr())
                addresses |= zip(on_host, starts, strict=False)
            else:
                held |= {member: self._kept(member, tensors[member].numel(), names) for member in on_host}
                addresses |= {member: held[member].data_ptr() for member in on_host}
            _native.copy_to_device([(addresses[member], *_rows(tensors[member])) for member in on_host], stream, device)
            if "block_table" in on_host:
                arrays = arrays._replace(row_stride=arrays.table_size)
        self._names, self._page_size = names, arrays.page_size
        self._table_name = getattr(names, arrays.table_name)
        self._check_table(addresses.get(arrays.table_name))
        return PlacedArrays(arrays.native(addresses), self._readable(arrays), tuple(held.values()))

    def _kept(self, member: str, size: int, names: ArgumentNames) -> torch.Tensor:
        """Return where an array lies in every plan of a fixed memory: in the caller's buffer if there is one."""
        buffer = None if self.buffers is None else self.buffers.get(member)
        if buffer is None:
            return self.pool.reserve(getattr(names, member), size, torch.int32)
        return buffer.part(size)

    def _readable(self, arrays: BatchArrays) -> int:
        """Return how many entries of the page table a run may read, now or in a replay."""
        if arrays.table is None:
            return 0
        if arrays.kv_indptr is None:
            rows = arrays.num_requests if arrays.rows is None else arrays.num_rows
            return arrays.row_stride * (rows - 1) + arrays.table_size
        buffer = None if self.buffers is None else self.buffers.get("kv_indices")
        return arrays.table_size if buffer is None or buffer.tensor is None else buffer.tensor.numel()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes for partial results, the caller's memory left aside, and for all else."""
        sizes = {**self.pool.bytes(), **self._scratch.bytes()}
        partial = sizes.pop("partial results", 0)
        return partial, sum(sizes.values())

    def slots(self, wanted: int) -> int:
        """Return for how many partial results to lay out memory that has to hold so many.

        In a fixed memory as many as in the first plan: a captured run reads them where they lay then.
        """
        if self.buffers is None:
            return wanted
        if self._slots is None:
            self._slots = wanted
        if wanted > self._slots:
            raise ValueError(
                f"plan: expected a batch that is cut into no more pieces than the first, since use_cuda_graph is set: "
                f"{self._slots}, got {wanted}; make the first plan with the largest batch"
            )
        return self._slots

    def partials(self, slots: int, rows: int, dim: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Return memory for partial outputs and log-sum-exps, its address, and the counters of finished pieces."""
        arrivals = self._scratch.reserve("arrivals", slots, torch.int32, zero=True)
        floats, given = slots * rows * (dim + 1), self.workspace
        if given is not None and given.device == self.device and given.is_contiguous():
            address = -(-given.data_ptr() // 256) * 256
            if given.data_ptr() + given.numel() * given.element_size() >= address + 4 * floats:
                return given, address, arrivals
        own = self._scratch.reserve("partial results", floats, torch.float32)
        return own, own.data_ptr(), arrivals

    def raise_fault(self) -> None:
        """Raise what the GPU found wrong in the arrays of an earlier call."""
        found = self.status.take()
        if found is None:
            return
        fault, request, value = found
        names = self._names
        table = f"{self._table_name}: expected pages of the cache"
        what = {
            1: f"{names.qo_indptr}: expected values from 0 that do not decrease",
            2: f"{names.kv_indptr}: expected values that do not decrease, within the page table",
            3: f"{names.kv_last_page_len}: expected 1 to page_size = {self._page_size}",
            4: f"{names.kv_lens}: expected 0 to the number of keys that the pages of the table hold",
            5: table if self._page_size else f"{names.kv_indptr}: expected rows of k and v",
            6: f"q: expected the rows that {names.qo_indptr} ends at",
            7: "fixed_split_size: expected no more pieces than the workspace was sized for",
            8: f"{names.rows}: expected rows of {names.block_table}",
        }[fault]
        raise RuntimeError(f"{what}, got {value} for request {request}; found on {self.device} by an earlier call")

    def _check_table(self, address: int | None) -> None:
        if self.buffers is None or address is None:
            return
        if self._table is None:
            self._table = address
        elif self._table != address:
            raise ValueError(
                f"{self._table_name}: expected the tensor of the first plan, since use_cuda_graph is set and captured "
                "graphs read it, got another; copy later page tables into it"
            )


def _rows(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address of an array in host memory, its rows, and their bytes and distance."""
    if t.dim() == 1:
        return t.data_ptr(), 1, 4 * t.numel(), 0
    return t.data_ptr(), t.shape[0], 4 * t.shape[1], 4 * t.stride(0)
