"""Argument checks of the public functions: each is made once, in Python, before native code sees a pointer.

Every failure names the argument, what was expected and what came. The checks run on each call of a kernel, so the
paths that succeed use attribute comparisons only and format nothing.

The wrong type is a `TypeError`, the wrong dtype, shape, stride or value a `ValueError`, and what this version does not
have (a device, a keyword's value) a `NotImplementedError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The codes of `enum class DType` in core_kernels/device/common/params.h.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
FLOAT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e5m2)
INDEX_DTYPES: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
KV_LAYOUTS = ("NHD", "HND")


def check_tensor(
    name: str,
    t: object,
    *,
    dtypes: Sequence[torch.dtype] | None = FLOAT_DTYPES,
    ndim: int | None = None,
    shape: tuple[int | None, ...] | None = None,
    last_dim_contiguous: bool = False,
    writable: bool = False,
    device: torch.device | None = None,
) -> None:
    """Check one tensor argument.

    Parameters
    ----------
    name
        The argument's name, for the message.
    t
        What the caller passed.
    dtypes
        The dtypes allowed; ``None`` allows all.
    ndim, shape
        The number of dimensions, or the whole shape with ``None`` for a free dimension.
    last_dim_contiguous
        Whether there must be a last dimension, with stride 1 if it has more than one element.
    writable
        Whether the tensor is an output: elements that share memory (an expanded tensor) are then refused.
    device
        Where it must be, if that is known: where another tensor of the call is.

    Raises
    ------
    TypeError
        Not a tensor.
    NotImplementedError
        A tensor that is neither on CPU nor on a CUDA device.
    ValueError
        Wrong dtype, shape, strides or device.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if not (t.is_cpu or t.is_cuda):
        raise NotImplementedError(f"{name}: expected a tensor on device cpu or cuda, got one on {t.device}")
    if device is not None and t.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {t.device}")
    if dtypes is not None and t.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {_dtype_names(dtypes)}, got {_dtype_name(t.dtype)}")
    if shape is not None:
        if t.shape != shape:
            _check_shape(name, t, shape)
    elif ndim is not None and t.dim() != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {_shape_name(t.shape)}")
    strides = t.stride()
    if last_dim_contiguous and (not strides or strides[-1] != 1):
        _check_last_dim(name, t)
    if writable and 0 in strides:
        _check_no_overlap(name, t)


def check_same_dtype(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise `ValueError` unless two tensors have one dtype."""
    if t.dtype != other.dtype:
        raise ValueError(
            f"{name}: expected dtype {_dtype_name(other.dtype)}, that of {other_name}, got {_dtype_name(t.dtype)}"
        )


def check_same_device(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise `ValueError` unless two tensors are on one device."""
    if t.device != other.device:
        raise ValueError(f"{name}: expected a tensor on {other.device}, as {other_name} is, got one on {t.device}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `ValueError` unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return the value as an `int`, or raise unless it is an integer of at least `low` and at most `high`."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        value = int(value.__index__())
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {bounds}, got {value}")
    return value


def refuse(name: str, value: object, default: object, why: str) -> None:
    """Raise `NotImplementedError` if a keyword that this version accepts but lacks differs from its default.

    `why` completes the sentence "name=value is not supported: ...".
    """
    if value is default:
        return
    if isinstance(value, torch.Tensor):
        shown = f"tensor of shape {_shape_name(value.shape)}"
    elif value == default:
        return
    else:
        shown = repr(value)
    raise NotImplementedError(f"{name}={shown} is not supported: {why} (leave it at {default!r})")


def rows_view(name: str, t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of at least one dimension as 2-D or 3-D, its leading dimensions merged without a copy."""
    dims = t.dim()
    if dims == 2 or dims == 3:
        return t
    if dims == 1:
        return t.unsqueeze(0)
    try:
        return t.view(math.prod(t.shape[:-2]), *t.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: expected leading dimensions that merge without a copy, got strides {t.stride()} for shape "
            f"{_shape_name(t.shape)}; pass {name}.contiguous()"
        ) from None


def rows_arg(t: torch.Tensor) -> tuple[int, int, int]:
    """Return the native form of a `rows_view`: address, outer stride, inner stride."""
    strides = t.stride()
    return (t.data_ptr(), strides[0], strides[1]) if len(strides) == 3 else (t.data_ptr(), 0, strides[0])


def indices_arg(t: torch.Tensor) -> tuple[int, bool, int, int]:
    """Return the native form of a 1-D tensor of `INDEX_DTYPES`: address, is it int64, stride, size."""
    return t.data_ptr(), t.dtype is torch.int64, t.stride()[0], t.shape[0]


def split_paged_kv_cache(name: str, cache: object, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a paged KV cache as two views ``[pages, page_size, heads, dim]``, whatever its form and layout.

    Parameters
    ----------
    name
        The argument's name, for the message.
    cache
        A tuple (K, V) of 4-D tensors, or one 5-D tensor with K and V at dimension 1.
    kv_layout
        ``"NHD"`` for ``[pages, page_size, heads, dim]``, ``"HND"`` for ``[pages, heads, page_size, dim]``.

    Returns
    -------
    The views. Their number of dimensions, and that K and V agree on all but the last, is checked here; dtype, device
    and strides are the caller's to check.
    """
    if kv_layout not in KV_LAYOUTS:
        check_choice("kv_layout", kv_layout, KV_LAYOUTS)
    if isinstance(cache, torch.Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            rest = "page_size, heads, dim" if kv_layout == "NHD" else "heads, page_size, dim"
            raise ValueError(f"{name}: expected shape [pages, 2, {rest}], got {_shape_name(cache.shape)}")
        k, v = cache.select(1, 0), cache.select(1, 1)
    elif isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise ValueError(f"{name}: expected two tensors (K, V), got {len(cache)}")
        k, v = cache
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
            raise TypeError(f"{name}: expected two tensors (K, V), got {type(k).__name__} and {type(v).__name__}")
        if k.dim() != 4 or k.shape[:3] != v.shape[:3] or v.dim() != 4:
            raise ValueError(
                f"{name}: expected two 4-D tensors that agree in all but the last dimension, got shapes "
                f"{_shape_name(k.shape)} and {_shape_name(v.shape)}"
            )
    else:
        raise TypeError(f"{name}: expected a tensor or a tuple (K, V), got {type(cache).__name__}")
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def _check_shape(name: str, t: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    actual = t.shape
    if len(actual) == len(shape):
        for i, want in enumerate(shape):
            if want is not None and want != actual[i]:
                break
        else:
            return
    raise ValueError(f"{name}: expected shape {_shape_name(shape)}, got {_shape_name(actual)}")


def _check_last_dim(name: str, t: torch.Tensor) -> None:
    if t.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got shape []")
    if t.shape[-1] > 1:
        raise ValueError(
            f"{name}: expected stride 1 in the last dimension, got strides {t.stride()} for shape "
            f"{_shape_name(t.shape)}; pass {name}.contiguous()"
        )


def _check_no_overlap(name: str, t: torch.Tensor) -> None:
    if t.numel() == 0:
        return
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name}: expected elements that do not overlap in memory, since they are written, got strides "
                f"{t.stride()} for shape {_shape_name(t.shape)}"
            )


def _shape_name(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(_dtype_name, dtypes)
    return f"{', '.join(others)} or {last}" if others else last
