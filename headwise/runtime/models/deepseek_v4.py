"""DeepSeek-V4: attention to a window and to entries that stand for several tokens, hyper-connections, experts.

Of each head, the last ``rotated`` elements turn, neighbours ``(2i, 2i + 1)`` by the angle ``i``. The rope operation
turns the elements ``(i, i + D / 2)``: so the rows, columns and vectors of all that makes a head's elements, or takes
them, are reordered when they are loaded.

Tensor parallel: query heads are dealt out, and what of them goes into the residual stream; what is kept of a token, the
indexer and hyper-connections are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_groups import Sharing
from headwise.errors import ModelError
from headwise.kernels.compressed import in_pieces
from headwise.kernels.compressed_base import EntryMaking, Making
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import Activation
from headwise.runtime.models.attention.compressed import Asking
from headwise.runtime.models.base import AttentionLayer, Embeds, Rotation
from headwise.runtime.models.compressed_config import CompressedConfig
from headwise.runtime.models.deepseek_v4_config import ARCHITECTURE, V4Config, V4MoeConfig, parse
from headwise.runtime.models.deepseek_v4_names import renamed
from headwise.runtime.models.drafting import DraftingLayer, DraftingNames
from headwise.runtime.models.hyper_decoder import HyperDecoder, check_shape
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.moe import MoeMlp
from headwise.runtime.models.moe_decoder import tokens_of
from headwise.runtime.models.rope import inverse_frequencies
from headwise.runtime.models.weight_view import ExpertWeights, RenamedWeights, taken
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, StreamingOps, Tensor
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_floats

__all__ = ["ARCHITECTURE", "DeepseekV4", "parse"]

_NEVER = np.float32(-1e30)
"""A router's logit of an expert that a token does not go to."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class IndexerWeights:
    """queries: of all its heads, out of ``q_rank`` numbers; of_heads: their weights, out of a hidden state"""

    queries: Linear
    of_heads: Linear


@dataclass(frozen=True)
class CompressedProjections:
    """One rank's weights of a layer's attention.

    into:       what queries are made of, and a token's key: ``[q_rank | head_dim]``
    into_norm, key_norm: of these
    queries:    of this rank's heads; query_norm: of each, a norm without a weight
    out:        of this rank's heads by parts of ``out_groups``: from and to which head, and two projections
    rows:       what entries are made of; None: a layer has none
    """

    into: Linear
    into_norm: Tensor
    key_norm: Tensor
    queries: Linear
    query_norm: Tensor
    out: tuple[tuple[int, int, Linear, Linear], ...]
    sink_logits: KernelArray
    rows: Linear | None = None
    making: EntryMaking | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True)
class HashedMoe:
    """Experts that are looked up by token. table: ``int64 [vocabulary, experts of a token]``"""

    moe: MoeMlp
    table: KernelArray


