"""Decoders some of whose layers have queries that count more the further behind they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import Besides, DecoderLayer, GroupedQueries, Latents
from headwise.runtime.models.base import AttentionLayer, Embeds, PagedCache
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, number, positive
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.position_config import TemperConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps


def temper_of_scaling(scaling: HfConfig, num_layers: int) -> TemperConfig | None:
    """What ``rope_parameters`` say of it: queries count more beyond the length that YaRN has lengthened; None: not."""
    factor = number(scaling, "llama_4_scaling_beta", optional=True)
    if not factor:
        return None
    step = positive(scaling, "original_max_position_embeddings")
    return TemperConfig(factor, step, ahead=0, layers=frozenset(range(num_layers)))


@dataclass(frozen=True)
class TemperedAttention:
    """`AttentionLayer` whose queries are multiplied in some layers.

    scales: float32 ``[T, 1, 1]``
    layers: those
    """

    attention: AttentionLayer
    ops: TensorOps
    scales: KernelArray
    layers: frozenset[int]

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        if layer in self.layers:
            query, *others = projected
            rows = self.ops.kernel_array(query)
            scaled = (rows * self.scales).astype(rows.dtype, copy=False)
            projected = (self.ops.from_kernel_array(scaled), *others)
        return self.attention(layer, *projected, wanted=wanted)


class TemperedDecoder(Decoder):
    """The shared decoder, as `TemperConfig` has it. Queries are multiplied before they are rotated as well as after."""

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        temper = self.config.temper
        if temper is not None and self.fused_over(attention) is None:
            scales = self._query_scales(positions)
            assert scales is not None, "with a temper there are"
            attention = TemperedAttention(attention, self.ops, scales.reshape(-1, 1, 1), temper.layers)
        return super().forward(token_ids, positions, attention, embeds, wanted, stream)

    def _query_scales(self, positions: KernelArray) -> KernelArray | None:
        """What tempered queries are multiplied with, float32 ``[T]``; None: nothing."""
        temper = self.config.temper
        if temper is None:
            return None
        steps = np.floor((positions.astype(np.float32) + np.float32(temper.ahead)) / np.float32(temper.step))
        return np.log1p(steps) * np.float32(temper.factor) + np.float32(1)

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found, temper = super().fusible(index, layer), self.config.temper
        if found is None or temper is None or index not in temper.layers:
            return found
        assert isinstance(found.attention, GroupedQueries | Latents), "which have queries to be multiplied"
        return replace(found, attention=replace(found.attention, is_scaled=True))

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        found = super().besides(token_ids, positions, x, cache)
        return replace(found, query_scales=self._query_scales(positions))
