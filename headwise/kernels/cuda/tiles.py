"""Tile sizes of the attention kernels, by head size, dtype and card."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwise.cache_controller.dtypes import dtype_bytes, packed_bytes
from headwise.kernels.gqa import QUANTISED
from headwise.kernels.joint import JOINT_ROWS
from headwise.kernels.nibbles import INT4

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}
"""Shared memory one block may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
SHARED_BYTES_FROM_90 = 227 << 10

LEAST_KEYS = 16
"""Of a tile: the least that matrix instructions take."""


@dataclass(frozen=True)
class Tile:
    """``rows`` of queries by ``keys``, worked on by ``warps``, with loads ``stages`` tiles ahead.

    parts: programs of a tile, each of which has all scores and makes so much less of the results
    tma:   the tensor memory accelerator brings keys and values, by a thread's word, not all threads' copies
    """

    rows: int
    keys: int
    warps: int
    stages: int
    parts: int = 1
    tma: bool = False


_EXACT = {64: Tile(32, 32, 4, 2)}
_EXACT_WIDE = Tile(16, 16, 4, 2)
"""float32 is multiplied without tensor cores, both operands in registers: larger tiles do not fit there."""

_QUANTISED = {
    32: Tile(64, 64, 4, 3), 64: Tile(64, 32, 4, 3), 96: Tile(64, 64, 8, 2), 128: Tile(128, 64, 8, 2),
    256: Tile(32, 32, 8, 2), 512: Tile(16, 32, 8, 2),
}  # fmt: skip
_QUANTISED[192] = _QUANTISED[256]
_QUANTISED_LARGE = {
    32: Tile(128, 64, 8, 2), 64: Tile(128, 64, 8, 3), 96: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2),
    256: Tile(64, 64, 8, 2), 512: Tile(64, 32, 8, 2, parts=2),
}  # fmt: skip
_QUANTISED_LARGE[192] = _QUANTISED_LARGE[256]
"""Of a prompt over a quantised cache, by head size: besides what others have in registers, all of a tile's numbers are
there before they are stored, and two scales for each column."""


def prefill_tile(head_dim: int, q_dtype: str, kv_dtype: str, sm: int) -> Tile:
    """Large, so that every key read serves many rows, as far as registers go.

    From sm_90 on, 128 rows are two warp groups' worth; 128 keys let one instruction of theirs work at full speed. Keys
    and values that are converted first are in registers at some time: half as many fit there. Heads of 96 are padded to
    128, and masked: with 128 keys that spills. Those of 192 are padded to 256. Results of 512 elements have no room
    beside anything else, so two programs have half of them each; two warp groups for 64 rows would compute the scores
    twice just as well, and read twice as many keys and values. Other cards have half as many rows, and twice as many
    warps for them. But of 128 numbers over quantised caches they have as many rows: half of these take nearly twice the
    instructions for a product. And so they have where shared memory, of 99 KiB, holds one program: that has eight warps
    then, not four.
    """
    is_large = sm >= 90 and SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90) == SHARED_BYTES_FROM_90
    if q_dtype == "float32":
        tile = _EXACT.get(head_dim, _EXACT_WIDE)
    elif kv_dtype in (*QUANTISED, INT4):
        tile = (_QUANTISED_LARGE if is_large else _QUANTISED)[head_dim]
        if sm >= 100 and head_dim == 64 and is_large:
            tile = replace(tile, stages=2)  # a third is worth no instruction there, and spills
    elif head_dim == 512:
        tile = Tile(128, 32, 8, 2, parts=2) if is_large else Tile(32, 32, 8, 2)
    elif sm >= 90:
        keys = 128 if kv_dtype == q_dtype else 64
        padded = Tile(128, 64, 8, 2)
        tile = {64: Tile(128, 64, 8, 3), 96: padded, 192: padded, 256: padded}.get(head_dim, Tile(128, keys, 8, 2))
    else:
        keys = 64 if kv_dtype == q_dtype else 32
        wide = Tile(64, 32, 8, 3)
        tile = {64: Tile(64, 64, 4, 3), 192: wide, 256: wide}.get(head_dim, Tile(64, keys, 4, 2))
        if head_dim == 128 and kv_dtype == q_dtype and SHARED_BYTES.get(sm) == 99 << 10:
            tile = Tile(128, keys, 8, 2)
    return _fitting(tile, head_dim, q_dtype, kv_dtype, sm)


