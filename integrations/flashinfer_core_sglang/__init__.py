"""The SGLang plug-in: makes the attention backend flashinfer_core known, and builds it when it is asked for.

SGLang calls `register` once in each of its processes, whether or not the backend is wanted. It is therefore cheap, and
imports no kernels: `backend.py` is loaded when a model is first served with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

NAME = "flashinfer_core"


def register() -> None:
    """Register the backend, and extend what else in SGLang decides by the name of a backend. Once is enough."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME in ATTENTION_BACKENDS:
        return
    from flashinfer_core_sglang.names import extend

    extend()
    register_attention_backend(NAME)(create)


def check() -> str:
    """Return the flag that selects the backend in this installation, or raise why none does."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    register()  # SGLang only logs what goes wrong in a plug-in
    load_plugins()
    if NAME not in ATTENTION_BACKENDS or NAME not in ATTENTION_BACKEND_CHOICES:
        raise RuntimeError("SGLang has loaded the plug-in and does not know its backend")
    load("FlashInferCoreAttnBackend")
    return f"--attention-backend {NAME}"


def create(runner: Any) -> AttentionBackend:
    """Return the backend of one model runner, or raise why it cannot serve this one."""
    return load("FlashInferCoreAttnBackend")(runner)


def load(name: str) -> Any:
    """Return a class of `backend.py`."""
    try:
        from flashinfer_core_sglang import backend
    except ImportError as error:
        raise ImportError(
            f"attention backend {NAME} was chosen, but flashinfer_core cannot be loaded ({error}); reinstall "
            "flashinfer-core, or choose another attention backend"
        ) from error
    return getattr(backend, name)
