"""Tile shapes of the CUDA attention kernels: the one place where a tile size appears.

A tile is some packed query rows (token * group + head in group) of one KV head; a CTA walks the keys of a tile's chunk
block by block through a ring of stages in shared memory. See ``TileShape`` in core_kernels/device/attention/params.h.
Which kernel runs is said in `flashinfer_core.attention.dispatch`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flashinfer_core import _native


@dataclass(frozen=True)
class Tile:
    """How one CTA's warps share a tile of query rows and a block of keys."""

    name: str
    warps_m: int
    warps_kv: int  # teams, each with a ring of its own
    rows_per_warp: int
    block_keys: int  # of a team
    least_block: int  # to which `block_keys` may shrink
    stages: int
    ctas: int  # of an SM at most
    min_chunk: int  # keys that are not worth cutting further

    @property
    def rows(self) -> int:
        """Packed rows of a tile."""
        return self.warps_m * self.rows_per_warp

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_kv

    def registers(self, dim_qk: int, dim_vo: int) -> int:
        """Return about how many registers a thread needs: output, scores, queries if they are kept, and 60 others."""
        fragments = self.rows_per_warp // 16
        queries = 4 * -(-dim_qk // 16) if fragments == 1 and dim_qk <= 128 else 0
        return fragments * (8 * -(-dim_vo // 16) + self.block_keys // 2) + queries + 60

    def smem_bytes(self, dim_qk: int, dim_vo: int, kv_bytes: int) -> int:
        """Return the dynamic shared memory of a CTA, with elements of K and V that take so many bytes there."""
        return _native.attention_smem_bytes(
            self.warps_m, self.warps_kv, self.rows_per_warp, self.block_keys, self.stages, dim_qk, dim_vo, kv_bytes
        )


# The figures are of one H200, bf16, 32 query heads on 8 KV heads, head_dim 128 unless another is named.
TILES = {
    tile.name: tile
    for tile in (
        # Decode, bound by DRAM: each warp streams keys of its own through three stages of 8 KiB; an SM that holds two
        # CTAs has 128 KiB under way. 64 requests of 2,048 keys: 4.0 TB/s; two stages and three CTAs 3.8, four stages
        # and one CTA 3.3. At head_dim 64 four CTAs fit: 64 x 4,096: 4.0 TB/s, two with blocks of 32 keys 3.8.
        Tile("m16", 1, 4, 16, 16, 16, 3, ctas=4, min_chunk=256),
        # The same bytes in a stage where the cache is FP8: 64 x 4,096: 3.6 TB/s, as with two stages and three CTAs.
        Tile("m16_k32", 1, 4, 16, 32, 16, 3, ctas=2, min_chunk=256),
        # Few tokens a request (speculation, short appends): a quarter of the rows of m128, so little padding.
        Tile("m64", 4, 1, 16, 64, 32, 2, ctas=2, min_chunk=512),
        # Prefill, bound by mma.sync: 32 rows a warp use each key that ldmatrix reads twice. With two CTAs an SM, one
        # multiplies while the other is in its softmax; 255 registers hold 32 rows of output up to 128 columns.
        # 4 x 4,096 full: 360 TFLOP/s; blocks of 32 keys 288, one stage 294, eight warps of 16 rows 270.
        Tile("m128", 4, 1, 32, 64, 32, 2, ctas=2, min_chunk=512),
        # Half the output leaves registers for twice the scores, and half as many blocks have their fixed costs:
        # head_dim 64, 4 x 4,096 causal: 283 TFLOP/s, with blocks of 64 keys 252.
        Tile("m128_k128", 4, 1, 32, 128, 32, 2, ctas=2, min_chunk=512),
        # Where two stages would leave room for one CTA only, two CTAs of one stage are better: head_dim 192 and 128,
        # 4 x 4,096 causal: 333 TFLOP/s; one CTA of two stages 288, two of two stages with blocks of 32 keys 313.
        Tile("m128_s1", 4, 1, 32, 64, 32, 1, ctas=2, min_chunk=512),
        # For wider output, of which a warp's registers hold 16 rows. head_dim 256, 4 x 4,096 causal: 290 TFLOP/s, at
        # the rate at which ldmatrix reads shared memory.
        Tile("m128_wide", 8, 1, 16, 64, 32, 2, ctas=1, min_chunk=512),
    )
}


def _full_tile(name: str, dim_qk: int, dim_vo: int, kv_bytes: int) -> Tile:
    """Return the row of the table for a kind of tile and a shape of keys."""
    if name == "m16" and kv_bytes == 1:
        name = "m16_k32"
    elif name == "m128" and dim_vo > 128:
        name = "m128_wide"
    elif name == "m128" and dim_qk > 128:
        name = "m128_s1"
    elif name == "m128" and max(dim_qk, dim_vo) <= 64:
        name = "m128_k128"
    return TILES[name]


def tile_name(rows: float) -> str:
    """Return the kind of tile, ``"m16"``, ``"m64"`` or ``"m128"``, for requests of so many packed rows."""
    return "m16" if rows <= 16 else "m64" if rows <= 64 else "m128"


@functools.cache
def choose_tile(name: str, dim_qk: int, dim_vo: int, kv_bytes: int, max_smem: int) -> Tile:
    """Return a kind's tile, shrunk until a CTA fits into the shared memory that the GPU gives it.

    Blocks of keys shrink first: stages hide the latency of loads, and halving both loses more than halving one.

    Parameters
    ----------
    name
        As `tile_name` returns it.
    dim_qk, dim_vo
        Head dims.
    kv_bytes
        Bytes of an element of K and V in shared memory: 1 for an FP8 cache that is copied as it is, else 2.
    max_smem
        Bytes of shared memory that a CTA can have.

    Raises
    ------
    NotImplementedError
        The smallest shape does not fit.
    """
    full = tile = _full_tile(name, dim_qk, dim_vo, kv_bytes)
    while tile.smem_bytes(dim_qk, dim_vo, kv_bytes) > max_smem:
        if tile.block_keys > tile.least_block:
            tile = replace(tile, block_keys=tile.block_keys // 2)
        elif tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            raise NotImplementedError(
                f"head_dim: expected dims whose tiles fit into {max_smem // 1024} KiB of shared memory, all that a CTA "
                f"has on this GPU, got {dim_qk} and {dim_vo}"
            )
    if tile != full:
        tile = replace(tile, name=f"{tile.name.partition('_')[0]}_k{tile.block_keys}_s{tile.stages}")
    return tile


def ctas_per_sm(tile: Tile, dim_qk: int, dim_vo: int, kv_bytes: int, smem_of_sm: int) -> int:
    """Return how many CTAs an SM should hold: as many as the tile is made for, if memory and registers suffice."""
    reserved = 1024  # by the system, for each CTA
    by_smem = smem_of_sm // (tile.smem_bytes(dim_qk, dim_vo, kv_bytes) + reserved)
    by_registers = 65536 // (tile.threads * tile.registers(dim_qk, dim_vo))
    return max(1, min(tile.ctas, by_smem, by_registers))


@dataclass(frozen=True)
class Sm90Tile:
    """How the kernel for SM90 walks the keys of a tile of 128 rows."""

    block_keys: int
    stages: int
    min_chunk: int = 512  # keys that are not worth cutting further

    rows = 128
    threads = 384
    warps_kv = 1

    def smem_bytes(self, dim_qk: int, dim_vo: int) -> int:
        """Return the dynamic shared memory of a CTA, of which an SM holds one."""
        return _native.attention_sm90_smem_bytes(self.block_keys, self.stages, dim_qk, dim_vo)


# By head_dim_qk and head_dim_vo; the figures are of one H200, bf16, 32 query heads on 8 KV heads, 4 x 4,096 causal, in
# TFLOP/s. Each block has its fixed costs, so blocks are as long as scores and weights find place in registers.
SM90_TILES = {
    (64, 64): Sm90Tile(192, 3),  # 415; two stages 2 % slower, blocks of 128 keys 5 %
    (128, 128): Sm90Tile(160, 2),  # 646; blocks of 128 keys 4 % slower, of 176 as fast
    (192, 128): Sm90Tile(128, 2),  # all that shared memory holds
    (256, 256): Sm90Tile(80, 2),  # 684, likewise; blocks of 64 keys 15 % slower
}
