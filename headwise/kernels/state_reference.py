"""How recurrent states go through a step, in plain NumPy: the walk that the definitions of their rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import FOLLOWS, AttentionBatch, HeadTable
from headwise.kernels.reference import sequences_of
from headwise.kernels.state_layout import sizes_of, state_views

Doubles = NDArray[np.float64]

TakeOn = Callable[[int, int, Doubles, Doubles], tuple[Doubles, Doubles]]
"""Of a row, a member, the last inputs of its convolution, and its state ``[share, key, value]``: these behind it."""


def walk(
    arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch, heads: HeadTable, take_on: TakeOn
) -> None:
    """Take the states of all sequences and members on by their rows, one at a time, in float64 but for what is kept."""
    sizes, size = sizes_of(layout), layout.block_size
    convolution, recurrent = state_views(arena, layout)
    for sequence, first, positions, known in _whole_sequences(batch):
        for member, (group, slot) in enumerate(zip(heads.group.tolist(), heads.slot.tolist(), strict=True)):
            columns = batch.block_tables[sequence * batch.groups + group]
            source = _source(columns, positions[0], known, size)
            inputs = np.zeros((sizes.convolution - 1, sizes.channels))
            state = np.zeros((sizes.share, sizes.key_dim, sizes.value_dim))
            if source >= 0:
                inputs, state = (role[source, slot].astype(np.float64) for role in (convolution, recurrent))
            for row, position in enumerate(positions, first):
                inputs, state = take_on(row, member, inputs, state)
                block = columns[position // size]
                if position <= known and block >= 0 and ((position + 1) % size == 0 or position == known):
                    convolution[block, slot], recurrent[block, slot] = inputs, state


def _whole_sequences(batch: AttentionBatch) -> Iterator[tuple[int, int, list[int], int]]:
    """Of each sequence, with those that follow it: its index, first row, positions, and the last that is no guess."""
    follows = np.zeros(len(batch.seq_lens), np.int32) if batch.follows is None else batch.follows
    found: list[tuple[int, int, list[int], int]] = []
    for sequence, rows, positions in sequences_of(batch):
        last = int(positions[-1])
        if not follows[sequence]:
            found.append((sequence, rows.start, positions.tolist(), last))
            continue
        index, first, before, known = found[-1]
        found[-1] = index, first, [*before, last], last if follows[sequence] == FOLLOWS else known
    yield from found


def _source(columns: NDArray[np.int32], first: int, last: int, size: int) -> int:
    """The block of the state before position ``first``; -1: it is 0."""
    if first == 0:
        return -1
    left = int(columns[(first - 1) // size])
    return left if left >= 0 else int(columns[last // size])


def silu(x: Doubles) -> Doubles:
    """``x * sigmoid(x)``, without overflow."""
    return np.asarray(x * (0.5 * np.tanh(0.5 * x) + 0.5))
