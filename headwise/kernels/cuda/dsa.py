"""The host half of latent attention with an indexer (DSA) on a GPU: scores, and attention to chosen tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import ALIGNMENT, LOG2E
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of
from headwise.kernels.cuda.mla import (
    MULTIPLE,
    QUANTISED,
    LatentShape,
    TritonLatents,
    batch_arguments,
    latent_arguments,
    latent_constants,
    power_of_two,
    query_arguments,
    typed,
)
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile, latent_tile, score_tile
from headwise.kernels.dsa import INDEXER, INDEXER_SCALE, index_role
from headwise.kernels.dsa_base import IndexQueries

MODULE = "dsa_jit"
MOST_INDEX_BYTES = 512
"""Of a key: a warp holds it in vectors."""
MOST_INDEX_HEADS = 128
CHUNK_TILES = 8
"""Tiles of keys that a program scores."""
MOST_SPLITS = 128

SCORE_SIGNATURE = (
    "query:q", "weights:q", "scores:*fp32", "key:kv", "key_scale:*fp32", "cu_seqlens_q:*i32", "seq_lens:*i32",
    "block_tables:*i32", "head_group:*i32", "head_slot:*i32", "head_window:*i32", "head_sink:*i32", "first:i32",
    "batch:i32", "groups:i32", "max_blocks:i32", "block_bytes:i64", "slot_bytes:i64", "query_stride:i32",
    "weight_stride:i32", "score_stride:i32", "chunks:i32", "part:i32", "parts:i32",
)  # fmt: skip
CHOSEN_SIGNATURE = (
    "absorbed:q", "query:q", "out:q", "counters:*i32", "partial:*fp32", "partial_lse:*fp32", "latent:kv",
    "latent_scale:scale", "places:*i32", "counts:*i32", "head_slot:*i32", "block_bytes:i64", "slot_bytes:i64",
    "query_stride:i32", "heads:i32", "head_dim:i32", "score_scale:fp32", "top:i32", "splits:i32", "tokens:i32",
)  # fmt: skip
OF_RANKS = {"own_heads": "i32"}
"""What there is to tell besides of queries of all ranks that keep tokens together."""
NOT_OF_RANKS = {"query": 0, "query_stride": 0, "head_dim": 0}
"""Parameters of which there is nothing to tell then."""
MULTIPLES = ("absorbed", "query", "out", "partial", "latent", "key", "block_bytes", "slot_bytes")


@dataclass(frozen=True)
class IndexShape:
    """What the machine code of an indexer's scores depends on besides the card.

    dtype:     of queries
    key_dtype: of keys in the cache: the same, int8 or float8_e4m3fn
    """

    heads: int
    dim: int
    block_size: int
    dtype: str
    key_dtype: str

    @classmethod
    def of(cls, layout: BlockLayout, heads: int, dtype: str) -> IndexShape:
        """The shape of scores by ``heads`` of ``dtype`` over keys in blocks of ``layout``.

        Raises:
            ConfigError: the layout has no keys of an indexer.
        """
        role = index_role(layout)
        return cls(heads, role.shape[0], layout.block_size, dtype, role.dtype)

    @property
    def is_quantised(self) -> bool:
        return self.key_dtype in QUANTISED


def check_index(shape: IndexShape) -> None:
    """Whether the kernels serve such an indexer.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    most = MOST_INDEX_BYTES // numpy_dtype(shape.dtype).itemsize
    if shape.dim % MULTIPLE or shape.dim > most:
        raise ConfigError(
            f"index_head_dim {shape.dim} of {shape.dtype} is not supported on a GPU: only multiples of {MULTIPLE} "
            f"up to {most}; use device cpu"
        )
    if shape.heads > MOST_INDEX_HEADS:
        raise ConfigError(
            f"index_n_heads {shape.heads} is not supported on a GPU: at most {MOST_INDEX_HEADS}; use device cpu"
        )
    if shape.key_dtype not in (shape.dtype, *QUANTISED):
        raise ConfigError(
            f"kv_dtype {shape.key_dtype} cannot keep an indexer's keys of dtype {shape.dtype} on a GPU: choose "
            f"{shape.dtype}, {' or '.join(QUANTISED)}"
        )


def variants_of(shape: LatentShape, index: IndexShape, sm: int) -> tuple[Variant, ...]:
    """All that is launched besides the kernels of latent attention, on a card of compute capability ``sm``."""
    return score_variant(index, sm), _attend(shape, sm)


