"""From SGLang's ``ForwardBatch`` and pools to the arrays of a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.nn.functional import pad

from flashinfer_core_sglang import NAME


class Batch(NamedTuple):
    """Which requests a forward has, and how many queries and keys each.

    Attributes
    ----------
    rows : torch.Tensor
        int64 ``[requests]``: each request's row of ``req_to_token``.
    q_lens : int or torch.Tensor
        Query rows of every request, or ``[requests]``.
    kv_lens : torch.Tensor
        int64 ``[requests]``: keys of each request, those of its own query rows included.
    encoder_lens : torch.Tensor or None
        ``[requests]``: the encoder's keys, which precede the others in a row.
    q_len_hint : float or None
        About the query rows of a request, where `q_lens` is on the GPU.
    most_queries : int
        Query rows that a request has at most.
    """

    rows: torch.Tensor
    q_lens: int | torch.Tensor
    kv_lens: torch.Tensor
    encoder_lens: torch.Tensor | None
    q_len_hint: float | None
    most_queries: int

    @property
    def size(self) -> int:
        """The number of requests."""
        return self.rows.shape[0]

    @staticmethod
    def of(forward_batch: Any, *, draft_step: int | None, captured: bool) -> Batch:
        """Read SGLang's batch, whose lengths mean something else in each mode.

        Parameters
        ----------
        forward_batch
            SGLang's.
        draft_step
            The step in which a draft model decodes; None for other models.
        captured
            Whether a CUDA graph will be made of it, or replayed: the hint must then depend on its shape only.
        """
        mode, size = forward_batch.forward_mode, forward_batch.batch_size
        for name in ("multi_item_delimiter_indices", "cross_attention_custom_mask"):
            if getattr(forward_batch, name, None) is not None:
                raise NotImplementedError(f"{name}: {NAME} does not serve this; choose another attention backend")
        lens, spec = forward_batch.seq_lens[:size], forward_batch.spec_info
        q_lens: int | torch.Tensor
        hint: float | None = None
        most = 1
        if draft_step is not None:  # the keys of this step and of those before are in the row, and not in its length
            q_lens, lens = 1, lens + (draft_step + 1)
        elif mode.is_decode_or_idle():
            q_lens = 1
        elif mode.is_target_verify():  # nor are those of the drafts that are verified
            if getattr(spec, "ragged_verify_layout", None) is not None:
                raise NotImplementedError(f"ragged_verify_layout: {NAME} does not serve this")
            q_lens = most = spec.draft_token_num
            lens = lens + q_lens
        elif mode is ForwardMode.DRAFT_EXTEND_V2:
            given = getattr(spec, "extend_seq_lens_tensor", None)
            q_lens = (forward_batch.extend_seq_lens if given is None else given)[:size]
            hint = most = forward_batch.out_cache_loc.shape[0] // max(size, 1)  # as many for every request
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL):
            q_lens = forward_batch.extend_seq_lens[:size]
            most = forward_batch.input_ids.shape[0]
            hint = None if captured else most / max(size, 1)
        else:
            raise NotImplementedError(f"forward mode {mode.name}: {NAME} does not serve it")
        encoder_lens = forward_batch.encoder_lens
        return Batch(
            forward_batch.req_pool_indices[:size],
            q_lens,
            lens,
            None if encoder_lens is None else encoder_lens[:size],
            hint,
            most,
        )


class Keys(NamedTuple):
    """The arrays of a plan, see `flashinfer_core.engine.LayerGroup.plan_paged`."""

    qo_indptr: int | torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor | None
    page_size: int


class Arrays:
    """int32 arrays that stay in their places from batch to batch, so that plans and captured graphs find them there.

    Parameters
    ----------
    device
        Where they are. On the CPU, where a plan copies what it needs, nothing is kept.
    fixed
        Whether captured graphs read them: then none is ever replaced by a larger one.
    """

    def __init__(self, device: torch.device, fixed: bool) -> None:
        self._device = device
        self._fixed = fixed
        self._held: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, rows: int, columns: int = 1) -> None:
        """Make room for so many rows."""
        self._held[name] = torch.zeros(rows, columns, dtype=torch.int32, device=self._device)

    def keep(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the values as int32, in their place."""
        if self._device.type == "cpu":
            return values.to(torch.int32)
        rows, columns = values.shape[0], values[0].numel()
        held = self._held.get(name)
        if held is None or held.shape[0] < rows or held.shape[1] < columns:
            if self._fixed:
                raise RuntimeError(
                    f"{name}: expected no more than was reserved for CUDA graphs, got {rows} x {columns}"
                )
            largest = (rows, columns) if held is None else (max(rows, held.shape[0]), max(columns, held.shape[1]))
            self.reserve(name, *largest)
            held = self._held[name]
        if values.dim() == 1:
            return held.view(-1)[:rows].copy_(values)
        held[:rows, :columns].copy_(values)
        return held[:rows]


