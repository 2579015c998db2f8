"""What is computed between a gated delta-net's projections and its rule, in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.delta_base import DeltaInputs, DeltaWeights
from headwise.kernels.state_layout import StateSizes

Floats = NDArray[np.float32]


def inputs_of(projected: Floats, weights: DeltaWeights, sizes: StateSizes) -> tuple[DeltaInputs, Floats]:
    """What the rule takes, and gates ``[tokens, value_heads, value_dim]``, of `DeltaProjected.numbers`."""
    tokens, (heads, share) = len(projected), weights.speed.shape
    of_heads = projected[:, : -2 * heads * share].reshape(tokens, heads, -1)
    rates, decays = np.split(projected[:, -2 * heads * share :].reshape(tokens, heads, -1), 2, axis=2)
    inputs = DeltaInputs(
        mixed=np.ascontiguousarray(of_heads[:, :, : sizes.channels]),
        rate=sigmoid(rates),
        decay=-weights.speed * np.logaddexp(np.float32(0), decays + weights.bias),
        weights=weights.convolution,
    )
    return inputs, of_heads[:, :, sizes.channels :].reshape(tokens, heads * share, sizes.value_dim)


def gated_norm(seen: Floats, gates: Floats, weights: DeltaWeights) -> Floats:
    """RMS norm of what value heads see, ``[tokens, value_heads, value_dim]``, times SiLU of their gates."""
    variance = np.square(seen).mean(axis=-1, keepdims=True)
    normed = weights.norm * (seen / np.sqrt(variance + np.float32(weights.eps)))
    return np.asarray(normed * (gates * sigmoid(gates)), np.float32)


def sigmoid(x: NDArray[Any]) -> Floats:
    """``1 / (1 + exp(-x))``, without overflow."""
    return np.asarray(0.5 * np.tanh(0.5 * x) + 0.5, np.float32)