def variants_of_ranks(shape: LatentShape, index: IndexShape, sm: int) -> tuple[Variant, ...]:
    """The same where ``shape`` has the heads of all ranks that keep tokens together, and blocks of this one's."""
    return score_variant(index, sm), _attend_of_ranks(shape, sm)


class TritonIndexed:
    """Scores, and attention to what is chosen by them, on a GPU or in the interpreter; nothing is read on the host.

    latents: those of the same layer, whose workspace is used
    """

    def __init__(self, launcher: TritonLauncher, latents: TritonLatents) -> None:
        self._launcher, self._latents = launcher, latents

    def prepare(self, shape: IndexShape) -> None:
        """Compile and load what scores need. Raises ConfigError: the shape is not supported."""
        check_index(shape)
        self._launcher.prepare(score_variant(shape, self._launcher.sm))

    def prepare_latents(self, shapes: Iterable[LatentShape]) -> None:
        """Compile and load what attention to chosen tokens needs."""
        for shape in shapes:
            self._launcher.prepare(_attend(shape, self._launcher.sm))

    def prepare_of_ranks(self, shape: LatentShape) -> None:
        """The same for `attend_of_ranks`: ``shape`` has the heads of all ranks, and blocks of this one's tokens."""
        self._launcher.prepare(_attend_of_ranks(shape, self._launcher.sm))

    def score(
        self,
        index: IndexQueries,
        first: int,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        scores: Array,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """``scores [rows, tokens]`` of queries from ``first`` on: float32, of each its own sequence's tokens.

        share: of these, whose keys blocks of ``layout`` have
        """
        shape = IndexShape.of(layout, index.query.shape[1], index.query.dtype.name)
        _check_index_arrays(index, shape)
        variant = score_variant(shape, self._launcher.sm)
        constants = dict(variant.constants)
        chunks = -(-scores.shape[1] // (constants["TILES"] * constants["BLOCK_N"]))
        query, weights = index.query, index.weights
        arguments: dict[str, Argument] = {
            "query": address_of(query),
            "weights": address_of(weights),
            "scores": address_of(scores),
            "first": first,
            **latent_arguments(arena, layout),
            **batch_arguments(batch, heads),
            "key": address_of(arena) + layout.role_offsets[INDEXER],
            "key_scale": address_of(arena) + layout.role_offsets.get(INDEXER_SCALE, 0),
            "query_stride": query.strides[0] // query.itemsize,
            "weight_stride": weights.strides[0] // weights.itemsize,
            "score_stride": scores.strides[0] // scores.itemsize,
            "chunks": chunks,
            "part": share.part,
            "parts": share.parts,
        }
        self._launch(variant, (scores.shape[0] * chunks, 1, 1), arguments)

    def attend(
        self,
        absorbed: Array,
        query: Array,
        shape: LatentShape,
        chosen: tuple[Array, Array],
        arena: Array,
        layout: BlockLayout,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """As `TritonLatents.attend`, to the latents that each query has chosen: places and counts, see `indexer.cu`."""
        self._latents.reserve(shape)
        given = query_arguments(absorbed, query, out, scale)
        variant, (tokens, count, _), top = _attend(shape, self._launcher.sm), query.shape, chosen[0].shape[1]
        self._attend(variant, given, tokens, count, top, shape, chosen, arena, layout, heads)

    def attend_of_ranks(
        self,
        queries: Array,
        shape: LatentShape,
        chosen: tuple[Array, Array],
        arena: Array,
        layout: BlockLayout,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """As `TritonLatents.attend_of_ranks`, to those of the chosen latents that this rank keeps."""
        self._latents.reserve(shape)
        ranks, tokens, own_heads, _ = queries.shape
        given: dict[str, Argument] = {
            "absorbed": address_of(queries), "out": address_of(out), "heads": ranks * own_heads,
            "own_heads": own_heads, "score_scale": LOG2E * scale,
        }  # fmt: skip
        variant, about = _attend_of_ranks(shape, self._launcher.sm), -(-chosen[0].shape[1] // ranks)
        self._attend(variant, given, tokens, ranks * own_heads, about, shape, chosen, arena, layout, heads)

    def _attend(
        self,
        variant: Variant,
        given: dict[str, Argument],
        tokens: int,
        count: int,
        about: int,
        shape: LatentShape,
        chosen: tuple[Array, Array],
        arena: Array,
        layout: BlockLayout,
        heads: HeadTable,
    ) -> None:
        """Of ``tokens`` with ``count`` heads each, to ``about`` as many latents as were chosen."""
        places, counts = chosen
        pieces = -(-count // dict(variant.constants)["HEADS"])
        useful = -(-about // self._latents.tuning.min_split_tokens)
        splits = max(1, min(self._latents.programs // (pieces * tokens), useful, MOST_SPLITS))
        arguments = {
            **given,
            **latent_arguments(arena, layout),
            **self._latents.partials(shape),
            "places": address_of(places),
            "counts": address_of(counts),
            "head_slot": address_of(heads.slot),
            "top": places.shape[1],
            "splits": splits,
            "tokens": tokens,
        }
        self._launch(variant, (tokens * splits * pieces, 1, 1), arguments)

    def _launch(self, variant: Variant, grid: tuple[int, int, int], arguments: dict[str, Argument]) -> None:
        self._launcher.launch(variant, grid, [arguments[name] for name, _ in variant.signature])


@lru_cache
def score_variant(shape: IndexShape, sm: int) -> Variant:
    """What scores of such an indexer launch on a card of compute capability ``sm``."""
    tile = score_tile(shape.dtype)
    constants = {
        "HEADS": shape.heads, "BLOCK_H": power_of_two(shape.heads), "INDEX_DIM": shape.dim,
        "BLOCK_D": power_of_two(shape.dim), "BLOCK_SIZE": shape.block_size, "BLOCK_N": tile.keys, "TILES": CHUNK_TILES,
        "KEY_BYTES": numpy_dtype(shape.key_dtype).itemsize, "QUANTISED": shape.is_quantised,
    }  # fmt: skip
    latents = LatentShape(1, MULTIPLE, MULTIPLE, shape.block_size, shape.dtype, shape.key_dtype)
    return _variant("score_tokens", typed(SCORE_SIGNATURE, latents), constants, tile.warps, tile.stages)


@lru_cache
def _attend(shape: LatentShape, sm: int) -> Variant:
    tile, constants = _chosen(shape, sm)
    alone: dict[str, Any] = {"OF_RANKS": False, **dict.fromkeys(OF_RANKS, 0)}
    return _variant("attend_chosen", typed(CHOSEN_SIGNATURE, shape), constants | alone, tile.warps, tile.stages)


@lru_cache
def _attend_of_ranks(shape: LatentShape, sm: int) -> Variant:
    """Results are float32, as of `mla.plan_of_ranks`."""
    tile, constants = _chosen(shape, sm)
    given = (pair for pair in typed(CHOSEN_SIGNATURE, shape) if pair[0] not in NOT_OF_RANKS)
    pairs = tuple((dict(given) | {"out": "*fp32"} | OF_RANKS).items())
    return _variant("attend_chosen", pairs, constants | {"OF_RANKS": True} | NOT_OF_RANKS, tile.warps, tile.stages)


def _chosen(shape: LatentShape, sm: int) -> tuple[Tile, dict[str, Any]]:
    """The tile of attention to chosen tokens, and what is compiled in for it."""
    tile = latent_tile(shape.heads, shape.q_dtype, shape.kv_dtype, sm, is_decode=True)
    of_tile = {"HEADS": min(shape.heads, tile.rows), "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
    return tile, latent_constants(shape) | of_tile


def _variant(
    kernel: str, pairs: tuple[tuple[str, str], ...], constants: dict[str, Any], warps: int, stages: int
) -> Variant:
    multiples = tuple(name for name, _ in pairs if name in MULTIPLES)
    return Variant(kernel, pairs, tuple(constants.items()), multiples, warps, stages, MODULE)


def _check_index_arrays(index: IndexQueries, shape: IndexShape) -> None:
    """Raise ValueError where the arrays do not fit each other, or the kernels cannot read them."""
    query, weights = index.query, index.weights
    tokens, heads, size = query.shape
    fits = weights.shape == (tokens, heads) and size == shape.dim and index.top >= 1
    if not fits or query.dtype != weights.dtype or shape.key_dtype not in (shape.dtype, *QUANTISED):
        raise ValueError(
            f"queries of the indexer {query.dtype} {query.shape}, weights {weights.dtype} {weights.shape} and its keys "
            f"of {shape.key_dtype} {shape.dim} do not fit each other, or to choose {index.top} cannot be"
        )
    itemsize = query.itemsize
    if (
        query.strides[1:] != (size * itemsize, itemsize)
        or weights.strides[1] != weights.itemsize
        or (query.strides[0] | address_of(query)) % ALIGNMENT
    ):
        raise ValueError("queries and weights of the indexer must lie side by side for each token: pass copies")
