"""Where SGLang decides by the name of an attention backend, and how each place learns ours.

To be searched for in SGLang: a backend's name in quotes, such as "triton". What an older or newer release lacks is left
out: each place is looked for, no version is compared.

Left as they are, because what they guard is not served (SGLang then says so itself, or the backend does):

* the lists for MLA: ``AttentionBackendRegistry``, ``MHA_ONE_SHOT_SUPPORTED_BACKENDS`` and
  ``FORWARD_ABSORB_CORE_ATTENTION_BACKENDS`` of the DeepSeek models, ``CHUNKED_PREFIX_CACHE_SUPPORTED_...``;
* ``_PAGE_TREE_SPEC_BACKENDS``: trees of draft tokens; DFLASH's own list of draft backends;
* quantized 4-bit caches, the unified memory pool, context parallelism (``dcp_allowed``, ``CPAttentionBackendKind``);
* Llama 4 (chunked local attention) and diffusion language models (bidirectional blocks).

Out of reach: Exaone 4 with a sliding window. SGLang compares the flag itself with names written out within a function.

Nothing to learn: the scheduler's alignment of chunks for deterministic inference. Triton and FlashInfer need it,
because they cut keys where a chunk begins; here no key is cut then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from flashinfer_core_sglang import NAME, load

# The name that stands in for ours while SGLang checks a model against lists that nobody can extend.
_STAND_IN = "triton"
_checking_model: ContextVar[bool] = ContextVar("_checking_model", default=False)


def extend() -> None:
    """Make every place know our name."""
    _choices()
    _model_checks()
    _draft_backends()
    if not torch.cuda.is_available():
        _no_triton()


def _choices() -> None:
    """Extend the lists of ``arg_groups/choices.py`` (in 0.5.17 of ``server_args.py``) by their own adders.

    * attention: ``--attention-backend``, ``--prefill-attention-backend``, ``--decode-attention-backend`` parse;
    * draft attention: else a draft model falls back to FlashInfer;
    * deterministic: ``--enable-deterministic-inference`` refuses other backends, and with the second list it keeps the
      prefix cache.
    """
    for adder in (
        "add_attention_backend_choices",
        "add_draft_attention_backend_choices",
        "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
    ):
        for module in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
            add = _found(f"{module}.{adder}")
            if add is not None:
                add([NAME])
                break


def _model_checks() -> None:
    """Pass the checks of ``handle_model_specific_adjustments``: GPT-OSS and Gemma 4 name the backends they accept.

    The lists are written out within the function, so for as long as it runs, our name reads as that of the backend
    that every such list has.
    """
    for handler, backends in (
        (
            "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
            "sglang.srt.arg_groups.overrides.attention_backends_of",
        ),
        (
            "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
            "sglang.srt.server_args.ServerArgs._resolved_attention_backends",
        ),
    ):
        if _found(handler) is not None and _found(backends) is not None:
            _around(handler, _check_model)
            _around(backends, _stand_in)


def _check_model(handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _checking_model.set(True)
    try:
        return handler(*args, **kwargs)
    finally:
        _checking_model.reset(token)


def _stand_in(backends: Callable[..., Sequence[str]], *args: Any, **kwargs: Any) -> Sequence[str]:
    names = backends(*args, **kwargs)
    return tuple(_STAND_IN if name == NAME else name for name in names) if _checking_model.get() else names


def _draft_backends() -> None:
    """Answer ``DraftBackendFactory`` of ``speculative/draft_utils.py``, which maps names to its own methods."""
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    _around(f"{factory}._create_backend", _create_draft_backend)


def _create_draft_backend(
    create: Callable[..., Any], factory: Any, setting: str, backends: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Add our backend to the map: to that for decoding a container of one for each step, to the other just one."""
    decodes = backends["triton"].__name__ == "_create_triton_decode_backend"

    def ours() -> Any:
        runner = factory.draft_model_runner
        if decodes:
            backend = load("FlashInferCoreMultiStepDraftBackend")(runner, factory.speculative_num_steps)
        else:
            backend = load("FlashInferCoreAttnBackend")(runner)
        # Newer releases want the name beside the backend.
        return (NAME, backend) if "stamps_children" in signature(create).parameters else backend

    return create(factory, setting, {**backends, NAME: ours}, *args, **kwargs)


def _no_triton() -> None:
    """Keep SGLang from launching Triton kernels on a machine without a GPU.

    * ``support_triton(name)`` is true of every backend but torch_native and intel_amx;
    * ``get_last_loc`` does not even ask it of ours;
    * the paged allocator asks nobody: with pages of several tokens it launches Triton for every backend.
    """
    _around("sglang.srt.utils.common.support_triton", lambda ask, backend: backend != NAME and ask(backend))
    _around("sglang.srt.mem_cache.allocation.get_last_loc", _get_last_loc)
    from sglang.srt.mem_cache.allocator import paged

    paged.alloc_extend_kernel = _Launched(_allocate_extend)
    paged.alloc_decode_kernel = _Launched(_allocate_decode)


def _get_last_loc(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    from sglang.srt.mem_cache import allocation

    slots: torch.Tensor = allocation.get_last_loc_torch(*args, **kwargs)
    return slots


class _Launched:
    """A function that is called as a Triton kernel is launched: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def _allocate_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _batch: int,
    page_size: int,
) -> None:
    """Give the new tokens of each request slots: what is left of its last page, then free pages in order."""
    held = -(-prefix_lens // page_size)
    wanted = -(-seq_lens // page_size) - held
    if int(wanted.sum()) > free_pages.numel():
        return  # the allocator counts too, and does not look at the slots
    count = seq_lens - prefix_lens
    owner = torch.repeat_interleave(torch.arange(count.numel()), count)
    offset = torch.arange(owner.numel()) - (count.cumsum(0) - count)[owner]
    position = prefix_lens[owner] + offset
    fresh = (wanted.cumsum(0) - wanted - held)[owner] + position // page_size
    in_held = position // page_size < held[owner]
    out[in_held] = (last_slots[owner] + 1 + offset)[in_held].to(out.dtype)
    out[~in_held] = (free_pages[fresh[~in_held]] * page_size + position[~in_held] % page_size).to(out.dtype)


def _allocate_decode(
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    page_size: int,
) -> None:
    """Give each request one slot more."""
    _allocate_extend(seq_lens - 1, seq_lens, last_slots, free_pages, out, batch, page_size)


def _around(target: str, hook: Callable[..., Any]) -> None:
    if _found(target) is not None:
        HookRegistry.register(target, hook, HookType.AROUND)


def _found(path: str) -> Any:
    """Return what a dotted path names, None if this release of SGLang lacks it."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        return None
