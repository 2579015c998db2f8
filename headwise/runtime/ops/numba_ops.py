"""Tensor operations on CPU cores by our own compiled kernels; weights are packed once, when they are loaded.

Tensors are float32 NumPy arrays. Weights may be narrower, since most bytes and most arithmetic are theirs. Activations
are then rounded where they are multiplied with weights (`headwise.kernels.cpu.matmul.matmul`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu import matmul as packed
from headwise.kernels.cpu.decoder import CpuDecoder
from headwise.kernels.cpu.experts import Mlp, PackedExperts
from headwise.kernels.cpu.low_rank import PackedLowRank, Pair, pack_low_rank
from headwise.kernels.cpu.matmul import PackedWeight
from headwise.kernels.cpu.memory import present
from headwise.kernels.cpu.pool import check_threads
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import Activation, BesideExperts, DecoderLayer, DecoderShape, DenseLayer
from headwise.runtime.ops.base import MlpWeights, PackedParts
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_float32, quantise_int8

Array = NDArray[np.float32]


class NumbaOps(NumpyOps):
    """`TensorOps` on ``threads`` cores.

    weights_dtype: of weights in memory: float32, bfloat16, int8 (a scale for each group), or int4 or gguf (quantised as
                   in the checkpoint or the GGUF file; what is not quantised there is bfloat16)

    Raises:
        ConfigError: this process may not use so many cores.
    """

    name = "numba"
    products = "headwise"
    packed_format = packed.PACKED_FORMAT

    def __init__(self, threads: int, weights_dtype: str = "float32") -> None:
        super().__init__()
        check_threads(threads)
        self.threads = threads
        self.itemsize = 4 if weights_dtype == "float32" else 2
        self._weights_dtype = weights_dtype

    def empty_bytes(self, num_bytes: int) -> NDArray[np.uint8]:
        return present(num_bytes)

    # ---- weights ----

    def linear_weight(self, weight: Matrix) -> PackedWeight:
        return self._pack(weight)

    def linear_bias(self, bias: Array) -> Array:
        return packed.pack_bias(bias)

    def gated_weight(self, weight: Matrix) -> PackedWeight:
        return self._pack(weight, gated=True)

    def gated_bias(self, bias: Array) -> Array:
        return packed.pack_bias(bias, gated=True)

    def embedding_table(self, table: Matrix) -> PackedWeight:
        return self._pack(table)

    def tied_weight(self, table: PackedWeight, start: int, stop: int) -> PackedWeight:
        if (start, stop) == (0, table.outputs):
            return table
        part = packed.panels_of(table, start, stop)
        return self._pack(packed.take_rows(table, np.arange(start, stop, dtype=np.int32))) if part is None else part

    def _pack(self, weight: Matrix, gated: bool = False) -> PackedWeight:
        if self._weights_dtype == "int8" and not isinstance(weight, GroupQuantised):
            weight = quantise_int8(weight)
        has_codes = self._weights_dtype in ("int8", "int4", "gguf")
        if has_codes and isinstance(weight, GroupQuantised) and not weight.group % packed.GROUP_STEP:
            return packed.pack_quantised(weight.codes, weight.scale, weight.minimum, weight.bits, gated)
        return packed.pack_float(as_float32(weight), self._float_dtype, gated)

    @property
    def _float_dtype(self) -> str:
        """Of weights that are no integers."""
        return "float32" if self._weights_dtype == "float32" else "bfloat16"

    def float_weight(self, weight: Array) -> PackedWeight:
        return packed.pack_float(weight, self._float_dtype)

    def adapters(self, pairs: Sequence[Pair | None], gated: bool = False) -> PackedLowRank | None:
        return pack_low_rank(pairs, self._float_dtype, self.threads, gated)

    def parts_of(self, weight: PackedWeight) -> PackedParts:
        arrays = {"packed": weight.packed, "scales": weight.scales, "minima": weight.minima}
        return PackedParts(
            weight.outputs * weight.inputs,
            {name: getattr(weight, name) for name in ("dtype", "outputs", "inputs", "gated", "depth", "offset")},
            {name: array for name, array in arrays.items() if array.size},
        )

    def weight_of(self, parts: PackedParts) -> PackedWeight:
        try:
            fields: dict[str, Any] = {**parts.facts, **parts.arrays}
            return packed.repacked(**fields)
        except (TypeError, KeyError, IndexError, ArithmeticError) as error:  # other fields, or of other types
            raise ValueError(f"no packed weight: {error}") from None

    def fuse(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> CpuDecoder | None:
        found = [_with_packed_experts(layer) for layer in layers]
        packed = [layer for layer in found if layer is not None]
        return CpuDecoder(packed, shape, self.threads) if len(packed) == len(layers) else None

    def grouped(self, mixture: Mixture, routed: Sequence[MlpWeights], shared: MlpWeights | None) -> _CpuExperts | None:
        experts = PackedExperts.of(mixture, [*map(_mlp, routed)], None if shared is None else _mlp(shared))
        return None if experts is None else _CpuExperts(experts, self.threads)

    # ---- arithmetic ----

    def linear(self, x: Array, weight: PackedWeight, bias: Array | None = None) -> Array:
        return packed.matmul(x, weight, self.threads, bias)

    def activated_linear(self, x: Array, weight: PackedWeight, bias: Array | None, activation: Activation) -> Array:
        return packed.matmul(x, weight, self.threads, bias, activation)

    def unactivated_linear(self, x: Array, weight: PackedWeight, bias: Array | None) -> Array:
        return packed.unactivated_linear(x, weight, self.threads, bias)

    def embedding(self, table: PackedWeight, ids: NDArray[np.int32], scale: float = 1.0) -> Array:
        rows = packed.take_rows(table, ids, self.threads)
        return rows if scale == 1.0 else rows * np.float32(scale)


@dataclass(frozen=True)
class _CpuExperts:
    """`GroupedExperts` on so many cores."""

    experts: PackedExperts
    threads: int

    def mix(self, x: Array, logits: Array) -> Array:
        return self.experts.mix(x, logits, self.threads)


def _mlp(weights: MlpWeights) -> Mlp:
    into, down = weights.into, weights.down
    return (into.weight, into.bias), (down.weight, down.bias)


def _with_packed_experts(layer: DecoderLayer) -> DecoderLayer | None:
    """The layer with experts as they are packed; None where they are not one call."""
    mlp = layer.mlp
    if mlp is None or isinstance(mlp, DenseLayer):
        return layer
    mixed = mlp.mixed if isinstance(mlp, BesideExperts) else mlp
    if not isinstance(mixed.experts.grouped, _CpuExperts):
        return None
    mixed = replace(mixed, experts=mixed.experts.grouped.experts)
    return replace(layer, mlp=replace(mlp, mixed=mixed) if isinstance(mlp, BesideExperts) else mixed)