def tma_tile(head_dim: int, q_dtype: str, kv_dtype: str, sm: int, block_size: int) -> Tile | None:
    """A prompt's tile whose keys and values come by TMA; None where it cannot bring them.

    It takes boxes out of a tensor: of one head, tokens of one block. So a tile is a part of a block, one, or two; rows
    are as many numbers as matrix instructions take, not padded; and what is converted first has no use for it. With
    heads of 64 a prompt of 4,096 tokens takes an H200 4% longer so, with 128 8% less.
    """
    if sm < 90 or kv_dtype != q_dtype or q_dtype == "float32" or head_dim not in (128, 256):
        return None
    tile = prefill_tile(head_dim, q_dtype, kv_dtype, sm)
    return replace(tile, keys=min(tile.keys, 2 * block_size), tma=True)


def is_read_by_words(head_dim: int, q_dtype: str, kv_dtype: str) -> bool:
    """Whether a decode reads several elements of a cache as one of 16 bits: see `cached_jit.split_pairs`.

    In four bits a head of 64 has fewer words than four warps multiply with side by side. Heads of 512 spill.
    """
    is_small = kv_dtype in QUANTISED or (kv_dtype == INT4 and head_dim >= 96)
    return is_small and q_dtype != "float32" and head_dim <= 256


def decode_tile(head_dim: int, q_dtype: str, kv_dtype: str, sm: int, block_size: int) -> Tile:
    """Small and deep: 16 rows, the least the tensor cores take, and loads far ahead, several programs side by side."""
    if q_dtype == "float32" and head_dim not in _EXACT:
        return _fitting(_EXACT_WIDE, head_dim, q_dtype, kv_dtype, sm)
    keys = {192: 32, 256: 32, 512: 16}.get(head_dim, 64)
    if is_read_by_words(head_dim, q_dtype, kv_dtype) and kv_dtype in QUANTISED and 64 <= head_dim <= 128:
        # As many bytes as of 16 bits: with half of them, what a tile costs whatever its size bounds it. Three stages
        # though it spans blocks: on an H200 four are slower.
        return _fitting(Tile(16, 128, 4, 3), head_dim, q_dtype, kv_dtype, sm)
    if is_read_by_words(head_dim, q_dtype, kv_dtype) and kv_dtype == INT4:
        keys = 64
    # Where a tile spans blocks, the compiler spends half of the stages ahead on loading their ids.
    stages = (4 if head_dim <= 64 else 3) if block_size >= keys else 5
    return _fitting(Tile(16, keys, 4, stages), head_dim, q_dtype, kv_dtype, sm)


def joint_tile(head_dim: int, q_dtype: str, kv_dtype: str, sm: int) -> Tile | None:
    """For decodes that read a prefix together: rows as of a small prompt, and loads further ahead, as all that is read
    comes from memory. None where they have no room in registers: of heads
    of 512, or before sm_90 beside keys and values that are converted there."""
    if head_dim > 256 or (head_dim > 128 and kv_dtype != q_dtype and sm < 90):
        return None
    if q_dtype == "float32":
        return Tile(JOINT_ROWS, LEAST_KEYS, 4, 2)
    is_wide = head_dim > 128
    keys = 64 if kv_dtype == q_dtype and not is_wide else 32
    return _fitting(Tile(JOINT_ROWS, keys, 8 if is_wide else 4, 3), head_dim, q_dtype, kv_dtype, sm)


