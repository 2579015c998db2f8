"""Sequences that pass through a gated delta-net by steps, and the answer of an oracle that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.state_scene import NEVER, StateCase, StateScene

from headwise.kernels.base import AttentionBatch
from headwise.kernels.delta_base import DeltaInputs, DeltaKernels
from headwise.kernels.state_layout import StateSizes


class DeltaScene(StateScene):
    """A case with random inputs."""

    kernels: DeltaKernels

    def __init__(self, case: StateCase) -> None:
        super().__init__(case)
        shape = (case.heads, case.sizes.share)
        self.inputs = [
            DeltaInputs(
                self.random(length, case.heads, case.sizes.channels),
                1 / (1 + np.exp(-self.random(length, *shape))),
                -np.exp(self.random(length, *shape) - 2),
                np.empty(0),
            )
            for length in self.lengths
        ]
        self.weights = self.random(case.heads, case.sizes.convolution, case.sizes.channels)

    def run(self, kernels: DeltaKernels, guesses: int | None = None, whole: int = NEVER) -> list[np.ndarray]:
        """What each sequence's value heads see, ``[tokens, key_heads, share, value]``."""
        self.kernels = kernels
        return self.steps() if guesses is None else self.guessed_steps(guesses, whole)

    def attend(self, parts: list[slice], batch: AttentionBatch) -> np.ndarray:
        mixed, rate, decay = (
            np.concatenate([getattr(inputs, name)[part] for inputs, part in zip(self.inputs, parts, strict=True)])
            for name in ("mixed", "rate", "decay")
        )
        sizes = self.case.sizes
        out = np.full((len(mixed), self.case.heads, sizes.share, sizes.value_dim), np.nan, np.float32)
        inputs = DeltaInputs(mixed, rate, decay, self.weights)
        self.kernels.attend_delta(inputs, self.arena, self.layout, batch, self.heads, out=out)
        return out

    def expected(self) -> list[np.ndarray]:
        """Token by token in float64, from the definition."""
        return [dense_delta(replace(inputs, weights=self.weights), self.case.sizes) for inputs in self.inputs]


def dense_delta(inputs: DeltaInputs, sizes: StateSizes) -> np.ndarray:
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
