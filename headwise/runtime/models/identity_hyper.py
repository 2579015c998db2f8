"""Hyper-connections that leave streams where they are (iHC): behind a part of a layer each is what it was, and a share
of what the part made.

The shares are made of the streams themselves, as transformers' `hy_v4` does. Before a part, and behind the last layer,
streams are mixed into one as `HyperConnections` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwise.runtime.models.hyper import HyperConfig, HyperConnections, HyperWeights, _sigmoid
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps


@dataclass(frozen=True)
class IdentityHyperConfig(HyperConfig):
    """magnitude: the most that a stream is given of what a part made, but for ``eps``"""

    magnitude: float


class IdentityConnections(HyperConnections):
    """Adds to streams ``[T, n, hidden]``. `HyperWeights` have ``2 * n`` rows and two scales: a part has no matrix."""

    def __init__(self, config: IdentityHyperConfig, ops: TensorOps) -> None:
        super().__init__(config, ops)
        self._magnitude, self._eps, self._count = config.magnitude, config.eps, config.streams

    def shares(self, streams: KernelArray, weights: HyperWeights) -> tuple[Tensor, KernelArray]:
        """What a part of a layer is given, ``[T, hidden]``, and which share of what it makes each stream is given,
        ``[T, n]``."""
        made, count, eps = self._made(streams, weights), self._count, np.float32(self._eps)
        scale, base = weights.scale, weights.base
        taken = _sigmoid(made[:, :count] * scale[0] + base[:count]) + eps
        given = np.float32(self._magnitude) * _sigmoid(made[:, count:] * scale[1] + base[count:]) + eps
        return self._mixed(streams, taken), given

    def added(self, streams: KernelArray, made: Tensor, given: KernelArray) -> KernelArray:
        """The streams behind a part of a layer that has ``made [T, hidden]``."""
        part = self._ops.kernel_array(made)
        total: KernelArray = streams + given[:, :, None].astype(streams.dtype, copy=False) * part[:, None]
        return total
