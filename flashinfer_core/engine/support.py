"""What can be served, and in which words the rest is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version

import torch

from flashinfer_core import _native
from flashinfer_core._checks import FLOAT_DTYPES
from flashinfer_core.attention.kernels import Q_DTYPES
from flashinfer_core.attention.plan import MAX_HEAD_DIM

_FP8_CACHES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_CACHE_DTYPES = {
    "cpu": ("auto", "float32", "float16", "bfloat16"),
    "cuda": ("auto", "float16", "bfloat16", *_FP8_CACHES),
}

# What an engine may ask of attention beyond the plain causal kind: None if it is served, else why not.
FEATURES: dict[str, str | None] = {
    "sink": None,
    "sliding_window": None,
    "non_causal": None,
    "kv_connector": None,
    "encoder_only": None,
    "cross_attention": None,
    "mla": "multi-head latent attention (MLA) is not served yet",
    "sparse": "sparse attention is not served",
    "mm_prefix": "bidirectional attention within the image tokens of a prompt is not served",
    "rswa": "reference sliding window attention (R-SWA) is not served",
    "per_head_quant_scales": "a quantized KV cache with scales per head is not served",
    "batch_invariant": None,
    "adaptive_verification": "query lengths that differ between host and device are not served",
    "pcp": "prefill context parallelism is not served",
    "dcp": "decode context parallelism is not served",
}

# Of those that are served, what only a GPU has.
ONLY_ON_GPUS = {"batch_invariant": "batch-invariant results are promised on GPUs only"}

LOOKS_BACK = (
    "a sliding window or ALiBi in attention that is not causal: flashinfer_core has only the forms that look back; "
    "choose another attention backend for this model"
)


def refusals(
    *,
    device_type: str,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    features: Iterable[str],
    compute_capability: int | None = None,
) -> list[str]:
    """Say why a configuration cannot be served.

    Parameters
    ----------
    device_type : str
        Where the engine runs, as in ``torch.device.type``.
    head_dim : int
        Elements of a query or key head.
    dtype : torch.dtype
        Type of queries and of the model's activations.
    kv_cache_dtype : str or None
        The engine's setting; ``None`` and ``"auto"`` mean the model's own type.
    features : iterable of str
        What else is asked for: keys of `FEATURES`. An unknown one is refused, so that what a later engine release adds
        is never ignored.
    compute_capability : int or None
        Of the GPU, such as 90, if that is known.

    Returns
    -------
    list of str
        One reason each; empty when the configuration can be served.
    """
    if device_type not in KV_CACHE_DTYPES:
        return [f"device type {device_type!r}: expected cpu or cuda; leave the attention backend unset on this device"]
    on_gpu = device_type == "cuda"
    reasons = []
    if on_gpu and compute_capability is not None and compute_capability < 75:
        reasons.append(f"compute capability {compute_capability / 10}: expected 7.5 or later")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head size {head_dim}: expected 1 to {MAX_HEAD_DIM}")
    known = Q_DTYPES if on_gpu else FLOAT_DTYPES
    if on_gpu and compute_capability is not None and compute_capability < 80:
        known = (torch.float16,)
    if dtype not in known:
        reasons.append(f"dtype {dtype}: expected {_one_of(known)}; choose another as the model's dtype")
    caches = KV_CACHE_DTYPES[device_type]
    if kv_cache_dtype is not None and kv_cache_dtype not in caches:
        reasons.append(f"KV-cache dtype {kv_cache_dtype!r}: expected one of {', '.join(caches)}; choose one of these")
    elif on_gpu and kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
        reasons.append(f"KV-cache dtype {kv_cache_dtype!r}: expected {_one_of((dtype,))}, the model's, or an FP8 dtype")
    for name in features:
        reason = FEATURES.get(name, f"{name}: flashinfer_core does not know this feature")
        if reason is None and not on_gpu:
            reason = ONLY_ON_GPUS.get(name)
        if reason is not None:
            reasons.append(reason)
    return reasons


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def cache_dtype(kv_cache_dtype: str | None) -> torch.dtype | None:
    """Return the dtype as which a quantized cache, which engines allocate as bytes, is to be viewed; else None."""
    return _FP8_CACHES.get(kv_cache_dtype or "auto")


def kernels_in_use(device_type: str) -> str:
    """Return the release and the kernels, for the line that says which backend serves."""
    kernels = _native.cpu_isa() if device_type == "cpu" else "CUDA"
    return f"flashinfer_core {version('flashinfer-core')}, {kernels} kernels"
