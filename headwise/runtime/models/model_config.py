"""A model's geometry: what its parts are, and what each layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.stages import deal_layers
from headwise.runtime.models.compressed_config import CompressedConfig
from headwise.runtime.models.mla_config import MlaConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.position_config import AXES, RopeConfig, TemperConfig
from headwise.runtime.models.states_config import StatesConfig

_Kept = TypeVar("_Kept")


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
    both_ways:       ``[num_layers]``, whether in a layer an item's tokens see all of that item, also behind themselves;
                     empty: in none. See `sees_both_ways`
    missing_for_images: what its images need that is not served, in words; empty: nothing
    image_tokens:    the control tokens that stand for an image in a chat's text, and for a video; empty: it takes none,
                     or its tower is not served
    attention_bias:  of the projections of queries, keys and values; out_bias of that of attention's output
    draft_layers:    the last ones, 1 or none, which are not the decoder's: see `Model.draft`
    eagle:           the head that such a layer is of, where it is not of the model's own checkpoint
    embed_levels:    the first layers, as many, behind each of which something is added to an item's tokens, too, that
                     came with their embeddings
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
    both_ways: tuple[bool, ...] = ()
    missing_for_images: str = ""
    image_tokens: tuple[str, str] = ("", "")
    draft_layers: int = 0
    eagle: EagleConfig | None = None
    embed_levels: int = 0

    @property
    def axes(self) -> int:
        """Positions of a token: 3 where pairs are turned by several (M-RoPE), else 1."""
        return AXES if any(rope.axes for rope in self.ropes) else 1

    @property
    def embed_size(self) -> int:
        """Numbers of an item's embedding of one token: what the first layer gets, then what is added behind layers."""
        return self.hidden_size * (1 + self.embed_levels)

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

    def sees_both_ways(self, layer: int) -> bool:
        """Whether an item's tokens see all of it in a layer; one that drafts has not learned to."""
        return layer < len(self.both_ways) and self.both_ways[layer]

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
        return () if sides is None else (*sides.rows, sides.entries)

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
        return "" if self.eagle is None else "draft_model drafts by what layers of all stages leave"

    def in_stages(self, count: int) -> ModelConfig:
        """The same where no cache has what layers of several of so many stages keep.

        Raises:
            ValueError: as `stages`.
        """
        return self

    @property
    def stream_size(self) -> int:
        """Numbers of a token between layers."""
        return self.hidden_size

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
        experts = moe.expert_size, moe.shared_expert_size, moe.gated_shared_size, moe.image_expert_size
        return tuple(size for size in (self.intermediate_size, *experts, *heads) if size)