class DeepseekV4(HyperDecoder):
    """A decoder over `CompressedProjections`."""

    activation: Activation = "limited_silu"
    drafting_names: ClassVar[DraftingNames | None] = DraftingNames(
        is_nested=False,
        layer="mtp.0.",
        embedding_norm="mtp.0.enorm",
        hidden_norm="mtp.0.hnorm",
        join="mtp.0.e_proj",
        final_norm="mtp.0.norm",
    )
    config: V4Config
    attends_to_projected: ClassVar[bool] = False

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(RenamedWeights(weights, renamed(weights.names)))

    @property
    def compressed(self) -> CompressedConfig:
        compressed = self.config.compressed
        assert compressed is not None, "parsed so"
        return compressed

    def _find_prefix(self, weights: Weights) -> str:
        return super()._find_prefix(self._weights)

    def load_more(self) -> None:
        super().load_more()
        self._streaming = self.ops if isinstance(self.ops, StreamingOps) else None

    def _load_drafting(self) -> DraftingLayer:
        """Of streams: what goes in is a projection of each, and one of the embedding, which all are given."""
        names, index, hidden = self.drafting_names, self.config.decoder_layers, self.config.hidden_size
        assert names is not None, "it has such"
        self._draft_connections, self._draft_joining = self.connections_at(names.layer), self.joining_at(names.layer)
        of_embedding, of_hidden = (f"{names.layer}{part}_proj.weight" for part in ("e", "h"))
        return DraftingLayer(
            embedding_norm=self._norm(f"{names.embedding_norm}.weight"),
            hidden_norm=self._norm(f"{names.hidden_norm}.weight"),
            of_embedding=self._made(of_embedding, lambda: self._all_of(of_embedding, hidden, hidden)),
            of_hidden=self._made(of_hidden, lambda: self._all_of(of_hidden, hidden, hidden)),
            layer=self._load_layer(index),
            final_norm=self._norm(f"{names.final_norm}.weight"),
        )

    def load_attention(self, layer: int, at: str) -> CompressedProjections:
        own, hidden, ops, (first, last) = self.compressed, self.config.hidden_size, self.ops, self._heads()
        order, size = self._order(own.head_dim), own.head_dim

        def into() -> Matrix:
            queries = self._all_of(f"{at}q_a_proj.weight", own.q_rank, hidden)
            return _stacked([queries, taken(self._all_of(f"{at}kv_proj.weight", size, hidden), order)])

        def queries() -> Matrix:
            rows = self._rows_of(f"{at}q_b_proj.weight", (first * size, last * size), own.q_rank)
            return taken(rows, _each(last - first, order))

        entries: dict[str, Any] = self._entries(layer, f"{at}compressor.") if own.rates[layer] else {}
        return CompressedProjections(
            into=self._made(f"{at}q_a_proj + kv_proj[turning]", into),
            into_norm=ops.norm_weight(self.tensor_of(f"{at}q_a_norm.weight", (own.q_rank,))),
            key_norm=ops.norm_weight(self.tensor_of(f"{at}kv_norm.weight", (size,))[order]),
            queries=self._made(f"{at}q_b_proj[heads {first}:{last}, turning]", queries),
            query_norm=ops.norm_weight(np.ones(size, np.float32)),
            out=self._out(at),
            sink_logits=self._sink_logits(at, layer),
            **entries,
        )

    def _heads(self) -> tuple[int, int]:
        """This rank's query heads, from and to."""
        part = Sharing(self._shard.rank, self._shard.size).of(self.config.num_heads)
        return part.start, part.stop

    def _order(self, size: int) -> Ints:
        """Of ``size`` elements, the last of which turn with their neighbours, that in which element ``i`` turns with
        ``i + size / 2``."""
        plain = size - self.compressed.rotated
        turning = np.arange(plain, size).reshape(-1, 2).T
        low, high = np.split(np.arange(plain), 2)
        return np.concatenate([turning[0], low, turning[1], high])

    def _made(self, name: str, make: Callable[[], Matrix]) -> Linear:
        return Linear(self._prepare(name, lambda: self.ops.linear_weight(make())))

    def _all_of(self, name: str, rows: int, inputs: int) -> Matrix:
        """A whole matrix, as `_rows_of` gives rows."""
        kept = self._weights.kept_rows(name, 0, rows)
        found = self._weights.tensor(name) if kept is None else kept
        check_shape(name, found.shape, (rows, inputs))
        return found

    def _rows_of(self, name: str, part: tuple[int, int], inputs: int) -> Matrix:
        """Rows of a matrix: as codes or in the model's dtype, where kept, else float32."""
        kept = self._weights.kept_rows(name, *part)
        rows = self._weights.rows(name, *part) if kept is None else kept
        check_shape(name, rows.shape, (part[1] - part[0], inputs))
        return rows

    def _out(self, at: str) -> tuple[tuple[int, int, Linear, Linear], ...]:
        own, (first, last), order = self.compressed, self._heads(), self._order(self.compressed.head_dim)
        heads, rank, found = self.config.num_heads // own.out_groups, own.out_rank, []
        for group in range(first // heads, -(-last // heads)):
            start, stop = max(first, group * heads), min(last, (group + 1) * heads)
            part = group * rank, (group + 1) * rank
            columns = _each(stop - start, order) + (start - group * heads) * own.head_dim

            def into(part: tuple[int, int] = part, columns: Ints = columns) -> Matrix:
                rows = self._rows_of(f"{at}o_a_proj.weight", part, heads * own.head_dim)
                return np.ascontiguousarray(as_floats(rows)[:, columns])

            def out(part: tuple[int, int] = part) -> Matrix:
                name = f"{at}o_b_proj.weight"
                kept = self._weights.kept_columns(name, *part)
                columns = self._weights.columns(name, *part) if kept is None else kept
                check_shape(name, columns.shape, (self.config.hidden_size, rank))
                return columns

            named = f"{at}o_a_proj[group {group}, heads {start}:{stop}, turning]"
            projections = self._made(named, into), self._made(f"{at}o_b_proj[:, group {group}]", out)
            found.append((start - first, stop - first, *projections))
        return tuple(found)

    def _entries(self, layer: int, at: str) -> dict[str, Any]:
        own, hidden, rate = self.compressed, self.config.hidden_size, self.compressed.rates[layer]
        parts = [(at, own.head_dim)]
        if own.is_indexed(layer):
            parts.append((f"{at}indexer.", own.index_dim))
        keys = 2 if own.is_indexed(layer) else 1

        def rows() -> Matrix:
            return _stacked([in_order(name, size) for name, size in parts])

        def in_order(name: str, size: int) -> Matrix:
            whole = _stacked(
                [
                    taken(self._all_of(f"{name}{kind}.weight", keys * size, hidden), _each(keys, self._order(size)))
                    for kind in ("kv_proj", "gate_proj")
                ]
            )
            pieces = own.pieces_of(size)
            return whole if pieces == 1 else taken(whole, in_pieces(size, keys, pieces))

        sides = own.sides(layer)
        assert sides is not None, "it has entries"
        makings = tuple(self._making(layer, name, size, rate, keys) for name, size in parts)
        found: dict[str, Any] = {
            "rows": self._made(f"{at}rows[turning{f', in {own.pieces} pieces' if own.pieces > 1 else ''}]", rows),
            "making": EntryMaking(rate, own.is_indexed(layer), makings, begin=sides.place * own.head_dim),
        }
        return {**found, "indexer": self._indexer(f"{at}indexer.")} if own.is_indexed(layer) else found

    def _making(self, layer: int, at: str, size: int, rate: int, keys: int) -> Making:
        order, upload = self._order(size), self.ops.upload
        rope = self.config.ropes[layer]
        inverse = inverse_frequencies(replace(rope, share=self.compressed.rotated / size), size)
        bias = self.tensor_of(f"{at}position_bias", (rate, keys * size))[:, _each(keys, order)]
        norm = self.tensor_of(f"{at}kv_norm.weight", (size,))[order]
        arrays = (upload(np.ascontiguousarray(each, np.float32)) for each in (bias, norm, inverse))
        bias, norm, inverse = arrays
        return Making(size, bias, norm, self.config.rms_norm_eps, inverse)

    def _indexer(self, at: str) -> IndexerWeights:
        own, hidden = self.compressed, self.config.hidden_size
        order = _each(own.index_heads, self._order(own.index_dim))

        def queries() -> Matrix:
            return taken(self._all_of(f"{at}q_b_proj.weight", own.index_heads * own.index_dim, own.q_rank), order)

        def of_heads() -> Matrix:
            return self._all_of(f"{at}scorer.weights_proj.weight", own.index_heads, hidden)

        return IndexerWeights(
            self._made(f"{at}q_b_proj[turning]", queries), self._made(f"{at}scorer.weights_proj", of_heads)
        )

    @property
    def _moe(self) -> V4MoeConfig:
        moe = self.config.moe
        assert isinstance(moe, V4MoeConfig), "parsed so"
        return moe

    def correction(self, layer: int, at: str) -> NDArray[np.float32] | None:
        return None if layer in self._moe.hashed else super().correction(layer, at)

    def load_mlp(self, layer: int, at: str) -> Any:
        made, moe = super().load_mlp(layer, at), self._moe
        if layer not in moe.hashed:
            return made
        name = f"{at}gate.tid2eid"
        table = self.tensor_of(name, (self.config.vocab_size, moe.experts_per_token)).astype(np.int64)
        if table.size and not 0 <= table.min() <= table.max() < moe.num_experts:
            raise ModelError(f"{name} names experts that there are not: config.json says {moe.num_experts}")
        return HashedMoe(made, self.ops.upload(table))

    def mixture(self, moe: Any, correction: NDArray[np.float32] | None) -> Mixture:
        return Mixture(moe.routing, self.activation, correction)

    # ---- computation ----

    def for_drafts(self, hidden: Tensor) -> Tensor:
        """All streams, before they are joined: ``[T, streams * hidden]``."""
        streams, self._streams_behind = self._streams_behind, None
        return self.side_by_side(streams)

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        self._tokens, self._ids = tokens_of(attention), following
        drafting, index, hyper = self._drafting, self.config.decoder_layers, self._streams
        assert drafting is not None, "asked of models that have it"
        size, tokens = self.config.hidden_size, hidden.shape[0]
        each = self.norm(hidden.reshape([tokens, -1, size]), drafting.hidden_norm)
        streams = self.ops.kernel_array(self._linear(each.reshape([-1, size]), drafting.of_hidden))
        embedding = self.norm(self.embedded(following, embeds), drafting.embedding_norm)
        given = self.ops.kernel_array(self._linear(embedding, drafting.of_embedding))
        streams = hyper.spread(self.ops.from_kernel_array(given)) + streams.reshape(tokens, -1, size)
        turning = _there_and_back(self.rotations(positions)[self.rotation_of[index]])
        where = self._draft_connections, streams, turning, attention, wanted
        return self.side_by_side(self.through_layer(index, drafting.layer, *where))

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        drafting = self._drafting
        assert drafting is not None, "asked of models that have it"
        streams = self.ops.kernel_array(made).reshape(made.shape[0], -1, self.config.hidden_size)
        joined = self._streams.joined(streams, self._draft_joining)
        scores = self.step_scores(self.norm(joined, drafting.final_norm))
        return None if scores is None else self.ops.greedy(scores)

    def turnings(self, positions: KernelArray) -> Sequence[tuple[Rotation, Rotation]]:
        """Of queries and keys, and of what was seen, which is turned back."""
        return [_there_and_back(rotation) for rotation in self.rotations(positions)]

    def attended(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        turning: Any,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None,
    ) -> Tensor:
        own, weights, ops = self.compressed, layer.attention, self.ops
        made = self._linear(x, weights.into)
        ranked = self.norm(made[:, : own.q_rank], weights.into_norm)
        key = self.norm(made[:, own.q_rank :], weights.key_norm)
        queries = self._linear(ranked, weights.queries).reshape([x.shape[0], -1, own.head_dim])
        queries = self.norm(queries, weights.query_norm)
        asking = None
        if weights.rows is not None:
            index_queries = None if weights.indexer is None else self._asked(weights.indexer, x, ranked)
            asking = Asking(self._linear(x, weights.rows), weights.making, index_queries)
        heads = attention(index, queries, key, *turning, weights.sink_logits, asking, wanted=wanted)
        if not heads.shape[0]:
            return heads
        total = None
        for first, last, into, out in weights.out:
            part = ops.from_kernel_array(ops.kernel_array(heads[:, first:last]))
            part = self._linear(self._linear(part.reshape([heads.shape[0], -1]), into), out)
            total = part if total is None else total + part
        return total

    def _asked(self, weights: IndexerWeights, x: Tensor, ranked: Tensor) -> IndexQueries:
        own, ops = self.compressed, self.ops
        queries = self._linear(ranked, weights.queries).reshape([x.shape[0], own.index_heads, own.index_dim])
        of_heads = self._linear(x, weights.of_heads)
        return IndexQueries(ops.kernel_array(queries), ops.kernel_array(of_heads), own.index_top)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if not isinstance(mlp, HashedMoe):
            return super().feed_forward(mlp, x)
        known = self._named(self._linear(x, mlp.moe.router), mlp.table)
        return self.ops.mix_experts(x, known, mlp.moe.experts, self._tokens)

    def _named(self, logits: Tensor, table: KernelArray) -> Tensor:
        """A router's logits, of the experts that ``table`` names for these tokens."""
        ops = self.ops
        if self._streaming is not None:
            return self._streaming.named_logits(logits, table, self._ids, float(_NEVER))
        of_all, chosen = ops.kernel_array(logits), table[self._ids]
        known = ops.empty_like(of_all)
        known[:] = _NEVER
        np.put_along_axis(known, chosen, np.take_along_axis(of_all, chosen, axis=1), axis=1)
        return ops.from_kernel_array(known)


def _there_and_back(rotation: Rotation) -> tuple[Rotation, Rotation]:
    cosines, sines = rotation
    return rotation, (cosines, -sines)


def _each(count: int, order: Ints) -> Ints:
    """``order`` in each of ``count`` runs of as many numbers."""
    return (np.arange(count)[:, None] * len(order) + order).reshape(-1)


def _stacked(parts: Sequence[Matrix]) -> Matrix:
    """Rows below each other."""
    quantised = [part for part in parts if isinstance(part, GroupQuantised)]
    if len(quantised) == len(parts):
        return GroupQuantised.concatenate(quantised, 0)
    return np.concatenate([as_floats(part) for part in parts])
