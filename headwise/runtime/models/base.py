"""What the engine and the model runner need of a model, whatever its architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import HeadGroupPlan, Sharing, can_be_dealt
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.stages import deal_layers
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.experts import Routing
from headwise.kernels.state_layout import StateSizes
from headwise.runtime.models.compressed_config import CompressedConfig
from headwise.runtime.models.low_rank import AdaptedRows
from headwise.runtime.ops.base import KernelArray, Tensor

_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of some layers.

    scaling: the ``rope_scaling`` mapping of ``config.json``, or None
    share:   of a head's elements, the first ones, that are rotated; `inverse_frequencies` puts their pairs first
    is_long: LongRoPE for sequences longer than those that the model was first trained with
    is_none: nothing is rotated
    """

    theta: float
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0
    is_long: bool = False
    is_none: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts that stands for the MLP in some layers.

    layers:             those layers, ascending; the others have a dense MLP of `ModelConfig.intermediate_size`
    expert_size:        intermediate size of one expert
    num_shared_experts: experts that every token goes through besides its routed ones
    shared_expert_size: intermediate size of one of those; 0: that of a routed one
    norm_min:           least sum that a token's routing weights are divided by; None: they are not divided
    gated_shared_size:  intermediate size of what every token goes through as far as a gate of its own lets it; 0: none
    latent_size:        numbers of what routed experts are given of a token, and make; 0: the hidden size
    """

    layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    expert_size: int
    num_shared_experts: int
    norm_min: float | None
    shared_expert_size: int = field(default=0, kw_only=True)
    gated_shared_size: int = field(default=0, kw_only=True)
    latent_size: int = field(default=0, kw_only=True)

    @property
    def shared_size(self) -> int:
        """Intermediate size of all shared experts side by side, as checkpoints have them: as one MLP."""
        return self.num_shared_experts * (self.shared_expert_size or self.expert_size)

    @property
    def shared_parts(self) -> int:
        """As many experts of ``expert_size`` as that has room for; 1 where that is no whole number."""
        return 1 if self.shared_size % self.expert_size else self.shared_size // self.expert_size

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts, self.experts_per_token, self.norm_min)


@dataclass(frozen=True)
class StatesConfig:
    """Recurrent states that stand for keys and values in some layers.

    layers:  those layers, ascending
    members: that what each of them keeps has, over all ranks
    sizes:   of a member
    """

    layers: tuple[int, ...]
    members: int
    sizes: StateSizes


@dataclass(frozen=True)
class DeltaConfig(StatesConfig):
    """Gated delta-nets. A member is a key head and the value heads that share it."""


@dataclass(frozen=True)
class KdaConfig(StatesConfig):
    """Kimi Delta Attention. A member is a head; its decays, and its gates, are made of ``rank`` numbers of a token."""

    rank: int


@dataclass(frozen=True)
class SsmConfig(StatesConfig):
    """State space models (Mamba-2). A member is some heads of one group.

    groups:      whose heads share keys and queries; they have equally many members
    norm_groups: parts of what comes out of all heads that are normed, each by itself
    eps:         of that norm
    """

    groups: int
    norm_groups: int
    eps: float

    def group_of(self, member: int) -> int:
        """The group whose heads a member has."""
        return member * self.groups // self.members


@lru_cache(maxsize=64)  # each layer of a step asks for it
def _others(layers: frozenset[int], count: int) -> tuple[int, ...]:
    """Of so many layers, those that are not among these."""
    return tuple(layer for layer in range(count) if layer not in layers)


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses the tokens that a layer's latent attention sees (DSA).

    heads, head_dim: of the indexer (``index_n_heads``, ``index_head_dim``)
    top:             tokens that are chosen for a query, at most (``index_topk``)
    shared:          layers that have none, and see what the last one before them with one has chosen. Then keys of
                     indexers have caches of their own, beside those of latents
    """

    heads: int
    head_dim: int
    top: int
    shared: frozenset[int] = frozenset()

    def layers(self, count: int) -> tuple[int, ...]:
        """Of so many layers, those with an indexer."""
        return _others(self.shared, count)


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: sizes of what heads and latents are made of.

    rank:      numbers of a latent that keys and values are made of (``kv_lora_rank``)
    rotated:   numbers of a key that carry its position, which heads share (``qk_rope_head_dim``)
    plain:     those of a head's own key, without a position (``qk_nope_head_dim``)
    value_dim: of a head's value
    q_rank:    numbers that a token's queries are made of (``q_lora_rank``); None: of its whole hidden state
    indexer:   None: attention sees all tokens
    in_halves: of what is rotated, the elements ``(i, i + D / 2)`` turn together, not neighbours
    """

    rank: int
    rotated: int
    plain: int
    value_dim: int
    q_rank: int | None
    indexer: IndexerConfig | None = None
    in_halves: bool = False

    @property
    def width(self) -> int:
        """Numbers of a latent in the cache."""
        return self.rank + self.rotated

    def turning_halves(self) -> MlaConfig:
        """The same ``in_halves``."""
        return replace(self, in_halves=True)


@dataclass(frozen=True)
class TemperConfig:
    """Queries that count more the further behind they are.

    At position ``p`` they are multiplied with ``1 + factor * log(1 + floor((p + ahead) / step))``.

    layers: those whose queries are
    """

    factor: float
    step: float
    ahead: int
    layers: frozenset[int]


@dataclass(frozen=True)
class LayerHeads:
    """Keys and values of one layer.

    head_dim:    of a query, and of a key
    cache_layer: whose keys and values it attends to: its own, or those of an earlier one, which has such heads, too
    smaller_value: size of a value, where that is less than a key's; else 0
    """

    kv_heads: int
    head_dim: int
    cache_layer: int
    smaller_value: int = 0

    @property
    def value_dim(self) -> int:
        """Size of a value."""
        return self.smaller_value or self.head_dim

    @property
    def dims(self) -> tuple[int, int]:
        """Sizes of a key and of a value."""
        return self.head_dim, self.value_dim


@dataclass(frozen=True)
class EagleConfig:
    """A head beside the decoder that drafts (EAGLE-3).

    layer:           its geometry, as that of a decoder of one layer
    vocab_size:      tokens that it may draft
    taken:           layers of the decoder before each of which it is given the residual stream, ascending
    norms_residual:  whether what goes around its attention is normed, too
    """

    layer: ModelConfig
    vocab_size: int
    taken: tuple[int, ...]
    norms_residual: bool


@dataclass(frozen=True)
class ModelConfig:
    """A model's geometry, read from a Hugging Face ``config.json`` by its architecture's module.

    num_layers:  the decoder's, and behind them those that draft
    num_kv_heads: members that a layer with attention keeps: 1 with latents
    head_dim: of keys and values; with latents, of what is rotated
    layer_heads: ``[num_layers]``, in place of the former two where layers differ; else empty. See `heads_of`
    num_heads: of each layer; the least of any where ``query_heads [num_layers]`` are not empty. See `query_heads_of`
    policies: ``[num_layers][members]``, what each KV head may see, or that it is a state; none of layers that use
              another one's cache. Behind them those of caches that layers have besides, see `sides_of`
    ropes:    per layer
    attention_scale: factor on q.k; softcaps are 0 where there is none
    sink_logits:     whether every query head has learned the score of a sink, see `AttentionKernels.attend`
    chunk:           layers whose heads have a window of so many tokens see none before their own chunk of as many; 0: a
                     window is what its policy says
    mlp_gate:        whether MLPs, and experts, have a gate: their activation is of both, else of one product
    logit_scale:     factor on logits
    missing_for_images: what its images need that is not served, in words; empty: nothing
    image_token:     the control token that its chat template writes for an image; empty: no tower of its is served
    attention_bias:  of the projections of queries, keys and values; out_bias of that of attention's output
    draft_layers:    the last ones, 1 or none, which are not the decoder's: see `Model.draft`
    eagle:           the head that such a layer is of, where it is not of the model's own checkpoint
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_embeddings: bool
    policies: tuple[tuple[HeadPolicy, ...], ...]
    ropes: tuple[RopeConfig, ...]
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp_gate: bool = True
    sink_logits: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    compressed: CompressedConfig | None = None
    layer_heads: tuple[LayerHeads, ...] = ()
    query_heads: tuple[int, ...] = ()
    states: StatesConfig | None = None
    chunk: int = 0
    temper: TemperConfig | None = None
    logit_scale: float = 1.0
    missing_for_images: str = ""
    image_token: str = ""
    draft_layers: int = 0
    eagle: EagleConfig | None = None

    @property
    def decoder_layers(self) -> int:
        """Layers that each token goes through to be scored."""
        return self.num_layers - self.draft_layers

    def heads_of(self, layer: int) -> LayerHeads:
        """Keys and values of a layer."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return LayerHeads(self.num_kv_heads, self.head_dim, layer)

    def query_heads_of(self, layer: int) -> int:
        """Query heads of a layer, over all ranks."""
        return self.query_heads[layer] if self.query_heads else self.num_heads

    @property
    def cache_layers(self) -> int:
        """Caches of layers, and those beside them."""
        return len(self.policies)

    def sides_of(self, layer: int) -> tuple[int, ...]:
        """Numbers of the caches that a layer has besides: of rows and of entries (`CompressedConfig`), of keys of its
        indexer (`IndexerConfig.shared`), or none."""
        if layer in self._index_layers:
            return (self.num_layers + self._index_layers.index(layer),)
        sides = None if self.compressed is None else self.compressed.sides(layer)
        return () if sides is None else (sides.rows, sides.entries)

    def caches_of(self, layers: range) -> tuple[int, ...]:
        """Numbers of all caches of some layers, theirs first."""
        return tuple(dict.fromkeys([*layers, *(side for layer in layers for side in self.sides_of(layer))]))

    @property
    def _index_layers(self) -> tuple[int, ...]:
        """Layers with keys of an indexer beside latents, where others share it."""
        indexer = None if self.mla is None else self.mla.indexer
        return indexer.layers(self.num_layers) if indexer is not None and indexer.shared else ()

    @property
    def layer_of_caches(self) -> tuple[int, ...]:
        """``[cache_layers]``, the layer that has each: the first of several."""
        found = dict(enumerate(range(self.num_layers)))
        for layer in range(self.num_layers):
            for side in self.sides_of(layer):
                found.setdefault(side, layer)
        return tuple(found[cache] for cache in range(self.cache_layers))

    @property
    def last_kept(self) -> int:
        """The last layer that keeps anything: those behind it attend to what earlier ones keep."""
        return max(layer for layer in range(self.num_layers) if self.heads_of(layer).cache_layer == layer)

    def stages(self, count: int) -> tuple[range, ...]:
        """The layers of each of so many stages of a pipeline: see `deal_layers`. One that drafts is with the decoder's
        last one.

        Raises:
            ValueError: the model cannot have as many.
        """
        if count > 1 and self.undivided:
            raise ValueError(f"pipeline_parallel_size {count}: {self.undivided}; leave it out")
        used = [self.heads_of(layer).cache_layer for layer in range(self.decoder_layers)]
        if self._index_layers:  # what an indexer has chosen stays in its stage
            used = [max(each for each in self._index_layers if each <= layer) for layer in range(self.decoder_layers)]
        return deal_layers([*used, *[self.decoder_layers - 1] * self.draft_layers], count)

    def by_cache_layer(self, kept: Sequence[_Kept]) -> tuple[_Kept, ...]:
        """``[num_layers]``: of each layer, what ``kept [num_layers]`` says of the one whose cache it uses."""
        return tuple(kept[self.heads_of(layer).cache_layer] for layer in range(self.num_layers))

    def mlp_size(self, layer: int) -> int:
        """Intermediate size of a layer's dense MLP."""
        if self.eagle is not None and layer == self.decoder_layers:
            return self.eagle.layer.intermediate_size
        return self.intermediate_size

    def with_draft_layer(self, *, has_window: bool = False) -> ModelConfig:
        """The same with a layer that drafts, which is as the decoder's last one that attends to all tokens; or with
        ``has_window`` to a window, without experts."""
        rows, beside = enumerate(self.policies[: self.num_layers]), self.policies[self.num_layers :]
        alike = max(layer for layer, row in rows if row and all(each.is_full != has_window for each in row))
        moe, heads = self.moe, self.layer_heads
        if moe is not None and alike in moe.layers and not has_window:
            moe = replace(moe, layers=(*moe.layers, self.num_layers))
        return replace(
            self,
            num_layers=self.num_layers + 1,
            draft_layers=1,
            policies=(*self.policies[: self.num_layers], self.policies[alike], *beside, *beside[-1:]),
            ropes=(*self.ropes, self.ropes[alike]),
            moe=moe,
            layer_heads=(*heads, replace(heads[alike], cache_layer=self.num_layers)) if heads else (),
            query_heads=(*self.query_heads, self.query_heads[alike]) if self.query_heads else (),
        )

    @property
    def undivided(self) -> str:
        """Why its layers cannot be dealt to the stages of a pipeline, in words; empty: they can."""
        if self.compressed is not None:
            return "entries of several layers lie side by side"
        return "" if self.eagle is None else "draft_model drafts by what layers of all stages leave"

    @property
    def side_elements(self) -> int:
        """Numbers in matrices that a token is multiplied with beside those of attention, MLPs and LM head."""
        return 0

    @property
    def kv_head_counts(self) -> tuple[int, ...]:
        """KV heads of the layers that have attention, ascending: of each number one; none with latents."""
        if self.mla is not None or self.compressed is not None:
            return ()
        return tuple(sorted({self.heads_of(layer).kv_heads for layer in range(self.num_layers)}))

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Intermediate sizes that tensor parallelism splits over the ranks."""
        heads = () if self.eagle is None else (self.eagle.layer.intermediate_size,)
        if self.moe is None:
            return (self.intermediate_size, *heads)
        moe = self.moe
        sizes = (self.intermediate_size, moe.expert_size, moe.shared_expert_size, moe.gated_shared_size, *heads)
        return tuple(size for size in sizes if size)


def valid_tp_sizes(config: ModelConfig) -> list[int]:
    """Tensor-parallel sizes with which each rank has a query head and a part of every MLP, and that fit all KV heads.

    See `can_be_dealt`: they divide each number of KV heads, or are more. They divide the members of recurrent states.
    """
    members = 0 if config.states is None else config.states.members
    return [
        size
        for size in range(1, config.num_heads + 1)
        if not members % size
        and all(can_be_split(total, size) for total in config.mlp_sizes)
        and all(can_be_dealt(count, size) for count in config.kv_head_counts)
    ]


_SHOWN_SIZES = 32


def fitting_sizes(config: ModelConfig) -> str:
    """`valid_tp_sizes` for an error's line: all, or the first and how many more up to which."""
    sizes = valid_tp_sizes(config)
    first = ", ".join(map(str, sizes[:_SHOWN_SIZES]))
    more = len(sizes) - _SHOWN_SIZES
    return f"[{first}]" if more <= 0 else f"[{first}] and {more} more up to {sizes[-1]}"


