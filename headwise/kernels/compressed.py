"""Layouts of what is kept for attention to entries, and their making, in NumPy. See `headwise.kernels.compressed_base`.

A block of a layout with a ``rate`` has the entries whose last token is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.bfloat16 import to_float32
from headwise.kernels.compressed_base import Entries, EntryMaking, Kept, Making
from headwise.kernels.compressed_rows import QUANTISED, row_roles, store_rows
from headwise.kernels.dsa import index_layout, store_keys
from headwise.kernels.mla import latent_view

_UNUSED = "unused"
_MADE_ROWS = 1 << 14
"""Of which entries are made at a time."""

Ints = NDArray[np.int64]


def rows_layout(block_size: int, slots: int, width: int, dtype: str) -> BlockLayout:
    """Of ``width`` numbers of each token that entries are made of, where these are kept in ``dtype``: softmaxes over
    gates are not made of codes, so beside those rows are bfloat16.

    Raises:
        ConfigError: they are not kept in this dtype.
    """
    return BlockLayout(block_size, slots, row_roles(width, "bfloat16" if dtype in QUANTISED else dtype))


def keys_layout(block_size: int, slots: int, size: int, dtype: str, turning: int = 0) -> BlockLayout:
    """Of a key of each token; turning: see `headwise.kernels.compressed_rows`.

    Raises:
        ConfigError: as `rows_layout`.
    """
    return BlockLayout(block_size, slots, row_roles(size, dtype, turning))


def entries_layout(
    block_size: int,
    slots: int,
    size: int,
    rate: int,
    dtype: str,
    turning: int = 0,
    *,
    index_dim: int = 0,
    beside: int = 1,
    least_bytes: int = 0,
) -> BlockLayout:
    """Of an entry of ``size`` numbers of every ``rate`` tokens, of each of ``beside`` layers, and a key of an indexer
    of ``index_dim``, if there is one.

    least_bytes: of a slot: so that one is as large as others are

    Raises:
        ConfigError: as `rows_layout`; or entries would end anywhere in blocks of so many tokens.
    """
    if block_size % rate and rate % block_size and block_size > 1:
        raise ConfigError(
            f"block_size {block_size} neither divides the {rate} tokens that an entry of this model stands for nor is "
            "a multiple of these: choose a power of two"
        )
    roles = row_roles(size, dtype, turning, beside)
    if index_dim:
        roles = (*roles, *index_layout(block_size, slots, index_dim, dtype).roles)
    layout = BlockLayout(block_size, slots, roles, rate=rate)
    if layout.slot_bytes < least_bytes:
        unused = Role(_UNUSED, (least_bytes - layout.slot_bytes,), "uint8", is_state=True)
        layout = replace(layout, roles=(*layout.roles, unused))
    return layout


def columns_of(entries: Any, layout: BlockLayout) -> tuple[Any, Any]:
    """In which column of a block table entries are, and at which place of that block."""
    return ((entries + 1) * layout.rate - 1) // layout.block_size, entries % layout.own_tokens


def table_of(table: NDArray[np.int32], layout: BlockLayout) -> NDArray[np.int32]:
    """Of a row of a block table the columns that entries end in: as of `BlockLayout.own`, one behind the other."""
    each = layout.rate // layout.block_size
    return np.ascontiguousarray(table[each - 1 :: each]) if each > 1 else table


def blocks_in(batch: AttentionBatch, sequences: Any, kept: Kept, columns: Any) -> NDArray[np.int32]:
    """Blocks that hold these columns of sequences."""
    found: NDArray[np.int32] = batch.block_tables[sequences * batch.groups + int(kept.heads.group[0]), columns]
    return found


def ending(batch: AttentionBatch, rate: int) -> tuple[Ints, Ints]:
    """The entries whose last token is of a batch's step: their sequences, and their numbers."""
    counts = np.diff(batch.cu_seqlens_q)
    first, last = (batch.seq_lens - counts) // rate, batch.seq_lens // rate
    number = (last - first).astype(np.int64)
    sequences = np.repeat(np.arange(len(counts)), number)
    behind = np.arange(len(sequences)) - np.repeat(np.cumsum(number) - number, number)
    return sequences, behind + first[sequences]


