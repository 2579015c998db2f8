# mypy: ignore-errors
"""The plan of a step's attention: items of work, and the parts they are cut into.

An *item* is one (sequence, KV head, tile of queries). All query heads of the KV head are rows of the tile, so its KV
is read once for all of them. An item of many keys is cut along these into *parts* (flash-decoding), each with a
softmax of its own. How a sequence is cut depends on that sequence alone, not on the batch nor on the threads: its
results are the same, bit by bit, in whatever company.

Sequences of one query that share their first blocks have one item for the parts that lie in these, whose tokens are
theirs, and items for what is their own, to which the results of the former are handed on:

        parts of a sequence alone    0  1  2  3  4  5
        of three that share          [ 0  1  2  3 ]
                                                    [ 4  5 ]   [ 4 ]   [ 4  5  6 ]

So the same keys are multiplied with the same queries, and the same parts are merged in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import machine_code, records
from headwise.kernels.cpu.addresses import array_at, ints_at, long_matrix_at, record_at
from headwise.kernels.cpu.records import PLANNING, address_of, place_of

Ints = NDArray[np.int32]

TILE_ROWS = 192
"""Rows (query tokens times query heads of a KV head) of a tile of several tokens: scratch stays in the L2 cache."""

FEW_ROWS = 24
"""Most rows of an item of tokens that are sequences of their own, each of which follows the one before: its keys and
values are read once for all of them."""

KEYS = 64
"""Parts begin on multiples of this many visible keys."""

PART_KEYS = 256
"""A part of an item of few rows has so many keys, and the last one fewer than as many more: with less of them, merging
costs more than it saves. So parts lie where they do however many come behind them."""

TILE_PART_KEYS = 2048
"""A part of a tile has at least so many: there are many tiles, and a part's result is large."""

THREAD_COST = 250_000
"""Work, in the units of `_cost`, that is worth waking a thread for (about 10 us)."""

_FIELDS = "sequence head token tokens position sink_end window_start window_end parts first_row in_place heirs handed"
ITEM = np.dtype([(name, np.int64) for name in _FIELDS.split(" ")])
"""An item. It sees the positions ``[0, sink_end)`` and ``[window_start, window_end)``, whose keys and values are read
``in_place``, or laid out for it.

``token`` is the row of its first token in the batch, ``position`` that token's position. Row ``r`` of an item is query
head ``r % share`` of its token ``r // share``. Where it has more than one part, their results lie in the rows of the
partial results from ``first_row`` on, those of one part behind those of another.

``heirs``: the items, behind this one, that go on from its results, each from some of its rows; 0: they are results of
attention. ``handed``: the first row of the partial results that an item goes on from; -1: none
"""

_ITEM_NUMBERS = len(ITEM.names or ())
_TOKEN, _TOKENS, _HEIRS = map(_FIELDS.split(" ").index, ("token", "tokens", "heirs"))
_items_at, _planning_at = array_at(numba.from_dtype(ITEM)), record_at(PLANNING)
_pasted = numba.njit(inline="always", nogil=True, error_model="numpy")


@_pasted
def keys_seen(item):
    """How many positions are visible to an item's queries."""
    return item.sink_end + item.window_end - item.window_start


