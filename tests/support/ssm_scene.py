"""Sequences that pass through a state space model by steps, and what an oracle says that knows nothing of blocks."""

from __future__ import annotations

import numpy as np
from support.state_scene import NEVER, StateCase, StateScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.base import AttentionBatch
from headwise.kernels.ssm_base import SsmKernels, SsmWeights
from headwise.kernels.state_layout import StateSizes


class SsmScene(StateScene):
    """A case with random numbers of a dtype, whose members are of up to two groups."""

    kernels: SsmKernels

    def __init__(self, case: StateCase, dtype: str = "float32") -> None:
        super().__init__(case)
        self.dtype = numpy_dtype(dtype)
        sizes, members = case.sizes, case.heads
        self.groups = min(2, members)
        self.width = width_of(sizes, members, self.groups)
        self.numbers = [self.random(length, self.width).astype(self.dtype) for length in self.lengths]
        each = members, sizes.share
        self.weights = SsmWeights(
            convolution=self.random(members, sizes.convolution, sizes.channels) / 2,
            convolution_bias=self.random(members, sizes.channels) / 2,
            speed=np.exp(self.random(*each) - 1),
            bias=self.random(*each) - 1,
            skip=self.random(*each),
            group=(np.arange(members) * self.groups // members).astype(np.int32),
            groups=self.groups,
        )

    def run(self, kernels: SsmKernels, guesses: int | None = None, whole: int = NEVER) -> list[np.ndarray]:
        """What comes out of each sequence's tokens, ``[tokens, members * share * value]``."""
        self.kernels = kernels
        return self.steps() if guesses is None else self.guessed_steps(guesses, whole)

    def attend(self, parts: list[slice], batch: AttentionBatch) -> np.ndarray:
        numbers = np.concatenate([rows[part] for rows, part in zip(self.numbers, parts, strict=True)])
        sizes = self.case.sizes
        out = np.full((len(numbers), self.case.heads * sizes.share * sizes.value_dim), np.nan, self.dtype)
        self.kernels.attend_ssm(numbers, self.weights, self.arena, self.layout, batch, self.heads, out=out)
        return out

    def expected(self) -> list[np.ndarray]:
        """Token by token in float64, from the definition."""
        return [dense_ssm(rows.astype(np.float64), self.weights, self.case.sizes) for rows in self.numbers]


def width_of(sizes: StateSizes, members: int, groups: int) -> int:
    """Numbers in a row of `SsmProjected`."""
    return groups * 2 * sizes.key_dim + members * sizes.share * (2 * sizes.value_dim + 1)


def dense_ssm(rows: np.ndarray, weights: SsmWeights, sizes: StateSizes) -> np.ndarray:
    """What comes of a whole sequence, ``[tokens, members * share * value]``, head by head."""
    tokens, keys, values = len(rows), 2 * sizes.key_dim, sizes.share * sizes.value_dim
    members = len(weights.group)
    behind_groups = weights.groups * keys
    behind_members = behind_groups + members * 2 * values
    found = []
    for member, group in enumerate(weights.group.tolist()):
        at = behind_groups + member * 2 * values
        mixed = np.hstack([rows[:, group * keys : (group + 1) * keys], rows[:, at : at + values]])
        padded = np.vstack([np.zeros((sizes.convolution - 1, sizes.channels)), mixed])
        taps = weights.convolution[member].astype(np.float64)
        sums = np.array([(padded[t : t + sizes.convolution] * taps).sum(axis=0) for t in range(tokens)])
        sums = sums.reshape(tokens, sizes.channels) + weights.convolution_bias[member]
        convolved = sums / (1 + np.exp(-sums))
        query, key = convolved[:, : sizes.key_dim], convolved[:, sizes.key_dim : keys]
        for head in range(sizes.share):
            columns = slice(head * sizes.value_dim, (head + 1) * sizes.value_dim)
            value, gate = convolved[:, keys:][:, columns], rows[:, at + values : at + 2 * values][:, columns]
            told = rows[:, behind_members + member * sizes.share + head] + float(weights.bias[member, head])
            steps, state, out = np.log1p(np.exp(told)), np.zeros((sizes.key_dim, sizes.value_dim)), []
            for t in range(tokens):
                state = state * np.exp(-float(weights.speed[member, head]) * steps[t])
                state = state + np.outer(key[t], steps[t] * value[t])
                out.append(query[t] @ state + float(weights.skip[member, head]) * value[t])
            found.append(np.array(out).reshape(value.shape) * gate / (1 + np.exp(-gate)))
    return np.hstack(found)