def _fitting(tile: Tile, head_dim: int, q_dtype: str, kv_dtype: str, sm: int) -> Tile:
    """``tile`` with stages, then keys, taken away until it fits into the card's shared memory."""
    limit = SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    while _shared_bytes(tile, head_dim, q_dtype, kv_dtype) > limit:
        if tile.stages > 2 or (tile.keys == LEAST_KEYS and tile.stages > 1):
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > LEAST_KEYS:
            tile = replace(tile, keys=tile.keys // 2)
        else:
            break
    return tile


def _shared_bytes(tile: Tile, head_dim: int, q_dtype: str, kv_dtype: str) -> int:
    """About what the compiler takes: queries, keys and values in flight, and one tile of each converted."""
    dims = 1 << (head_dim - 1).bit_length()
    q_bytes = dtype_bytes(q_dtype)
    pair = dims + dims // tile.parts  # elements of a key and a value
    converted = 0 if kv_dtype == q_dtype else tile.keys * pair * q_bytes
    return tile.rows * dims * q_bytes + tile.stages * packed_bytes(kv_dtype, tile.keys * pair) + converted


def latent_tile(heads: int, q_dtype: str, kv_dtype: str, sm: int, is_decode: bool) -> Tile:
    """For latents of 512 + 64: a row's sums take 512 registers of a program, so rows are few, and warps many.

    By what the compiler makes of each (`benchmarks/gpu/machine_code.py --latents`): the largest tiles that do not spill
    within the loop. With 64 rows, the least that wgmma takes, sm_90 spills; tcgen05 keeps sums in memory of its own.
    Latents of fewer bits are in registers when they are converted: smaller tiles, and beside 32 rows the smallest of
    those in four bits, of which two numbers come from a byte.
    """
    if q_dtype == "float32":
        return Tile(16, 16, 4, 2)
    is_wide = is_decode and heads > 16
    if kv_dtype in ("int8", "float8_e4m3fn", INT4):
        return Tile(32 if is_wide else 16, 16 if is_wide and kv_dtype == INT4 else 32, 8, 2)
    has_room = SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90) == SHARED_BYTES_FROM_90
    if not is_decode:
        return Tile(64, 32, 8, 2) if has_room and sm >= 100 else Tile(32, 64 if has_room else 32, 8, 2)
    return Tile(32 if is_wide else 16, 64 if has_room else 32, 8, 2)


def compressed_tile(heads: int, dtype: str, kv_dtype: str, sm: int) -> Tile:
    """For rows of 512 that are keys and values at once, of some heads of one query: as of a decode over latents.

    A stage more brings places, and with two the compiler spills for sm_90 where an indexer chooses. Codes are in
    registers when they are converted, and so are the sums of numbers of two bytes: beside 32 rows the smallest tile.
    """
    tile = latent_tile(heads, dtype, kv_dtype, sm, is_decode=True)
    if dtype == "float32":
        return tile
    return replace(tile, stages=3, keys=LEAST_KEYS if kv_dtype != dtype and tile.rows > 16 else tile.keys)


def score_tile(dtype: str) -> Tile:
    """For an indexer's scores: rows are its heads, whatever their number."""
    return Tile(64, 16, 4, 2) if dtype == "float32" else Tile(64, 64, 4, 3)


@dataclass(frozen=True)
class ProductTile:
    """Tiles of tokens times an expert's weights: ``rows`` of tokens by ``columns`` of the result, ``depth`` at a time.

    gated_columns: of the result where ``gate`` and ``up`` are both multiplied with
    least_rows:    of an expert on average, from which on such tiles pay
    """

    rows: int
    columns: int
    gated_columns: int
    depth: int
    warps: int
    stages: int
    least_rows: int = 0


def expert_tiles(dtype: str, sm: int) -> tuple[ProductTile, ...]:
    """By the number of an expert's rows, the smallest first.

    Few rows: all that counts is that weights come in fast, in many small programs with loads far ahead. Many: tiles as
    large as registers allow, so that weights serve many rows.
    """
    if dtype == "float32":  # multiplied without tensor cores, both operands in registers
        return (ProductTile(16, 32, 16, 32, 4, 2),)
    if sm >= 90 and SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90) == SHARED_BYTES_FROM_90:
        return (
            ProductTile(16, 64, 32, 128, 4, 4),
            ProductTile(64, 128, 64, 64, 4, 4, least_rows=24),
            ProductTile(128, 128, 64, 64, 8, 4, least_rows=96),
        )
    return (
        ProductTile(16, 64, 32, 64, 4, 4),
        ProductTile(64, 64, 32, 64, 4, 3, least_rows=24),
        ProductTile(128, 128, 64, 32, 8, 3, least_rows=96),
    )
