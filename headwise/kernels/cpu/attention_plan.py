# mypy: ignore-errors
"""The plan of a step's attention: items of work, and the parts they are cut into.

An *item* is one (sequence, KV head, tile of queries). All query heads of the KV head are rows of the tile, so its KV
is read once for all of them. An item of many keys is cut along these into *parts* (flash-decoding), each with a
softmax of its own. How a sequence is cut depends on that sequence alone, not on the batch nor on the threads: its
results are the same, bit by bit, in whatever company.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

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

SEQUENCE, HEAD, TOKEN, TOKENS, POSITION, SINK_END, WINDOW_START, WINDOW_END, PARTS, FIRST_ROW = range(10)
"""Fields of an item. It sees the positions ``[0, SINK_END)`` and ``[WINDOW_START, WINDOW_END)``.

TOKEN is the row of its first token in the batch, POSITION that token's position. Row ``r`` of an item is query head
``r % share`` of its token ``r // share``. Where it has more than one part, their results lie in the rows of the
partial results from FIRST_ROW on, those of one part behind those of another.
"""

_inlined = numba.njit(forceinline=True, nogil=True, error_model="numpy")
_compiled = numba.njit(nogil=True, error_model="numpy")


class Plan(NamedTuple):
    """What a step's attention does, for all layers whose heads have the same windows and sinks.

    items:        ``int64 [items, fields]``
    parts:        ``int64 [parts, 2]`` of (item, part), those that take longest last
    rows:         the most rows of an item
    is_tiled:     whether an item has several tokens
    partial_rows: rows of partial results
    workers:      threads that are worth waking
    """

    items: Any
    parts: Any
    rows: Any
    is_tiled: Any
    partial_rows: Any
    workers: Any


@_inlined
def keys_seen(item):
    """How many positions are visible to an item's queries."""
    return item[SINK_END] + item[WINDOW_END] - item[WINDOW_START]


@_inlined
def span_of_part(item, part):
    """The part's share ``[begin, end)`` of the item's visible keys."""
    seen = keys_seen(item)
    each = -(-seen // (item[PARTS] * KEYS)) * KEYS
    return min(part * each, seen), min((part + 1) * each, seen)


@_compiled
def make_plan(cu, lens, windows, sinks, share, dim, threads):
    """The `Plan` of a batch for heads of these windows and sinks (``int32 [kv_heads]``)."""
    items = _plan_items(cu, lens, windows, sinks, share)
    parts, partial_rows = _plan_parts(items, share)
    rows, cost, is_tiled = 0, 0, False
    for item in items:
        rows = max(rows, item[TOKENS] * share)
        cost += _cost(item, share, dim)
        is_tiled = is_tiled or item[TOKENS] > 1
    workers = max(1, min(threads, len(parts), cost // THREAD_COST))
    return Plan(items, parts, rows, is_tiled, partial_rows, workers)


@_inlined
def _tile_tokens(queries, share):
    return min(queries, max(2, TILE_ROWS // share)) if queries > 1 else 1


@_inlined
def _cost(item, share, dim):
    # Reading a key and its value costs as much as the arithmetic of about twelve rows.
    return keys_seen(item) * (item[TOKENS] * share + 12) * dim


@_compiled
def _plan_items(cu, lens, windows, sinks, share):
    """All items of the batch, not yet cut into parts."""
    heads, count = len(windows), 0
    for sequence in range(len(lens)):
        queries = cu[sequence + 1] - cu[sequence]
        if queries > 0:
            count += heads * -(-queries // _tile_tokens(queries, share))
    items = np.zeros((count, FIRST_ROW + 1), np.int64)
    at = 0
    for sequence in range(len(lens)):
        queries = cu[sequence + 1] - cu[sequence]
        for head in range(heads):
            done = 0
            while done < queries:
                item = items[at]
                item[SEQUENCE], item[HEAD], item[TOKEN] = sequence, head, cu[sequence] + done
                item[TOKENS] = min(_tile_tokens(queries, share), queries - done)
                item[POSITION] = lens[sequence] - queries + done
                item[WINDOW_END] = item[POSITION] + item[TOKENS]
                if windows[head] > 0:
                    item[WINDOW_START] = max(0, item[POSITION] - windows[head] + 1)
                    item[SINK_END] = min(sinks[head], item[WINDOW_START])
                done += item[TOKENS]
                at += 1
    return items


@_compiled
def _plan_parts(items, share):
    """Cut items into parts: (the parts, rows of partial results)."""
    count = rows = 0
    for item in items:
        item[PARTS] = max(1, keys_seen(item) // (TILE_PART_KEYS if item[TOKENS] > 1 else PART_KEYS))
        item[FIRST_ROW] = rows
        count += item[PARTS]
        rows += item[PARTS] * item[TOKENS] * share if item[PARTS] > 1 else 0
    parts = np.empty((count, 2), np.int64)
    at = 0
    for index in range(len(items)):
        for part in range(items[index][PARTS]):
            parts[at, 0], parts[at, 1] = index, part
            at += 1
    return parts, rows
