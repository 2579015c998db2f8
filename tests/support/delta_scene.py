"""Sequences that pass through a gated delta-net by steps, and the answer of an oracle that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.delta import DeltaSizes, delta_layout
from headwise.kernels.delta_base import DeltaInputs, DeltaKernels

SIZES = DeltaSizes(8, 12, 2, 4)

PADDING = 192
"""Bytes that a block has behind its slots."""


@dataclass(frozen=True)
class DeltaCase:
    """steps: of each sequence, the tokens of each step; 0: it is not in that step"""

    steps: tuple[tuple[int, ...], ...]
    sizes: DeltaSizes = SIZES
    heads: int = 2
    block_size: int = 16
    seed: int = 0


class DeltaScene:
    """A case with random inputs, in an arena that was all NaN. Steps leave checkpoints, or move states along."""

    def __init__(self, case: DeltaCase) -> None:
        self.case, self.draw = case, np.random.default_rng(case.seed)
        sizes, lengths = case.sizes, [sum(steps) for steps in case.steps]
        self.columns = -(-max(lengths) // case.block_size)
        slots = delta_layout(case.block_size, 3, sizes)
        self.layout: BlockLayout = replace(slots, tail_bytes=PADDING)
        self.heads = HeadTable(
            group=np.array([1 + head % 2 for head in range(case.heads)], np.int32),
            slot=self.draw.integers(3, size=case.heads).astype(np.int32)
            if case.heads < 3
            else np.arange(3, dtype=np.int32),
            window=np.zeros(case.heads, np.int32),
            sink=np.zeros(case.heads, np.int32),
        )
        num_blocks = len(lengths) * 2 * self.columns
        self.arena = np.full((num_blocks + 1) * self.layout.block_bytes, 0xFF, np.uint8)
        self._free = self.draw.permutation(num_blocks).tolist()
        # Three groups, of which the first has nothing to do with this layer.
        self.tables = np.full((len(lengths), 3, self.columns), -1, np.int32)
        shape = (case.heads, sizes.share)
        self.inputs = [
            DeltaInputs(
                self._random(length, case.heads, sizes.channels),
                1 / (1 + np.exp(-self._random(length, *shape))),
                -np.exp(self._random(length, *shape) - 2),
                np.empty(0),
            )
            for length in lengths
        ]
        self.weights = self._random(case.heads, sizes.convolution, sizes.channels)

    def _random(self, *shape: int) -> np.ndarray:
        return self.draw.standard_normal(shape).astype(np.float32)

    def run(self, kernels: DeltaKernels) -> list[np.ndarray]:
        """What each sequence's value heads see, ``[tokens, key_heads, share, value]``."""
        done, found = [0] * len(self.inputs), [[] for _ in self.inputs]
        for counts in zip(*self.case.steps, strict=True):
            for sequence, count in enumerate(counts):
                self._make_room(sequence, done[sequence], done[sequence] + count)
            for sequence, out in enumerate(self._step(kernels, done, counts)):
                found[sequence].append(out)
                done[sequence] += counts[sequence]
        return [np.concatenate(outs) for outs in found]

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

    def _step(self, kernels: DeltaKernels, done: list[int], counts: tuple[int, ...]) -> list[np.ndarray]:
        lens = np.add(done, counts).astype(np.int32)
        cu = np.cumsum([0, *counts], dtype=np.int32)
        parts = [slice(start, start + count) for start, count in zip(done, counts, strict=True)]
        mixed, rate, decay = (
            np.concatenate([getattr(inputs, name)[part] for inputs, part in zip(self.inputs, parts, strict=True)])
            for name in ("mixed", "rate", "decay")
        )
        sizes = self.case.sizes
        out = np.full((cu[-1], self.case.heads, sizes.share, sizes.value_dim), np.nan, np.float32)
        batch = AttentionBatch(cu, lens, self.tables.reshape(-1, self.columns).copy(), 3)
        inputs = DeltaInputs(mixed, rate, decay, self.weights)
        kernels.attend_delta(inputs, self.arena, self.layout, batch, self.heads, out=out)
        return np.split(out, cu[1:-1])

    def expected(self) -> list[np.ndarray]:
        """Token by token in float64, from the definition."""
        return [dense_delta(replace(inputs, weights=self.weights), self.case.sizes) for inputs in self.inputs]


def dense_delta(inputs: DeltaInputs, sizes: DeltaSizes) -> np.ndarray:
    """What the value heads of a whole sequence see, ``[tokens, key_heads, share, value]``."""
    tokens, heads, _ = inputs.mixed.shape
    padded = np.concatenate([np.zeros((sizes.convolution - 1, *inputs.mixed.shape[1:])), inputs.mixed])
    out = np.empty((tokens, heads, sizes.share, sizes.value_dim))
    for head in range(heads):
        weights = inputs.weights[head].astype(np.float64)
        sums = np.array([(padded[t : t + sizes.convolution, head] * weights).sum(axis=0) for t in range(tokens)])
        query, key, values = np.split(sums / (1 + np.exp(-sums)), [sizes.key_dim, 2 * sizes.key_dim], axis=1)
        query, key = (x / np.sqrt((x**2).sum(axis=1, keepdims=True) + 1e-6) for x in (query, key))
        for j, value in enumerate(np.split(values, sizes.share, axis=1)):
            state = np.zeros((sizes.key_dim, sizes.value_dim))
            for t in range(tokens):
                state = state * np.exp(float(inputs.decay[t, head, j]))
                state += np.outer(key[t], inputs.rate[t, head, j] * (value[t] - key[t] @ state))
                out[t, head, j] = query[t] @ state / sizes.key_dim**0.5
    return out
