"""The pre-norm decoder that Llama-like models share. A model overrides the parts that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import (
    NOTHING,
    Activation,
    Attention,
    Besides,
    DecoderLayer,
    DecoderShape,
    DenseLayer,
    FusedDecoder,
    GroupedQueries,
    LayerNorms,
    MixedLayer,
    is_gated,
)
from headwise.runtime.models.attention.wanted import ending_at
from headwise.runtime.models.base import (
    AttentionLayer,
    Embeds,
    Model,
    ModelConfig,
    PagedCache,
    RopeConfig,
    Rotation,
    Shard,
    can_be_split,
    fitting_sizes,
)
from headwise.runtime.models.layers import DenseMlp, Layer, Linear, QkvProjections, Residual
from headwise.runtime.models.low_rank import AdaptedRows, Adapter, RankAdapter, added_by
from headwise.runtime.models.rope import inverse_frequencies, rotation_scale
from headwise.runtime.models.weights import Prepare, Weights, make_anew
from headwise.runtime.ops.base import FusingOps, KernelArray, Tensor, TensorOps, Weight
from headwise.runtime.ops.comm import Collectives
from headwise.runtime.ops.quantised import GroupQuantised, Matrix


class Decoder(Model):
    """Attention and an MLP, each after an RMS norm and added to the residual stream.

    Tensor parallel: heads and MLP columns are split over the ranks, whose partial sums meet in two all-reduces a
    layer; the embedding is on every rank, the LM head's vocabulary is split and gathered on rank 0.
    """

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
        self._embedding = prepare(f"{self.prefix}embed_tokens.weight", self._load_embedding)
        self._layers: Sequence[Layer] = [self._load_layer(layer) for layer in range(config.num_layers)]
        self._final_norm = self._norm(f"{self.prefix}{self.final_norm_name}.weight", config.logit_scale)
        self._lm_head = self._load_lm_head()
        self.load_more()
        for adapter in self._adapters:
            adapter.check_used()
        self.adapted: AdaptedRows | None = None
        of_layers = [(rope, config.heads_of(layer).head_dim) for layer, rope in enumerate(config.ropes)]
        ropes = _distinct(of_layers)
        self._frequencies = [ops.upload(inverse_frequencies(rope, dim)) for rope, dim in ropes]
        scales = (rotation_scale(rope, dim) for rope, dim in ropes)
        self._rotation_scales = [None if scale is None else ops.upload(scale) for scale in scales]
        self.rotation_of = [ropes.index(rope) for rope in of_layers]
        del self._weights, self._prepare, self._adapters
        self.last_kept = config.last_kept
        self._fused = self._fuse()

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        """A checkpoint's weights by the names, and in the order of rows, that the rest of this class asks for."""
        return weights

    def _find_prefix(self, weights: Weights) -> str:
        """The prefix of the decoder's weight names: multimodal checkpoints nest the decoder."""
        for name in weights.names:
            if name.endswith("embed_tokens.weight"):
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
        at = f"{self.prefix}layers.{layer}."
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

    def load_norm(self, layer: int, norm: str, name: str) -> Tensor:
        """The weight of that name, which is one of a layer's `LayerNorms`, ``norm``."""
        return self._norm(name)

    def norms_of(self, layer: int) -> Mapping[str, str]:
        """Those of `norm_names` that a layer has."""
        return self.norm_names

    def load_attention(self, layer: int, at: str) -> Any:
        """The weights named ``at...`` of a layer's attention."""
        config, shard, heads = self.config, self._shard, self.config.heads_of(layer)
        dim, has_bias = heads.head_dim, config.attention_bias
        kv = [(head * dim, (head + 1) * dim) for head in shard.kv_heads[layer]]
        q = [(start * dim, stop * dim) for start, stop in shard.query_heads(config, layer)]
        query, *others = self.projections(layer)
        qkv = self._split_rows([(at + query, q), *((at + name, kv) for name in others)], has_bias)
        is_normed = bool({"query", "key"} & self.norms_of(layer).keys())
        adds_later = self.ops.leaves_biases and self.attends_to_projected and not is_normed
        return QkvProjections(
            qkv=replace(qkv, bias=None) if adds_later else qkv,
            out=self._split_columns(f"{at}o_proj", q, config.out_bias, self.adds_later(layer, "after_attention")),
            sink_logits=self._sink_logits(at, layer) if config.sink_logits else None,
            bias=qkv.bias if adds_later else None,
        )

    def adds_later(self, layer: int, norm: str) -> bool:
        """Whether the bias of what goes into the residual stream is added there: not if ``norm`` comes before."""
        return self.ops.leaves_biases and norm not in self.norms_of(layer)

    def projections(self, layer: int) -> Sequence[str]:
        """Hugging Face's names of what queries, and keys and values, are projected by."""
        return "q_proj", "k_proj", "v_proj"

    def _sink_logits(self, at: str, layer: int) -> KernelArray:
        every = self._weights.tensor(f"{at}sinks")
        if every.shape != (self.config.num_heads,):
            raise ModelError(f"{at}sinks has the shape {every.shape}, config.json says {self.config.num_heads} heads")
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
        where = [(name, *part) for name, ranges in parts for part in _merged(ranges)]
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
        parts = _merged(ranges)
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

    # ---- computation ----

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        cache = self.fused_over(attention)
        if cache is not None:
            return self._run_fused(token_ids, positions, embeds, cache, wanted)
        taken, wanted = self.taken_last(wanted)
        rotations, x = self.rotations(positions), self.embedded(token_ids, embeds)
        norms = [layer.norms.before_attention for layer in self._layers]
        residual = Residual(x, x if norms[0] is None else self.norm(x, norms[0]))
        for index, (layer, next_norm) in enumerate(zip(self._layers, [*norms[1:], self._final_norm], strict=True)):
            rows = wanted if index == len(self._layers) - 1 else None
            attended = self.attend(index, layer, residual.normed, rotations[self.rotation_of[index]], attention, rows)
            if rows is not None and not len(rows):
                return residual.x[:0]
            if rows is not None:
                residual = Residual(*(self.ops.take_rows(each, rows) for each in residual))
            residual = self.behind(layer, residual, attended, next_norm)
        return self.rows_of(residual.normed, taken)

    def taken_last(self, wanted: NDArray[np.int64] | None) -> tuple[NDArray[np.int64] | None, ...]:
        """Of rows that are wanted of layers which are computed one by one, those that are taken behind all of them, and
        those that are as soon as others are not needed. What goes by adapters is told which of all rows do."""
        return (None, wanted) if self.adapted is None else (wanted, None)

    def rows_of(self, x: Tensor, taken: NDArray[np.int64] | None) -> Tensor:
        """These rows of ``x``; None: all."""
        if taken is None:
            return x
        return self.ops.take_rows(x, taken) if len(taken) else x[:0]

    def behind(self, layer: Layer, before: Residual, attended: Tensor, next_norm: Tensor | None) -> Residual:
        """The residual stream behind a layer, normed with ``next_norm``; before: that before it, of the same rows."""
        if layer.mlp is None:
            return self.add_reduced(before.x, attended, next_norm, layer.attention.out.added)
        return self.after_mlp(layer, self.after_attention(layer, before.x, attended), next_norm)

    def rotations(self, positions: KernelArray) -> list[Rotation]:
        """Of the tokens' positions, one of each kind; ``rotation_of`` says which each layer has."""
        angles = zip(self._frequencies, self._rotation_scales, strict=True)
        return [self.ops.rotation(positions, inverse, scale) for inverse, scale in angles]

    def _fuse(self) -> FusedDecoder | None:
        """All layers as one, where the operations can, and nothing is to be done between them that these cannot."""
        config, ops = self.config, self.ops
        if not isinstance(ops, FusingOps):
            return None
        found = [self.fusible(index, layer) for index, layer in enumerate(self._layers)]
        layers = [layer for layer in found if layer is not None]
        is_part = self._shard.size > 1
        if len(layers) < len(found) or (is_part and not all(layer.can_be_a_part for layer in layers)):
            return None
        scale, softcap = config.attention_scale, config.attention_softcap
        return ops.fuse(layers, DecoderShape(self.activation, scale, softcap, config.rms_norm_eps))

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        """A layer as one of a fused decoder's; None: it cannot be."""
        attention = self.fusible_attention(index, layer.attention)
        mlp = None if layer.mlp is None else self.fusible_mlp(layer.mlp)
        if attention is None or (mlp is None and layer.mlp is not None):
            return None
        return DecoderLayer(attention, mlp, layer.norms)

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        """What `load_attention` made, as a part of a fused layer; None: it cannot be."""
        if not isinstance(attention, QkvProjections):
            return None
        own = self._shard.query_heads(self.config, index)
        return GroupedQueries(
            qkv=attention.qkv.weight,
            out=attention.out.weight,
            q_heads=sum(stop - start for start, stop in own),
            kv_heads=len(own),
            head_dim=self.config.heads_of(index).head_dim,
            rotation=self.rotation_of[index],
            qkv_bias=attention.qkv.bias,
            out_bias=attention.out.bias,
            sink_logits=attention.sink_logits,
            qkv_adapters=attention.qkv.adapters,
            out_adapters=attention.out.adapters,
        )

    def fusible_mlp(self, mlp: Any) -> DenseLayer | MixedLayer | None:
        """What `load_mlp` made, as a part of a fused layer; None: it cannot be."""
        if not isinstance(mlp, DenseMlp):
            return None
        into, down = mlp.into, mlp.down
        return DenseLayer(into.weight, down.weight, into.bias, down.bias, into.adapters, down.adapters)

    def fused_over(self, attention: AttentionLayer) -> PagedCache | None:
        """The cache that fused layers take a step over; None: the step goes layer by layer."""
        cache = _cache_of(attention) if self._fused else None
        return cache if cache and self._fused and self._fused.takes(cache.batch, cache.layouts) else None

    def _run_fused(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        embeds: Embeds | None,
        cache: PagedCache,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """All layers and the final norm in one call; layer by layer if the cache comes so."""
        fused = self._fused
        assert fused is not None, "asked of `fused_over`"
        x = fused.embedded(self._embedding, token_ids, self.embedding_scale)
        if embeds is not None:
            self.ops.put_rows(x, *embeds)
        x = self.entering(x)
        besides, layers = self.besides(token_ids, positions, x, cache), range(len(self._layers))
        if self.adapted is not None:
            besides = replace(besides, adapters=self.adapted.adapters)
        if wanted is None:
            self._run_layers(fused, layers, x, positions, cache, besides)
            return x
        keeping = layers[: self.last_kept + 1]
        self._run_layers(fused, keeping, x, positions, cache, besides, wanted)
        x, others = x[: len(wanted)], layers[len(keeping) :]
        if others and len(wanted):
            cache = replace(cache, batch=ending_at(cache.batch, wanted, self.ops))
            self._run_layers(fused, others, x, positions[wanted], cache, besides.of_rows(wanted))
        return x

    def _run_layers(
        self,
        fused: FusedDecoder,
        layers: range,
        x: Tensor,
        positions: KernelArray,
        cache: PagedCache,
        besides: Besides,
        wanted: NDArray[np.int64] | None = None,
    ) -> None:
        """Take ``x`` through some layers in place, and through the final norm behind the last. wanted: see
        `FusedDecoder.run`"""
        rotations = fused.rotations(positions, self._frequencies, self._rotation_scales)
        step = 1 if cache.wait_layer else len(layers)
        for some in (layers[first : first + step] for first in range(0, len(layers), step)):
            if cache.wait_layer:
                cache.wait_layer(some.start)
            fused.run(
                x, some, rotations, cache.arena, cache.layouts, cache.batch, cache.heads,
                self._final_norm if some.stop == len(self._layers) else None, besides,
                sum_over_ranks=self.reduce if self._shard.size > 1 else None,
                wanted=wanted if some.stop == layers.stop else None,
            )  # fmt: skip

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        """What fused layers are told of a step besides, of tokens whose embeddings are ``x [T, hidden]``."""
        return NOTHING

    def embedded(self, token_ids: KernelArray, embeds: Embeds | None) -> Tensor:
        """The tokens' embeddings ``[T, hidden]``, with those that are given in their places."""
        x = self.ops.embedding(self._embedding, token_ids, self.embedding_scale)
        if embeds is not None:
            self.ops.put_rows(x, *embeds)
        return self.entering(x)

    def entering(self, x: Tensor) -> Tensor:
        """What the residual stream begins with, of the tokens' embeddings ``x [T, hidden]``, which it may overwrite."""
        return x

    @property
    def embedding_scale(self) -> float:
        """What the tokens' embeddings are multiplied with."""
        return 1.0

    def after_attention(self, layer: Layer, x: Tensor, attended: Tensor) -> Residual:
        """The residual stream ``x`` after attention, normed for the MLP; ``attended`` is this rank's part."""
        norm = layer.norms.after_attention
        if norm is None:
            return self.add_reduced(x, attended, layer.norms.before_mlp, layer.attention.out.added)
        return self.add(x, self.norm(self.reduce(attended), norm), layer.norms.before_mlp)

    def after_mlp(self, layer: Layer, residual: Residual, next_norm: Tensor | None) -> Residual:
        """The residual stream after the MLP, normed with ``next_norm``, the norm weight of the next layer, if any."""
        norm = layer.norms.after_mlp
        if norm is None:
            bias = layer.mlp.down.added if isinstance(layer.mlp, DenseMlp) else None
            return self.add_reduced(residual.x, self.feed_forward(layer.mlp, residual.normed), next_norm, bias)
        return self.add(residual.x, self.norm(self.mlp(layer, residual.normed), norm), next_norm)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps)

    def add(self, x: Tensor, addend: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Residual:
        """The sum, with a bias if there is one, and its norm with ``weight``; without one, itself."""
        if weight is None:
            total = x + addend if bias is None else x + (addend + bias)
            return Residual(total, total)
        return Residual(*self.ops.add_rms_norm(x, addend, weight, self.config.rms_norm_eps, bias))

    def add_reduced(self, x: Tensor, partial: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Residual:
        """`add` of the sum of ``partial`` over the ranks; ``partial`` is the caller's no more."""
        if weight is None:
            return self.add(x, self.reduce(partial), None, bias)
        added = self._collectives.add_rms_norm(partial, x, weight, self.config.rms_norm_eps, bias)
        return self.add(x, self.reduce(partial), weight, bias) if added is None else Residual(*added)

    def attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: Rotation,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """This rank's part of the self attention of the normed ``x [T, hidden]``, to be summed over the ranks: all
        rows, or those that are wanted."""
        query, key, value = self.query_key_value(index, layer, x)
        weights = layer.attention
        more = () if weights.bias is None else (weights.bias,)
        heads = attention(index, query, key, value, rotation, weights.sink_logits, *more, wanted=wanted)
        return self.projected(self.gated(layer, x, heads, wanted), weights.out)

    def gated(self, layer: Layer, x: Tensor, heads: Tensor, wanted: NDArray[np.int64] | None) -> Tensor:
        """What heads have seen, of those rows of ``x`` that are wanted, as far as it counts."""
        return heads

    def projected(self, heads: Tensor, out: Linear) -> Tensor:
        """What ``out`` makes of what heads have seen, ``[rows, ...]``; of nothing, nothing."""
        rows = heads.shape[0]
        return self._linear(heads.reshape([rows, -1]), out) if rows else heads

    def query_key_value(self, index: int, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries ``[T, q_heads, D]``, keys and values ``[T, kv_heads, D]``, as they are before they are rotated."""
        dim, kv_heads = self.config.heads_of(index).head_dim, len(self._shard.kv_heads[index])
        qkv = self._linear(x, layer.attention.qkv).reshape([x.shape[0], -1, dim])
        q_heads = qkv.shape[1] - 2 * kv_heads
        query, key = self.normed_heads(layer, qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads])
        return query, key, qkv[:, q_heads + kv_heads :]

    def normed_heads(self, layer: Layer, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed per head where the model does."""
        norms = layer.norms
        return (
            query if norms.query is None else self.norm(query, norms.query),
            key if norms.key is None else self.norm(key, norms.key),
        )

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """The MLP of the normed ``x [T, hidden]``, summed over the ranks."""
        return self.reduce(self.feed_forward(layer.mlp, x))

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        """This rank's part of what `load_mlp` made, for ``x [T, hidden]``."""
        into = mlp.into
        if self.adapted is not None and into.adapters is not None:
            given = into.adapters.add(self.ops.unactivated_linear(x, into.weight, into.bias), x, self.adapted)
            return self._linear(self.ops.activated(given, self.activation), mlp.down)
        return self._linear(self.ops.activated_linear(x, into.weight, into.bias, self.activation), mlp.down)

    def scores(self, hidden: Tensor) -> Tensor | None:
        return self._collectives.gather(self._linear(hidden, self._lm_head))

    def step_scores(self, hidden: Tensor) -> Tensor | None:
        if self._fused is None:
            return self.scores(hidden)
        scores = self._fused.scores(hidden, self._lm_head.weight)
        return self._collectives.gather(scores) if self._shard.size > 1 else scores

    def logits(self, hidden: Tensor) -> NDArray[np.float32] | None:
        scores = self.scores(hidden)
        return None if scores is None else self.capped(self.ops.numpy(scores))

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of a partial result over the ranks; ``x`` is the caller's no more."""
        return self._collectives.all_reduce(x)

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        y = self.ops.linear(x, linear.weight, linear.bias)
        return y if self.adapted is None or linear.adapters is None else linear.adapters.add(y, x, self.adapted)


def _cache_of(attention: AttentionLayer) -> PagedCache | None:
    """The cache of a `PagedAttentionLayer` that shows it. To ask whether it is one would take longer than the rest."""
    shown: Callable[[], PagedCache | None] | None = getattr(attention, "paged", None)
    return None if shown is None else shown()


def _distinct(ropes: Sequence[tuple[RopeConfig, int]]) -> list[tuple[RopeConfig, int]]:
    found: list[tuple[RopeConfig, int]] = []
    for rope in ropes:
        if rope not in found:
            found.append(rope)
    return found


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
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
