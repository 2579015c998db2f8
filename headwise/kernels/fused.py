"""The contract of decoder layers that are computed many in one call: attention and an MLP or experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.kda_base import KdaWeights
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes

Activation = Literal["silu", "gelu_tanh", "clamped", "limited_silu", "clipped_silu", "relu2"]
"""Of an MLP. ``silu`` and ``gelu_tanh`` are of a gate, which multiplies an up. ``clamped`` is gpt-oss's: ``gate *
sigmoid(SWIGLU_ALPHA * gate) * (up + 1)``, of a gate of at most `SWIGLU_LIMIT`, and an up of a magnitude of at most
that. ``limited_silu`` is DeepSeek-V4's: ``silu`` of a gate of at most `SILU_LIMIT`, and of an up of a magnitude of at
most that. ``clipped_silu`` is Step-3.7's: the least of ``silu`` of a gate and `SWIGLU_LIMIT`, and of an up of a
magnitude of at most that. ``relu2`` is ``max(up, 0) ** 2`` of an MLP without a gate: see `is_gated`."""

_UNGATED = ("relu2",)

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
SILU_LIMIT = 10.0


def is_gated(activation: str | None) -> bool:
    """Whether an `Activation` is of two numbers, ``gate | up``, not of one. No activation, None or empty, is not."""
    return bool(activation) and activation not in _UNGATED


SumOverRanks = Callable[[Array], Array]
"""Of a float32 array ``[rows, hidden]``, which is the caller's no more."""

Weight = Any
"""As the tensor operations made it that offer such a decoder."""


@dataclass(frozen=True)
class LayerNorms:
    """Weights of a layer's RMS norms, ``[hidden]``, those of heads ``[head_dim]``; None where a model has none.

    before_attention, before_mlp: of what comes from the residual stream
    after_attention, after_mlp:   of what is added to it
    query, key:                   of each head, before it is rotated; or, ``[heads * head_dim]``, of all heads as one
    """

    before_attention: Array | None = None
    before_mlp: Array | None = None
    after_attention: Array | None = None
    after_mlp: Array | None = None
    query: Array | None = None
    key: Array | None = None


@dataclass(frozen=True)
class GroupedQueries:
    """Grouped-query attention.

    qkv:         to queries, keys and values of heads of ``head_dim``; keys alone where these are the values, too, and
                 queries alone where keys and values in the cache are another layer's
    gate:        of heads, whose sigmoids multiply what they have seen; None: there is none
    value_norm:  of each head, ``[value_dim]``
    sink_logits: float32 ``[q_heads]``, if there are any
    value_dim:   of a head's values, no more than ``head_dim``
    rotation:    index of its angles
    is_chunked:  whether heads see all of their chunk up to a token, and no more: see `Besides.chunks`
    is_scaled:   whether queries are multiplied by `Besides.query_scales`, before they are rotated
    ..._adapters: what a model's adapters add to that product, as the tensor operations made it; None: nothing
    """

    qkv: Weight
    out: Weight
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotation: int
    qkv_bias: Array | None = None
    out_bias: Array | None = None
    sink_logits: Array | None = None
    gate: Weight | None = None
    value_norm: Array | None = None
    is_chunked: bool = False
    is_scaled: bool = False
    qkv_adapters: Any = None
    out_adapters: Any = None
    gate_adapters: Any = None