class Tables:
    """SGLang's tables of slots as the page tables of plans, and its pools as pages.

    A row of ``req_to_token`` names the slot of each token of a request: with pages of one token it is a page table as
    it stands. With larger pages, and for layers in a pool of their own for windows, tables are made once for a batch.

    Parameters
    ----------
    req_to_token
        int32 ``[rows, context]``.
    pool
        SGLang's pool of keys and values.
    page_size
        Tokens of a page.
    """

    def __init__(self, req_to_token: torch.Tensor, pool: Any, page_size: int) -> None:
        self._req_to_token = req_to_token
        self._pool = pool
        self._page_size = page_size
        device = req_to_token.device
        self.eager, self.captured = Arrays(device, fixed=False), Arrays(device, fixed=True)
        self.max_requests: int = req_to_token.shape[0]

    @property
    def reads_shared(self) -> bool:
        """Whether attention itself reads ``req_to_token``."""
        return self._page_size == 1

    def pages(self, cache: torch.Tensor) -> torch.Tensor:
        """View keys or values as ``[pages, page_size, heads, dim]``."""
        if cache.dim() == 4:  # [pages, heads, page_size, dim]
            return cache.transpose(1, 2)
        return cache.view(-1, self._page_size, *cache.shape[1:])

    def reserve(self, max_requests: int, *, q_len: int, windows: set[int], encoder: bool) -> None:
        """Make the arrays of captured batches, whose requests have at most `q_len` query rows each.

        `windows` are those of layers in the pool for windows; `encoder` says whether rows begin with an encoder's keys.
        """
        self.max_requests = max(self.max_requests, max_requests)
        for name in ("rows", "lens", "lens of the encoder", *(f"lens in window {window}" for window in windows)):
            self.captured.reserve(name, max_requests)
        self.captured.reserve("qo_indptr", max_requests + 1)
        for window in windows:
            self.captured.reserve(
                f"pages in window {window}", max_requests, self._num_pages(window + q_len + self._page_size)
            )
        if self._page_size > 1 or encoder:
            self.captured.reserve("pages", max_requests, self._num_pages(self._req_to_token.shape[1]))

    def keys(self, arrays: Arrays, batch: Batch, *, cross: bool, window: int | None) -> Keys:
        """Return the arrays of a plan.

        Parameters
        ----------
        arrays
            Where they are to lie.
        batch
            The requests.
        cross
            Whether the keys are those of the encoder.
        window
            For layers in the pool for windows, the keys before its own that a query sees; else None.
        """
        q_lens, lens, starts = batch.q_lens, batch.kv_lens, None
        if isinstance(q_lens, torch.Tensor):
            qo_indptr: int | torch.Tensor = arrays.keep("qo_indptr", pad(q_lens.cumsum(0), (1, 0)))
        else:
            qo_indptr = q_lens
        which = ""
        if window is not None:  # keys that no query sees may be gone from the pool
            which = f" in window {window}"
            starts = (lens - q_lens - window).clamp(min=0) // self._page_size * self._page_size
            lens = lens - starts
        elif cross:
            which = " of the encoder"
            assert batch.encoder_lens is not None
            lens = batch.encoder_lens
        else:
            starts = batch.encoder_lens
        if starts is None and self._page_size == 1:
            table, rows = self._req_to_token, arrays.keep("rows", batch.rows)
        else:
            width = self._width(lens, window, batch)
            pages = self._pages(batch.rows, starts, width, window is not None)
            table, rows = arrays.keep(f"pages{which}", pages), None
        return Keys(qo_indptr, arrays.keep(f"lens{which}", lens), table, rows, self._page_size)

    def _width(self, lens: torch.Tensor, window: int | None, batch: Batch) -> int:
        """Return how many tokens a page table has to cover, without waiting for a GPU."""
        if lens.is_cpu:
            return int(lens.max())
        context = self._req_to_token.shape[1]
        if window is None:
            return context
        return min(context, window + batch.most_queries + self._page_size)

    def _pages(self, rows: torch.Tensor, starts: torch.Tensor | None, width: int, in_window_pool: bool) -> torch.Tensor:
        """Return the pages of each request from a token on, which begins a page."""
        tokens = torch.arange(0, self._num_pages(width) * self._page_size, self._page_size, device=rows.device)
        if starts is not None:
            tokens = starts[:, None] + tokens
        slots = self._req_to_token[rows[:, None], tokens.clamp(max=self._req_to_token.shape[1] - 1)]
        if in_window_pool:
            slots = self._pool.translate_loc_from_full_to_swa(slots)
        return slots // self._page_size

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
