"""Matrices of low rank that are added to rows of a product, each row's own (LoRA): the Python half (`low_rank_jit` is
compiled)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.bfloat16 import to_bits
from headwise.kernels.cpu import records
from headwise.kernels.cpu.low_rank_jit import HALF, MOST_ROWS, RANKS, add_in_place, down_of, up_of
from headwise.kernels.cpu.matmul import packed_order, places_of
from headwise.kernels.cpu.matmul_jit import TILE
from headwise.kernels.cpu.matmul_kinds import PANEL
from headwise.kernels.cpu.memory import Slabs, from_a_line_on
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import address_of, place_of

Floats = NDArray[np.float32]
Pair = tuple[Floats, Floats]
"""What one adapter adds to a projection: ``down [rank, inputs]`` and ``up [outputs, rank]``."""

THREAD_FLOPS = 1_000_000
"""Multiplications that are worth waking a thread for."""

_matrices = Slabs()

Made = TypeVar("Made")


class AdaptedRows(Protocol):
    """Which rows go by which adapter, int16 ``[rows]``, by its place from 1 on; 0: none."""

    def known(self, make: Callable[[NDArray[np.int16]], Made]) -> Made:
        """What ``make`` makes of them; once."""


@dataclass(frozen=True)
class PackedLowRank:
    """What a model's adapters add to a projection.

    dtype:   that their matrices are kept in, ``float32`` or ``bfloat16``
    ranks:   numbers between the two matrices of an adapter, padded, at most
    outputs: of the projection; ``gated``: they are the two halves of a gated MLP, which lie interleaved
    threads: that multiply at most
    record:  a `records.LOW_RANK`
    arrays:  what it points to
    """

    dtype: str
    ranks: int
    outputs: int
    gated: bool
    threads: int
    record: NDArray[np.int64]
    arrays: tuple[NDArray[Any], ...]

    def add(self, y: Floats, x: Floats, adapted: AdaptedRows) -> Floats:
        """``y [rows, outputs]``, which is the caller's no more, with what adapters make of ``x [rows, inputs]``."""
        rows, groups = len(x), adapted.known(RowGroups.of)
        if not groups.adapted:
            return y
        made = np.zeros((rows, self._columns), np.float32) if self.gated else np.ascontiguousarray(y)
        self._add(made, np.ascontiguousarray(x), groups)
        return y + made[:, places_of(self.outputs)] if self.gated else made

    @property
    def _columns(self) -> int:
        return len(packed_order(self.outputs, self.gated)) if self.gated else self.outputs

    def _add(self, made: Floats, x: Floats, groups: RowGroups) -> None:
        """In place, to columns as they lie packed."""
        (rows, inputs), columns = x.shape, made.shape[1]
        work = rows * self.ranks * (inputs + columns)
        threads = max(1, min(self.threads, work // THREAD_FLOPS))
        counters = np.zeros(2 * (1 + threads), np.int64)
        between = np.empty((rows, self.ranks), np.float32)
        tiles = from_a_line_on(threads * TILE, np.float32)
        own = records.filled(
            records.ADDING, down=down_of(self.dtype).address, up=up_of(self.dtype).address,
            low_rank=place_of(self.record), x=address_of(x, np.float32), x_row=inputs, between=place_of(between),
            between_row=self.ranks, made=address_of(made, np.float32), columns=columns, rows=rows,
            groups=place_of(groups.table), adapted=groups.adapted, counters=place_of(counters), tiles=place_of(tiles),
            threads=threads,
        )  # fmt: skip
        pool_of_this_process().run(add_in_place().address, threads, place_of(own))


def pack_low_rank(pairs: Sequence[Pair | None], dtype: str, threads: int, gated: bool = False) -> PackedLowRank | None:
    """What all adapters, in their order, add to a projection (None: nothing), as it is multiplied; None: none does.

    See `PackedLowRank`. A matrix kept in ``bfloat16`` is rounded to nearest even; all is computed in float32.
    """
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return None
    inputs, outputs = known[0][0].shape[1], len(known[0][1])
    order, table, arrays = packed_order(outputs, gated), np.zeros(len(pairs), records.ADAPTER), list[NDArray[Any]]()
    for its, pair in zip(table, pairs, strict=True):
        if pair is not None:
            down, (ups, matrices) = _packed_down(pair[0], dtype), _packed_ups(pair[1], order, dtype)
            its["down"], its["rank_panels"], its["ups"] = place_of(down), len(down), ups.ctypes.data
            arrays += down, ups, matrices
    panels = int(table["rank_panels"].max())
    record = records.filled(
        records.LOW_RANK, adapters=table.ctypes.data, inputs=inputs, rank_panels=panels, panels=len(order) // PANEL
    )
    return PackedLowRank(dtype, panels * RANKS, outputs, gated, threads, record, (table, *arrays))


def _packed_down(down: Floats, dtype: str) -> NDArray[Any]:
    """``down [rank, inputs]`` as `records.ADAPTER` has it; ranks are padded with zeros."""
    rank, inputs = down.shape
    padded = np.zeros((-(-rank // RANKS) * RANKS, inputs), np.float32)
    padded[:rank] = down
    return _kept(padded.reshape(-1, RANKS, inputs).transpose(0, 2, 1), dtype)


def _packed_ups(up: Floats, order: NDArray[np.int64], dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """``up [outputs, rank]`` as `records.UP`, and the numbers that these point to."""
    columns = np.where(order[:, None] >= 0, up[np.maximum(order, 0)], np.float32(0))
    halves = columns.reshape(-1, HALF, up.shape[1])
    found, parts, place = np.zeros(len(halves), records.UP), list[Floats](), 0
    for one, half in zip(found, halves, strict=True):
        used = np.flatnonzero(half.any(axis=0))
        if len(used):
            first, last = int(used[0]), int(used[-1]) + 1
            one["first_rank"], one["ranks"], one["matrix"] = first, last - first, place
            parts.append(half[:, first:last].T.ravel())
            place += parts[-1].size
    matrices = _kept(np.concatenate([*parts, np.zeros(0, np.float32)]), dtype)
    found["matrix"] = matrices.ctypes.data + found["matrix"] * matrices.itemsize
    return found, matrices


def _kept(numbers: Floats, dtype: str) -> NDArray[Any]:
    """Side by side with others, in ``dtype``: bfloat16 as bits."""
    kept = _matrices.empty(numbers.shape, np.float32 if dtype == "float32" else np.uint16)
    kept[...] = numbers if dtype == "float32" else to_bits(np.ascontiguousarray(numbers))
    return kept


@dataclass(frozen=True)
class RowGroups:
    """Rows that follow one another and go by one adapter, at most `MOST_ROWS` of them.

    table:   int32 ``[groups, 3]``: adapter (-1: none), first row, rows; those of an adapter beside each other, those
             of none behind
    adapted: how many go by some
    """

    table: NDArray[np.int32]
    adapted: int

    @staticmethod
    def of(adapters: NDArray[np.int16]) -> RowGroups:
        """adapters: int16 ``[rows]``, by its place from 1 on; 0: none"""
        rows = np.arange(len(adapters))
        begins = np.append(True, adapters[1:] != adapters[:-1])[: len(adapters)]
        in_run = rows - np.maximum.accumulate(np.where(begins, rows, 0))
        firsts = (in_run % MOST_ROWS == 0).nonzero()[0]
        counts = np.diff(firsts, append=len(adapters))
        places = adapters[firsts].astype(np.int32) - 1
        order = np.argsort(np.where(places < 0, np.iinfo(np.int32).max, places), kind="stable")
        table = np.stack([places, firsts, counts], axis=1)[order].astype(np.int32)
        return RowGroups(np.ascontiguousarray(table), int((places >= 0).sum()))


NO_GROUPS = RowGroups.of(np.zeros(0, np.int16))
