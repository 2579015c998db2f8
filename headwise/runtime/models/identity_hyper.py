"""Hyper-connections that leave streams where they are (iHC): behind a part of a layer each is what it was, and a share
of what the part made.

The shares are made of the streams themselves, as transformers' `hy_v4` does. Before a part, and behind the last layer,
streams are mixed into one as `HyperConnections` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwise.kernels.experts import sigmoid
from headwise.runtime.models.hyper import HyperConfig, HyperConnections, HyperWeights, Mixing
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps


@dataclass(frozen=True)
class IdentityHyperConfig(HyperConfig):
    """magnitude: the most that a stream is given of what a part made, but for ``eps``"""

    magnitude: float

    @property
    def part_weights(self) -> tuple[int, int]:
        """A part has no matrix."""
        return 2 * self.streams, 2


class IdentityConnections(HyperConnections):
    """Adds to streams ``[T, n, hidden]``. `HyperWeights` have ``2 * n`` rows and two scales."""

    def __init__(self, config: HyperConfig, ops: TensorOps) -> None:
        super().__init__(config, ops)
        assert isinstance(config, IdentityHyperConfig), "models that have these are parsed so"
        self._magnitude = np.float32(config.magnitude)

    def before(self, streams: KernelArray, weights: HyperWeights) -> tuple[Tensor, Mixing]:
        made, count, eps = self._made(streams, weights), self._config.streams, np.float32(self._config.eps)
        scale, base = weights.scale, weights.base
        taken = sigmoid(made[:, :count] * scale[0] + base[:count]) + eps
        given = self._magnitude * sigmoid(made[:, count:] * scale[1] + base[count:]) + eps
        return self._mixed(streams, taken), Mixing(given, None)
