"""Rotary position embedding of queries and keys.

The first ``rotary_dim`` elements of every head are rotated in pairs, pair ``i`` by ``position * frequency[i]``; the
others pass unchanged. With ``interleave`` a pair is elements ``(2 i, 2 i + 1)``, without it ``(i, i + rotary_dim / 2)``
(GPT-NeoX, Llama). The frequencies are ``rope_theta ** (-2 i / rotary_dim) / rope_scale``; the Llama 3.1 forms divide
by ``rope_scale`` only the low ones: a frequency of fewer than ``low_freq_factor`` turns in ``old_context_len`` tokens
is divided, one of more than ``high_freq_factor`` turns is kept, between them the two are blended.

Frequencies, then angles, are rounded to float32 as in the models' own code; all other arithmetic is float32, rounded
once, when the result is stored.

Shapes and dtypes
-----------------
q, k
    ``[tokens, heads, head_dim]`` of one dtype, float32, float16 or bfloat16, of any strides with the last one 1. The
    number of heads may differ.
pos_ids, positions
    ``[tokens]`` int32 or int64: the position of each token.
indptr, offsets
    ``[batch + 1]`` and ``[batch]``, int32 or int64: request ``b`` has tokens ``indptr[b]`` to ``indptr[b + 1] - 1``,
    the first at position ``offsets[b]``.
rotary_dim
    Even; all of head_dim if None.

The plain forms return new tensors ``(q, k)``; those ending in ``_inplace`` overwrite q and k and return None.

Errors: `ValueError` for a shape, dtype, stride, device or index that does not fit, before anything is written;
`NotImplementedError` for a tensor that is neither on CPU nor on a CUDA device. Index tensors on a CUDA device are not
checked, since that would have to wait for the GPU: what belongs to a token with a position outside of the table, or to
one that no request contains, becomes NaN where it would have been rotated.

References
----------
Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Llama 3.1's frequencies: the model's
published ``rope_scaling`` configuration.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from flashinfer_core._checks import FLOAT_DTYPES, INDEX_DTYPES, check_int, check_same_device, check_tensor
from flashinfer_core._rope import MAX_CACHED_DIM, MAX_ROTARY_DIM, run_rope, run_rope_cached

# rope_scale and rope_theta; for Llama 3.1 also low_freq_factor, high_freq_factor and old_context_len.
_Scaling: TypeAlias = tuple[float, ...]
_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the tokens of a ragged batch, see the module's text."""
    return _by_frequency(q, k, None, (indptr, offsets), rotary_dim, interleave, (rope_scale, rope_theta), False)


def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate the tokens of a ragged batch in place, see the module's text."""
    _by_frequency(q, k, None, (indptr, offsets), rotary_dim, interleave, (rope_scale, rope_theta), True)


def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate tokens by given positions, see the module's text."""
    return _by_frequency(q, k, pos_ids, None, rotary_dim, interleave, (rope_scale, rope_theta), False)


def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """Rotate tokens by given positions in place, see the module's text."""
    _by_frequency(q, k, pos_ids, None, rotary_dim, interleave, (rope_scale, rope_theta), True)


def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the tokens of a ragged batch with Llama 3.1's frequencies, see the module's text."""
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _by_frequency(q, k, None, (indptr, offsets), rotary_dim, interleave, scaling, False)


def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate the tokens of a ragged batch in place with Llama 3.1's frequencies, see the module's text."""
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _by_frequency(q, k, None, (indptr, offsets), rotary_dim, interleave, scaling, True)


