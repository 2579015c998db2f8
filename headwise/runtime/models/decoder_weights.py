"""What decoders load, one rank's part of it: by Hugging Face's names, which a model overrides where its own differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import Activation, LayerNorms, is_gated
from headwise.runtime.models.base import Model
from headwise.runtime.models.drafting import DraftingLayer, DraftingNames
from headwise.runtime.models.layers import DenseMlp, Layer, Linear, QkvProjections
from headwise.runtime.models.low_rank import AdaptedRows, Adapter, RankAdapter, added_by
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import rotation_scale, turning
from headwise.runtime.models.shard import Shard, can_be_split, fitting_sizes
from headwise.runtime.models.weights import Prepare, Weights, make_anew
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight
from headwise.runtime.ops.comm import Collectives
from headwise.runtime.ops.quantised import GroupQuantised, Matrix


class DecoderWeights(Model):
    """The weights of `headwise.runtime.models.decoder.Decoder`."""

    prefix = "model."
    norm_names: ClassVar[Mapping[str, str]] = {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    }
    """Those of `LayerNorms` that the model has, by their Hugging Face names."""
    final_norm_name: ClassVar[str] = "norm"
    mlp_name: ClassVar[str] = "mlp"
    mlp_parts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    """Hugging Face's names of what stands for a layer's MLP, and of its gate, up and down projections; a gate's is not
    asked for where `activation` has none."""
    attends_to_projected: ClassVar[bool] = True
    """Whether queries, keys and values go to attention as they are projected, but for norms of `norm_names`."""
    drafting_names: ClassVar[DraftingNames | None] = None
    """Of the layer that drafts; None: no checkpoint has one, or none is served."""
    activation: Activation = "silu"
    norm_offset = 0.0
    """Added to every norm weight: 1 where a model stores it as its distance from 1."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: TensorOps,
        collectives: Collectives,
        shard: Shard,
        prepare: Prepare = make_anew,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        undivided = next((size for size in config.mlp_sizes if not can_be_split(size, shard.size)), None)
        if undivided is not None:
            raise ModelError(
                f"tp_size {shard.size} is too much for the model's MLP size, {undivided}; sizes that fit: "
                f"{fitting_sizes(config)}"
            )
        self.config = config
        self.ops = ops
        self._collectives = collectives
        self._shard = shard
        self._weights, self._prepare = self.view(weights), prepare
        self.prefix = self._find_prefix(weights)
        self._adapters = [RankAdapter(each, self.prefix, self.view) for each in adapters]
        self._places, self._is_last = shard.layers(config), shard.is_last(config)
        is_embedded = shard.is_first(config) or (self._is_last and (config.tie_embeddings or config.draft_layers))
        self._embedding: Weight = None
        if is_embedded:
            self._embedding = prepare(f"{self.prefix}embed_tokens.weight", self._load_embedding)
        self._layers: Sequence[Layer] = [self._load_layer(layer) for layer in self._places]
        self._final_norm: Tensor | None = None
        if self._is_last:
            self._final_norm = self._norm(f"{self.prefix}{self.final_norm_name}.weight", config.logit_scale)
            self._lm_head = self._load_lm_head()
        self.load_more()
        elsewhere = [f"layers.{layer}." for layer in range(config.decoder_layers) if layer not in self._places]
        for adapter in self._adapters:
            adapter.check_used(elsewhere)
        self._is_adapted = any(adapter.is_used for adapter in self._adapters)
        self._adapters = []  # they are of the decoder
        has_drafting = config.draft_layers and config.eagle is None and self._is_last
        self._drafting = self._load_drafting() if has_drafting else None
        self.adapted: AdaptedRows | None = None
        of_layers = [(rope, config.heads_of(layer).head_dim) for layer, rope in enumerate(config.ropes)]
        ropes = _distinct(of_layers)
        self._frequencies = [ops.upload(turning(rope, dim)) for rope, dim in ropes]
        scales = (rotation_scale(rope, dim) for rope, dim in ropes)
        self._rotation_scales = [None if scale is None else ops.upload(scale) for scale in scales]
        self.rotation_of = [ropes.index(rope) for rope in of_layers]
        del self._weights, self._prepare, self._adapters
        self.last_kept = config.last_kept

    def view(self, weights: Weights) -> Weights:
        """A checkpoint's weights by the names, and in the order of rows, that the rest of this class asks for."""
        return weights

    def _find_prefix(self, weights: Weights) -> str:
        """The prefix of the decoder's weight names: multimodal checkpoints nest the decoder."""
        for name in weights.names:
            if name.endswith("embed_tokens.weight") and ".layers." not in name:  # a layer that drafts may have a copy
                return name.removesuffix("embed_tokens.weight")
        raise ModelError("the weights have no 'embed_tokens.weight': this is not a decoder's checkpoint")

    def _load_embedding(self) -> Weight:
        name, expected = f"{self.prefix}embed_tokens.weight", (self.config.vocab_size, self.config.hidden_size)
        kept = self._weights.kept_rows(name, 0, expected[0])
        table = self._weights.tensor(name) if kept is None else kept
        if table.shape != expected:
            raise ModelError(
                f"the embedding has the shape {table.shape}, config.json says {expected}: weights and config.json "
                "do not belong together"
            )
        return self.ops.embedding_table(table)

    def _norm(self, name: str, factor: float = 1.0) -> Tensor:
        weight = self._weights.tensor(name)
        weight = weight + np.float32(self.norm_offset) if self.norm_offset else weight
        return self.ops.norm_weight(weight if factor == 1.0 else weight * np.float32(factor))

    def _load_layer(self, layer: int) -> Layer:
        at = self._layer_at(layer)
        return Layer(
            attention=self.load_attention(layer, f"{at}self_attn."),
            mlp=self.load_mlp(layer, f"{at}{self.mlp_name}."),
            norms=LayerNorms(
                **{
                    norm: self.load_norm(layer, norm, f"{at}{name}.weight")
                    for norm, name in self.norms_of(layer).items()
                }
            ),
        )

    def _layer_at(self, layer: int) -> str:
        """What names of a layer's weights begin with."""
        names = self.drafting_names
        if names is not None and layer == self.config.decoder_layers:
            return names.of(names.layer, self.prefix, layer)
        return f"{self.prefix}layers.{layer}."

    def _load_drafting(self) -> DraftingLayer:
        names, index = self.drafting_names, self.config.decoder_layers
        assert names is not None, "its config has such a layer"

        def named(name: str) -> str:
            return names.of(name, self.prefix, index)

        join, hidden = named(names.join), self.config.hidden_size
        of_embedding, of_hidden = (self._inputs_of(join, start, start + hidden) for start in (0, hidden))
        if names.has_hidden_first:
            of_embedding, of_hidden = of_hidden, of_embedding
        return DraftingLayer(
            embedding_norm=self._norm(f"{named(names.embedding_norm)}.weight"),
            hidden_norm=self._norm(f"{named(names.hidden_norm)}.weight"),
            of_embedding=of_embedding,
            of_hidden=of_hidden,
            layer=self._load_layer(index),
            final_norm=self._norm(f"{named(names.final_norm)}.weight", self.config.logit_scale),
        )

    def _inputs_of(self, name: str, start: int, stop: int) -> Linear:
        made_of, expected = f"{name}.weight[:, {start}:{stop}]", (self.config.hidden_size, stop - start)

        def weight() -> Weight:
            part = self._columns(f"{name}.weight", [(start, stop)])
            if part.shape != expected:
                raise ModelError(
                    f"{made_of} has the shape {part.shape}, config.json says {expected}: weights and config.json do "
                    "not belong together"
                )
            return self.ops.linear_weight(part)

        return Linear(self._prepare(made_of, weight))

    def load_norm(self, layer: int, norm: str, name: str) -> Tensor:
        """The weight of that name, which is one of a layer's `LayerNorms`, ``norm``."""
        return self._norm(name)

    def norms_of(self, layer: int) -> Mapping[str, str]:
        """Those of `norm_names` that a layer has."""
        return self.norm_names

    def load_attention(self, layer: int, at: str) -> Any:
        """The weights named ``at...`` of a layer's attention."""
        config, shard, dims = self.config, self._shard, self.config.heads_of(layer).dims
        q, seen = ([(start * dim, stop * dim) for start, stop in shard.query_heads(config, layer)] for dim in dims)
        keys, values = ([(head * dim, (head + 1) * dim) for head in shard.kv_heads[layer]] for dim in dims)
        rows = zip(self.projections(layer), (q, keys, values), strict=False)  # the last ones may have no projection
        qkv = self._split_rows([(at + name, ranges) for name, ranges in rows], config.attention_bias)
        is_normed = bool({"query", "key"} & self.norms_of(layer).keys())
        adds_later = self.ops.leaves_biases and self.attends_to_projected and not is_normed
        return QkvProjections(
            qkv=replace(qkv, bias=None) if adds_later else qkv,
            out=self._split_columns(f"{at}o_proj", seen, config.out_bias, self.adds_later(layer, "after_attention")),
            sink_logits=self._sink_logits(at, layer) if config.sink_logits else None,
            bias=qkv.bias if adds_later else None,
        )

    def adds_later(self, layer: int, norm: str) -> bool:
        """Whether the bias of what goes into the residual stream is added there: not if ``norm`` comes before."""
        return self.ops.leaves_biases and norm not in self.norms_of(layer)

    def projections(self, layer: int) -> Sequence[str]:
        """Hugging Face's names of what queries, and keys and values, are projected by."""
        return "q_proj", "k_proj", "v_proj"

    def _sink_logits(self, at: str, layer: int) -> KernelArray | None:
        """None: this layer has none."""
        every = self._weights.tensor(f"{at}sinks")
        heads = self.config.query_heads_of(layer)
        if every.shape != (heads,):
            raise ModelError(f"{at}sinks has the shape {every.shape}, config.json says {heads} heads")
        own = [every[start:stop] for start, stop in self._shard.query_heads(self.config, layer)]
        return self.ops.upload(np.concatenate(own, dtype=np.float32))

    def load_mlp(self, layer: int, at: str) -> Any:
        """The weights named ``at...`` that stand for a layer's MLP; None: it has none, nor a norm before it."""
        return self.dense_mlp(at, self.config.mlp_size(layer), adds_later=self.adds_later(layer, "after_mlp"))

    def load_more(self) -> None:
        """Load the weights that a model has beside its embedding, layers, last norm and LM head."""

    def dense_mlp(self, at: str, size: int, experts: int = 1, adds_later: bool = False) -> DenseMlp:
        """This rank's part of an MLP of intermediate size ``size``.

        experts: that it is made of, side by side: the part is as large as those of so many
        adds_later: see `Linear.added`
        """
        shard, has_bias, one = self._shard, self.config.mlp_bias, size // experts
        start, stop = shard.columns(one)
        mine = [(expert * one + start, expert * one + stop) for expert in range(experts)]
        if not one % shard.size:
            mine = [shard.columns(size)]
        *into, down = (at + name for name in self.mlp_parts)
        gated = is_gated(self.activation)
        return DenseMlp(
            into=self._split_rows([(name, mine) for name in (into if gated else into[1:])], has_bias, gated=gated),
            down=self._split_columns(down, mine, has_bias, adds_later),
        )

    def _split_rows(
        self, parts: list[tuple[str, list[tuple[int, int]]]], has_bias: bool, gated: bool = False
    ) -> Linear:
        """Output rows of several projections as one weight: column parallel."""
        ops, source = self.ops, self._weights
        where = [(name, *part) for name, ranges in parts for part in merged(ranges)]
        make_weight, make_bias = (ops.gated_weight, ops.gated_bias) if gated else (ops.linear_weight, ops.linear_bias)
        made_of = " + ".join(f"{name}.weight[{start}:{stop}]" for name, start, stop in where)
        weight = self._prepare(made_of, lambda: make_weight(self._rows(where)))
        bias = _join([source.rows(f"{name}.bias", start, stop) for name, start, stop in where], 0) if has_bias else None
        adapters = added_by([each.of_rows(parts, self.config.hidden_size) for each in self._adapters], ops, gated)
        return Linear(weight, None if bias is None else make_bias(bias), adapters=adapters)

    def _rows(self, where: list[tuple[str, int, int]]) -> Matrix:
        source = self._weights
        kept = _whole([source.kept_rows(f"{name}.weight", start, stop) for name, start, stop in where], 0)
        if kept is not None:
            return kept
        return _join([source.rows(f"{name}.weight", start, stop) for name, start, stop in where], 0)

    def _split_columns(
        self, name: str, ranges: list[tuple[int, int]], has_bias: bool, adds_later: bool = False
    ) -> Linear:
        """Input columns of a projection: row parallel. The bias is added once: by rank 0, or as `Linear.added`."""
        parts = merged(ranges)
        made_of = " + ".join(f"{name}.weight[:, {start}:{stop}]" for start, stop in parts)
        weight = self._prepare(made_of, lambda: self.ops.linear_weight(self._columns(f"{name}.weight", parts)))
        pairs = [each.of_columns(name, parts, self.config.hidden_size) for each in self._adapters]
        adapters = added_by(pairs, self.ops)
        if not has_bias or (self._shard.rank and not adds_later):
            return Linear(weight, adapters=adapters)
        bias = self.ops.linear_bias(self._weights.tensor(f"{name}.bias"))
        return Linear(weight, added=bias, adapters=adapters) if adds_later else Linear(weight, bias, adapters=adapters)

    def _columns(self, name: str, parts: list[tuple[int, int]]) -> Matrix:
        source = self._weights
        kept = _whole([source.kept_columns(name, start, stop) for start, stop in parts], 1)
        return _join([source.columns(name, *part) for part in parts], 1) if kept is None else kept

    def _load_lm_head(self) -> Linear:
        start, stop = (self.config.vocab_size * r // self._shard.size for r in (self._shard.rank, self._shard.rank + 1))
        if self.config.tie_embeddings:
            return Linear(self.ops.tied_weight(self._embedding, start, stop))
        return self._split_rows([(self._lm_head_name(), [(start, stop)])], has_bias=False)

    def _lm_head_name(self) -> str:
        """As checkpoints have it, without ``.weight``."""
        name = next((name for name in self._weights.names if name.endswith("lm_head.weight")), None)
        if name is None:
            raise ModelError("the weights have no 'lm_head.weight', and config.json does not tie it to the embedding")
        return name.removesuffix(".weight")


def _distinct(ropes: Sequence[tuple[RopeConfig, int]]) -> list[tuple[RopeConfig, int]]:
    found: list[tuple[RopeConfig, int]] = []
    for rope in ropes:
        if rope not in found:
            found.append(rope)
    return found


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges, so that whole tensors are read (and shared) as a whole."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _whole(parts: Sequence[Matrix | None], axis: int) -> Matrix | None:
    """Parts that are all kept in the same way, as one; None if one of them is not."""
    quantised = [part for part in parts if isinstance(part, GroupQuantised)]
    if len(quantised) == len(parts):
        return GroupQuantised.concatenate(quantised, axis)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return _join(arrays, axis) if len(arrays) == len(parts) else None


def _join(parts: list[NDArray[Any]], axis: int) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
