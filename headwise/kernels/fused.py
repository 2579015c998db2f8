"""The contract of decoder layers that are computed many in one call: attention and an MLP or experts, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable

Activation = Literal["silu", "gelu_tanh", "clamped"]
"""Of a gated MLP. ``clamped`` is gpt-oss's: ``gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1)``, of a gate of at most
`SWIGLU_LIMIT`, and an up of a magnitude of at most that."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

Weight = Any
"""As the tensor operations made it that offer such a decoder."""


@dataclass(frozen=True)
class LayerNorms:
    """Weights of a layer's RMS norms, ``[hidden]``, those of heads ``[head_dim]``; None where a model has none.

    before_attention, before_mlp: of what comes from the residual stream
    after_attention, after_mlp:   of what is added to it
    query, key:                   of each head, before it is rotated
    """

    before_attention: Array
    before_mlp: Array
    after_attention: Array | None = None
    after_mlp: Array | None = None
    query: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class GatedLayer:
    """A gated MLP."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


@dataclass(frozen=True)
class MixedLayer:
    """A mixture of experts, as the tensor operations made it that offer such a decoder, and its router."""

    router: Weight
    experts: Any
    router_bias: Array | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's weights. sink_logits: float32 ``[q_heads]``, if there are any; rotation: index of its angles"""

    qkv: Weight
    out: Weight
    mlp: GatedLayer | MixedLayer
    qkv_bias: Array | None
    out_bias: Array | None
    sink_logits: Array | None
    norms: LayerNorms
    rotation: int


@dataclass(frozen=True)
class DecoderShape:
    """What all layers share. scale: of attention's scores; softcap: of them, 0 for none; eps: of norms"""

    q_heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    scale: float
    softcap: float
    eps: float


class FusedDecoder(Protocol):
    """A decoder's layers, with the KV write and attention of each within."""

    def make_ready(self, layout: BlockLayout) -> None:
        """Compile for a cache of this layout, or load what this machine has compiled before."""

    def embedded(self, table: Weight, ids: Array, scale: float = 1.0) -> Array:
        """Rows ``ids int32 [rows]`` of an embedding, times ``scale``: ``[rows, hidden]``, there until the next call."""

    def scores(self, x: Array, head: Weight) -> Array:
        """``x [rows, hidden] @ head.T``: ``[rows, vocabulary]``, there until the next call."""

    def rotations(self, positions: Array, inverses: Sequence[Array], scales: Sequence[Array | None]) -> Array:
        """Cosines and sines for `run`, of several kinds, there until the next call; see `TensorOps.rotation`."""

    def run(
        self,
        x: Array,
        layers: range,
        rotations: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: Sequence[HeadTable],
        final_norm: Array | None,
    ) -> None:
        """Take the residual stream ``x [rows, hidden]`` through some ``layers``, in place.

        rotations:  cosines and sines of the tokens' positions, ``[kinds, 2, rows, head_dim / 2]``
        heads:      of all layers; the same object from call to call
        final_norm: weight of the RMS norm of what comes out of them, if there is one
        """
