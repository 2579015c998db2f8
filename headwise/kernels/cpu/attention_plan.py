# mypy: ignore-errors
"""The plan of a step's attention: items of work, and the parts they are cut into.

An *item* is one (sequence, KV head, tile of queries). All query heads of the KV head are rows of the tile, so its KV
is read once for all of them. An item of many keys is cut along these into *parts* (flash-decoding), each with a
softmax of its own. How a sequence is cut depends on that sequence alone, not on the batch nor on the threads: its
results are the same, bit by bit, in whatever company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.records import address_of

Ints = NDArray[np.int32]

TILE_ROWS = 192
"""Rows (query tokens times query heads of a KV head) of a tile of several tokens: scratch stays in the L2 cache."""

KEYS = 64
"""Parts begin on multiples of this many visible keys."""

PART_KEYS = 256
"""A part of one token's item has at least this many keys: fewer, and merging costs more than it saves."""

TILE_PART_KEYS = 2048
"""The same for a tile: there are many of them, and a part's result is large."""

THREAD_COST = 250_000
"""Work, in the units of `_cost`, that is worth waking a thread for (about 10 us)."""

_FIELDS = "sequence head token tokens position sink_end window_start window_end parts first_row"
ITEM = np.dtype([(name, np.int64) for name in _FIELDS.split(" ")])
"""An item. It sees the positions ``[0, sink_end)`` and ``[window_start, window_end)``.

``token`` is the row of its first token in the batch, ``position`` that token's position. Row ``r`` of an item is query
head ``r % share`` of its token ``r // share``. Where it has more than one part, their results lie in the rows of the
partial results from ``first_row`` on, those of one part behind those of another.
"""

_ITEMS, _INTS = numba.from_dtype(ITEM)[::1], types.Array(types.int32, 1, "C", readonly=True)
_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


@_pasted
def keys_seen(item):
    """How many positions are visible to an item's queries."""
    return item.sink_end + item.window_end - item.window_start


@_pasted
def span_of_part(item, part):
    """The part's share ``[begin, end)`` of the item's visible keys."""
    seen = keys_seen(item)
    each = -(-seen // (item.parts * KEYS)) * KEYS
    return min(part * each, seen), min((part + 1) * each, seen)


@_pasted
def _tile_tokens(queries, share):
    return min(queries, max(2, TILE_ROWS // share)) if queries > 1 else 1


@_pasted
def _cost(item, share, dim):
    # Reading a key and its value costs as much as the arithmetic of about twelve rows.
    return keys_seen(item) * (item.tokens * share + 12) * dim


@machine_code.entry(types.int64(_INTS, _INTS, types.int64), nogil=True, error_model="numpy")
def count_items(cu, windows, share):
    """How many items a batch has."""
    tiles = 0
    for sequence in range(len(cu) - 1):
        queries = cu[sequence + 1] - cu[sequence]
        if queries > 0:
            tiles += -(-queries // _tile_tokens(queries, share))
    return tiles * len(windows)


@machine_code.entry(
    types.UniTuple(types.int64, 5)(_INTS, _INTS, _INTS, _INTS, types.int64, types.int64, _ITEMS),
    nogil=True, error_model="numpy",
)  # fmt: skip
def plan_items(cu, lens, windows, sinks, share, dim, items):
    """Fill in all ``items`` of a batch.

    Returns their parts; the most rows of an item; whether one has several tokens, 0 or 1; rows of partial results; and
    the work there is, in the units of `THREAD_COST`.
    """
    at = parts = most_rows = is_tiled = partial_rows = cost = 0
    for sequence in range(len(lens)):
        queries = cu[sequence + 1] - cu[sequence]
        for head in range(len(windows)):
            done = 0
            while done < queries:
                item = items[at]
                item.sequence, item.head, item.token = sequence, head, cu[sequence] + done
                item.tokens = min(_tile_tokens(queries, share), queries - done)
                item.position = lens[sequence] - queries + done
                item.window_start = item.sink_end = 0
                item.window_end = item.position + item.tokens
                if windows[head] > 0:
                    item.window_start = max(0, item.position - windows[head] + 1)
                    item.sink_end = min(sinks[head], item.window_start)
                item.parts = max(1, keys_seen(item) // (TILE_PART_KEYS if item.tokens > 1 else PART_KEYS))
                item.first_row = partial_rows
                rows = item.tokens * share
                if item.parts > 1:
                    partial_rows += item.parts * rows
                parts += item.parts
                most_rows, is_tiled = max(most_rows, rows), 1 if item.tokens > 1 else is_tiled
                cost += _cost(item, share, dim)
                done += item.tokens
                at += 1
    return parts, most_rows, is_tiled, partial_rows, cost


@machine_code.entry(types.void(_ITEMS, types.int64[:, ::1]), nogil=True, error_model="numpy")
def list_parts(items, parts):
    """Fill in ``parts [parts, 2]`` of (item, part): whoever takes one finds its item there."""
    at = 0
    for index in range(len(items)):
        for part in range(items[index].parts):
            parts[at, 0], parts[at, 1] = index, part
            at += 1


@dataclass(frozen=True)
class Plan:
    """What a step's attention does, for all layers whose heads have the same windows and sinks.

    items:        of `ITEM`
    parts:        ``int64 [parts, 2]`` of (item, part), those that take longest last
    rows:         the most rows of an item
    is_tiled:     whether an item has several tokens
    partial_rows: rows of partial results
    cost:         in the units of `THREAD_COST`
    """

    items: NDArray[Any]
    parts: NDArray[np.int64]
    rows: int
    is_tiled: bool
    partial_rows: int
    cost: int


def make_plan(batch: AttentionBatch, windows: Ints, sinks: Ints, share: int, dim: int) -> Plan:
    """The `Plan` of a batch for heads of these windows and sinks (``int32 [kv_heads]``).

    Raises:
        TypeError: an array is not contiguous int32.
    """
    for array in (batch.cu_seqlens_q, batch.seq_lens, windows, sinks):
        address_of(array, np.int32)
    items = np.empty(count_items(batch.cu_seqlens_q, windows, share), ITEM)
    count, rows, is_tiled, partial_rows, cost = plan_items(
        batch.cu_seqlens_q, batch.seq_lens, windows, sinks, share, dim, items
    )
    parts = np.empty((count, 2), np.int64)
    list_parts(items, parts)
    return Plan(items, parts, rows, bool(is_tiled), partial_rows, cost)
