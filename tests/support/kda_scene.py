"""Sequences that pass through Kimi Delta Attention by steps, and what an oracle says that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.state_scene import NEVER, StateCase, StateScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.base import AttentionBatch
from headwise.kernels.kda_base import KdaKernels, KdaProjected, KdaWeights
from headwise.kernels.state_layout import StateSizes

BEHIND = 5
"""Numbers of a row that no kernel asks for."""


class KdaScene(StateScene):
    """A case, whose members are heads, with random numbers of a dtype."""

    kernels: KdaKernels

    def __init__(self, case: StateCase, dtype: str = "float32") -> None:
        super().__init__(replace(case, sizes=replace(case.sizes, share=1)))
        self.dtype = numpy_dtype(dtype)
        sizes, heads = self.case.sizes, case.heads
        widths = heads * (sizes.channels + 1) + BEHIND, heads * sizes.key_dim, heads * sizes.value_dim
        self.numbers, self.decays, self.gates = (
            [self.random(length, width).astype(self.dtype) for length in self.lengths] for width in widths
        )
        self.weights = KdaWeights(
            convolution=self.random(heads, sizes.convolution, sizes.channels) / 2,
            speed=np.exp(self.random(heads) - 1),
            bias=self.random(heads, sizes.key_dim) - 1,
            norm=self.random(sizes.value_dim),
            eps=1e-5,
        )

    def run(self, kernels: KdaKernels, guesses: int | None = None, whole: int = NEVER) -> list[np.ndarray]:
        """What comes out of each sequence's tokens, ``[tokens, heads * value]``."""
        self.kernels = kernels
        return self.steps() if guesses is None else self.guessed_steps(guesses, whole)

    def attend(self, parts: list[slice], batch: AttentionBatch) -> np.ndarray:
        made = (
            np.concatenate([rows[part] for rows, part in zip(every, parts, strict=True)])
            for every in (self.numbers, self.decays, self.gates)
        )
        projected = KdaProjected(*made, self.weights)
        out = np.full((len(projected.numbers), self.case.heads * self.case.sizes.value_dim), np.nan, self.dtype)
        self.kernels.attend_kda(projected, self.arena, self.layout, batch, self.heads, out=out)
        return out

    def expected(self) -> list[np.ndarray]:
        """Token by token in float64, from the definition."""
        every = zip(self.numbers, self.decays, self.gates, strict=True)
        return [dense_kda(*(rows.astype(np.float64) for rows in of), self.weights, self.case.sizes) for of in every]


def dense_kda(
    numbers: np.ndarray, decays: np.ndarray, gates: np.ndarray, weights: KdaWeights, sizes: StateSizes
) -> np.ndarray:
    """What comes of a whole sequence, ``[tokens, heads * value]``, head by head."""
    tokens, heads, channels, found = len(numbers), len(weights.speed), sizes.channels, []
    for head in range(heads):
        queries, keys = head * sizes.key_dim, (heads + head) * sizes.key_dim
        values = 2 * heads * sizes.key_dim + head * sizes.value_dim
        fresh = np.hstack(
            [
                numbers[:, queries : queries + sizes.key_dim],
                numbers[:, keys : keys + sizes.key_dim],
                numbers[:, values : values + sizes.value_dim],
            ]
        )
        mixed = np.vstack([np.zeros((sizes.convolution - 1, channels)), fresh])
        taps = weights.convolution[head].astype(np.float64)
        sums = np.array([(mixed[t : t + sizes.convolution] * taps).sum(axis=0) for t in range(tokens)])
        query, key, value = np.split(
            (sums / (1 + np.exp(-sums))).reshape(tokens, channels), [sizes.key_dim, 2 * sizes.key_dim], axis=1
        )
        query /= np.sqrt((query**2).sum(axis=1, keepdims=True) + 1e-6) * np.sqrt(sizes.key_dim)
        key /= np.sqrt((key**2).sum(axis=1, keepdims=True) + 1e-6)
        rates = 1 / (1 + np.exp(-numbers[:, heads * channels + head]))
        told = decays[:, head * sizes.key_dim : (head + 1) * sizes.key_dim] + weights.bias[head]
        kept = np.exp(-float(weights.speed[head]) * np.logaddexp(0, told))
        state, seen = np.zeros((sizes.key_dim, sizes.value_dim)), []
        for t in range(tokens):
            state = kept[t][:, None] * state
            state = state + np.outer(key[t], rates[t] * (value[t] - key[t] @ state))
            seen.append(query[t] @ state)
        out = np.array(seen).reshape(tokens, sizes.value_dim)
        gate = gates[:, head * sizes.value_dim : (head + 1) * sizes.value_dim]
        found.append(
            weights.norm * out / np.sqrt((out**2).mean(axis=1, keepdims=True) + weights.eps) / (1 + np.exp(-gate))
        )
    return np.hstack(found)
