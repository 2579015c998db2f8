"""Decoders whose layers are connected by several streams: their weights, and the way through the layers.

Subclasses say what a part of a layer does; `attended` where it is given more than other decoders' attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import Attention
from headwise.runtime.models.base import AttentionLayer, Embeds
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hyper import HyperConfig, HyperConnections, HyperModelConfig, HyperWeights
from headwise.runtime.models.layers import Layer
from headwise.runtime.models.moe_decoder import tokens_of
from headwise.runtime.ops.base import KernelArray, Tensor


@dataclass(frozen=True)
class LayerConnections:
    """Of one layer, around its two parts."""

    attention: HyperWeights
    mlp: HyperWeights


class HyperDecoder(GroupedMoeDecoder):
    """Streams begin as copies of the embedding, and are joined behind the last layer."""

    config: HyperModelConfig
    connections_kind: ClassVar[type[HyperConnections]] = HyperConnections

    @property
    def hyper(self) -> HyperConfig:
        """How layers are connected."""
        hyper = self.config.hyper
        assert hyper is not None, "parsed so"
        return hyper

    # ---- weights ----

    def load_more(self) -> None:
        self._streams = self.connections_kind(self.hyper, self.ops)
        self._ones = self.ops.norm_weight(np.ones(self.hyper.streams * self.config.hidden_size, np.float32))
        self._connections = [self.connections_at(f"{self.prefix}layers.{layer}.") for layer in self._places]
        self._joining = self.joining_at(self.prefix) if self._is_last else None

    def connections_at(self, at: str) -> LayerConnections:
        """Of the layer whose weights' names begin so."""
        count, scales = self.hyper.part_weights
        return LayerConnections(*(self._hyper_weights(f"{at}{part}_hc.", count, scales) for part in ("attn", "ffn")))

    def joining_at(self, at: str) -> HyperWeights:
        """What streams are joined by."""
        return self._hyper_weights(f"{at}hc_head.hc_", self.hyper.streams, 1)

    def _hyper_weights(self, at: str, count: int, scales: int) -> HyperWeights:
        ops = self.ops
        fn = self.tensor_of(f"{at}fn", (count, self.hyper.streams * self.config.hidden_size))
        base, scale = self.tensor_of(f"{at}base", (count,)), self.tensor_of(f"{at}scale", (scales,))
        weight = self._prepare(f"{at}fn", lambda: ops.float_weight(fn))
        base, scale = (ops.upload(np.ascontiguousarray(vector, np.float32)) for vector in (base, scale))
        return HyperWeights(weight, base, scale, self._ones)

    def tensor_of(self, name: str, expected: tuple[int, ...]) -> NDArray[np.float32]:
        """A weight. Raises `ModelError` if it is of another shape."""
        found = self._weights.tensor(name)
        check_shape(name, found.shape, expected)
        return found

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        return None

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        self._tokens, self._ids = tokens_of(attention), token_ids  # for the layers of this pass
        behind, wanted = self.taken_last(wanted if self._is_last else None)
        turnings = self.turnings(positions)
        streams = self._streams.spread(self.embedded(token_ids, embeds)) if stream is None else self._split(stream)
        for index, layer, connections in zip(self._places, self._layers, self._connections, strict=True):
            rows = wanted if index == self._places[-1] else None
            turning = turnings[self.rotation_of[index]]
            streams = self.through_layer(index, layer, connections, streams, turning, attention, rows)
        if self._joining is None:
            return self.side_by_side(streams)
        self._streams_behind = streams
        if not streams.shape[0]:
            return self.ops.from_kernel_array(self.ops.empty_like(streams, (0, self.config.hidden_size)))
        return self.rows_of(self.norm(self._streams.joined(streams, self._joining), self._final_norm), behind)

    def side_by_side(self, streams: KernelArray) -> Tensor:
        """Streams ``[T, n, hidden]`` as ``[T, n * hidden]``."""
        return self.ops.from_kernel_array(streams.reshape(streams.shape[0], streams.shape[1] * streams.shape[2]))

    def _split(self, stream: Tensor) -> KernelArray:
        """The reverse."""
        return self.ops.kernel_array(stream).reshape(stream.shape[0], self.hyper.streams, self.config.hidden_size)

    def through_layer(
        self,
        index: int,
        layer: Layer,
        connections: LayerConnections,
        streams: KernelArray,
        turning: Any,
        attention: AttentionLayer,
        rows: NDArray[np.int64] | None,
    ) -> KernelArray:
        """The streams behind a layer, of all rows or of these."""
        hyper, norms = self._streams, layer.norms
        given, mixing = hyper.before(streams, connections.attention)
        seen = self.attended(index, layer, self.norm(given, norms.before_attention), turning, attention, rows)
        if rows is not None:
            at = self.ops.upload(rows)
            streams, self._ids, mixing = streams[at], self._ids[at], mixing.of_rows(at)
        if not streams.shape[0]:
            return streams
        streams = hyper.behind(streams, self.reduce(seen), mixing)
        given, mixing = hyper.before(streams, connections.mlp)
        return hyper.behind(streams, self.mlp(layer, self.norm(given, norms.before_mlp)), mixing)

    def turnings(self, positions: KernelArray) -> Sequence[Any]:
        """What `attended` is given of each rotation."""
        return self.rotations(positions)

    def attended(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        turning: Any,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None,
    ) -> Tensor:
        """This rank's part of a layer's attention: of all rows, or of the wanted ones."""
        return self.attend(index, layer, x, turning, attention, wanted)


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `ModelError` where they differ."""
    if tuple(shape) != expected:
        raise ModelError(
            f"{name} has the shape {shape} where config.json says {expected}: weights and config.json do not "
            "belong together"
        )
