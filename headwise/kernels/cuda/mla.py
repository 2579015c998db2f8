"""The host half of latent attention (MLA) on a GPU: what to launch, with which tiles and how many splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import (
    ALIGNMENT,
    FLOATS,
    LOG2E,
    OLDEST_SM,
    OLDEST_SM_E4M3,
    TRITON_TYPES,
    Tuning,
)
from headwise.kernels.cuda.latents import check_groups
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile, latent_tile
from headwise.kernels.cuda.workspace import PartsWorkspace
from headwise.kernels.mla import LATENT_SCALE, has_scales, latent_width
from headwise.kernels.mla_quantised import FLOAT8, INT8
from headwise.kernels.nibbles import GROUP, INT4

MODULE = "mla_jit"
QUANTISED = (INT8, FLOAT8)
"""Dtypes of rows with a scale each that the kernels read."""
MOST_RANK = 512
"""Of latents: a tile's sums are in registers."""
MOST_ROTATED = 128
MULTIPLE = 16
"""Of a latent's two parts: what a matrix instruction takes at once, and whole vectors of any dtype."""
TUNING = Tuning(split_programs=2)
"""A split's partial result is as large as some 60 latents, and two programs fill a multiprocessor: on an H200 64
sequences of 2,048 tokens take 66 us so, 80 with twice as many."""


@dataclass(frozen=True)
class LatentShape:
    """What the machine code of latent attention depends on besides the card.

    heads:  query heads of the rank; a call may be of some of them
    rank, rotated: numbers of a latent in its two parts
    kv_dtype: of the cache: that of queries, int8, float8_e4m3fn or int4
    """

    heads: int
    rank: int
    rotated: int
    block_size: int
    q_dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, layout: BlockLayout, heads: int, rank: int, rotated: int, q_dtype: str) -> LatentShape:
        """The shape of attention of ``heads`` of ``q_dtype`` over latents in blocks of ``layout``.

        Raises:
            ValueError: latents of such parts are not what the layout keeps.
        """
        stored = rank + rotated * (2 if has_scales(layout) else 1)
        if latent_width(layout) != stored:
            raise ValueError(f"latents of {rank} + {rotated} are not what {layout.identity} keeps")
        return cls(heads, rank, rotated, layout.block_size, q_dtype, layout.roles[0].dtype)

    @property
    def width(self) -> int:
        """Numbers of a latent as they are stored."""
        return self.rank + self.rotated * (2 if self.kv_dtype in (*QUANTISED, INT4) else 1)

    @property
    def row(self) -> int:
        """Elements that a latent takes: of its dtype, or in four bits bytes."""
        return self.width // 2 if self.kv_dtype == INT4 else self.width

    @property
    def scales(self) -> int:
        """Of a latent, each of four bytes: none, one, or with a minimum one for each of several groups."""
        return self.width // GROUP if self.kv_dtype == INT4 else int(self.kv_dtype in QUANTISED)


def check_latents(shape: LatentShape, sm: int) -> None:
    """Whether the kernels serve latents of ``shape`` on a card of compute capability ``sm`` (90 for an H100).

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    if sm < OLDEST_SM:
        raise ConfigError(f"a card of compute capability {sm / 10} is too old: {OLDEST_SM / 10} is the least")
    for name, size, most in (
        ("kv_lora_rank", shape.rank, MOST_RANK),
        ("qk_rope_head_dim", shape.rotated, MOST_ROTATED),
    ):
        if size % MULTIPLE or not 0 < size <= most:
            raise ConfigError(
                f"{name} {size} is not supported on a GPU: only multiples of {MULTIPLE} up to {most}; use device cpu"
            )
    if shape.q_dtype not in FLOATS:
        raise ConfigError(f"dtype {shape.q_dtype} is not supported on a GPU: choose one of {', '.join(FLOATS)}")
    if shape.kv_dtype not in (shape.q_dtype, *QUANTISED, INT4):
        raise ConfigError(
            f"kv_dtype {shape.kv_dtype} cannot keep latents of dtype {shape.q_dtype} on a GPU: choose "
            f"{shape.q_dtype}, {', '.join(QUANTISED)} or {INT4}"
        )
    if shape.kv_dtype == INT4:
        check_groups(shape.rank, shape.rotated)
    check_e4m3(shape.kv_dtype, sm)
    if shape.block_size & (shape.block_size - 1):
        raise ConfigError(f"block_size {shape.block_size} is not supported on a GPU: choose a power of two, 16 or more")


def check_e4m3(kv_dtype: str, sm: int) -> None:
    """Raise ConfigError where a card of compute capability ``sm`` does not convert what is kept in ``kv_dtype``."""
    if kv_dtype == FLOAT8 and sm < OLDEST_SM_E4M3:
        raise ConfigError(
            f"kv_dtype {FLOAT8} needs compute capability {OLDEST_SM_E4M3 / 10} or newer, this card has {sm / 10}: "
            "choose kv_dtype int8"
        )


@dataclass(frozen=True)
class LatentPlan:
    """The kernels of one shape on one card. rows, tokens: of a prefill's tile; decode_heads: of a decode's"""

    prefill: Variant
    decode: Variant
    tokens: int
    heads: int
    decode_heads: int

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.prefill, self.decode


@dataclass(frozen=True)
class RanksPlan:
    """The kernel for queries of all ranks that keep latents together. heads: of its tile"""

    decode: Variant
    heads: int


def variants_of(shape: LatentShape, sm: int) -> tuple[Variant, ...]:
    """All that attention of ``shape`` launches on a card of compute capability ``sm``."""
    return plan_of(shape, sm, TUNING).variants


def variants_of_ranks(shape: LatentShape, sm: int) -> tuple[Variant, ...]:
    """The same where ``shape`` has the heads of all ranks, and blocks of this one's tokens."""
    return (plan_of_ranks(shape, sm, TUNING).decode,)


