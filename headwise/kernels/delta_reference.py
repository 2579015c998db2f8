"""Gated delta-nets in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.delta_base import NORM_EPS, DeltaInputs
from headwise.kernels.state_reference import Doubles, silu, walk


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

        def take_on(row: int, head: int, before: Doubles, state: Doubles) -> tuple[Doubles, Doubles]:
            window = np.vstack([before, inputs.mixed[row, head]])
            convolved = silu((window * inputs.weights[head]).sum(axis=0))
            state, out[row, head] = _step(state, convolved, inputs.decay[row, head], inputs.rate[row, head])
            return window[1:], state

        walk(arena, layout, batch, heads, take_on)


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
