"""Gated delta-nets in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.delta import sizes_of, state_views
from headwise.kernels.delta_base import NORM_EPS, DeltaInputs
from headwise.kernels.reference import sequences_of

Doubles = NDArray[np.float64]


class ReferenceDeltaKernels:
    """Clarity over speed: one (sequence, head, token) at a time, in float64 but for what the cache keeps."""

    name = "reference"

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[Any],
    ) -> None:
        """See `DeltaKernels.attend_delta`."""
        sizes, size = sizes_of(layout), layout.block_size
        convolution, recurrent = state_views(arena, layout)
        for sequence, rows, positions in sequences_of(batch):
            for head, (group, slot) in enumerate(zip(heads.group.tolist(), heads.slot.tolist(), strict=True)):
                columns = batch.block_tables[sequence * batch.groups + group]
                source = _source(columns, int(positions[0]), int(positions[-1]), size)
                inputs_before = np.zeros((sizes.convolution - 1, sizes.channels))
                state = np.zeros((sizes.share, sizes.key_dim, sizes.value_dim))
                if source >= 0:
                    inputs_before, state = (role[source, slot].astype(np.float64) for role in (convolution, recurrent))
                for row, position in enumerate(positions.tolist(), rows.start):
                    window = np.vstack([inputs_before, inputs.mixed[row, head]])
                    inputs_before = window[1:]
                    convolved = _silu((window * inputs.weights[head]).sum(axis=0))
                    state, out[row, head] = _step(state, convolved, inputs.decay[row, head], inputs.rate[row, head])
                    block = columns[position // size]
                    if block >= 0 and ((position + 1) % size == 0 or position == positions[-1]):
                        convolution[block, slot], recurrent[block, slot] = inputs_before, state


def _source(columns: NDArray[np.int32], first: int, last: int, size: int) -> int:
    """The block of the state before position ``first``; -1: it is 0."""
    if first == 0:
        return -1
    left = int(columns[(first - 1) // size])
    return left if left >= 0 else int(columns[last // size])


def _step(state: Doubles, convolved: Doubles, decay: Doubles, rate: Doubles) -> tuple[Doubles, Doubles]:
    """States ``[share, key, value]`` behind one more token, and what the value heads see ``[share, value]``."""
    share, key_dim, value_dim = state.shape
    query, key, values = np.split(convolved, [key_dim, 2 * key_dim])
    query = query / np.sqrt((query**2).sum() + NORM_EPS) / np.sqrt(key_dim)
    key = key / np.sqrt((key**2).sum() + NORM_EPS)
    state = np.exp(decay.astype(np.float64))[:, None, None] * state
    corrections = rate[:, None] * (values.reshape(share, value_dim) - key @ state)
    state = state + key[:, None] * corrections[:, None, :]
    return state, query @ state


def _silu(x: Doubles) -> Doubles:
    return np.asarray(x / (1 + np.exp(-x)))
