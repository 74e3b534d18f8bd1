"""The short forms of the wrappers' methods: what they leave out, the tensors of the first run say.

The short form of `plan` may omit head counts, head_dim, page size and dtypes. It names the page table ``kv_indptr``,
``kv_indices`` and ``kv_last_page_len`` in every wrapper, or takes ``page_indices``, a dense table ``[batch, most
pages]``, with ``kv_lens`` (by default all pages are full). Its index arrays may also be lists and int64 tensors, and
the cache may come with it, as ``kv_cache``, for a `forward` that brings none. A full plan waits too if nothing yet says
on which device it is for: neither a workspace nor an array on a GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from flashinfer_core._checks import check_tensor

_F = TypeVar("_F", bound=Callable[..., Any])
_FROM_TENSORS = frozenset({"num_qo_heads", "num_kv_heads", "head_dim", "head_dim_qk", "page_size"})


def takes_short_plan(**page_table: str) -> Callable[[_F], _F]:
    """Let a wrapper's `plan` take the short form too.

    Parameters
    ----------
    page_table
        The arrays that say where the keys are: their names in the short form, and what `plan` calls them.
    """

    def decorate(plan: _F) -> _F:
        forms = _Forms(plan, page_table)

        @functools.wraps(plan)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            self._deferred = self._kv_cache = None
            full = forms.is_full(args, kwargs)
            if full and (self._device is not None or _any_on_gpu(*args, *kwargs.values())):
                plan(self, *args, **kwargs)
                return
            self._kv_cache = kwargs.pop("kv_cache", None)
            self._deferred = DeferredPlan(plan, forms.by_name(args, kwargs) if full else forms.short(args, kwargs))
            self._plan = None

        return cast(_F, call)

    return decorate


def takes_planned_cache(forward: _F) -> _F:
    """Let a wrapper's `forward` use the cache that came with `begin_forward`, and take one as ``kv_cache`` too."""

    @functools.wraps(forward)
    def call(self: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and "paged_kv_cache" not in kwargs:
            args = (kwargs.pop("kv_cache", self._kv_cache),)
            if args[0] is None:
                raise TypeError("paged_kv_cache: expected a cache, here or as kv_cache of begin_forward, got none")
        return forward(self, q, *args, **kwargs)

    return cast(_F, call)


def takes_kv_data(forward: _F) -> _F:
    """Let a ragged wrapper's `forward` take K and V in one: ``forward(q, kv_data)``, or as a pair ``(k, v)``."""

    @functools.wraps(forward)
    def call(self: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        data = kwargs.pop("kv_data", None)
        if data is None and len(args) == 1 and "v" not in kwargs:
            data, args = args[0], ()
        if data is None:
            return forward(self, q, *args, **kwargs)
        if args or "k" in kwargs or "v" in kwargs:
            raise TypeError("kv_data: expected forward(q, k, v, ...) or forward(q, kv_data=, ...), got a mix of both")
        if isinstance(data, torch.Tensor):
            k, v = split_kv_data(data)
            if self._kv_layout == "HND":
                k, v = k.transpose(0, 1), v.transpose(0, 1)
        else:
            k, v = data
        return forward(self, q, k, v, **kwargs)

    return cast(_F, call)


def split_kv_data(kv_data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of ``[tokens, 2, heads, dim]``."""
    check_tensor("kv_data", kv_data, dtypes=None, shape=(None, 2, None, None))
    return kv_data.select(1, 0), kv_data.select(1, 1)


@dataclass(frozen=True)
class DeferredPlan:
    """A call of `plan` that waits for the tensors of the first run."""

    plan: Callable[..., None]
    given: dict[str, Any]

    def complete(self, wrapper: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Plan, with what is missing taken from the tensors: K and V ``[pages, page_size, heads, dim]`` or ragged."""
        check_tensor("q", q, dtypes=None, ndim=3)
        found = {
            "num_qo_heads": q.shape[1],
            "num_kv_heads": k.shape[-2],
            "head_dim": q.shape[2],
            "head_dim_qk": q.shape[2],
            "head_dim_vo": v.shape[-1],
            "page_size": k.shape[1],
            "q_data_type": q.dtype,
            "kv_data_type": k.dtype,
        }
        names = inspect.signature(self.plan).parameters
        arguments: dict[str, Any] = {name: value for name, value in found.items() if name in names} | self.given
        table = arguments.get("block_tables")
        if table is not None and arguments.get("seq_lens") is None:
            check_tensor("page_indices", table, dtypes=(torch.int32,), ndim=2)
            full = table.shape[1] * arguments["page_size"]
            arguments["seq_lens"] = torch.full((len(table),), full, dtype=torch.int32, device=table.device)
        self.plan(wrapper, **arguments)


class _Forms:
    """The full and the short form of one `plan`."""

    def __init__(self, plan: Callable[..., None], page_table: dict[str, str]) -> None:
        parameters = inspect.signature(plan).parameters
        self._names = [name for name in parameters if name != "self"]
        self._required = [name for name in self._names if parameters[name].default is inspect.Parameter.empty]
        self._known = frozenset(self._names)
        self._page_table = page_table
        self._full_names = {**page_table, "page_indices": "block_tables", "kv_lens": "seq_lens"}

    def is_full(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has all that the full form requires and nothing that only the short form has."""
        return self._known.issuperset(kwargs) and all(name in kwargs for name in self._required[len(args) :])

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a full form by their names."""
        return dict(zip(self._names, args, strict=False)) | kwargs

    def short(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a short form by their full names."""
        given = self.by_name(args, {})
        for name, value in kwargs.items():
            full_name = self._full_names.get(name, name)
            if full_name not in self._known or full_name in given:
                self._refuse(name)
            given[full_name] = value
        for name in {"qo_indptr", *self._full_names.values()} & given.keys():
            given[name] = _int32(given[name])
        pages = self._page_table.values()
        if given.get("block_tables") is not None:
            for name in pages:
                if name in given:
                    self._refuse(name)
            given |= dict.fromkeys(pages)
        for name in self._required:
            if name not in given and name not in _FROM_TENSORS:
                self._refuse(name)
        return given

    def _refuse(self, name: str) -> None:
        short = ", ".join(f"{name}=" for name in self._page_table)
        dense = " or plan(page_indices=, kv_lens=, ...)" if "block_tables" in self._known else ""
        raise TypeError(
            f"{name}: expected plan({', '.join(self._required)}, ...), or the short form plan({short}, ...){dense}, "
            "which takes the rest from the tensors of the first run; got a mix of both, or not all of one"
        )


def _any_on_gpu(*arguments: Any) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.is_cuda for argument in arguments)


def _int32(indices: Any) -> Any:
    if isinstance(indices, (list, tuple)):
        return torch.tensor(indices, dtype=torch.int32)
    is_int64 = isinstance(indices, torch.Tensor) and indices.dtype is torch.int64
    return indices.int() if is_int64 else indices
