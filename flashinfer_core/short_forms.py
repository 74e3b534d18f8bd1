"""The short call forms of the functions: each is turned into the full call, or refused with both forms named.

``kv_data`` holds K and V side by side in one tensor:

* contiguous or ragged ``[tokens, 2, heads, dim]``, with ``kv_indptr`` if it holds several requests;
* padded ``[batch, max_len, 2, heads, dim]``, with ``kv_lens`` unless every request has max_len tokens;
* paged ``[pages, 2, heads, page_size, dim]`` (``kv_layout="NHD"``: ``[pages, 2, page_size, heads, dim]``), with
  ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``, or with a dense table ``page_indices`` ``[batch, most pages]``
  and ``kv_lens``.

Index arrays are int32 or int64. The wrappers' short forms are in `flashinfer_core.attention.deferred`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from flashinfer_core._checks import check_tensor
from flashinfer_core.attention import cudnn, single
from flashinfer_core.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer_core.attention.deferred import split_kv_data
from flashinfer_core.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer_core.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer_core.attention.wrapper import Result
from flashinfer_core.cascade import merge_state

_Full = ParamSpec("_Full")
_Short = ParamSpec("_Short")
_R = TypeVar("_R", covariant=True)
State = tuple[torch.Tensor, torch.Tensor]
Indices = torch.Tensor | Sequence[Any] | None
_CSR = {"kv_indptr", "kv_indices", "kv_last_page_len"}
_OF_RUN = ("q_scale", "k_scale", "v_scale", "sinks", "return_lse")  # the other options belong to `plan`


class _TwoForms(Protocol[_Full, _Short, _R]):
    @overload
    def __call__(self, *args: _Full.args, **kwargs: _Full.kwargs) -> _R: ...
    @overload
    def __call__(self, *args: _Short.args, **kwargs: _Short.kwargs) -> _R: ...


def short_form_of(full: Callable[_Full, _R]) -> Callable[[Callable[_Short, _R]], _TwoForms[_Full, _Short, _R]]:
    """Make one function of a full form and of the decorated short one, which a keyword of its own tells apart."""
    parameters = inspect.signature(full).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]

    def decorate(short: Callable[_Short, _R]) -> _TwoForms[_Full, _Short, _R]:
        keywords = [name for name in inspect.signature(short).parameters if name != "options"]
        only_short = frozenset(keywords) - parameters.keys()
        only_full = frozenset(required) - set(keywords)

        @functools.wraps(full)
        def call(*args: Any, **kwargs: Any) -> Any:
            if only_short.isdisjoint(kwargs):
                return full(*args, **kwargs)
            if len(args) > 1 or not only_full.isdisjoint(kwargs):
                got = ", ".join([*required[: len(args)], *(f"{name}=" for name in kwargs)])
                raise TypeError(
                    f"kv_data: expected {full.__name__}({', '.join(required)}, ...), or the short form "
                    f"{full.__name__}({'=, '.join(keywords)}=, ...), got a mix of both, ({got})"
                )
            return short(*args, **kwargs)

        call.__doc__ = "\n\n".join(
            [inspect.cleandoc(full.__doc__ or ""), "Short form\n----------", inspect.cleandoc(short.__doc__ or "")]
        )
        return call

    return decorate


@short_form_of(single.single_decode_with_kv_cache)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    *,
    kv_data: torch.Tensor,
    kv_indices: Indices = None,
    kv_indptr: Indices = None,
    kv_last_page_len: Indices = None,
    kv_layout: str | None = None,
    **options: Any,
) -> Result:
    """``q`` is ``[heads, dim]``; ``kv_data`` is contiguous, or paged with the CSR arrays of the one request.

    Paged ``kv_data`` alone means all its pages, in order and full. Other options are those of the full form.
    """
    pages = _pages_of_one_request(kv_data, kv_indptr, kv_indices, kv_last_page_len, kv_layout)
    if pages is None:
        return single.single_decode_with_kv_cache(q, *split_kv_data(kv_data), **options)
    check_tensor("q", q, dtypes=None, ndim=2)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(kv_layout=kv_layout or "HND")
    result = _plan_and_run(wrapper, (q.unsqueeze(0), kv_data), pages, options)
    return result.squeeze(0) if isinstance(result, torch.Tensor) else (result[0].squeeze(0), result[1].squeeze(0))


@short_form_of(single.single_prefill_with_kv_cache)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    *,
    kv_data: torch.Tensor,
    kv_indices: Indices = None,
    kv_indptr: Indices = None,
    kv_last_page_len: Indices = None,
    causal: bool | None = None,
    append_mode: bool = False,
    kv_layout: str | None = None,
    **options: Any,
) -> Result:
    """``q`` is ``[tokens, heads, dim]``; ``kv_data`` is contiguous, or paged with the CSR arrays of the one request.

    ``append_mode`` says that the queries are the last tokens of the cache: it means ``causal``, which is aligned that
    way in any case. Other options are those of the full form.
    """
    if append_mode and causal is False:
        raise ValueError("causal: expected True, or nothing, beside append_mode=True, got False")
    options["causal"] = append_mode or bool(causal)
    pages = _pages_of_one_request(kv_data, kv_indptr, kv_indices, kv_last_page_len, kv_layout)
    if pages is None:
        return single.single_prefill_with_kv_cache(q, *split_kv_data(kv_data), **options)
    check_tensor("q", q, dtypes=None, ndim=3)
    pages["qo_indptr"] = torch.tensor([0, len(q)], dtype=torch.int32, device=_device_of(*pages.values()))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(kv_layout=kv_layout or "HND")
    return _plan_and_run(wrapper, (q, kv_data), pages, options)


def batch_decode_with_kv_cache(
    q: torch.Tensor,
    kv_data: torch.Tensor,
    *,
    kv_indptr: Indices = None,
    kv_indices: Indices = None,
    kv_last_page_len: Indices = None,
    page_indices: Indices = None,
    kv_lens: Indices = None,
    kv_layout: str | None = None,
    **options: Any,
) -> Result:
    """Attend with one query token of each request to its keys, in one call.

    A loop over layers plans once instead: `BatchDecodeWithPagedKVCacheWrapper`.

    Parameters
    ----------
    q
        ``[batch, num_qo_heads, head_dim]``.
    kv_data
        Ragged, padded or paged, see `flashinfer_core.short_forms`; the arrays given say which.
    kv_indptr, kv_indices, kv_last_page_len
        The page table of paged `kv_data`; `kv_indptr` alone the offsets ``[batch + 1]`` of ragged `kv_data`.
    page_indices, kv_lens
        A dense page table; `kv_lens` alone the lengths of padded `kv_data`. Without lengths all is full.
    kv_layout
        Of paged `kv_data`: ``"HND"``, the default, or ``"NHD"``.
    options
        ``sm_scale``, ``window_left``, ``logits_soft_cap``, ``pos_encoding_mode``, ``return_lse`` and the others of
        `BatchDecodeWithPagedKVCacheWrapper.plan` and ``run``.

    Returns
    -------
    torch.Tensor
        ``[batch, num_qo_heads, head_dim]``, and with ``return_lse`` the base-2 log-sum-exp ``[batch, num_qo_heads]``.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        Named after the argument that is wrong.
    """
    check_tensor("q", q, dtypes=None, ndim=3)
    check_tensor("kv_data", kv_data, dtypes=None)
    arrays = {
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_len": kv_last_page_len,
        "page_indices": page_indices,
        "kv_lens": kv_lens,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    names = set(given)
    if kv_data.dim() == 4 and names == {"kv_indptr"}:
        _refuse_layout(kv_layout)
        given["qo_indptr"] = torch.arange(len(q) + 1, dtype=torch.int32, device=_device_of(kv_indptr))
        return _plan_and_run(BatchPrefillWithRaggedKVCacheWrapper(), (q, *split_kv_data(kv_data)), given, options)
    if kv_data.dim() == 5 and names <= {"kv_lens"}:
        _refuse_layout(kv_layout)
        check_tensor("kv_data", kv_data, dtypes=None, shape=(len(q), None, 2, None, None))
        # Padding is paging: each request has one page of max_len tokens.
        device = kv_data.device if kv_lens is None else _device_of(kv_lens)
        given["page_indices"] = torch.arange(len(q), dtype=torch.int32, device=device).unsqueeze(1)
        kv_data, kv_layout = kv_data.transpose(1, 2), "NHD"
    elif kv_data.dim() != 5 or not (names == _CSR or names - {"kv_lens"} == {"page_indices"}):
        raise TypeError(
            "kv_data: expected [total, 2, heads, dim] with kv_indptr; [batch, max_len, 2, heads, dim] with kv_lens; or "
            "[pages, 2, heads, page_size, dim] with kv_indptr, kv_indices and kv_last_page_len, or with page_indices "
            f"and kv_lens; got shape {list(kv_data.shape)} with {', '.join(given) or 'no array'}"
        )
    wrapper = BatchDecodeWithPagedKVCacheWrapper(kv_layout=kv_layout or "HND")
    return _plan_and_run(wrapper, (q, kv_data), given, options)


@short_form_of(cudnn.cudnn_batch_decode_with_kv_cache)
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    *,
    kv_data: torch.Tensor,
    qo_indptr: Indices,
    kv_indptr: Indices,
    scale: float | None = None,
    **options: Any,
) -> Result:
    """``kv_data`` is ragged; ``q`` ``[qo_indptr[-1], heads, dim]`` holds the last tokens of each request.

    Other options are those of `BatchPrefillWithRaggedKVCacheWrapper.plan` and ``run``.
    """
    arrays = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "causal": True, "sm_scale": scale}
    return _plan_and_run(BatchPrefillWithRaggedKVCacheWrapper(), (q, *split_kv_data(kv_data)), arrays, options)


def merge_attention_states(a: State, b: State) -> State:
    """Merge the results of attention over two sets of keys into that over both.

    Parameters
    ----------
    a, b
        ``(output, lse)`` as functions and wrappers return them with ``return_lse=True``: ``[tokens, heads, dim]`` and
        ``[tokens, heads]``, or both without tokens.

    Returns
    -------
    tuple
        The merged output and base-2 log-sum-exp.

    Raises
    ------
    TypeError, ValueError
        Not a pair, or shapes and dtypes that do not fit.
    """
    for name, state in (("a", a), ("b", b)):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"{name}: expected (output, lse), as with return_lse=True, got {type(state).__name__}")
    if a[0].dim() == b[0].dim() == 2:
        out, lse = merge_state(*(t.unsqueeze(0) for t in (*a, *b)))
        return out.squeeze(0), lse.squeeze(0)
    return merge_state(*a, *b)


def _pages_of_one_request(
    kv_data: torch.Tensor, kv_indptr: Indices, kv_indices: Indices, kv_last_page_len: Indices, kv_layout: str | None
) -> dict[str, Any] | None:
    """Return the page table as `plan` takes it, or None for contiguous `kv_data`."""
    check_tensor("kv_data", kv_data, dtypes=None)
    arrays = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
    given: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    if kv_data.dim() == 4 and not given:
        _refuse_layout(kv_layout)
        return None
    if kv_data.dim() == 5 and not given:
        return {"page_indices": torch.arange(len(kv_data), dtype=torch.int32, device=kv_data.device).unsqueeze(0)}
    if kv_data.dim() != 5 or len(given) != 3:
        raise TypeError(
            "kv_data: expected [tokens, 2, heads, dim] alone, or [pages, 2, heads, page_size, dim] alone or with "
            f"kv_indptr, kv_indices and kv_last_page_len; got shape {list(kv_data.shape)} with "
            f"{', '.join(given) or 'no array'}"
        )
    if len(given["kv_indptr"]) != 2:
        raise ValueError(f"kv_indptr: expected 2 entries, those of one request, got {len(given['kv_indptr'])}")
    return given


def _plan_and_run(wrapper: Any, tensors: tuple[torch.Tensor, ...], arrays: dict[str, Any], options: Any) -> Result:
    run = {name: options.pop(name) for name in _OF_RUN if name in options}
    wrapper.plan(**arrays, **options)
    result: Result = wrapper.run(*tensors, **run)
    return result


def _refuse_layout(kv_layout: str | None) -> None:
    if kv_layout is not None:
        raise TypeError(f"kv_layout: expected nothing, since it is a matter of paged kv_data, got {kv_layout!r}")


def _device_of(*arrays: object) -> torch.device:
    """Return where index arrays lie; lists become CPU tensors."""
    return next((array.device for array in arrays if isinstance(array, torch.Tensor)), torch.device("cpu"))
