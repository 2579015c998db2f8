"""Hyper-connections: a residual stream of several streams, which each part of a layer is given a mixture of.

Before a part of a layer, ``n`` streams of a token are mixed into one, its input; behind it they become ``n`` again:
what the part makes is added to each, times a weight, and the streams before are mixed into each other. All weights are
made of the streams themselves, and the mixing matrix is made doubly stochastic (manifold-constrained hyper-connections,
mHC, by Sinkhorn-Knopp), as transformers' `deepseek_v4` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.kernels.experts import sigmoid
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.base import KernelArray, StreamingOps, Tensor, TensorOps, Weight


@dataclass(frozen=True)
class HyperConfig:
    """streams: of a token; iterations, eps: of Sinkhorn-Knopp; norm_eps: of the norm of all streams as one"""

    streams: int
    iterations: int
    eps: float
    norm_eps: float

    @property
    def part_weights(self) -> tuple[int, int]:
        """How many mixing weights a part of a layer has, and how many scales of them."""
        return (2 + self.streams) * self.streams, 3


@dataclass(frozen=True)
class HyperModelConfig(ModelConfig):
    """hyper: how layers are connected"""

    hyper: HyperConfig | None = None

    @property
    def stream_size(self) -> int:
        """See `ModelConfig.stream_size`: of all streams."""
        hyper = self.hyper
        assert hyper is not None, "parsed so"
        return hyper.streams * self.hidden_size

    @property
    def side_elements(self) -> int:
        """See `ModelConfig.side_elements`: of connections around both parts of each layer, and of what joins streams
        behind the decoder, and behind layers that draft."""
        hyper = self.hyper
        assert hyper is not None, "parsed so"
        made = 2 * self.num_layers * hyper.part_weights[0] + (1 + self.draft_layers) * hyper.streams
        return super().side_elements + made * hyper.streams * self.hidden_size


@dataclass(frozen=True)
class HyperWeights:
    """What mixing weights are made by.

    fn:    ``[(2 + n) * n, n * hidden]``, as `TensorOps.float_weight` prepares it, or behind the last layer ``[n, ...]``
    base:  float32 ``[(2 + n) * n]`` or ``[n]``
    scale: float32 ``[3]`` or ``[1]``
    ones:  the weight of a norm that has none
    """

    fn: Weight
    base: KernelArray
    scale: KernelArray
    ones: Tensor


@dataclass(frozen=True)
class Mixing:
    """Of each token's streams. given: ``[T, n]``, to each of what a part makes; between: ``[T, n, n]``, from and
    to; None: each stays what it is
    """

    given: KernelArray
    between: KernelArray | None

    def of_rows(self, rows: KernelArray) -> Mixing:
        """That of some tokens."""
        return Mixing(self.given[rows], None if self.between is None else self.between[rows])


class HyperConnections:
    """Mixes streams ``[T, n, hidden]``, kernel arrays."""

    def __init__(self, config: HyperConfig, ops: TensorOps) -> None:
        self._config, self._ops = config, ops
        self._streaming = ops if isinstance(ops, StreamingOps) else None
        if self._streaming is not None:
            self._streaming.prepare_streams(config.streams)

    def _by_kernels(self, streams: KernelArray) -> StreamingOps | None:
        """Operations that do all this in a few kernels, if there are any for these streams."""
        ops = self._streaming
        return ops if ops is not None and ops.takes_streams(streams) else None

    def spread(self, x: Tensor) -> KernelArray:
        """The streams that begin as one."""
        one = self._ops.kernel_array(x)
        streams = self._ops.empty_like(one, (one.shape[0], self._config.streams, one.shape[1]))
        streams[:] = one[:, None]
        return streams

    def before(self, streams: KernelArray, weights: HyperWeights) -> tuple[Tensor, Mixing]:
        """What a part of a layer is given, ``[T, hidden]``, and what `behind` is to be told."""
        config, count = self._config, self._config.streams
        if (by_kernels := self._by_kernels(streams)) is not None:
            how: dict[str, Any] = {"iterations": config.iterations, "eps": config.eps, "norm_eps": config.norm_eps}
            mixed, *mixing = by_kernels.mixed_streams(streams, weights.fn, weights.base, weights.scale, **how)
            return mixed, Mixing(*mixing)
        made = self._made(streams, weights)
        taken, given, between = made[:, :count], made[:, count : 2 * count], made[:, 2 * count :]
        scale, base = weights.scale, weights.base
        taken = sigmoid(taken * scale[0] + base[:count]) + np.float32(config.eps)
        given = np.float32(2) * sigmoid(given * scale[1] + base[count : 2 * count])
        between = (between * scale[2] + base[2 * count :]).reshape(-1, count, count)
        return self._mixed(streams, taken), Mixing(given, self._doubly_stochastic(between))

    def behind(self, streams: KernelArray, made: Tensor, mixing: Mixing) -> KernelArray:
        """The streams behind a part of a layer that has ``made [T, hidden]`` of what it was given. Those before may be
        overwritten.
        """
        between = mixing.between
        if between is not None and (by_kernels := self._by_kernels(streams)) is not None:
            by_kernels.put_streams(streams, made, mixing.given, between)
            return streams
        part, mixed = self._ops.kernel_array(made), streams
        if between is not None:
            mixed = np.matmul(between.transpose(0, 2, 1).astype(streams.dtype, copy=False), streams)
        mixed += mixing.given[:, :, None].astype(streams.dtype, copy=False) * part[:, None]
        return mixed

    def joined(self, streams: KernelArray, weights: HyperWeights) -> Tensor:
        """Behind the last layer: one stream, ``[T, hidden]``."""
        if (by_kernels := self._by_kernels(streams)) is not None:
            eps = {"eps": self._config.eps, "norm_eps": self._config.norm_eps}
            return by_kernels.joined_streams(streams, weights.fn, weights.base, weights.scale, **eps)
        made = self._made(streams, weights)
        return self._mixed(streams, sigmoid(made * weights.scale + weights.base) + np.float32(self._config.eps))

    def _made(self, streams: KernelArray, weights: HyperWeights) -> KernelArray:
        """Float32 ``[T, ...]``: what ``fn`` makes of all streams as one, normed."""
        ops = self._ops
        flat = ops.from_kernel_array(streams.reshape(streams.shape[0], streams.shape[1] * streams.shape[2]))
        made = ops.linear(ops.rms_norm(flat, weights.ones, self._config.norm_eps), weights.fn)
        return ops.kernel_array(made).astype(np.float32, copy=False)

    def _mixed(self, streams: KernelArray, shares: KernelArray) -> Tensor:
        mixed = self._ops.empty_like(streams, (streams.shape[0], streams.shape[2]))
        mixed[:] = np.matmul(shares[:, None].astype(streams.dtype, copy=False), streams)[:, 0]
        return self._ops.from_kernel_array(mixed)

    def _doubly_stochastic(self, logits: KernelArray) -> KernelArray:
        """Softmaxes of rows ``[T, n, n]`` whose columns and rows are divided by their sums in turn."""
        eps = np.float32(self._config.eps)
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        matrix = powers / powers.sum(axis=-1, keepdims=True) + eps
        matrix /= matrix.sum(axis=-2, keepdims=True) + eps
        for _ in range(self._config.iterations - 1):
            matrix /= matrix.sum(axis=-1, keepdims=True) + eps
            matrix /= matrix.sum(axis=-2, keepdims=True) + eps
        return matrix