@dataclass
class TritonLatents:
    """Attention of absorbed queries to latents on a GPU, or in the interpreter.

    What `attention.TritonAttention` says of launches and memory holds: nothing is read on the host.
    """

    launcher: TritonLauncher
    allocate: Callable[[int], Array]
    tuning: Tuning = field(default_factory=lambda: TUNING)

    def __post_init__(self) -> None:
        self._workspace = PartsWorkspace(self.allocate, 2 * self.programs)
        self._prepared: set[LatentShape] = set()

    def prepare(self, shapes: Iterable[LatentShape]) -> None:
        """Compile and load all that ``shapes`` need, and make their workspace: no call does either later.

        Raises:
            ConfigError: a shape is not supported (`check_latents`).
        """
        for shape in shapes:
            for variant in self.plan(shape).variants:
                self.launcher.prepare(variant)

    def prepare_of_ranks(self, shape: LatentShape) -> None:
        """The same for `attend_of_ranks`: ``shape`` has the heads of all ranks, and blocks of this one's tokens."""
        self.reserve(shape)
        self.launcher.prepare(plan_of_ranks(shape, self.launcher.sm, self.tuning).decode)

    def plan(self, shape: LatentShape) -> LatentPlan:
        """The kernels of a shape, for which there is memory from now on."""
        self.reserve(shape)
        return plan_of(shape, self.launcher.sm, self.tuning)

    def reserve(self, shape: LatentShape) -> None:
        """Have memory for partial results of such a shape. Raises ConfigError: it is not supported."""
        if shape not in self._prepared:
            check_latents(shape, self.launcher.sm)
            self._workspace.reserve(2 * self.programs * shape.heads, shape.rank)
            self._prepared.add(shape)

    @property
    def programs(self) -> int:
        """Splits that all which a batch sees is cut into, about."""
        return self.launcher.sms * self.tuning.split_programs

    def partials(self, shape: LatentShape) -> dict[str, Argument]:
        """Where partial results go, and their counters; see `programs` for how many of each head there may be."""
        return self._workspace.arguments(2 * self.programs * shape.heads, shape.rank)

    def attend(
        self,
        absorbed: Array,
        query: Array,
        shape: LatentShape,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """``out [tokens, heads, rank]``: of each query the mean of latents that it sees, by its weights.

        absorbed: ``[tokens, heads, rank]``, what of a query is multiplied with the compressed part of latents
        query:    ``[tokens, heads, plain + rotated]``, whose last numbers are multiplied with the rotated part

        A visible token whose block is ``-1`` is treated as not visible.
        """
        sequences = batch.cu_seqlens_q.shape[0] - 1
        if query.shape[0] == 0 or sequences == 0:
            return
        plan, count = self.plan(shape), query.shape[1]
        pieces = -(-count // plan.decode_heads)
        units = self._units(pieces, layout, batch)
        arguments = {
            **query_arguments(absorbed, query, out, scale),
            **latent_arguments(arena, layout),
            **self.partials(shape),
            **batch_arguments(batch, heads),
            "units": units,
        }

        def launch(variant: Variant, grid: tuple[int, int, int], **more: Argument) -> None:
            every = arguments | more
            self.launcher.launch(variant, grid, [every[name] for name, _ in variant.signature])

        longest = 1 if query.shape[0] == 1 else batch.max_query_len
        decodes = longest == 1 or sequences > 1
        if longest != 1:
            tiles = (query.shape[0] // plan.tokens + sequences) * -(-count // plan.heads)
            launch(plan.prefill, (tiles, 1, 1), fewest_queries=2 if decodes else 1)
        if decodes:
            launch(plan.decode, ((units + sequences) * pieces, 1, 1), fewest_queries=1)

    def attend_of_ranks(
        self,
        queries: Array,
        shape: LatentShape,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        out: Array,
    ) -> None:
        """What all ranks' heads see of the latents that one of them keeps.

        queries: ``[ranks, tokens, heads, rank + rotated]``, absorbed, with their rotated part behind
        batch:   sequences with a query or none; their lengths, and blocks of ``layout``, are of the rank's own tokens
        out:     float32 ``[ranks, tokens, heads, rank + BESIDE]``: a query's mean of latents, and behind it the
                 logarithm to base 2 of the sum of its weights; 0 and -inf of one that sees nothing
        """
        self.reserve(shape)
        plan, (ranks, tokens, own_heads, _) = plan_of_ranks(shape, self.launcher.sm, self.tuning), queries.shape
        count = ranks * own_heads
        pieces = -(-count // plan.heads)
        units = self._units(pieces, layout, batch)
        arguments: dict[str, Argument] = {
            "absorbed": address_of(queries), "out": address_of(out), "heads": count, "own_heads": own_heads,
            "tokens_of_step": tokens, "score_scale": LOG2E * scale, "units": units,
            **latent_arguments(arena, layout), **self.partials(shape), **batch_arguments(batch, heads),
        }  # fmt: skip
        grid = ((units + batch.cu_seqlens_q.shape[0] - 1) * pieces, 1, 1)
        self.launcher.launch(plan.decode, grid, [arguments[name] for name, _ in plan.decode.signature])

    def _units(self, pieces: int, layout: BlockLayout, batch: AttentionBatch) -> int:
        """Splits that a decode is cut into, of each of so many pieces of its heads."""
        useful = -(-batch.block_tables.shape[1] * layout.block_size // self.tuning.min_split_tokens)
        units: int = max(1, min(self.programs // pieces, (batch.cu_seqlens_q.shape[0] - 1) * useful))
        return units


def query_arguments(absorbed: Array, query: Array, out: Array, scale: float) -> dict[str, Argument]:
    """Raises ValueError where the kernels cannot read the arrays, or write them."""
    tokens, heads, head_dim = query.shape
    contiguous = (head_dim * query.itemsize, query.itemsize)
    if query.strides[1:] != contiguous or query.strides[0] % ALIGNMENT or address_of(query) % ALIGNMENT:
        raise ValueError(
            f"query with strides {query.strides} at {address_of(query):#x}: a token's heads must lie side by side, "
            f"each token on a multiple of {ALIGNMENT} bytes; pass a contiguous copy"
        )
    fits = absorbed.shape == out.shape and absorbed.shape[:2] == (tokens, heads)
    if not (fits and absorbed.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"absorbed queries {absorbed.shape} and out {out.shape} do not fit queries {query.shape}")
    if not scale > 0:
        raise ValueError(f"scale {scale} is not positive: attention scores are scaled up or down, never turned around")
    return {
        "absorbed": address_of(absorbed),
        "query": address_of(query),
        "out": address_of(out),
        "query_stride": query.strides[0] // query.itemsize,
        "heads": heads,
        "head_dim": head_dim,
        "score_scale": LOG2E * scale,
    }


def latent_arguments(arena: Array, layout: BlockLayout) -> dict[str, Argument]:
    """Where latents lie."""
    start = address_of(arena)
    return {
        "latent": start + layout.role_offsets[layout.roles[0].name],
        "latent_scale": start + layout.role_offsets.get(LATENT_SCALE, 0),
        "block_bytes": layout.block_bytes,
        "slot_bytes": layout.slot_bytes,
    }


def batch_arguments(batch: AttentionBatch, heads: HeadTable) -> dict[str, Argument]:
    """Sequences, their tables, and where a layer's one member lies in them."""
    return {
        "cu_seqlens_q": address_of(batch.cu_seqlens_q),
        "seq_lens": address_of(batch.seq_lens),
        "block_tables": address_of(batch.block_tables),
        "head_group": address_of(heads.group),
        "head_slot": address_of(heads.slot),
        "head_window": address_of(heads.window),
        "head_sink": address_of(heads.sink),
        "batch": batch.cu_seqlens_q.shape[0] - 1,
        "groups": batch.groups,
        "max_blocks": batch.block_tables.strides[0] // batch.block_tables.itemsize,
    }


ATTEND_SIGNATURE = (
    "absorbed:q", "query:q", "out:q", "counters:*i32", "partial:*fp32", "partial_lse:*fp32", "latent:kv",
    "latent_scale:scale", "cu_seqlens_q:*i32", "seq_lens:*i32", "block_tables:*i32", "head_group:*i32",
    "head_slot:*i32", "head_window:*i32", "head_sink:*i32", "batch:i32", "groups:i32", "max_blocks:i32",
    "block_bytes:i64", "slot_bytes:i64", "query_stride:i32", "heads:i32", "head_dim:i32", "score_scale:fp32",
    "units:i32", "fewest_queries:i32",
)  # fmt: skip
MORE_OF_RANKS = {"tokens_of_step": "i32", "own_heads": "i32"}
"""Parameters for queries of all ranks."""
NOT_OF_RANKS = {"query": 0, "query_stride": 0, "head_dim": 0, "fewest_queries": 1}
"""Those that there is nothing to tell of then."""
MULTIPLES = ("absorbed", "query", "out", "partial", "latent", "block_bytes", "slot_bytes")


@lru_cache
def plan_of(shape: LatentShape, sm: int, tuning: Tuning) -> LatentPlan:
    """The kernels that a shape needs, with the tiles of ``tuning`` or those for the card."""
    prefill = tuning.prefill or latent_tile(shape.heads, shape.q_dtype, shape.kv_dtype, sm, is_decode=False)
    decode, of_decode = _decode(shape, sm, tuning)
    heads = min(shape.heads, prefill.rows)
    tokens = prefill.rows // heads
    alone: dict[str, Any] = {"OF_RANKS": False, **dict.fromkeys(MORE_OF_RANKS, 0)}
    of_prefill = {"DECODE": False, "BLOCK_N": prefill.keys, "MIN_SPLIT_TILES": 1, "HEADS": heads, "TOKENS": tokens}
    signature = typed(ATTEND_SIGNATURE, shape)
    return LatentPlan(
        prefill=_variant(shape, prefill, signature, of_prefill | alone),
        decode=_variant(shape, decode, signature, of_decode | alone),
        tokens=tokens,
        heads=heads,
        decode_heads=of_decode["HEADS"],
    )


@lru_cache
def plan_of_ranks(shape: LatentShape, sm: int, tuning: Tuning) -> RanksPlan:
    """The kernel for queries of all ranks, which ``shape`` has the heads of.

    Results are float32: those of several ranks may cancel out when they are merged, but for their rounding errors.
    """
    tile, constants = _decode(shape, sm, tuning)
    given = (pair for pair in typed(ATTEND_SIGNATURE, shape) if pair[0] not in NOT_OF_RANKS)
    signature = tuple((dict(given) | {"out": "*fp32"} | MORE_OF_RANKS).items())
    return RanksPlan(
        _variant(shape, tile, signature, constants | {"OF_RANKS": True} | NOT_OF_RANKS), constants["HEADS"]
    )


def _decode(shape: LatentShape, sm: int, tuning: Tuning) -> tuple[Tile, dict[str, Any]]:
    """The tile of a decode, and what is compiled in for it."""
    tile = tuning.decode or latent_tile(shape.heads, shape.q_dtype, shape.kv_dtype, sm, is_decode=True)
    least = max(1, tuning.min_split_tokens // tile.keys)
    heads = min(shape.heads, tile.rows)
    return tile, {"DECODE": True, "BLOCK_N": tile.keys, "MIN_SPLIT_TILES": least, "HEADS": heads, "TOKENS": 1}


def _variant(
    shape: LatentShape, tile: Tile, signature: tuple[tuple[str, str], ...], constants: dict[str, Any]
) -> Variant:
    constants = constants | latent_constants(shape) | {"BLOCK_M": tile.rows}
    multiples = tuple(name for name in MULTIPLES if name in dict(signature))
    return Variant("attend_latents", signature, tuple(constants.items()), multiples, tile.warps, tile.stages, MODULE)


def latent_constants(shape: LatentShape) -> dict[str, Any]:
    """What is compiled in of latents."""
    return {
        "WIDTH": shape.row,
        "RANK": shape.rank,
        "BLOCK_R": power_of_two(shape.rank),
        "ROTATED": shape.rotated,
        "BLOCK_P": power_of_two(shape.rotated),
        "BLOCK_SIZE": shape.block_size,
        "LATENT_BYTES": 1 if shape.kv_dtype == INT4 else numpy_dtype(shape.kv_dtype).itemsize,
        "SCALES": shape.scales,
    }


def typed(signature: tuple[str, ...], shape: LatentShape) -> tuple[tuple[str, str], ...]:
    """(parameter, Triton type) of each, with the dtypes of ``shape``."""
    pointers = {"q": "*" + TRITON_TYPES[shape.q_dtype], "kv": "*" + TRITON_TYPES[shape.kv_dtype]}
    pointers["scale"] = "*i32" if shape.kv_dtype == INT4 else "*fp32"  # with a minimum, float16 each
    pairs = (parameter.split(":") for parameter in signature)
    return tuple((name, pointers.get(type_, type_)) for name, type_ in pairs)


def power_of_two(number: int) -> int:
    """The smallest power of two not below ``number``, and no less than what a matrix instruction takes."""
    return max(MULTIPLE, 1 << (number - 1).bit_length())
