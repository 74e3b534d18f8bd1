"""The one plan behind every attention wrapper: a batch of requests, where their keys are, and the work list.

A plan knows lengths and addresses of pages; a run brings tensors, scales and masks. One plan serves all layers of a
model. Everything that does not change between runs is checked once, here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, check_int, check_tensor

MAX_HEAD_DIM = _native.MAX_HEAD_DIM


@dataclass(frozen=True)
class ArgumentNames:
    """What a public function calls the arrays that it hands on, for error messages."""

    qo_indptr: str = "qo_indptr"
    kv_indptr: str = "kv_indptr"
    kv_indices: str = "kv_indices"
    kv_last_page_len: str = "kv_last_page_len"
    kv_lens: str = "kv_lens"
    block_table: str = "block_table"

    def as_tuple(self) -> tuple[str, str, str, str, str, str]:
        """Return the names in the order of the native constructor."""
        return (
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.kv_last_page_len,
            self.kv_lens,
            self.block_table,
        )


DEFAULT_NAMES = ArgumentNames()


class AttentionPlan:
    """Schedule of one batch of attention requests.

    Request ``r`` has query rows ``qo_indptr[r]`` to ``qo_indptr[r + 1]``; its keys are given in one of three forms:

    * CSR pages: ``kv_indptr``, ``kv_indices`` and either ``kv_last_page_len`` or ``kv_lens``;
    * dense pages: ``block_table`` and ``kv_lens``, the form of the serving engines;
    * ragged: ``kv_start`` and ``kv_lens``, ``page_size=None``.

    Parameters
    ----------
    qo_indptr
        int32 ``[requests + 1]``, from 0, not decreasing.
    kv_lens
        int32 ``[requests]``: keys of each request, those of its own query rows included.
    num_qo_heads, num_kv_heads
        The first is a multiple of the second.
    head_dim_qk, head_dim_vo
        At most 256; the second defaults to the first.
    page_size
        Tokens of a page; ``None`` for ragged keys.
    block_table
        int32 ``[requests, most pages of a request]`` with any row stride; entries past a request's last page are not
        read.
    kv_indptr, kv_indices, kv_last_page_len
        int32 ``[requests + 1]``, ``[pages]``, ``[requests]``.
    kv_start
        int64 ``[requests]``: first token of each request in a ragged K.
    causal
        Query ``i`` sees key ``j`` when ``j <= i + kv_len - qo_len``.
    window_left
        Query ``i`` sees key ``j`` only when ``j >= i + kv_len - qo_len - window_left``; -1 for no window.
    fixed_split_size
        Keys after which a request's work is cut, whatever the batch. ``None``: chosen from the batch.
    disable_split_kv
        Never cut a request's keys.
    names
        The caller's names of the arrays.

    Raises
    ------
    ValueError
        Inconsistent arrays: lengths that differ, an ``indptr`` that decreases, a page that is missing or negative.

    Notes
    -----
    With ``fixed_split_size`` or ``disable_split_kv`` a request's result does not depend, bit for bit, on the other
    requests of its batch. Otherwise long requests are cut so that all threads of ``torch.get_num_threads()`` have work.
    """

    def __init__(
        self,
        qo_indptr: torch.Tensor,
        kv_lens: torch.Tensor | None = None,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        page_size: int | None = None,
        block_table: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        kv_start: torch.Tensor | None = None,
        causal: bool = True,
        window_left: int = -1,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        names: ArgumentNames = DEFAULT_NAMES,
    ) -> None:
        check_int("num_kv_heads", num_kv_heads, 1)
        check_int("num_qo_heads", num_qo_heads, 1)
        if num_qo_heads % num_kv_heads != 0:
            raise ValueError(f"num_qo_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_qo_heads}")
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        check_int("head_dim_qk", head_dim_qk, 1, MAX_HEAD_DIM)
        check_int("head_dim_vo", head_dim_vo, 1, MAX_HEAD_DIM)
        check_int("window_left", window_left, -1)
        if page_size is not None:
            check_int("page_size", page_size, 1)
        if fixed_split_size is not None:
            check_int("fixed_split_size", fixed_split_size, 1)

        _check_index(names.qo_indptr, qo_indptr)
        num_requests = qo_indptr.numel() - 1
        if num_requests < 0:
            raise ValueError(f"{names.qo_indptr}: expected at least one entry, got none")
        if kv_lens is not None:
            _check_index(names.kv_lens, kv_lens, num_requests)
        table, table_size, row_stride = None, 0, 0
        if block_table is not None:
            check_tensor(
                names.block_table,
                block_table,
                dtypes=(torch.int32,),
                shape=(num_requests, None),
                last_dim_contiguous=True,
            )
            table, table_size, row_stride = block_table, block_table.shape[1], block_table.stride(0)
        elif kv_indices is not None:
            assert kv_indptr is not None
            _check_index(names.kv_indptr, kv_indptr, num_requests + 1)
            _check_index(names.kv_indices, kv_indices)
            if kv_last_page_len is not None:
                _check_index(names.kv_last_page_len, kv_last_page_len, num_requests)
            table, table_size = kv_indices, kv_indices.numel()
        else:
            assert kv_start is not None
            assert page_size is None

        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim_qk = head_dim_qk
        self.head_dim_vo = head_dim_vo
        self.page_size = page_size
        self.causal = causal
        self.window_left = window_left
        # An empty table has no address, which would mean "ragged" below.
        placeholder = qo_indptr.data_ptr()
        self._native = _native.AttentionPlan(
            num_requests,
            qo_indptr.data_ptr(),
            page_size or 0,
            0 if table is None else table.data_ptr() or placeholder,
            table_size,
            row_stride,
            0 if kv_indptr is None or block_table is not None else kv_indptr.data_ptr(),
            0 if kv_last_page_len is None else kv_last_page_len.data_ptr(),
            0 if kv_lens is None else kv_lens.data_ptr(),
            0 if kv_start is None else kv_start.data_ptr(),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            causal,
            window_left,
            fixed_split_size or 0,
            not disable_split_kv,
            names.as_tuple(),
        )
        self.num_queries: int = self._native.num_queries
        self._kv_extent: int = self._native.kv_extent
        # The tensors of the last run, as far as they were checked, and what native code needs to know of them: one
        # object, so that threads that run the plan on different tensors never see half of each.
        self._checked: tuple[tuple[object, ...], _native.TensorLayout] | None = None

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each request."""
        return list(self._native.kv_lens)

    @property
    def num_splits(self) -> int:
        """Query tiles whose keys are split over several work items."""
        return int(self._native.num_splits)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        sm_scale: float,
        logits_soft_cap: float = 0.0,
        causal: bool | None = None,
        window_left: int | None = None,
        v_scale: float = 1.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        custom_mask: torch.Tensor | None = None,
        mask_indptr: torch.Tensor | None = None,
        rope_cos_sin: torch.Tensor | None = None,
        kv_name: str = "paged_kv_cache",
    ) -> None:
        """Compute attention for every planned row, into `out` and `lse`.

        Parameters
        ----------
        q
            ``[tokens, num_qo_heads, head_dim_qk]``; rows past the planned ones are not read.
        k, v
            ``[pages, page_size, num_kv_heads, dim]``, or ``[tokens, num_kv_heads, dim]`` for a ragged plan; any strides
            but the last, which is 1. K and V may differ in strides.
        out
            ``[tokens, num_qo_heads, head_dim_vo]``; rows past the planned ones are not written.
        lse
            float32 ``[tokens, num_qo_heads]`` with any strides: base-2 logarithm of the sum of exponentials.
        sm_scale
            Factor of the logits.
        logits_soft_cap
            ``cap``: logits become ``cap * tanh(logits / cap)``; 0 for none.
        causal, window_left
            Override those of a plan made without.
        v_scale
            Factor of the output.
        alibi_slopes
            float32 ``[num_qo_heads]``: adds ``slope * (j - i - kv_len + qo_len)`` to the capped logits.
        sinks
            float32 ``[num_qo_heads]``: one more logit in each row's denominator, after scale and cap.
        custom_mask, mask_indptr
            uint8 bits, little endian, row-major ``[qo_len, kv_len]`` of each request from byte ``mask_indptr[r]``
            (int64) on: 1 for a visible key.
        rope_cos_sin
            float32 ``[positions, head_dim_qk]``: cosines then sines that rotate q and k on load.
        kv_name
            The caller's name of `k` and `v`, for error messages.
        """
        if torch.compiler.is_compiling():
            # A traced call would bake in the addresses of the tensors that it was traced with.
            raise NotImplementedError(
                "attention inside torch.compile is not in this version; call it from a function under "
                "torch.compiler.disable, which splits the graph around it"
            )
        checked = self._checked
        signature = _signature(q, k, v, out)
        if checked is None or checked[0] != signature:
            checked = self._checked = (signature, self._checked_layout(q, k, v, out, kv_name))
        rows = self.num_queries
        lse_address = lse_token = lse_head = 0
        if lse is not None:
            check_tensor("lse", lse, dtypes=(torch.float32,), shape=(None, self.num_qo_heads), writable=True)
            if lse.shape[0] < rows:
                raise ValueError(f"lse: expected at least {rows} query tokens, as planned, got {lse.shape[0]}")
            lse_address, (lse_token, lse_head) = lse.data_ptr(), lse.stride()
        if window_left is None:
            window_left = self.window_left
        elif check_int("window_left", window_left, -1) != self.window_left and self.window_left != -1:
            raise ValueError(f"window_left: the plan was made for {self.window_left}, got {window_left}")
        if causal is None:
            causal = self.causal
        elif self.causal and not causal:
            raise ValueError("causal: the plan was made with causal=True, got False")
        if alibi_slopes is not None:
            _check_per_head("alibi_slopes", alibi_slopes, self.num_qo_heads)
        if sinks is not None:
            _check_per_head("sinks", sinks, self.num_qo_heads)
        self._native.run(
            checked[1],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse_address,
            lse_token,
            lse_head,
            causal,
            window_left,
            sm_scale,
            logits_soft_cap,
            v_scale,
            0 if alibi_slopes is None else alibi_slopes.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if custom_mask is None else custom_mask.data_ptr(),
            0 if mask_indptr is None else mask_indptr.data_ptr(),
            0 if rope_cos_sin is None else rope_cos_sin.data_ptr(),
        )

    def _checked_layout(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, kv_name: str
    ) -> _native.TensorLayout:
        """Check the tensors of a run. Those of a model's next layer have the same layout, and then this is skipped."""
        q_heads = (self.num_qo_heads, self.head_dim_qk)
        out_heads = (self.num_qo_heads, self.head_dim_vo)
        slots = () if self.page_size is None else (self.page_size,)
        unit = "tokens" if self.page_size is None else "pages"
        for name, t, tail, least, what in (
            ("q", q, q_heads, self.num_queries, "query tokens"),
            (kv_name, k, (*slots, self.num_kv_heads, self.head_dim_qk), self._kv_extent, unit),
            (kv_name, v, (*slots, self.num_kv_heads, self.head_dim_vo), self._kv_extent, unit),
            ("out", out, out_heads, self.num_queries, "query tokens"),
        ):
            check_tensor(name, t, shape=(None, *tail), last_dim_contiguous=True, writable=name == "out")
            if t.shape[0] < least:
                raise ValueError(f"{name}: expected at least {least} {what}, as planned, got {t.shape[0]}")
        if k.dtype != v.dtype:
            raise ValueError(f"{kv_name}: expected K and V of one dtype, got {k.dtype} and {v.dtype}")
        no_page = (0,) if self.page_size is None else ()
        return _native.TensorLayout(
            DTYPE_CODES[q.dtype],
            DTYPE_CODES[k.dtype],
            DTYPE_CODES[out.dtype],
            q.stride()[:2],
            (*no_page, *k.stride()[:-1]),
            (*no_page, *v.stride()[:-1]),
            out.stride()[:2],
        )


def _signature(*tensors: torch.Tensor) -> tuple[object, ...]:
    """Return all that `_checked_layout` checks; nothing of what is not a tensor, which it then names."""
    try:
        q, k, v, out = tensors
        on_cpu = q.is_cpu and k.is_cpu and v.is_cpu and out.is_cpu
        return (
            *(q.shape, q.stride(), q.dtype, out.shape, out.stride(), out.dtype),
            *(k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, on_cpu),
        )
    except AttributeError:
        return ()


def _check_index(name: str, t: torch.Tensor, size: int | None = None) -> None:
    check_tensor(name, t, dtypes=(torch.int32,), shape=(size,), last_dim_contiguous=True)


def _check_per_head(name: str, t: torch.Tensor, heads: int) -> None:
    check_tensor(name, t, dtypes=(torch.float32,), shape=(heads,), last_dim_contiguous=True)