@_pasted
def span_of_part(item, part):
    """The part's share ``[begin, end)`` of the item's visible keys."""
    seen, each = keys_seen(item), PART_KEYS
    if not item.in_place:
        each = -(-seen // (item.parts * KEYS)) * KEYS
    return min(part * each, seen), seen if part == item.parts - 1 else min((part + 1) * each, seen)


@_pasted
def has_partials(item):
    """Whether results of an item's parts are partial ones."""
    return item.parts > 1 or item.heirs > 0 or item.handed >= 0


@_pasted
def _parts_of(seen):
    """Into how many parts one token's item is cut that sees so many keys."""
    return max(1, seen // PART_KEYS)


@_pasted
def _tile_tokens(queries, share):
    return min(queries, max(2, TILE_ROWS // share)) if queries > 1 else 1


@_pasted
def _cost(item, share, dim):
    # Reading a key and its value costs as much as the arithmetic of about twelve rows.
    return keys_seen(item) * (item.tokens * share + 12) * dim


@_pasted
def _most_items(cu, sequences, kv_heads, share):
    """No plan has more: each item that has heirs is of two sequences at least."""
    tiles = 0
    for sequence in range(sequences):
        queries = cu[sequence + 1] - cu[sequence]
        if queries > 0:
            tiles += -(-queries // _tile_tokens(queries, share))
    return (tiles + sequences // 2) * kv_heads


@_pasted
def _joined(marks, is_told, sequences, sequence):
    """How many sequences there are from this one on, each of which but the first has a mark: that it follows the one
    before, or shares its first blocks."""
    count = 1
    while is_told and sequence + count < sequences and marks[sequence + count] != 0:
        count += 1
    return count


@_pasted
def _taken_together(own, position, most, window):
    """Of so many sequences of one query each, which follow each other from a position on, how many are one item: their
    keys begin with the first, and are cut into as many parts. Every one of them computes the same as alone then."""
    count, parts = 1, _parts_of(position + 1)
    while count < most and (count + 1) * own.share <= FEW_ROWS and (window <= 0 or position + count < window):
        if _parts_of(position + count + 1) != parts:
            break
        count += 1
    return count


@_pasted
def _add(own, item, has_heirs):
    """Count an item whose other numbers are known, and give it its partial results."""
    rows = item.tokens * own.share
    item.first_row = own.partial_rows
    if has_heirs or has_partials(item):
        own.partial_rows += item.parts * rows
    own.part_count += item.parts
    own.rows = max(own.rows, rows)
    if not item.in_place:
        own.is_tiled = 1
    own.cost += _cost(item, own.share, own.dim)


@_pasted
def _plan_sequence(own, cu, lens, sees, windows, sinks, items, at, sequence, together, head):
    """The items of a sequence's head, from number ``at`` on, or of so many sequences that each follow the one before;
    the number behind them."""
    done, queries = 0, cu[sequence + together] - cu[sequence]
    while done < queries:
        item, in_place = items[at], queries == 1 or together > 1
        item.position = lens[sequence] - (1 if together > 1 else queries) + done
        item.tokens = min(_tile_tokens(queries, own.share), queries - done)
        if together > 1:
            item.tokens = _taken_together(own, item.position, queries - done, windows[head])
        # Of several the last one: its table has the blocks of all.
        item.sequence = sequence + done + item.tokens - 1 if together > 1 else sequence
        item.head, item.token, item.in_place = head, cu[sequence] + done, 1 if in_place else 0
        item.window_start = item.sink_end = 0
        item.window_end = item.position + item.tokens
        if own.sees != 0 and not in_place:  # one query alone sees nothing behind itself
            item.window_end = sees[item.token + item.tokens - 1]
        if windows[head] > 0:
            item.window_start = max(0, item.position - windows[head] + 1)
            item.sink_end = min(sinks[head], item.window_start)
        seen = keys_seen(item)
        item.parts = _parts_of(seen) if in_place else max(1, seen // TILE_PART_KEYS)
        item.heirs, item.handed = 0, -1
        _add(own, item, False)
        done += item.tokens
        at += 1
    return at


@_pasted
def _plan_group(own, cu, lens, follows, shared, items, at, sequence, count, head):
    """The same of so many sequences that share their first blocks, of a head that sees all. No more than `FEW_ROWS` of
    their rows are an item: they are cut into as few as may be, and as even. Some may follow each other."""
    pieces = -(-count // max(1, FEW_ROWS // own.share))
    end = sequence + count
    while sequence < end:
        some = -(-(end - sequence) // pieces)
        parts = _parts_of(lens[sequence]) - 1  # the last one has keys of its own
        for each in range(sequence + 1, sequence + some):
            parts = min(parts, _parts_of(lens[each]) - 1, shared[each] // PART_KEYS)
        has_common = some > 1 and parts > 0
        whole = items[at]
        if has_common:
            whole.sequence, whole.head, whole.token, whole.tokens = sequence, head, cu[sequence], some
            whole.in_place, whole.window_start, whole.sink_end = 1, 0, 0
            whole.window_end, whole.position = parts * PART_KEYS, parts * PART_KEYS - 1
            whole.parts, whole.heirs, whole.handed = parts, 0, -1
            _add(own, whole, True)
            at += 1
        first, behind = sequence, sequence + some
        while sequence < behind:
            item = items[at]
            item.position = lens[sequence] - 1
            in_a_row = _joined(follows, own.follows != 0, behind, sequence)
            item.tokens = _taken_together(own, item.position, in_a_row, 0) if in_a_row > 1 else 1
            # Of several the last one: its table has the blocks of all.
            item.sequence, item.head, item.token = sequence + item.tokens - 1, head, cu[sequence]
            item.in_place, item.sink_end, item.window_end = 1, 0, item.position + item.tokens
            item.window_start, item.handed = (parts * PART_KEYS if has_common else 0), -1
            item.parts, item.heirs = _parts_of(keys_seen(item)), 0
            if has_common:
                item.handed = whole.first_row + (sequence - first) * own.share
                whole.heirs += 1
            _add(own, item, False)
            sequence += item.tokens
            at += 1
        pieces -= 1
    return at


@_pasted
def _plan_items(own, cu, lens, follows, shared, sees, windows, sinks, items):
    """Fill in all items of a batch, and what they come to; how many there are."""
    at = sequence = 0
    own.part_count = own.rows = own.is_tiled = own.partial_rows = own.cost = 0
    while sequence < own.sequences:
        group = _joined(shared, own.shared != 0, own.sequences, sequence)
        end = sequence + max(group, _joined(follows, own.follows != 0, own.sequences, sequence))
        for head in range(own.kv_heads):
            if group > 1 and windows[head] <= 0:
                at = _plan_group(own, cu, lens, follows, shared, items, at, sequence, group, head)
            each = sequence + group if group > 1 and windows[head] <= 0 else sequence
            while each < end:
                together = _joined(follows, own.follows != 0, end, each)
                at = _plan_sequence(own, cu, lens, sees, windows, sinks, items, at, each, together, head)
                each += together
        sequence = end
    return at


def _plan(address):
    own = _planning_at(address)
    cu, lens = ints_at(own.cu_seqlens, own.sequences + 1), ints_at(own.seq_lens, own.sequences)
    windows, sinks = ints_at(own.windows, own.kv_heads), ints_at(own.sinks, own.kv_heads)
    follows, shared = ints_at(own.follows, own.sequences), ints_at(own.shared, own.sequences)
    sees = ints_at(own.sees, cu[own.sequences])
    own.item_count, own.part_count = _most_items(cu, own.sequences, own.kv_heads, own.share), 0
    if own.item_count > own.item_room:
        return
    items = _items_at(own.items, own.item_count)
    own.item_count = _plan_items(own, cu, lens, follows, shared, sees, windows, sinks, items)
    if own.part_count > own.part_room:
        return
    parts, at = long_matrix_at(own.parts, own.part_count, 2), 0
    for index in range(own.item_count):
        for part in range(items[index].parts):
            parts[at, 0], parts[at, 1] = index, part
            at += 1


@cache
def plan() -> Any:
    """The compiled function of a `PLANNING`'s address: fills in its items, then its parts, where there is room."""
    return machine_code.unit(_plan, 1, error_model="numpy")


@dataclass(frozen=True)
class Plan:
    """What a step's attention does, for all layers whose heads have the same windows and sinks.

    items:        ``int64 [items, numbers]``, the numbers of an `ITEM`
    parts:        ``int64 [parts, 2]`` of (item, part), those that take longest last
    rows:         the most rows of an item
    is_tiled:     whether an item has keys and values laid out for it
    partial_rows: rows of partial results
    cost:         in the units of `THREAD_COST`
    sees:         of the batch, where heads go by it
    """

    items: NDArray[np.int64]
    parts: NDArray[np.int64]
    rows: int
    is_tiled: bool
    partial_rows: int
    cost: int
    sees: Ints | None

    def of_rows(self, wanted: NDArray[np.int64]) -> Plan:
        """The same without items none of whose tokens is among these rows of the batch, ascending. Of an item that is
        left, all heirs are."""
        first, tokens = self.items[:, _TOKEN], self.items[:, _TOKENS]
        is_kept = np.searchsorted(wanted, first) < np.searchsorted(wanted, first + tokens)
        for item in np.flatnonzero(self.items[:, _HEIRS]).tolist():
            is_kept[item + 1 : item + 1 + self.items[item, _HEIRS]] = is_kept[item]
        parts = self.parts[is_kept[self.parts[:, 0]]]
        parts[:, 0] = (np.cumsum(is_kept) - 1)[parts[:, 0]]
        return replace(self, items=self.items[is_kept], parts=parts)


class Planner:
    """Makes the plans of steps for heads of these windows and sinks (``int32 [kv_heads]``), which may see both ways.

    A plan is valid until the next one is made, which mostly fits into the same memory.
    """

    def __init__(self, windows: Ints, sinks: Ints, share: int, dim: int, both_ways: bool = False) -> None:
        self._heads = windows, sinks  # keeps alive what the record points to
        self._both_ways = both_ways
        self._own = records.filled(
            PLANNING, windows=address_of(windows, np.int32), sinks=address_of(sinks, np.int32), kv_heads=len(windows),
            share=share, dim=dim,
        )  # fmt: skip
        self._items, self._parts = np.empty((0, _ITEM_NUMBERS), np.int64), np.empty((0, 2), np.int64)
        self._plan, self._place = plan().ctypes, place_of(self._own)

    def plan(self, batch: AttentionBatch) -> Plan:
        """The `Plan` of a batch.

        Raises:
            TypeError: an array of the batch is not contiguous int32.
        """
        cu_seqlens, seq_lens = (address_of(array, np.int32) for array in (batch.cu_seqlens_q, batch.seq_lens))
        sees = batch.sees if self._both_ways else None
        told = (0 if array is None else address_of(array, np.int32) for array in (batch.follows, batch.shared, sees))
        self._own[: len(_BATCH)] = cu_seqlens, seq_lens, len(batch.seq_lens), *told
        self._plan(self._place)
        items, parts, *others = self._own[-len(_FOUND) :].tolist()
        if items > len(self._items) or parts > len(self._parts):
            self._make_room(items, parts)
            return self.plan(batch)
        rows, is_tiled, partial_rows, cost = others
        return Plan(self._items[:items], self._parts[:parts], rows, bool(is_tiled), partial_rows, cost, sees)

    def _make_room(self, items: int, parts: int) -> None:
        """For so many; parts are not known before there is room for the items."""
        if items > len(self._items):
            self._items = np.empty((items, _ITEM_NUMBERS), np.int64)
        if parts > len(self._parts):
            self._parts = np.empty((parts, 2), np.int64)
        rooms = place_of(self._items), len(self._items), place_of(self._parts), len(self._parts)
        self._own[-len(_FOUND) - len(rooms) : -len(_FOUND)] = rooms


_BATCH = ("cu_seqlens", "seq_lens", "sequences", "follows", "shared", "sees")
"""The first fields of a `PLANNING`, in order."""

_FOUND = ("item_count", "part_count", "rows", "is_tiled", "partial_rows", "cost")
"""The last ones; those before them are its rooms."""
