"""Packing of booleans into bits."""

from __future__ import annotations

from itertools import pairwise

import torch


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Return the bits of x in bytes, the last one filled up with zeros."""
    bits = torch.nn.functional.pad((x != 0).int(), (0, -len(x) % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, device=x.device)
    return (bits * (weights.flip(0) if bitorder == "big" else weights)).sum(-1).to(torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of each segment in bytes of its own, and where each segment's bytes begin."""
    starts = indptr.tolist()
    segments = [packbits(x[start:end], bitorder) for start, end in pairwise(starts)]
    byte_starts = torch.tensor([0, *(len(segment) for segment in segments)]).cumsum(0).to(indptr)
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=x.device), *segments]), byte_starts