def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate tokens by given positions with Llama 3.1's frequencies, see the module's text."""
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return _by_frequency(q, k, pos_ids, None, rotary_dim, interleave, scaling, False)


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """Rotate tokens by given positions in place with Llama 3.1's frequencies, see the module's text."""
    scaling = (rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    _by_frequency(q, k, pos_ids, None, rotary_dim, interleave, scaling, True)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate tokens by cosines and sines from a table.

    Parameters
    ----------
    positions
        ``[tokens]``, rows of the table.
    query, key
        ``[tokens, heads * head_size]``, or ``[tokens, heads, head_size]``.
    head_size
        The dimension of a head.
    cos_sin_cache
        ``[positions, rotary_dim]`` float32: the cosines of all pairs, then the sines.
    is_neox
        The opposite of ``interleave``.

    Returns
    -------
    New tensors ``(query, key)`` of the inputs' shapes.
    """
    return _by_cache(positions, query, key, head_size, cos_sin_cache, is_neox, False)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate tokens in place by cosines and sines from a table; see `apply_rope_with_cos_sin_cache`."""
    _by_cache(positions, query, key, head_size, cos_sin_cache, is_neox, True)


def _by_frequency(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor | None,
    ragged: _Pair | None,
    rotary_dim: int | None,
    interleave: bool,
    scaling: _Scaling,
    inplace: bool,
) -> _Pair:
    check_tensor("q", q, ndim=3, last_dim_contiguous=True, writable=inplace)
    tokens, _, head_dim = q.shape
    shape = (tokens, None, head_dim)
    device = q.device
    check_tensor("k", k, dtypes=(q.dtype,), shape=shape, last_dim_contiguous=True, writable=inplace, device=device)
    if ragged is None:
        indptr = offsets = None
        check_tensor("pos_ids", pos_ids, dtypes=INDEX_DTYPES, shape=(tokens,), device=device)
    else:
        indptr, offsets = ragged
        check_tensor("offsets", offsets, dtypes=INDEX_DTYPES, ndim=1, device=device)
        check_tensor("indptr", indptr, dtypes=INDEX_DTYPES, shape=(offsets.shape[0] + 1,), device=device)
    rotary_dim = head_dim if rotary_dim is None else check_int("rotary_dim", rotary_dim, 0, head_dim)
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number, got {rotary_dim}")
    if rotary_dim > MAX_ROTARY_DIM and q.is_cuda:
        raise NotImplementedError(f"rotary_dim: expected at most {MAX_ROTARY_DIM} on a GPU, got {rotary_dim}")
    q_out, k_out = _outputs(q, k, inplace)
    floats = [*map(float, scaling)]
    run_rope(q, k, q_out, k_out, pos_ids, indptr, offsets, rotary_dim, bool(interleave), floats)
    return q_out, k_out


def _by_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    inplace: bool,
) -> _Pair:
    head_size = check_int("head_size", head_size, 1)
    check_tensor("cos_sin_cache", cos_sin_cache, dtypes=(torch.float32,), ndim=2, last_dim_contiguous=True)
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or rotary_dim > head_size:
        raise ValueError(
            f"cos_sin_cache: expected shape [positions, rotary_dim] with an even rotary_dim of at most head_size = "
            f"{head_size}, got {list(cos_sin_cache.shape)}"
        )
    q = _split_heads("query", query, head_size, FLOAT_DTYPES, inplace)
    if rotary_dim > MAX_CACHED_DIM and q.is_cuda:
        raise NotImplementedError(
            f"cos_sin_cache: expected a rotary_dim of at most {MAX_CACHED_DIM} on a GPU, got {rotary_dim}"
        )
    k = _split_heads("key", key, head_size, (q.dtype,), inplace)
    check_same_device("key", key, "query", query)
    check_same_device("cos_sin_cache", cos_sin_cache, "query", query)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"key: expected {q.shape[0]} tokens, as many as query has, got {k.shape[0]}")
    check_tensor("positions", positions, dtypes=INDEX_DTYPES, shape=q.shape[:1], device=q.device)
    q_out, k_out = _outputs(q, k, inplace)
    run_rope_cached(q, k, q_out, k_out, positions, cos_sin_cache, not is_neox)
    return (q_out, k_out) if inplace else (q_out.view(query.shape), k_out.view(key.shape))


def _split_heads(
    name: str, x: torch.Tensor, head_size: int, dtypes: tuple[torch.dtype, ...], inplace: bool
) -> torch.Tensor:
    check_tensor(name, x, dtypes=dtypes, last_dim_contiguous=True, writable=inplace)
    if x.dim() == 2 and x.shape[1] % head_size == 0:
        return x.view(x.shape[0], x.shape[1] // head_size, head_size)
    if x.dim() == 3 and x.shape[2] == head_size:
        return x
    raise ValueError(
        f"{name}: expected shape [tokens, heads * head_size] or [tokens, heads, head_size] with head_size = "
        f"{head_size}, got {list(x.shape)}"
    )


def _outputs(q: torch.Tensor, k: torch.Tensor, inplace: bool) -> _Pair:
    if inplace:
        return q, k
    contiguous = torch.contiguous_format
    return torch.empty_like(q, memory_format=contiguous), torch.empty_like(k, memory_format=contiguous)