@dataclass(frozen=True)
class Latents:
    """Latent attention (MLA), in its absorbed form.

    into:        to ``[queries | latent]`` of a token; with ``ranked`` to what queries are made of, and its latent
    ranked:      norm of that, and what makes queries of it
    latent_norm: of the part of a latent that is not rotated
    eps:         of both norms
    rotation:    index of its angles
    is_scaled, out_adapters: see `GroupedQueries`
    """

    into: Weight
    ranked: tuple[Array, Weight] | None
    latent_norm: Array
    up: UpProjections
    out: Weight
    rotation: int
    eps: float
    into_bias: Array | None = None
    out_bias: Array | None = None
    is_scaled: bool = False
    out_adapters: Any = None


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta-net: ``into`` makes `DeltaProjected.numbers`, and ``between`` is before ``out``."""

    into: Weight
    between: DeltaWeights
    out: Weight


@dataclass(frozen=True)
class KimiDelta:
    """Kimi Delta Attention: ``into`` makes `KdaProjected.numbers`, of the last of which ``decays`` and ``gates`` make
    those, and ``between`` is before ``out``."""

    into: Weight
    decays: Weight
    gates: Weight
    between: KdaWeights
    out: Weight


@dataclass(frozen=True)
class StateSpace:
    """A state space model: ``into`` makes `SsmProjected.numbers`, and ``between`` and a norm are before ``out``.

    sizes: of a member
    norm:  of all that comes of a token, in ``norm_groups`` equal parts, each normed by itself; eps: of it
    """

    into: Weight
    between: SsmWeights
    sizes: StateSizes
    norm: Array
    norm_groups: int
    eps: float
    out: Weight


WithStates = DeltaNet | KimiDelta | StateSpace
"""What keeps recurrent states."""

Attention = GroupedQueries | Latents | WithStates


@dataclass(frozen=True)
class DenseLayer:
    """An MLP. into: to ``gate | up``, or to up alone where `is_gated` says no to its activation; ..._adapters: see
    `GroupedQueries`"""

    into: Weight
    down: Weight
    into_bias: Array | None = None
    down_bias: Array | None = None
    into_adapters: Any = None
    down_adapters: Any = None


@dataclass(frozen=True)
class GatedShare:
    """An MLP that all tokens go through, times the sigmoid of what ``gate [1, hidden]`` makes of each."""

    mlp: DenseLayer
    gate: Weight


@dataclass(frozen=True)
class MixedLayer:
    """A mixture of experts, as the tensor operations made it that offer such a decoder, and its router."""

    router: Weight
    experts: Any
    router_bias: Array | None = None
    shared: GatedShare | None = None


@dataclass(frozen=True)
class BesideExperts:
    """An MLP with a mixture of experts beside it. Both are given the residual stream, and normed before their sum is.

    choose, before: norms of the stream for the router and for the experts; ``before_mlp`` is that for the MLP
    after:          norm of what experts make, and after_mlp of what the MLP does; of their sum it is `LayerNorms`'
    """

    mlp: DenseLayer
    mixed: MixedLayer
    choose: Array
    before: Array
    after: Array
    after_mlp: Array


@dataclass(frozen=True)
class SideInput:
    """What adds what a layer is told besides of each token to the residual stream, behind its MLP.

    gate, out: to its size, where GELU of it gates what the layer is told, and back to the hidden size
    after:     norm of what is added
    """

    gate: Weight
    out: Weight
    after: Array


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's weights.

    mlp:         None: the next layer, or the final norm, comes right behind attention
    scale:       factor on the residual stream behind the layer
    is_parallel: the MLP is given what attention is, and has no norm before it of its own
    is_centred:  each row of the residual stream has its mean taken off behind the layer
    """

    attention: Attention
    mlp: DenseLayer | MixedLayer | BesideExperts | None
    norms: LayerNorms
    side: SideInput | None = None
    scale: float = 1.0
    is_parallel: bool = False
    is_centred: bool = False

    @property
    def can_be_a_part(self) -> bool:
        """Whether it can be one rank's: all that is added to the residual stream is to be summed over ranks, and
        nothing is made of it before, nor of all heads as one."""
        return self.side is None and not isinstance(self.mlp, BesideExperts) and not self._norms_all_heads

    @property
    def _norms_all_heads(self) -> bool:
        norms = self.norms.query, self.norms.key
        heads = self.attention.head_dim if isinstance(self.attention, GroupedQueries) else 0
        return any(norm is not None and len(norm) > heads for norm in norms)


@dataclass(frozen=True)
class DecoderShape:
    """What all layers share. scale: of attention's scores; softcap: of them, 0 for none; eps: of norms"""

    activation: Activation
    scale: float
    softcap: float
    eps: float


@dataclass(frozen=True)
class Besides:
    """What some layers are told of a step besides.

    sides:        what layers with a `SideInput` are told of each token, ``[rows, layers, size]``
    query_scales: float32 ``[rows]``
    chunks:       the batch with a sequence for each chunk that has queries, which begins there
    adapters:     int16 ``[rows]``: which adapter each row goes by, by its place from 1 on, 0 for none; None: no row
                  goes by one
    """

    sides: Array | None = None
    query_scales: Array | None = None
    chunks: AttentionBatch | None = None
    adapters: Array | None = None

    def of_rows(self, wanted: Array) -> Besides:
        """The same of these rows alone, int64, for layers that do not see chunks."""
        told = (self.sides, self.query_scales, self.adapters)
        sides, query_scales, adapters = (None if rows is None else rows[wanted] for rows in told)
        return Besides(sides, query_scales, adapters=adapters)


NOTHING = Besides()


class FusedDecoder(Protocol):
    """A decoder's layers, with the KV write and attention of each within."""

    def takes(self, batch: AttentionBatch, layouts: Sequence[BlockLayout]) -> bool:
        """Whether a step is one for it; others are computed layer by layer."""

    def embedded(self, table: Weight, ids: Array, scale: float = 1.0) -> Array:
        """Rows ``ids int32 [rows]`` of an embedding, times ``scale``: ``[rows, hidden]``, there until the next call."""

    def scores(self, x: Array, head: Weight) -> Array:
        """``x [rows, hidden] @ head.T``: ``[rows, vocabulary]``, there until the next call."""

    def rotations(
        self, positions: Array, inverses: Sequence[Array], scales: Sequence[Array | None]
    ) -> Sequence[tuple[Array, Array]]:
        """Cosines and sines for `run`, of several kinds, there until the next call; see `TensorOps.rotation`."""

    def run(
        self,
        x: Array,
        layers: range,
        rotations: Sequence[tuple[Array, Array]],
        arena: Array,
        layouts: Sequence[BlockLayout],
        batch: AttentionBatch,
        heads: Sequence[HeadTable],
        final_norm: Array | None,
        besides: Besides = NOTHING,
        sum_over_ranks: SumOverRanks | None = None,
        wanted: Array | None = None,
    ) -> None:
        """Take the residual stream ``x [rows, hidden]`` through some ``layers``, in place. Rows go by adapters only
        where some layer has some.

        sum_over_ranks: of what attention and MLP add to it, where these are parts: see `DecoderLayer.can_be_a_part`
        wanted:         int64, ascending: which rows are wanted of what comes out, where they are the first ones then:
                        the last of the layers, which is the last one that keeps anything, computes no others once it
                        has attended; None: all

        rotations:      cosines and sines of the tokens' positions, ``[rows, head_dim / 2]`` each, of each kind
        layouts, heads: of all layers, and maybe of others behind them; the same objects from call to call
        final_norm:     weight of the RMS norm of what comes out of them, if there is one
        """
