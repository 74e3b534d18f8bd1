"""The memory of plans on a GPU, and how arrays of a batch get there without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_core import _native
from flashinfer_core._cuda import current_stream
from flashinfer_core.attention.arrays import DEFAULT_NAMES, ArgumentNames, BatchArrays, Buffer


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
    """

    def __init__(
        self,
        device: torch.device,
        buffers: Mapping[str, Buffer] | None = None,
        workspace: torch.Tensor | None = None,
        scratch: Pool | None = None,
    ) -> None:
        self.device = device
        self.buffers = buffers
        self.workspace = workspace
        self.tile: str | None = None
        self.pool = Pool(device, buffers is not None)
        self.status = _native.AttentionStatus()
        self._scratch = self.pool if scratch is None else scratch
        self._table: int | None = None
        self._names, self._page_size, self._table_name = DEFAULT_NAMES, 0, ""

    def place(self, arrays: BatchArrays, names: ArgumentNames) -> BatchArrays:
        """Return the batch with every array on the GPU, in the caller's buffers if there are some."""
        tensors = arrays.tensors()
        on_host = {member: t for member, t in tensors.items() if t.is_cpu}
        moved: dict[str, torch.Tensor] = {}
        if on_host:
            if is_capturing(self.device):
                listed = ", ".join(getattr(names, member) for member in on_host)
                raise RuntimeError(
                    f"{listed}: expected tensors on {self.device} while a CUDA graph is captured, since the graph "
                    "would replay with the numbers of now, got CPU tensors"
                )
            sizes = [t.numel() for t in on_host.values()]
            copies = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
            torch.cat([t.reshape(-1) for t in on_host.values()], out=copies)
            if self.buffers is None:
                space = self.pool.reserve("arrays", sum(sizes), torch.int32)[: sum(sizes)]
                copies = space.copy_(copies, non_blocking=True)
            moved = dict(zip(on_host, torch.split(copies, sizes), strict=True))
        if self.buffers is not None:
            for member, t in tensors.items():
                if member in self.buffers:
                    moved[member] = self.buffers[member].fill(moved.get(member, t))
                elif member in moved:
                    space = self.pool.reserve(getattr(names, member), t.numel(), torch.int32)[: t.numel()]
                    moved[member] = space.copy_(moved[member], non_blocking=True)
        placed = arrays.moved(moved)
        self._names, self._page_size = names, arrays.page_size
        self._table_name = getattr(names, arrays.table_name)
        self._check_table(placed.table)
        return placed

    def readable(self, placed: BatchArrays) -> int:
        """Return how many entries of the page table a run may read, now or in a replay."""
        table = placed.table
        if table is None:
            return 0
        if table.dim() == 2:
            return table.stride(0) * (table.shape[0] - 1) + table.shape[1]
        buffer = None if self.buffers is None else self.buffers.get("kv_indices")
        held = table if placed.kv_indptr is None or buffer is None else buffer.tensor
        return 0 if held is None else held.numel()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes for partial results, the caller's memory left aside, and for all else."""
        sizes = {**self.pool.bytes(), **self._scratch.bytes()}
        partial = sizes.pop("partial results", 0)
        return partial, sum(sizes.values())

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
        }[fault]
        raise RuntimeError(f"{what}, got {value} for request {request}; found on {self.device} by an earlier call")

    def _check_table(self, table: torch.Tensor | None) -> None:
        if self.buffers is None or table is None:
            return
        address = table.data_ptr()
        if self._table is None:
            self._table = address
        elif self._table != address:
            raise ValueError(
                f"{self._table_name}: expected the tensor of the first plan, since use_cuda_graph is set and captured "
                "graphs read it, got another; copy later page tables into it"
            )
