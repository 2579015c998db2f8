"""What layers project, such that inputs of a gated delta-net come of it, and what kernels must make of that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from support.delta_scene import DeltaScene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.delta_base import DeltaInputs, DeltaWeights, ProjectedDeltaKernels
from headwise.kernels.delta_gates import gated_norm, inputs_of

EPS = 1e-2
"""Of the norm: what is seen here may be much smaller than 1."""


class OfProjected:
    """`DeltaKernels` that are handed what is projected: of what comes, `expected_of` says the norm."""

    def __init__(self, kernels: ProjectedDeltaKernels) -> None:
        self.name, self._kernels = kernels.name, kernels

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: np.ndarray,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: np.ndarray,
    ) -> None:
        numbers = projected(inputs, out.shape[2] * out.shape[3])
        rows, *each = out.shape
        made = out.reshape(rows, math.prod(each))  # of no tokens, too
        self._kernels.attend_projected(
            numbers, weights_of(inputs.weights, out.shape), arena, layout, batch, heads, out=made
        )


def projected(inputs: DeltaInputs, values: int, dtype: str = "float32") -> np.ndarray:
    """`DeltaProjected.numbers` that `weights_of` makes the inputs of; gates are what values are made of."""
    controls = [np.log(inputs.rate / (1 - inputs.rate)), np.log(np.expm1(-inputs.decay))]
    parts = [np.concatenate([inputs.mixed, gates_of(inputs, values)], axis=2), np.concatenate(controls, axis=2)]
    rows = [part.reshape(len(part), part.shape[1] * part.shape[2]) for part in parts]  # of no tokens, too
    return np.concatenate(rows, axis=1).astype(numpy_dtype(dtype))


def gates_of(inputs: DeltaInputs, values: int) -> np.ndarray:
    return inputs.mixed[:, :, -values:]


def weights_of(convolution: np.ndarray, shape: Sequence[int]) -> DeltaWeights:
    _, key_heads, share, value_dim = shape
    zeros = np.zeros((key_heads, share), np.float32)
    return DeltaWeights(convolution, zeros + 1, zeros, np.linspace(0.5, 2, value_dim, dtype=np.float32), EPS)


def expected_of(scene: DeltaScene, dtype: str = "float32") -> list[np.ndarray]:
    """What value heads see, from the definition, then normed and gated: of inputs that are of a dtype."""
    sizes, rounded = scene.case.sizes, DeltaScene(scene.case)
    values, shape = sizes.share * sizes.value_dim, (0, scene.case.heads, sizes.share, sizes.value_dim)
    weights = weights_of(scene.weights, shape)
    for index, inputs in enumerate(scene.inputs):
        rounded.inputs[index] = inputs_of(projected(inputs, values, dtype).astype(np.float32), weights, sizes)[0]
    rounded.weights, found = scene.weights, []
    for seen, inputs in zip(rounded.expected(), rounded.inputs, strict=True):
        heads = seen.reshape(len(seen), -1, sizes.value_dim)
        found.append(gated_norm(heads, gates_of(inputs, values).reshape(heads.shape), weights).reshape(seen.shape))
    return found