_UNITS = (256, 128, 64, 32)
"""Columns of an MLP that stay together where ranks cannot have equally many: so many do groups of codes have."""

_EVEN = 8
"""With so many units a rank, none has over an eighth more than another."""


def can_be_split(total: int, ranks: int) -> bool:
    """Whether each rank can have a part of an MLP of intermediate size ``total``."""
    return total >= ranks


def split(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """From and to which of an MLP's ``total`` columns are a rank's: equally many, or whole units that differ by one.

    A unit is the largest of `_UNITS` of which each rank has `_EVEN`, or else the smallest; where there are not enough
    of those, a column.
    """
    unit = 1
    if total % ranks:
        dividing = [size for size in _UNITS if not total % size and total >= size * ranks]
        unit = next((size for size in dividing if total >= size * ranks * _EVEN), dividing[-1] if dividing else 1)
    units = total // unit
    return units * rank // ranks * unit, units * (rank + 1) // ranks * unit


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    rank, size: among the tensor-parallel ranks that have the same layers
    kv_heads: ``[num_layers]`` tuples of the global KV heads dealt to this rank, in ascending order, of the layer whose
              cache each uses; their query heads go with them, or a part of these where other ranks keep them, too
    sharing:  ``[num_layers]``, which part; empty: all of them are this rank's own
    stage:    of a pipeline, whose layers these are, those that draft included; None: there is one, of all layers

    Ranks may have different numbers of query heads where they share KV heads, but each of its own KV heads has as many.
    """

    rank: int
    size: int
    kv_heads: tuple[tuple[int, ...], ...]
    sharing: tuple[Sharing, ...] = ()
    stage: range | None = None

    @classmethod
    def of(cls, config: ModelConfig, plan: HeadGroupPlan, rank: int) -> Shard:
        """What the plan of a model deals to a rank, of all stages' ranks."""
        heads, sharing = config.by_cache_layer(plan.kv_heads(rank)), config.by_cache_layer(plan.sharing(rank))
        stage = plan.stages[rank // plan.tp_size] if len(plan.stages) > 1 else None
        return cls(rank % plan.tp_size, plan.tp_size, heads, sharing, stage)

    def layers(self, config: ModelConfig) -> range:
        """Layers of the decoder that are this rank's."""
        every = range(config.decoder_layers)
        return every if self.stage is None else every[self.stage.start : self.stage.stop]

    def is_first(self, config: ModelConfig) -> bool:
        """Whether tokens' embeddings enter here, not what an earlier stage made of them."""
        return self.layers(config).start == 0

    def is_last(self, config: ModelConfig) -> bool:
        """Whether what comes out of its layers is scored here, and not given to another stage."""
        return self.layers(config).stop == config.decoder_layers

    def query_heads(self, config: ModelConfig, layer: int) -> list[tuple[int, int]]:
        """Ranges of a layer's query heads that are this rank's, in the order of its KV heads."""
        share = config.query_heads_of(layer) // config.heads_of(layer).kv_heads
        part = (self.sharing[layer] if self.sharing else Sharing(0, 1)).of(share)
        return [(head * share + part.start, head * share + part.stop) for head in self.kv_heads[layer]]

    def columns(self, total: int) -> tuple[int, int]:
        """From and to which of an MLP's ``total`` columns are this rank's."""
        return split(total, self.rank, self.size)


Rotation = tuple[KernelArray, KernelArray]
"""Cosines and sines of the tokens' positions, as `TensorOps.rotation` gives them."""


Embeds = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Embeddings that stand for those of some tokens: which of a step's ``T``, ``[k]``; and they, ``[k, hidden]``."""


class AttentionLayer(Protocol):
    """Given to `Model.forward` by the model runner: rotates, writes what is kept, waits for loads, attends."""

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        """What this rank's heads see, ``[T, q_heads, size of a head's values]``: all rows, or those that are wanted, as
        of `Model.forward`.

        ``projected`` is what the model made of its input for this layer, as its attention variant takes it; see
        `headwise.runtime.models.attention`. Only the layer uses that, so it may rotate it in place.
        """


@dataclass(frozen=True)
class PagedCache:
    """The cache that a step's attention is over, for models that read and write it themselves.

    layouts, heads: of every layer of the rank's; the same objects in all steps
    wait_layer: to be called before a layer, where its cache is still being loaded; None: all is there
    """

    arena: KernelArray
    layouts: Sequence[BlockLayout]
    batch: AttentionBatch
    heads: Sequence[HeadTable]
    wait_layer: Callable[[int], None] | None


class PagedAttentionLayer(AttentionLayer, Protocol):
    """An `AttentionLayer` over a paged cache."""

    def paged(self) -> PagedCache | None:
        """The cache; None where only the call may compute with it."""

    def ending_at(self, rows: NDArray[np.int64]) -> PagedAttentionLayer:
        """The same for these rows' queries alone, of layers that write nothing."""

    def tokens(self) -> KernelArray | None:
        """int32 ``[1]``: rows of the step from this one on are padding, which nobody reads; None: there is none."""


class Model(ABC):
    """A decoder, or a stage of one: some of its layers. Built with its weights; holds nothing between calls but room
    for the next one's results."""

    config: ModelConfig
    adapted: AdaptedRows | None
    """Which rows of the next steps go by adapters; None: none."""

    @abstractmethod
    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Hidden states ``[T, hidden]`` after the final norm, the same on every rank, until the next call.

        Of another stage than the last the residual stream behind its layers, of all of the ``T`` in any case; another
        one than the first begins with that of the stage before, ``stream [T, hidden]``, which it may overwrite.

        ``wanted`` are the rows that come of it, ascending, and may be none: once all is written that layers keep,
        nothing is computed for others. With them ``attention`` is a `PagedAttentionLayer`. None: all of the ``T``. In
        a step that is recorded they are a kernel array, int32: which rows they are, is told when it runs.

        ``token_ids`` and ``positions`` are ``int32 [T]``, as `TensorOps.upload` gives them. ``embeds`` takes the place
        of what `Decoder.embedded` makes of these tokens; whatever else a model looks up, it looks up by ``token_ids``.
        """

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Hidden states that `drafted` scores the token behind the next one by, where `ModelConfig.draft_layers` is 1.

        Of ``hidden [T, hidden]``, as `for_drafts` gave them, or as this did of the tokens before, of tokens at
        ``positions``, and of the tokens ``following int32 [T]`` that come next. The layer keeps keys and values of its
        own, in the places of ``positions``. wanted: see `forward`

        Sources: multi-token prediction, DeepSeek-V3 (arXiv 2412.19437), section 2.2; EAGLE-3 (arXiv 2503.01840).
        """
        raise NotImplementedError("asked of models whose config has such a layer")

    def for_drafts(self, hidden: Tensor) -> Tensor:
        """What `draft` is to be given of all tokens that `forward` has just given these ``hidden`` states of; asked
        for once."""
        return hidden

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        """The likeliest token by each row of what `draft` made, and its score, as `TensorOps.greedy` has them; ``None``
        on other ranks than 0, which take part."""
        raise NotImplementedError("asked of models whose config has such a layer")

    @abstractmethod
    def scores(self, hidden: Tensor) -> Tensor | None:
        """Scores ``[rows, vocab_size]`` of hidden rows, on rank 0's device; ``None`` on other ranks, which take part.

        They are the logits before any cap, which leaves their order as it is.
        """

    def step_scores(self, hidden: Tensor) -> Tensor | None:
        """As `scores`, there until the next call: a step needs no new memory for them."""
        return self.scores(hidden)

    @abstractmethod
    def logits(self, hidden: Tensor) -> NDArray[np.float32] | None:
        """Logits ``[rows, vocab_size]`` of hidden rows, on rank 0's host; ``None`` on other ranks, which take part."""

    def capped(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits out of scores."""
        cap = np.float32(self.config.logit_softcap)
        return cap * np.tanh(scores / cap) if cap else scores
