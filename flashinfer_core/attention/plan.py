"""The one plan behind every attention wrapper: a batch of requests, where their keys are, and the work list.

A plan knows lengths and addresses of pages; a run brings tensors, scales and masks. One plan serves all layers of a
model. Everything that does not change between runs is checked once, here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_core import _native
from flashinfer_core._checks import check_int, check_tensor
from flashinfer_core.attention.arrays import DEFAULT_NAMES, ArgumentNames, BatchArrays, Buffer
from flashinfer_core.attention.cuda_plan import CudaBatch, schedule
from flashinfer_core.attention.layout import Layout, Signature, check_device, check_layout, signature_of
from flashinfer_core.attention.memory import PlanMemory
from flashinfer_core.attention.operators import attention_plan_run, register
from flashinfer_core.attention.options import NO_GPU_SCALES, GpuScales

MAX_HEAD_DIM = _native.MAX_HEAD_DIM


class AttentionPlan:
    """Schedule of one batch of attention requests.

    Request ``r`` has query rows ``qo_indptr[r]`` to ``qo_indptr[r + 1]``; its keys are given in one of four forms:

    * CSR pages: ``kv_indptr``, ``kv_indices`` and either ``kv_last_page_len`` or ``kv_lens``;
    * dense pages: ``block_table`` and ``kv_lens``, the form of the serving engines; keys that are padded to one length
      are pages of that length, one for each request;
    * ragged: ``kv_indptr`` counts tokens, ``page_size=None``;
    * one request that has all keys: ``kv_lens``, ``page_size=None``.

    Parameters
    ----------
    qo_indptr
        int32 ``[requests + 1]``, from 0, not decreasing; or the number of query rows that every request has.
    kv_lens
        int32 ``[requests]``: keys of each request, those of its own query rows included.
    num_qo_heads, num_kv_heads
        The first is a multiple of the second.
    head_dim_qk, head_dim_vo
        At most 256; the second defaults to the first.
    page_size
        Tokens of a page; ``None`` for keys without pages.
    block_table
        int32 ``[requests, most pages of a request]`` with any row stride; entries past a request's last page are not
        read.
    rows
        int32 ``[requests]``: the row of `block_table` that each request has, if not its own number; the table may then
        have any number of rows.
    kv_indptr, kv_indices, kv_last_page_len
        int32 ``[requests + 1]``, ``[pages]``, ``[requests]``.
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
    device
        Where the tensors of the runs are; by default where the arrays are. For a GPU each array may also be in host
        memory.
    buffers
        Tensors of the caller's into which the arrays are copied, by the members of `ArgumentNames`.
    memory
        What plans of one wrapper share on a GPU; of several plans with one memory the last may run.
    q_len_hint
        About the query rows of a request, for the choice of a kernel where their numbers are on the GPU.
    kv_dtype
        Of K and V, if known: a hint for the size of the work list.
    backend
        On a GPU ``"fa2"``, the universal kernel, ``"fa3"``, that for SM90, or ``"auto"``: the latter where it applies,
        see `flashinfer_core.attention.dispatch`.

    Raises
    ------
    ValueError
        Inconsistent arrays: lengths that differ, an ``indptr`` that decreases, a page that is missing or negative.
    RuntimeError
        An earlier call found wrong values in arrays on the GPU.

    Notes
    -----
    With ``fixed_split_size`` or ``disable_split_kv`` a request's result does not depend, bit for bit, on the other
    requests of its batch. Otherwise long requests are cut so that all threads of ``torch.get_num_threads()``, or all
    multiprocessors of the GPU, have work.

    Nothing here waits for the GPU. Values of arrays that are there are checked by the kernels, which stay inside of the
    tensors whatever they are; the next call of the plan or of its wrapper then raises.
    """

    def __init__(
        self,
        qo_indptr: torch.Tensor | int,
        kv_lens: torch.Tensor | None = None,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        page_size: int | None = None,
        block_table: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        causal: bool = True,
        window_left: int = -1,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        names: ArgumentNames = DEFAULT_NAMES,
        device: torch.device | None = None,
        buffers: Mapping[str, Buffer] | None = None,
        memory: PlanMemory | None = None,
        q_len_hint: float | None = None,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
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
        arrays = BatchArrays.check(
            names, qo_indptr, kv_lens, page_size, block_table, kv_indptr, kv_indices, kv_last_page_len, rows
        )
        self.device = arrays.device(names, device)
        self.arrays = arrays
        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim_qk = head_dim_qk
        self.head_dim_vo = head_dim_vo
        self.page_size = page_size
        self.causal = causal
        self.window_left = window_left
        self.layout: Layout | None = None  # of the last run
        self._handle = register(self)
        self._batch: _native.AttentionPlan | CudaBatch
        if self.device.type == "cpu":
            self._batch = _native.AttentionPlan(
                (arrays if buffers is None else arrays.in_buffers(buffers)).native(),
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
        else:
            self._batch = schedule(
                arrays,
                PlanMemory(self.device, buffers) if memory is None else memory,
                names,
                num_kv_heads=num_kv_heads,
                group=num_qo_heads // num_kv_heads,
                head_dim_qk=head_dim_qk,
                head_dim_vo=head_dim_vo,
                causal=causal,
                window_left=window_left,
                fixed_split_size=fixed_split_size,
                disable_split_kv=disable_split_kv,
                q_len_hint=q_len_hint,
                kv_bytes=2 if kv_dtype is None else kv_dtype.itemsize,
                backend=backend,
            )
        self.num_queries: int | None = self._batch.num_queries
        self._kv_extent: int = self._batch.kv_extent

    @property
    def kv_lens(self) -> list[int] | None:
        """Keys of each request, unless only the GPU knows them."""
        return self._batch.kv_lens

    @property
    def backend(self) -> str:
        """The kernel that runs: ``"cpu"``, ``"fa2"``, or ``"fa3"`` if the tensors let it."""
        if not isinstance(self._batch, CudaBatch):
            return "cpu"
        return "fa3" if self._batch.sm90 else "fa2"

    def refresh(self) -> None:
        """Plan anew for arrays that are all on a GPU and whose values, not their places, have changed.

        As cheap as a kernel launch, and like it part of a CUDA graph that is captured.
        """
        assert isinstance(self._batch, CudaBatch)
        self._batch.refresh()

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
        gpu_scales: GpuScales = NO_GPU_SCALES,
        kv_name: str = "paged_kv_cache",
    ) -> None:
        """Compute attention for every planned row, into `out` and `lse`.

        Parameters
        ----------
        q
            ``[tokens, num_qo_heads, head_dim_qk]``; rows past the planned ones are not read. float16 or bfloat16, on
            the CPU also float32.
        k, v
            ``[pages, page_size, num_kv_heads, dim]``, or ``[tokens, num_kv_heads, dim]`` without pages; any strides
            but the last, which is 1. K and V may differ in strides. On a GPU of q's dtype, float8_e4m3fn or
            float8_e5m2.
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
            float32 ``[positions, head_dim_qk]``: cosines then sines that rotate q and k on load. On a GPU the rotated
            q and k are rounded to q's dtype.
        gpu_scales
            float32 tensors of one element on the GPU: two more factors of the logits and one of the output.
        kv_name
            The caller's name of `k` and `v`, for error messages.
        """
        if torch.compiler.is_compiling():
            attention_plan_run(
                self._handle, q, k, v, out, lse, sm_scale, logits_soft_cap, causal, window_left, v_scale, alibi_slopes,
                sinks, custom_mask, mask_indptr, rope_cos_sin, gpu_scales, kv_name,
            )  # fmt: skip
            return
        layout = self.layout
        signature = signature_of(q, (k, v), out)
        if layout is None or layout.signature != signature:
            layout = self.check_layout(q, k, v, out, signature, kv_name)
        self.run_checked(
            layout, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse, sm_scale, logits_soft_cap, causal,
            window_left, v_scale, alibi_slopes, sinks, custom_mask, mask_indptr, rope_cos_sin, gpu_scales,
        )  # fmt: skip

    def run_checked(
        self,
        layout: Layout,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: torch.Tensor | None,
        sm_scale: float,
        logits_soft_cap: float,
        causal: bool | None,
        window_left: int | None,
        v_scale: float,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        custom_mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        rope_cos_sin: torch.Tensor | None,
        gpu_scales: GpuScales,
    ) -> None:
        """`run` with tensors that `check_layout` has passed, by their addresses."""
        lse_address = lse_token = lse_head = 0
        if lse is not None:
            self._check_float32("lse", lse, None, self.num_qo_heads, writable=True)
            if lse.shape[0] < (self.num_queries or 0):
                raise ValueError(
                    f"lse: expected at least {self.num_queries} query tokens, as planned, got {lse.shape[0]}"
                )
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
            self._check_float32("alibi_slopes", alibi_slopes, self.num_qo_heads)
        if sinks is not None:
            self._check_float32("sinks", sinks, self.num_qo_heads)
        arguments = (
            q,
            k,
            v,
            out,
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
        if gpu_scales is not NO_GPU_SCALES:
            for name, scale in zip(("q_scale", "k_scale", "v_scale"), gpu_scales, strict=True):
                if scale is not None:
                    check_device(name, scale, self.device)
        if isinstance(self._batch, CudaBatch):
            self._batch.run(
                layout, arguments, logits_soft_cap > 0, alibi_slopes is not None, custom_mask, rope_cos_sin, gpu_scales
            )
        else:
            self._batch.run(layout.native, arguments)

    def check_layout(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        signature: Signature,
        kv_name: str,
    ) -> Layout:
        """Check the tensors of a run and remember their layout."""
        layout = self.layout = check_layout(
            q,
            k,
            v,
            out,
            signature,
            kv_name=kv_name,
            device=self.device,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            page_size=self.page_size,
            num_queries=self.num_queries or 0,
            kv_extent=self._kv_extent,
        )
        return layout

    def _check_float32(self, name: str, t: torch.Tensor, *shape: int | None, writable: bool = False) -> None:
        check_tensor(name, t, dtypes=(torch.float32,), shape=shape, last_dim_contiguous=not writable, writable=writable)
        check_device(name, t, self.device)
