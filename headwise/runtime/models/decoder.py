"""The pre-norm decoder that Llama-like models share. A model overrides the parts that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import (
    NOTHING,
    Attention,
    Besides,
    DecoderLayer,
    DecoderShape,
    DenseLayer,
    FusedDecoder,
    GroupedQueries,
    MixedLayer,
)
from headwise.runtime.models.attention.wanted import ending_at
from headwise.runtime.models.base import AttentionLayer, Embeds, PagedCache, Rotation
from headwise.runtime.models.decoder_weights import DecoderWeights
from headwise.runtime.models.drafting import DraftHead
from headwise.runtime.models.layers import DenseMlp, Layer, Linear, QkvProjections, Residual
from headwise.runtime.models.low_rank import Adapter
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import Prepare, Weights, make_anew
from headwise.runtime.ops.base import FusingOps, KernelArray, Tensor, TensorOps, Weight
from headwise.runtime.ops.comm import Collectives


class Decoder(DecoderWeights):
    """Attention and an MLP, each after an RMS norm and added to the residual stream.

    Tensor parallel: heads and MLP columns are split over the ranks, whose partial sums meet in two all-reduces a
    layer; the embedding is on every rank, the LM head's vocabulary is split and gathered on rank 0.

    Layers are known by their places in the whole model, also where a stage of a pipeline has some of them. Fused ones
    are numbered from its first on.
    """

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
        super().__init__(config, weights, ops, collectives, shard, prepare, adapters)
        self._fused = self._fuse()
        self.head: DraftHead | None = None

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        wanted = wanted if self._is_last else None
        cache = self.fused_over(attention)
        if cache is not None:
            return self._run_fused(token_ids, positions, embeds, cache, wanted, stream)
        taken, wanted = self.taken_last(wanted)
        rotations, x = self.rotations(positions), self.embedded(token_ids, embeds) if stream is None else stream
        norms = [layer.norms.before_attention for layer in self._layers]
        residual = Residual(x, x if norms[0] is None else self.norm(x, norms[0]))
        each = zip(self._places, self._layers, [*norms[1:], self._final_norm], strict=True)
        for index, layer, next_norm in each:
            rows = wanted if index == self._places[-1] else None
            self._before(index, residual.x)
            residual = self._through(index, layer, residual, rotations, attention, rows, next_norm)
            if self._add_level(index, embeds, residual.x) and next_norm is not None:
                residual = Residual(residual.x, self.norm(residual.x, next_norm))
        return self.rows_of(residual.normed, taken)

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        if self.head is not None:
            return self.head.draft(following, positions, hidden, attention, wanted, embeds)
        drafting, index = self._drafting, self.config.decoder_layers
        assert drafting is not None, "asked of models that have it"
        before = self._linear(self.norm(hidden, drafting.hidden_norm), drafting.of_hidden)  # `hidden` is gone then
        embedding = self.ops.embedding(self._embedding, following, self.embedding_scale)
        self._put(embedding, embeds)
        x = before + self._linear(self.norm(embedding, drafting.embedding_norm), drafting.of_embedding)
        cache = self.fused_over(attention)
        if cache is not None and self._fused is not None:
            besides = self.besides(following, positions, x, cache)
            own = index - self._places.start
            self._run_layers(self._fused, range(own, own + 1), x, positions, cache, besides, wanted)
            return x if wanted is None else x[: len(wanted)]
        norm = drafting.layer.norms.before_attention
        residual = Residual(x, x if norm is None else self.norm(x, norm))
        rotations = self.rotations(positions)
        return self._through(index, drafting.layer, residual, rotations, attention, wanted, drafting.final_norm).normed

    def draft_by(self, make: Callable[[Weight], DraftHead]) -> None:
        """Have a head draft that is made with this decoder's embedding, if it has none of its own."""
        self.head = make(self._embedding)

    def _before(self, index: int, x: Tensor) -> None:
        """Gives the residual stream before a layer to what drafts beside the decoder, if that takes it there."""
        if self.head is not None and index in self.head.taken:
            self.head.take(index, x)

    def for_drafts(self, hidden: Tensor) -> Tensor:
        return hidden if self.head is None else self.head.given()

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        if self.head is not None:
            return self.head.drafted(made)
        scores = self.step_scores(made)
        return None if scores is None else self.ops.greedy(scores)

    def _through(
        self,
        index: int,
        layer: Layer,
        residual: Residual,
        rotations: Sequence[Rotation],
        attention: AttentionLayer,
        rows: NDArray[np.int64] | None,
        next_norm: Tensor | None,
    ) -> Residual:
        """The residual stream behind a layer, of all rows or of these: of none, nothing."""
        attended = self.attend(index, layer, residual.normed, rotations[self.rotation_of[index]], attention, rows)
        if rows is not None and not len(rows):
            return Residual(residual.x[:0], residual.x[:0])
        if rows is not None:
            residual = Residual(*(self.ops.take_rows(each, rows) for each in residual))
        return self.behind(layer, residual, attended, next_norm)

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
        every = self._layers if self._drafting is None else [*self._layers, self._drafting.layer]
        found = [self.fusible(index, layer) for index, layer in enumerate(every, start=self._places.start)]
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
            value_dim=self.config.heads_of(index).value_dim,
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
        stream: Tensor | None = None,
    ) -> Tensor:
        """All layers and the final norm in one call; layer by layer if the cache comes so."""
        fused = self._fused
        assert fused is not None, "asked of `fused_over`"
        x = stream
        if x is None:
            x = fused.embedded(self._embedding, token_ids, self.embedding_scale)
            self._put(x, embeds)
            x = self.entering(x)
        besides, layers = self.besides(token_ids, positions, x, cache), range(len(self._layers))
        if self.adapted is not None and self._is_adapted:
            besides = replace(besides, adapters=self.adapted.adapters)
        if wanted is None:
            self._run_layers(fused, layers, x, positions, cache, besides, embeds=embeds)
            return x
        keeping = layers[: self.last_kept + 1 - self._places.start]
        self._run_layers(fused, keeping, x, positions, cache, besides, wanted, embeds)
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
        embeds: Embeds | None = None,
    ) -> None:
        """Take ``x`` through some layers in place, and through the final norm behind the last. wanted: see
        `FusedDecoder.run`; embeds: of items, as far as they go on behind layers"""
        rotations = fused.rotations(positions, self._frequencies, self._rotation_scales)
        for some in self._runs(layers, is_each=cache.wait_layer is not None or self._has_levels(embeds)):
            if cache.wait_layer:
                cache.wait_layer(self._places.start + some.start)
            self._before(some.start, x)
            fused.run(
                x, some, rotations, cache.arena, cache.layouts, cache.batch, cache.heads,
                self._norm_behind(some.stop), besides,
                sum_over_ranks=self.reduce if self._shard.size > 1 else None,
                wanted=wanted if some.stop == layers.stop else None,
            )  # fmt: skip
            self._add_level(self._places.start + some.stop - 1, embeds, x)

    def _runs(self, layers: range, is_each: bool) -> list[range]:
        """Those of ``layers`` between which nothing is to be done; is_each: before each one there is."""
        taken = () if self.head is None else self.head.taken
        begins = layers if is_each else [layers.start, *(layer for layer in taken if layer in layers[1:])]
        return [range(*some) for some in pairwise([*begins, layers.stop])]

    def _norm_behind(self, layers: int) -> Tensor | None:
        """The norm of what comes out of so many layers, if it goes no further."""
        if layers == len(self._layers):
            return self._final_norm
        return self._drafting.final_norm if self._drafting is not None and layers > len(self._layers) else None

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        """What fused layers are told of a step besides, of tokens whose embeddings are ``x [T, hidden]``."""
        return NOTHING

    def embedded(self, token_ids: KernelArray, embeds: Embeds | None) -> Tensor:
        """The tokens' embeddings ``[T, hidden]``, with those that are given in their places."""
        x = self.ops.embedding(self._embedding, token_ids, self.embedding_scale)
        self._put(x, embeds)
        return self.entering(x)

    def _put(self, x: Tensor, embeds: Embeds | None) -> None:
        """Put embeddings that are given in their tokens' places."""
        if embeds is not None:
            rows, values = embeds
            self.ops.put_rows(x, rows, np.ascontiguousarray(values[:, : self.config.hidden_size]))

    def _has_levels(self, embeds: Embeds | None) -> bool:
        """Whether something is added to the residual stream behind this stage's layers."""
        return embeds is not None and self.config.embed_levels > self._places.start

    def _add_level(self, index: int, embeds: Embeds | None, x: Tensor) -> bool:
        """Add to the residual stream ``x`` behind a layer, in place, what given embeddings have for it. Whether they
        have something (DeepStack, Meng et al., arXiv 2406.04334)."""
        if embeds is None or index >= self.config.embed_levels:
            return False
        (rows, values), hidden = embeds, self.config.hidden_size
        level = np.ascontiguousarray(values[:, hidden * (1 + index) : hidden * (2 + index)])
        self.ops.scatter_add_rows(x, rows.astype(np.int64), self.ops.tensor(level), np.ones(len(rows), np.float32))
        return True

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
        """Queries ``[T, q_heads, D]``, keys ``[T, kv_heads, D]`` and values ``[T, kv_heads, V]``, as they are before
        they are rotated."""
        dim, value_dim = self.config.heads_of(index).dims
        kv_heads, rows = len(self._shard.kv_heads[index]), x.shape[0]
        qkv = self._linear(x, layer.attention.qkv)
        if value_dim == dim:
            qkv = qkv.reshape([rows, -1, dim])
            query_key, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        else:
            values_at = qkv.shape[1] - kv_heads * value_dim
            query_key = qkv[:, :values_at].reshape([rows, -1, dim])
            value = qkv[:, values_at:].reshape([rows, kv_heads, value_dim])
        query, key = self.normed_heads(layer, query_key[:, :-kv_heads], query_key[:, -kv_heads:])
        return query, key, value

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
