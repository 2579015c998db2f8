"""Kimi Delta Attention in plain NumPy: the definition that every other implementation is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.delta_base import NORM_EPS
from headwise.kernels.kda_base import KdaProjected
from headwise.kernels.state_layout import sizes_of
from headwise.kernels.state_reference import Doubles, silu, walk


class ReferenceKdaKernels:
    """Clarity over speed: one (sequence, head, token) at a time, in float64 but for what the cache keeps."""

    name = "reference"

    def attend_kda(
        self,
        projected: KdaProjected,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: NDArray[Any],
    ) -> None:
        """See `KdaKernels.attend_kda`."""
        sizes, weights, count = sizes_of(layout), projected.weights, len(heads.group)
        numbers, decays, gates = (
            rows.astype(np.float64) for rows in (projected.numbers, projected.decays, projected.gates)
        )
        tokens, ends = len(numbers), count * np.cumsum([sizes.key_dim, sizes.key_dim, sizes.value_dim])
        *parts, told = np.split(numbers, ends, axis=1)
        of_heads = zip(parts, (sizes.key_dim, sizes.key_dim, sizes.value_dim), strict=True)
        mixed = np.concatenate([part.reshape(tokens, count, size) for part, size in of_heads], axis=2)
        speed = weights.speed.astype(np.float64)[:, None]
        decays = -speed * np.logaddexp(0, decays.reshape(tokens, *weights.bias.shape) + weights.bias)
        gates, seen = (rows.reshape(tokens, count, sizes.value_dim) for rows in (gates, out))
        rates = _sigmoid(told[:, :count])

        def take_on(row: int, head: int, before: Doubles, state: Doubles) -> tuple[Doubles, Doubles]:
            window = np.vstack([before, mixed[row, head]])
            convolved = silu((window * weights.convolution[head]).sum(axis=0))
            matrix, found = _step(state[0], convolved, decays[row, head], float(rates[row, head]))
            normed = weights.norm * found / np.sqrt(np.square(found).mean() + weights.eps)
            seen[row, head] = normed * _sigmoid(gates[row, head])
            return window[1:], matrix[None]

        walk(arena, layout, batch, heads, take_on)


def _step(state: Doubles, convolved: Doubles, decay: Doubles, rate: float) -> tuple[Doubles, Doubles]:
    """A state ``[key, value]`` behind one more token, and what its head sees ``[value]``."""
    key_dim = len(state)
    query, key, value = np.split(convolved, [key_dim, 2 * key_dim])
    query = query / np.sqrt((query**2).sum() + NORM_EPS) / np.sqrt(key_dim)
    key = key / np.sqrt((key**2).sum() + NORM_EPS)
    state = np.exp(decay)[:, None] * state
    state = state + np.outer(key, rate * (value - key @ state))
    return state, query @ state


def _sigmoid(x: Doubles) -> Doubles:
    return np.asarray(0.5 * np.tanh(0.5 * x) + 0.5)
