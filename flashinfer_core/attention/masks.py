"""Custom masks, from booleans to bits with each request on a fresh byte. Nothing here waits for a GPU."""

from __future__ import annotations

import torch

from flashinfer_core._checks import check_tensor
from flashinfer_core.attention.arrays import BatchArrays
from flashinfer_core.quantization import pack_segments


def packed_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    arrays: BatchArrays,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a custom mask as little-endian bits with the first byte of each request (int64), or two ``None``.

    Parameters
    ----------
    custom_mask
        bool or 0/1, the masks ``[qo_len, kv_len]`` of all requests, flattened one after the other.
    packed_custom_mask
        uint8, the same as bits, each request on a fresh byte; wins over `custom_mask`.
    arrays
        The planned batch. The size of the mask is checked if all its lengths are in host memory.
    device
        Of the mask and of the result.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    name = "custom_mask" if packed_custom_mask is None else "packed_custom_mask"
    mask = custom_mask if packed_custom_mask is None else packed_custom_mask
    bits = _mask_bits(arrays, device)
    if packed_custom_mask is None:
        check_tensor(name, mask, dtypes=(torch.bool, torch.uint8, torch.int32, torch.int64))
    else:
        check_tensor(name, mask, dtypes=(torch.uint8,), ndim=1, last_dim_contiguous=True)
    assert mask is not None
    if mask.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {mask.device}")
    byte_indptr = _starts((bits + 7) // 8)
    if packed_custom_mask is not None:
        if bits.is_cpu and mask.numel() < int(byte_indptr[-1]):
            raise ValueError(f"{name}: expected at least {int(byte_indptr[-1])} bytes, got {mask.numel()}")
        return mask, _on(device, byte_indptr)
    if bits.is_cpu and mask.numel() != int(bits.sum()):
        raise ValueError(f"{name}: expected {int(bits.sum())} elements, got {mask.numel()}")
    num_bytes = int(byte_indptr[-1]) if bits.is_cpu else None
    return pack_segments(mask.reshape(-1), _on(device, _starts(bits)), little=True, size=num_bytes)


def _mask_bits(arrays: BatchArrays, device: torch.device) -> torch.Tensor:
    """Return the bits of each request, int64, in host memory if all lengths are."""
    tensors = arrays.tensors()
    tensors.pop(arrays.table_name, None)
    if not all(t.is_cpu for t in tensors.values()):
        arrays = arrays.moved({member: _on(device, t) for member, t in tensors.items()})
    if arrays.kv_lens is not None:
        kv_lens = arrays.kv_lens.long()
    else:
        assert arrays.kv_indptr is not None
        kv_lens = arrays.kv_indptr.diff().long()
        if arrays.kv_last_page_len is not None:
            kv_lens = torch.where(kv_lens > 0, (kv_lens - 1) * arrays.page_size + arrays.kv_last_page_len, 0)
    return kv_lens * (arrays.q_len if arrays.qo_indptr is None else arrays.qo_indptr.diff())


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def _on(device: torch.device, t: torch.Tensor) -> torch.Tensor:
    return t if t.device == device else t.pin_memory().to(device, non_blocking=True)
