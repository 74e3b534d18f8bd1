"""The vLLM plug-in: makes the attention backend FLASHINFER_CORE known, and answers when it is asked for.

vLLM calls `register` once in each of its processes, whether or not the backend is wanted. It is therefore cheap, and
imports no kernels: `backend.py` is loaded when a layer first asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

NAME = "FLASHINFER_CORE"


def register() -> None:
    """Register the backend under its own name (vLLM 0.32) and in the slot CUSTOM (0.26 has only that)."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.backend.CustomSlotBackend")
    if hasattr(AttentionBackendEnum, "register") and NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.backend.FlashInferCoreBackend")
        _survive_pickling(AttentionBackendEnum[NAME])
    if current_platform.is_cpu():
        _answer_for_our_names(type(current_platform))


def check() -> str:
    """Return the flag that selects the backend in this installation, or raise why none does."""
    import torch
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()  # vLLM only logs what goes wrong in a plug-in
    load_general_plugins()
    selected = AttentionBackendEnum[NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"]
    if not _is_ours(selected):
        raise RuntimeError(f"this release has one slot for plug-ins, and {selected.get_path()} is in it")
    reasons = selected.get_class().validate_configuration(
        device_capability=current_platform.get_device_capability(),
        head_size=64,
        dtype=torch.float16,
        kv_cache_dtype="auto",
        attn_type="decoder",
    )
    if reasons:
        raise RuntimeError("; ".join(reasons))
    return f"--attention-backend {selected.name}"


def member(name: str) -> AttentionBackendEnum:
    """Return the registered member `name`, registering it first in a process that has not loaded its plug-ins yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[name]


def _survive_pickling(added: AttentionBackendEnum) -> None:
    # vLLM sends its configuration to the processes it spawns, and they unpickle it before they load plug-ins: there the
    # enumeration has no such member yet, and looking it up by value would fail.
    added.__reduce_ex__ = lambda _protocol: (member, (added.name,))


def _is_ours(selected: AttentionBackendEnum | None) -> bool:
    return selected is not None and selected.name in (NAME, "CUSTOM") and selected.get_path().startswith(f"{__name__}.")


def _answer_for_our_names(platform: Any) -> None:
    # The CPU platform serves with CPU_ATTN whatever it was asked for, and only notes it in the log. So it is asked
    # about other backends, and never about ours: those are served or refused, not replaced.
    others = platform.get_attn_backend_cls.__func__
    if hasattr(others, "answers_for_flashinfer_core"):
        return

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _is_ours(selected_backend):
            return _checked_path(selected_backend, attn_selector_config, cls.get_device_capability())
        return others(cls, selected_backend, attn_selector_config, *args, **kwargs)

    get_attn_backend_cls.answers_for_flashinfer_core = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _checked_path(selected: AttentionBackendEnum, config: Any, device_capability: Any) -> str:
    try:
        backend = selected.get_class()
    except ImportError as error:
        raise ImportError(
            f"attention backend {selected.name} was chosen, but flashinfer_core cannot be loaded ({error}); reinstall "
            "flashinfer-core, or choose another attention backend"
        ) from error
    reasons = backend.validate_configuration(device_capability=device_capability, **config._asdict())
    if reasons:
        raise ValueError(f"attention backend {selected.name} was chosen, but cannot serve this: {'; '.join(reasons)}")
    path: str = selected.get_path()
    return path
