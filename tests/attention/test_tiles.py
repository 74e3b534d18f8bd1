"""The table of tile shapes, and the names of the kernels made from it. No GPU is asked."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer_core import _native
from flashinfer_core.attention.kernels import Features, Smem, Variant, attention_spec, specs
from flashinfer_core.attention.tiles import TILES, choose_tile, ctas_per_sm, tile_name

KIB = 1024
GPUS = {"80": Smem(163 * KIB, 164 * KIB), "89": Smem(99 * KIB, 100 * KIB), "90a": Smem(227 * KIB, 228 * KIB)}
DIMS = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (1, 1), (33, 256)]


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("name", ["m16", "m64", "m128"])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_every_head_dim_fits(arch: str, name: str, kv_bytes: int) -> None:
    smem = GPUS[arch]
    for dims in DIMS:
        tile = choose_tile(name, *dims, kv_bytes, smem.of_cta)
        assert tile.smem_bytes(*dims, kv_bytes) <= smem.of_cta
        assert tile.rows == int(name[1:])
        ctas = ctas_per_sm(tile, *dims, kv_bytes, smem.of_sm)
        assert ctas * (tile.smem_bytes(*dims, kv_bytes) + KIB) <= smem.of_sm
        # Registers for a warp's rows of the output and of scores, and half of what is left for everything else.
        needed = tile.rows_per_warp * (-(-dims[1] // 16) * 16 + tile.block_keys) // 32
        assert min(255, 65536 // (tile.threads * ctas)) >= needed + 50
        # The lanes of a warp hold the pages of the keys that it loads.
        assert tile.block_keys // tile.warps_m <= 32


def test_too_little_shared_memory() -> None:
    with pytest.raises(NotImplementedError, match=r"^head_dim: expected dims whose tiles fit into 64 KiB"):
        choose_tile("m128", 256, 256, 2, 64 * KIB)


def test_shared_memory_of_a_cta() -> None:
    """Queries and a ring of two stages, in whole lines of 128 bytes; what else a CTA needs takes less than 1 KiB."""
    tile = TILES["m128"]
    for dim_qk, dim_vo, lines in ((128, 128, 128 * 2 + 2 * 64 * 4), (72, 40, 128 * 2 + 2 * 64 * 3)):
        assert 0 < tile.smem_bytes(dim_qk, dim_vo, 2) - lines * 128 < KIB
    assert tile.smem_bytes(128, 128, 2) == _native.attention_smem_bytes(4, 1, 32, 64, 2, 128, 128, 2)


@pytest.mark.parametrize(("rows", "name"), [(0, "m16"), (16, "m16"), (16.5, "m64"), (64, "m64"), (65, "m128")])
def test_tile_name(rows: float, name: str) -> None:
    assert tile_name(rows) == name


def test_names_state_all_parameters() -> None:
    dtypes = [torch.float16, torch.bfloat16]
    variants = [
        Variant(q, kv, out, *dims, tile, Features(*bits))
        for q in dtypes
        for kv in (q, torch.float8_e4m3fn, torch.float8_e5m2)
        for out in (*dtypes, torch.float32)
        for dims in ((64, 64), (128, 128), (192, 128))
        for tile in ("m16", "m64", "m128")
        for bits in itertools.product([False, True], repeat=5)
    ]
    made = {attention_spec(variant, GPUS["90a"]) for variant in variants}
    assert len({spec.name for spec in made}) == len(made) == len(variants)
    plain = Variant(torch.bfloat16, torch.bfloat16, torch.bfloat16, 128, 128, "m128")
    assert attention_spec(plain, GPUS["90a"]).name == "attention_sm80_bf16_d128_m128"
    other = Variant(torch.float16, torch.float8_e4m3fn, torch.float32, 192, 128, "m128", Features(True, mask=True))
    assert attention_spec(other, GPUS["89"]).name == "attention_sm80_f16_d192_m128_s1_kve4m3_vo128_of32_direct_mask"


@pytest.mark.parametrize("arch", ["75", "80", "89", "90a", "100", "120"])
def test_specs(arch: str) -> None:
    listed = list(specs(arch))
    assert len({spec.name for spec in listed}) == len(listed)
    assert listed[0].name == "schedule_attention"
    assert len(listed) == {"75": 11, "90a": 39}.get(arch, 31)