def make_entries(arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch, dtype: Any = np.float32) -> None:
    """See `CompressedKernels.make_entries`. dtype: that is computed in"""
    making = entries.making
    sequences, numbers = ending(batch, making.rate)
    each = max(1, _MADE_ROWS // (making.rate * making.keys))
    for first in range(0, len(numbers), each):
        some = slice(first, first + each)
        made = made_of(arena, entries, batch, sequences[some], numbers[some], dtype)
        store_entries(arena, entries, batch, sequences[some], numbers[some], made)


def made_of(
    arena: NDArray[np.uint8], entries: Entries, batch: AttentionBatch, sequences: Ints, numbers: Ints, dtype: Any
) -> list[NDArray[Any]]:
    """Of these entries what each making gives, ``[n, size]``."""
    making, made = entries.making, []
    for one, kept in zip(making.makings, entries.rows, strict=True):
        pieces = [
            _piece_of(arena, making, kept.piece(index), batch, sequences, numbers, dtype)
            for index in range(kept.pieces)
        ]
        keys, gates = (
            np.concatenate(each, axis=-1).reshape(*each[0].shape[:-2], -1) for each in zip(*pieces, strict=True)
        )
        made.append(_made(making, one, keys, gates + one.bias.astype(dtype), numbers))
    return made


def _piece_of(
    arena: NDArray[np.uint8],
    making: EntryMaking,
    kept: Kept,
    batch: AttentionBatch,
    sequences: Ints,
    numbers: Ints,
    dtype: Any,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """``[n, keys, rate, keys, size]`` of a piece's size, twice: keys and gates of the tokens of entries, and where
    these overlap before them of the tokens of those before; anything before the first."""
    tokens = (numbers[:, None, None] - np.arange(making.keys - 1, -1, -1)[:, None]) * making.rate
    tokens = np.maximum(tokens + np.arange(making.rate), 0)
    size = kept.layout.block_size
    blocks = blocks_in(batch, sequences[:, None, None], kept, tokens // size)
    stored = latent_view(arena, kept.layout)[blocks, int(kept.heads.slot[0]), tokens % size]
    rows = (to_float32(stored) if stored.dtype == np.uint16 else stored).astype(dtype, copy=False)
    keys, gates = np.split(rows.reshape(*rows.shape[:-1], 2 * making.keys, -1), 2, axis=-2)
    return keys, gates


def pieces_of(entries: Entries) -> Iterator[tuple[slice, Kept]]:
    """Which numbers of a token's rows, side by side, are each piece of them, and where that is kept."""
    for row, kept in zip(entries.making.parts, entries.rows, strict=True):
        each = (row.stop - row.start) // kept.pieces
        for index in range(kept.pieces):
            yield slice(row.start + index * each, row.start + (index + 1) * each), kept.piece(index)


def in_pieces(size: int, keys: int, pieces: int) -> Ints:
    """Numbers of a row ``[keys | gates]``, of which a token has so many of ``size`` each, in the order of pieces."""
    return np.arange(2 * keys * size).reshape(2 * keys, pieces, -1).swapaxes(0, 1).reshape(-1)


def _made(making: EntryMaking, one: Making, keys: Any, gates: Any, numbers: Ints) -> NDArray[Any]:
    """What is made of ``[n, keys, rate, keys * size]``, with the bias in ``gates``."""
    if making.overlaps:
        keys, gates = (np.concatenate([x[:, 0, :, : one.size], x[:, 1, :, one.size :]], axis=1) for x in (keys, gates))
        gates[numbers == 0, : making.rate] = -np.inf
    else:
        keys, gates = keys[:, 0], gates[:, 0]
    powers = np.exp(gates - gates.max(axis=1, keepdims=True))
    mixed = (keys * powers).sum(axis=1) / powers.sum(axis=1)
    normed = mixed / np.sqrt(np.square(mixed).mean(axis=1, keepdims=True) + one.eps) * one.norm
    angles = (numbers * making.rate).astype(np.float32)[:, None] * one.inverse
    cosines, sines = np.cos(angles), np.sin(angles)
    low, high = np.split(normed, 2, axis=1)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=1)


def store_entries(
    arena: NDArray[np.uint8],
    entries: Entries,
    batch: AttentionBatch,
    sequences: Ints,
    numbers: Ints,
    made: list[NDArray[Any]],
) -> None:
    """Store what was made of these entries."""
    kept, begin = entries.made, entries.making.begin
    columns, places = columns_of(numbers, kept.layout)
    blocks, slot = blocks_in(batch, sequences, kept, columns), int(kept.heads.slot[0])
    mapped = blocks >= 0
    at = blocks[mapped], slot, places[mapped]
    own = kept.layout.own
    store_rows(arena, own, at, made[0][mapped], begin)
    if len(made) > 1:
        store_keys(arena, own, at, made[1][mapped])
