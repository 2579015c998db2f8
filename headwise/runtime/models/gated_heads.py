"""Decoders whose heads are gated: what they have seen counts as far as sigmoids, made of a token itself, let it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import Attention, GroupedQueries
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.layers import Layer, Linear, QkvProjections
from headwise.runtime.ops.base import Tensor


@dataclass(frozen=True)
class GatedProjections(QkvProjections):
    """One rank's part of attention with gates of its query heads' outputs: for each number, or for each head."""

    gate: Linear = field(kw_only=True)


class GatedHeadsDecoder(Decoder):
    """The shared decoder over `GatedProjections`."""

    gate_name: ClassVar[str]
    """Of the gates' projection, below a layer's attention."""

    def gate_size(self, layer: int) -> int:
        """Numbers of a head's gate."""
        return self.config.heads_of(layer).head_dim

    def load_attention(self, layer: int, at: str) -> Any:
        found, dim = super().load_attention(layer, at), self.gate_size(layer)
        q = [(start * dim, stop * dim) for start, stop in self._shard.query_heads(self.config, layer)]
        return GatedProjections(**vars(found), gate=self._split_rows([(f"{at}{self.gate_name}", q)], has_bias=False))

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        found = super().fusible_attention(index, attention)
        if not isinstance(found, GroupedQueries):
            return found
        return replace(found, gate=attention.gate.weight, gate_adapters=attention.gate.adapters)

    def gated(self, layer: Layer, x: Tensor, heads: Tensor, wanted: NDArray[np.int64] | None) -> Tensor:
        if not heads.shape[0]:
            return heads
        gates = self._linear(x if wanted is None else self.ops.take_rows(x, wanted), layer.attention.gate)
        return self.ops.sigmoid_mul(heads.reshape(gates.shape), gates)
