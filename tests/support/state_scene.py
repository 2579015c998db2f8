"""Sequences that pass through layers with recurrent states by steps, on an arena that was all NaN."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import FOLLOWS, GUESSED, AttentionBatch, HeadTable
from headwise.kernels.state_layout import StateSizes, state_layout, state_views

SIZES = StateSizes(8, 12, 2, 4)

PADDING = 192
"""Bytes that a block has behind its slots."""

NO_BLOCK = 0x7F000000
"""What a column may have that nobody reads."""


NEVER = 1 << 30
"""More tokens than a step has."""


@dataclass(frozen=True)
class StateCase:
    """steps: of each sequence, the tokens of each step; 0: it is not in that step; heads: members of the layer"""

    steps: tuple[tuple[int, ...], ...]
    sizes: StateSizes = SIZES
    heads: int = 2
    block_size: int = 16
    seed: int = 0


@st.composite
def state_cases(draw: st.DrawFn, longest: int) -> StateCase:
    """Of steps of up to so many tokens."""
    num_steps = draw(st.integers(1, 6))
    counts = st.one_of(st.integers(0, 2), st.integers(0, longest))
    sequences = draw(
        st.lists(st.tuples(*[counts] * num_steps).filter(any), min_size=1, max_size=4),
    )
    sizes = StateSizes(
        key_dim=draw(st.sampled_from([4, 8, 20])),
        value_dim=draw(st.sampled_from([4, 12, 16])),
        share=draw(st.integers(1, 3)),
        convolution=draw(st.integers(1, 4)),
    )
    return StateCase(
        tuple(sequences),
        sizes,
        heads=draw(st.integers(1, 4)),
        block_size=draw(st.sampled_from([1, 3, 16, 64])),
        seed=draw(st.integers(0, 2**16)),
    )


class StateScene(ABC):
    """A case with blocks for its states. Steps leave checkpoints, or move states along."""

    def __init__(self, case: StateCase) -> None:
        self.case, self.draw = case, np.random.default_rng(case.seed)
        self.lengths = [sum(steps) for steps in case.steps]
        self.columns = -(-max(self.lengths) // case.block_size)
        slots = state_layout(case.block_size, 3, case.sizes)
        self.layout: BlockLayout = replace(slots, tail_bytes=PADDING)
        self.heads = HeadTable(
            group=np.array([1 + head % 2 for head in range(case.heads)], np.int32),
            slot=self.draw.integers(3, size=case.heads).astype(np.int32)
            if case.heads < 3
            else np.arange(case.heads, dtype=np.int32) % 3,
            window=np.zeros(case.heads, np.int32),
            sink=np.zeros(case.heads, np.int32),
        )
        num_blocks = len(self.lengths) * 2 * self.columns
        self.arena = np.full((num_blocks + 1) * self.layout.block_bytes, 0xFF, np.uint8)
        self._free = self.draw.permutation(num_blocks).tolist()
        # Three groups, of which the first has nothing to do with this layer.
        self.tables = np.full((len(self.lengths), 3, self.columns), -1, np.int32)
        # What came of guesses: whose they are, and which of its tokens is the first.
        self.guessed: list[tuple[int, int, np.ndarray]] = []

    def random(self, *shape: int) -> np.ndarray:
        return self.draw.standard_normal(shape).astype(np.float32)

    def guessed_steps(self, guesses: int, whole: int = NEVER) -> list[np.ndarray]:
        """As `steps`, where each token is a sequence that follows the one before it, and up to so many behind those of
        a step are guesses, within the block of its last one. Where there are ``whole`` tokens or more, they are one
        sequence, as a prompt's."""
        done, found = [0] * len(self.lengths), [[] for _ in self.lengths]
        for counts in zip(*self.case.steps, strict=True):
            parts, rows, queries, lens, follows = [], [], [], [], []
            for sequence, count in enumerate(counts):
                start, end = done[sequence], done[sequence] + count
                self._make_room(sequence, start, end)
                one_by_one = 0 < count < whole
                room = min(-end % self.case.block_size, self.lengths[sequence] - end, guesses) if one_by_one else 0
                parts.append(slice(start, end + room))
                own = range(start + 1, end + room + 1) if one_by_one else [end]
                lens += own
                rows += [sequence] * len(own)
                queries += [1] * len(own) if one_by_one else [count]
                follows += [0, *[FOLLOWS] * (count - 1), *[GUESSED] * room][: len(own)]
                done[sequence] = end
            tables = self.tables[rows].reshape(-1, self.columns).copy()
            cu = np.cumsum([0, *queries], dtype=np.int32)
            given = AttentionBatch(cu, np.array(lens, np.int32), tables, 3, follows=np.array(follows, np.int32))
            out = self.attend(parts, given)
            ends = np.cumsum([part.stop - part.start for part in parts])
            for sequence, (of_step, count) in enumerate(zip(np.split(out, ends[:-1]), counts, strict=True)):
                found[sequence].append(of_step[:count])
                self.guessed.append((sequence, done[sequence], of_step[count:]))
        return [np.concatenate(outs) for outs in found]

    def assert_guesses(self, expected: Sequence[np.ndarray], rtol: float, atol: float) -> None:
        """What comes of right guesses is what comes of the tokens."""
        assert any(len(out) for _, _, out in self.guessed)
        for sequence, first, out in self.guessed:
            wanted = expected[sequence][first : first + len(out)]
            np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=rtol, atol=atol)

    def assert_same_states(self, other: StateScene, atol: float) -> None:
        """The live ones and all checkpoints; blocks that nothing was written to are NaN still."""
        for own, others in zip(*(state_views(scene.arena, self.layout) for scene in (self, other)), strict=True):
            np.testing.assert_allclose(own, others, rtol=1e-3, atol=atol)

    def steps(self) -> list[np.ndarray]:
        """What the layer makes of each sequence's tokens, step by step: ``[tokens, ...]``."""
        done, found = [0] * len(self.lengths), [[] for _ in self.lengths]
        for counts in zip(*self.case.steps, strict=True):
            for sequence, count in enumerate(counts):
                self._make_room(sequence, done[sequence], done[sequence] + count)
            cu = np.cumsum([0, *counts], dtype=np.int32)
            lens = np.add(done, counts).astype(np.int32)
            batch = AttentionBatch(cu, lens, self.tables.reshape(-1, self.columns).copy(), 3)
            parts = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
            for sequence, out in enumerate(np.split(self.attend(parts, batch), cu[1:-1])):
                found[sequence].append(out)
                done[sequence] += counts[sequence]
        return [np.concatenate(outs) for outs in found]

    @abstractmethod
    def attend(self, parts: list[slice], batch: AttentionBatch) -> np.ndarray:
        """One step, of these parts of the sequences."""

    def _make_room(self, sequence: int, start: int, end: int) -> None:
        size, table = self.case.block_size, self.tables[sequence, 1:]
        source, to = (start - 1) // size, (end - 1) // size
        if start == end or (start and source == to):
            return
        if start == 0 or self.draw.random() < 0.5:
            self._take(table[:, to])
        else:
            table[:, to] = table[:, source]
            table[:, source] = -1
        for column in range(start // size, to):
            if (table[:, column] < 0).all() and column != source and self.draw.random() < 0.5:
                self._take(table[:, column])

    def _take(self, cells: np.ndarray) -> None:
        cells[:] = [self._free.pop(), self._free.pop()]


def on_device(batch: AttentionBatch, block_size: int, padding: int = 0, tells: bool = False) -> AttentionBatch:
    """A batch as kernels on a GPU are given it: what sequences do not reach of their tables names no block, and decodes
    have so much `padded` behind them. tells: that none follows another, too"""
    counts = np.diff(batch.cu_seqlens_q)
    if padding and (counts == 1).all():
        batch = padded(batch, padding)
    unread = np.arange(batch.block_tables.shape[1]) >= -(-batch.seq_lens // block_size)[:, None]
    tables = np.where(np.repeat(unread, batch.groups, axis=0), np.int32(NO_BLOCK), batch.block_tables)
    told = np.zeros(len(batch.seq_lens), np.int32) if tells or batch.follows is not None else None
    if told is not None and batch.follows is not None:
        told[: len(batch.follows)] = batch.follows
    return replace(batch, block_tables=tables, max_query_len=int(counts.max()), follows_on_device=told)


def spoilt(rows: np.ndarray, batch: AttentionBatch) -> np.ndarray:
    """``rows [T, ...]`` where those of guesses are of other tokens."""
    firsts = batch.cu_seqlens_q[np.flatnonzero(batch.follows == GUESSED)]
    rows = rows.copy()
    rows[firsts] = 1 - rows[firsts]
    return rows


def padded(batch: AttentionBatch, count: int) -> AttentionBatch:
    """As a graph's: sequences without tokens, whose columns name no block."""
    none = np.full((count * batch.groups, batch.block_tables.shape[1]), NO_BLOCK, np.int32)
    return replace(
        batch,
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, np.repeat(batch.cu_seqlens_q[-1:], count)]),
        seq_lens=np.concatenate([batch.seq_lens, np.zeros(count, np.int32)]),
        block_tables=np.concatenate([batch.block_tables, none]),
    )
