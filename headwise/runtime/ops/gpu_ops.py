"""Tensor operations of a GPU by kernels of our own: what `ArrayOps` computes in many passes is one kernel here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.cuda.elementwise import CudaElementwise
from headwise.kernels.cuda.experts import CudaExperts, StackedExperts
from headwise.kernels.cuda.launch import TritonLauncher, address_of
from headwise.kernels.cuda.likeliest import THREADS, CudaLikeliest
from headwise.kernels.cuda.named_experts import CudaNamedExperts
from headwise.kernels.cuda.packed import (
    FEW_ROWS,
    PLAIN_ROWS,
    CudaPacked,
    PackedMatrix,
    multiplies_codes,
    pack,
    plain,
    plain_form,
)
from headwise.kernels.cuda.packed_many import CudaPackedMany
from headwise.kernels.cuda.programs import Programs
from headwise.kernels.cuda.streams import COUNTS, CudaStreams
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import Activation, is_gated
from headwise.runtime.ops.array_ops import Array, ArrayOps
from headwise.runtime.ops.base import MlpWeights
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_float32, quantise_int8
from headwise.runtime.ops.stacked_experts import can_be_cut, stack_experts

_ALIGNED_BYTES = 16
_ALIGNED_ELEMENTS = 16
_PACKED = ("int8", "int4", "gguf", "fp8")
_E4M3_NAN = np.uint8(0x7F)
"""Of float8_e4m3fn, but for the sign."""


def _has_dense_rows(array: Array) -> bool:
    """Whether what each ``array[i]`` is of lies side by side. Every layer of a step asks: views would take longer."""
    shape, strides, apart = array.shape, array.strides, array.itemsize
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] != 1 and strides[axis] != apart:  # the stride of a dimension of one says nothing
            return False
        apart *= shape[axis]
    return len(shape) > 1 and shape[0] > 0


def _put_back(taken: list[MlpWeights], remaining: Iterator[MlpWeights]) -> Iterator[MlpWeights]:
    """All of them, none of which is kept here: experts are given up one by one as they are stacked."""
    yield taken.pop()
    yield from remaining


@dataclass(frozen=True)
class GpuExperts:
    """A layer's experts.

    stacked: the routed ones, and the shared one where it is made of experts like them
    beside:  the shared one where it is not: an MLP by itself
    """

    stacked: StackedExperts
    beside: MlpWeights | None


class GpuOps(ArrayOps):
    """`ArrayOps` with the kernels of `CudaElementwise` and `CudaLikeliest`, for arrays that these take.

    Raises:
        ConfigError: there are no kernels for ``dtype``.
    """

    captures_experts = True
    leaves_biases = True

    def __init__(
        self,
        xp: Any,
        dtype: np.dtype[Any],
        programs: Programs,
        launcher: TritonLauncher,
        weights_dtype: str = "auto",
        threads: int = THREADS,
        own_products: bool = False,
    ) -> None:
        """
        weights_dtype: of weights in memory: int8 (a scale for each group), int4, fp8 or gguf (quantised as in the
                       checkpoint or the GGUF file; what is not quantised there is of ``dtype``), else ``dtype``
        threads:       of a thread block that searches a row of logits; see `CudaLikeliest`
        own_products:  whether those of few rows with weights of 16 bits are `CudaPacked`'s, too
        """
        super().__init__(xp, dtype)
        self._weights_dtype = weights_dtype
        self._plain_rows = PLAIN_ROWS if own_products and dtype.itemsize == 2 else 0
        self._packed = CudaPacked(launcher, programs, self.xp.empty)
        self._packed_many = CudaPackedMany(launcher, programs, self.xp.empty)
        if self._plain_rows:
            self._packed.prepare(plain_form(dtype.name))
        self._experts = CudaExperts(launcher, programs, self.xp.empty)
        self._likeliest = CudaLikeliest(programs, dtype, lambda size: xp.zeros(size, np.uint8), threads)
        self._streams, self._named = CudaStreams(programs), CudaNamedExperts(programs)
        self._kernels = CudaElementwise(programs)
        self._kernels.prepare(dtype)

    def kernel_array(self, tensor: Array) -> Array:
        return tensor if _has_dense_rows(tensor) else super().kernel_array(tensor)

    def linear_weight(self, weight: Matrix) -> Array | PackedMatrix:
        if self._weights_dtype == "int8" and not isinstance(weight, GroupQuantised):
            weight = quantise_int8(as_float32(weight))
        if self._weights_dtype not in _PACKED or not isinstance(weight, GroupQuantised):
            return super().linear_weight(weight)
        packed = pack(weight, self.dtype.name, self.send)
        if weight.is_float and bool((packed.codes & _E4M3_NAN == _E4M3_NAN).any()):
            raise ModelError("a matrix in FP8 has numbers that are none (NaN): fetch the model again")
        self._packed.prepare(packed.form)
        self._packed_many.prepare(packed.form)
        return packed

    def float_weight(self, weight: NDArray[np.float32]) -> Array:
        return super().linear_weight(weight)

    def send(self, array: NDArray[Any]) -> Array:
        """`upload`, of much."""
        return self.upload(array)

    def linear(self, x: Array, weight: Array | PackedMatrix, bias: Array | None = None) -> Array:
        if not isinstance(weight, PackedMatrix) and 0 < len(x) <= self._plain_rows:
            weight = plain(weight.T, self.dtype.name) or weight
        if not isinstance(weight, PackedMatrix):
            y = self.matmul(x, weight)
        elif 0 < len(x) <= FEW_ROWS and multiplies_codes(weight.form):
            y = self._packed.multiply(self._aligned(x), weight)
        elif self._packed_many.takes(weight, len(x)):
            y = self._packed_many.multiply(self._aligned(x), weight)
        else:
            y = self.matmul(x, self._packed.expand(weight, self.dtype).T)
        if bias is not None:
            y += bias
        return y

    def _aligned(self, x: Array) -> Array:
        """``x [T, N]`` with rows that begin where 16 bytes can be read at once."""
        apart, within = x.strides
        fits = within == self.itemsize and apart % (_ALIGNED_ELEMENTS * self.itemsize) == 0
        return x if fits and address_of(x) % _ALIGNED_BYTES == 0 else self.xp.array(x, order="C")

    def embedding(self, table: Array, ids: Array, scale: float = 1.0) -> Array:
        out = self.xp.empty((*ids.shape, *table.shape[1:]), self.dtype)
        # The factor is rounded to the dtype, as `ArrayOps.embedding` does.
        if self._kernels.gather_rows(table, ids, out, float(self.dtype.type(scale))):
            return out
        return super().embedding(table, ids, scale)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = self.xp.empty(x.shape, self.dtype)
        return out if self._kernels.rms_norm(x, weight, eps, out) else super().rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Array, addend: Array, weight: Array, eps: float, bias: Array | None = None
    ) -> tuple[Array, Array]:
        total, out = self.xp.empty(x.shape, self.dtype), self.xp.empty(x.shape, self.dtype)
        if self._kernels.add_rms_norm(x, addend, weight, eps, total, out, bias):
            return total, out
        return super().add_rms_norm(x, addend, weight, eps, bias)

    def activated_linear(
        self, x: Array, weight: Array | PackedMatrix, bias: Array | None, activation: Activation
    ) -> Array:
        if bias is None:
            return super().activated_linear(x, weight, None, activation)
        product = self.linear(x, weight)
        out = self._activated(product, activation, bias)
        return self.activated(product + bias, activation) if out is None else out

    def silu_mul(self, gate_up: Array) -> Array:
        out = self._activated(gate_up, "silu")
        return super().silu_mul(gate_up) if out is None else out

    def gelu_tanh_mul(self, gate_up: Array) -> Array:
        out = self._activated(gate_up, "gelu_tanh")
        return super().gelu_tanh_mul(gate_up) if out is None else out

    def clamped_mul(self, gate_up: Array) -> Array:
        out = self._activated(gate_up, "clamped")
        return super().clamped_mul(gate_up) if out is None else out

    def limited_silu_mul(self, gate_up: Array) -> Array:
        out = self._activated(gate_up, "limited_silu")
        return super().limited_silu_mul(gate_up) if out is None else out

    def clipped_silu_mul(self, gate_up: Array) -> Array:
        out = self._activated(gate_up, "clipped_silu")
        return super().clipped_silu_mul(gate_up) if out is None else out

    def squared_relu(self, x: Array) -> Array:
        out = self._activated(x, "relu2")
        return super().squared_relu(x) if out is None else out

    def sigmoid_mul(self, x: Array, gate: Array) -> Array:
        out = self.xp.empty(x.shape, self.dtype)
        return out if self._kernels.sigmoid_mul(x, gate, out) else super().sigmoid_mul(x, gate)

    def greedy(self, logits: Array) -> tuple[Array, Array]:
        if not self._likeliest.takes(logits):
            return super().greedy(logits)
        tokens, best = (self.xp.empty(len(logits), dtype) for dtype in (np.int32, np.float32))
        self._likeliest(logits, tokens, best)
        return tokens, best

    @abstractmethod
    def multiply_heads(self, x: Array, weights: Array, out: Array) -> None:
        """``out [T, H, N] = x [T, H, K] @ weights [H, K, N]``, head by head; see `Cublas.products_of_heads`."""

    @abstractmethod
    def multiply_wide(self, x: Array, weight: Array, out: Array) -> None:
        """``out [T, N] = x [T, K] @ weight [K, N]``, of float32 whatever the others are; see `Cublas.product`."""

    def prepare_streams(self, count: int) -> None:
        self._named.prepare(self.dtype)
        if count in COUNTS:
            self._streams.prepare(self.dtype, count)

    def takes_streams(self, streams: Array) -> bool:
        _, count, size = streams.shape
        return self._streams.takes(count, size, streams.dtype)

    def mixed_streams(
        self, streams: Array, weight: Array, base: Array, scale: Array, *, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Array, Array, Array]:
        tokens, count, size = streams.shape
        mixed = self.xp.empty((tokens, size), streams.dtype)
        given, between = (self.xp.empty((tokens, *rest), np.float32) for rest in ((count,), (count, count)))
        made = self._made_of(streams, weight)
        self._streams.mix(
            streams, made, base, scale, mixed, (given, between), iterations=iterations, eps=eps, norm_eps=norm_eps
        )
        return mixed, given, between

    def joined_streams(
        self, streams: Array, weight: Array, base: Array, scale: Array, *, eps: float, norm_eps: float
    ) -> Array:
        mixed, made = self.xp.empty(streams.shape[::2], streams.dtype), self._made_of(streams, weight)
        self._streams.mix(streams, made, base, scale, mixed, None, iterations=0, eps=eps, norm_eps=norm_eps)
        return mixed

    def _made_of(self, streams: Array, weight: Array) -> Array:
        """Float32: products of all streams as one, not normed: what norms them divides these."""
        made = self.xp.empty((len(streams), weight.shape[1]), np.float32)
        if len(streams):
            self.multiply_wide(streams.reshape(len(streams), -1), weight, made)
        return made

    def put_streams(self, streams: Array, made: Array, given: Array, between: Array) -> None:
        self._streams.add(streams, made, given, between)

    def named_logits(self, logits: Array, table: Array, ids: Array, never: float) -> Array:
        out = self.xp.empty(logits.shape, logits.dtype)
        self._named.keep(logits, table, ids, out, never)
        return out

    def experts(self, mixture: Mixture, routed: Iterable[MlpWeights], shared: MlpWeights | None) -> GpuExperts:
        remaining = iter(routed)
        first = next(remaining)
        is_beside = shared is not None and not can_be_cut(self.xp, mixture, first, shared)
        every = _put_back([first], remaining)
        del first
        stacked = stack_experts(self.xp, self.upload, mixture, self.dtype.name, every, None if is_beside else shared)
        self._experts.prepare(stacked.shape)
        return GpuExperts(stacked, shared if is_beside else None)

    def mix_experts(self, x: Array, logits: Array, experts: GpuExperts, tokens: Array | None = None) -> Array:
        every, stacked = self.xp.full(1, len(x), np.int32) if tokens is None else tokens, experts.stacked
        total = self._experts.mix(self.xp.ascontiguousarray(x), logits, stacked, every)
        return total if experts.beside is None else total + self._mlp(x, experts.beside, stacked.shape.activation)

    def _activated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array | None:
        out = self.xp.empty((x.shape[0], x.shape[1] // (2 if is_gated(activation) else 1)), self.dtype)
        return out if self._kernels.activated(x, out, activation, bias) else None
