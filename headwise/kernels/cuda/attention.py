"""The host half of attention on a GPU: what to launch, with which tiles and how many splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np

from headwise.cache_controller.dtypes import packed_bytes
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.joint import OF_JOINT, JointDecodes, JointVariants, joint_variants
from headwise.kernels.cuda.launch import OVERLAPS, OVERLAPS_FROM, Array, Kernel, TritonLauncher, Variant, address_of
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile, decode_tile, is_read_by_words, prefill_tile, tma_tile
from headwise.kernels.cuda.workspace import MOST_KV_HEADS, PartsWorkspace
from headwise.kernels.gqa import QUANTISED, head_dim_of, kv_dtype_of, value_dim_of
from headwise.kernels.latest import OfLatest
from headwise.kernels.nibbles import INT4

HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)
"""Of keys, and of values, which may be smaller."""
FLOATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
TRITON_TYPES = {**FLOATS, "int8": "i8", "float8_e4m3fn": "fp8e4nv", INT4: "u8"}
OLDEST_SM = 80
OLDEST_SM_E4M3 = 89
LOG2E = math.log2(math.e)
ALIGNMENT = 16
"""Bytes that query rows and the arena start on multiples of, so that a thread moves 16 bytes at once."""


def check_supported(
    head_dim: int, q_dtype: str, kv_dtype: str, sm: int, block_size: int = 1, value_dim: int | None = None
) -> None:
    """Whether the attention kernels serve this model on a card of compute capability ``sm`` (90 for an H100).

    value_dim: of values; None: ``head_dim``

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    if sm < OLDEST_SM:
        raise ConfigError(f"a card of compute capability {sm / 10} is too old: {OLDEST_SM / 10} is the least")
    if head_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"head_dim {head_dim} is not supported on a GPU: only {allowed}; use device cpu")
    if value_dim is not None and (value_dim not in HEAD_DIMS or value_dim > head_dim):
        allowed = ", ".join(str(dim) for dim in HEAD_DIMS if dim <= head_dim)
        raise ConfigError(
            f"values of {value_dim} beside keys of {head_dim} are not supported on a GPU: only {allowed}; use device "
            "cpu"
        )
    if q_dtype not in FLOATS:
        raise ConfigError(f"dtype {q_dtype} is not supported on a GPU: choose one of {', '.join(FLOATS)}")
    if kv_dtype not in TRITON_TYPES:
        raise ConfigError(f"KV dtype {kv_dtype} is not supported on a GPU: choose one of {', '.join(TRITON_TYPES)}")
    if kv_dtype == "float8_e4m3fn" and sm < OLDEST_SM_E4M3:
        raise ConfigError(
            f"KV dtype float8_e4m3fn needs compute capability {OLDEST_SM_E4M3 / 10} or newer, this card has {sm / 10}: "
            "choose int8, which takes as many bytes"
        )
    if block_size & (block_size - 1):
        raise ConfigError(f"block_size {block_size} is not supported on a GPU: choose a power of two, 16 or more")


@dataclass(frozen=True)
class AttentionShape:
    """What the machine code of attention depends on besides the card."""

    share: int
    """Query heads per KV head."""
    head_dim: int
    block_size: int
    q_dtype: str
    kv_dtype: str
    softcap: bool = False
    sink_logits: bool = False
    chunked: bool = False
    """See `HeadTable`."""
    smaller_value: int = 0
    """Size of a head's values, where they are smaller than its keys; else 0."""
    both_ways: bool = False
    """Whether rows of prompts see what `AttentionBatch.sees` says."""

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.smaller_value or self.head_dim

    @classmethod
    def of(
        cls,
        layout: BlockLayout,
        q_heads: int,
        kv_heads: int,
        q_dtype: str,
        softcap: float,
        sink_logits: bool = False,
        chunked: bool = False,
        both_ways: bool = False,
    ) -> AttentionShape:
        """The shape of attention with ``q_heads`` of ``q_dtype`` over ``kv_heads`` in blocks of ``layout``."""
        if q_heads % kv_heads:
            raise ConfigError(f"{q_heads} query heads cannot share {kv_heads} KV heads evenly: give a multiple")
        share = q_heads // kv_heads
        dtypes, options = (q_dtype, kv_dtype_of(layout)), (softcap > 0, sink_logits, chunked)
        dim, value_dim = head_dim_of(layout), value_dim_of(layout)
        return cls(share, dim, layout.block_size, *dtypes, *options, 0 if value_dim == dim else value_dim, both_ways)


def check_shape(shape: AttentionShape, sm: int) -> None:
    """`check_supported` of attention of this shape."""
    check_supported(shape.head_dim, shape.q_dtype, shape.kv_dtype, sm, shape.block_size, shape.value_dim)


@dataclass(frozen=True)
class Tuning:
    """What may be measured and set otherwise; the defaults are those of `tiles` for each shape and card.

    split_bytes:      of keys and values that a split has, about, if that makes a number of programs per multiprocessor
                      between the next two: with less, planning and merging are most of what it does
    fewest_programs:  that there be work for all multiprocessors
    split_programs:   enough that the ones that end first leave little idle
    few_programs:     the same of up to `few_sequences`, whose splits are alike: all run at once, and less is merged
    few_fewest:       likewise, for `fewest_programs`
    min_split_tokens: a split has at least so many tokens, in any case
    tma:              the tensor memory accelerator brings a prompt's keys and values, where `tma_tile` has a tile
    """

    prefill: Tile | None = None
    decode: Tile | None = None
    joint: Tile | None = None
    split_bytes: int = 256 << 10
    fewest_programs: int = 2
    split_programs: int = 8
    few_programs: int = 3
    few_fewest: int = 1
    few_sequences: int = 4
    min_split_tokens: int = 128
    tma: bool = False


@dataclass(frozen=True)
class _Plan:
    """The kernels of one shape on one card; joint: None, where no sequences read anything together."""

    prefill: Variant
    decode: Variant
    joint: JointVariants | None
    tokens: int
    """Query tokens per prefill tile."""
    parts: int
    """Programs of a prefill tile."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.prefill, self.decode

    @property
    def every(self) -> tuple[Variant, ...]:
        """With those of decodes that read tokens together."""
        return self.variants if self.joint is None else (*self.variants, self.joint.together, self.joint.apart)


@dataclass(frozen=True)
class _Ready:
    """A shape's plan, whose kernels are loaded."""

    shape: AttentionShape
    plan: _Plan
    prefill: Kernel
    decode: Kernel


def variants_of(shape: AttentionShape, sm: int, tma: bool = False) -> tuple[Variant, ...]:
    """What attention of ``shape`` launches on a card of compute capability ``sm``: for prompts, and for decodes."""
    return _plan(shape, sm, Tuning(tma=tma)).variants


def every_variant_of(shape: AttentionShape, sm: int, tma: bool = False) -> tuple[Variant, ...]:
    """The same, and behind them those for decodes that read tokens together, where it has such."""
    return _plan(shape, sm, Tuning(tma=tma)).every


def variant_of_ranks(shape: AttentionShape, sm: int) -> Variant:
    """What `TritonAttention.attend_of_ranks` launches; ``shape`` has the query heads of all ranks, and blocks of this
    one's tokens."""
    return _of_ranks(shape, sm, Tuning())


@dataclass
class TritonAttention:
    """`AttentionKernels.attend` on a GPU, or in the interpreter.

    Reads no device array on the host: what is launched depends on the shapes of ``batch`` and its ``max_query_len``
    alone, so launches can be captured in a CUDA graph and replayed with other lengths. Rows of query and out have
    contiguous heads; tokens may be any multiple of 16 bytes apart.

    joint_share: query heads over a KV head, at most, of prepared shapes whose decodes read tokens together; 0: none do

    ``allocate(nbytes)`` gives device memory as a flat uint8 array; called by `prepare`, or by the first `attend` of a
    shape that was not prepared.
    """

    launcher: TritonLauncher
    allocate: Callable[[int], Array]
    tuning: Tuning = field(default_factory=Tuning)

    def __post_init__(self) -> None:
        self.joint_share = 0
        self._ready: dict[AttentionShape, _Ready] = {}
        self._of_ranks: dict[AttentionShape, tuple[Variant, Kernel]] = {}
        self._asked: dict[tuple[Any, ...], _Ready] = {}  # by what `AttentionShape.of` was given
        self._batch_arguments = OfLatest(_batch_arguments)
        # Of all KV heads together, two for a unit: see `attention_jit.attend`.
        self._splits = 2 * max(self._most_programs, MOST_KV_HEADS)
        self._workspace = PartsWorkspace(self.allocate, self._splits)
        self._joint = JointDecodes(self.launcher, self.allocate, self._workspace)

    def prepare(self, shapes: Iterable[AttentionShape], kv_heads: int = 0) -> None:
        """Compile and load all that ``shapes`` need, and make their workspace: no call does either later.

        kv_heads: of a rank's layer at most, for decodes that read tokens together; 0: none do

        Raises:
            ConfigError: a shape is not supported (`check_supported`).
        """
        for shape in shapes:
            joint = self._prepared(shape).plan.joint
            if kv_heads and joint is not None:
                self._joint.prepare(joint, kv_heads * shape.share)
                self.joint_share = max(self.joint_share, shape.share)

    def prepare_of_ranks(self, shape: AttentionShape) -> tuple[Variant, Kernel]:
        """The same for `attend_of_ranks`; ``shape`` is that of `variant_of_ranks`."""
        if shape not in self._of_ranks:
            self._reserve(shape)
            variant = _of_ranks(shape, self.launcher.sm, self.tuning)
            self._of_ranks[shape] = variant, self.launcher.prepare(variant)
        return self._of_ranks[shape]

    def attend(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None = None,
    ) -> None:
        """See `AttentionKernels.attend`. A visible token whose block is ``-1`` is treated as not visible.

        Raises:
            ConfigError: the shape is not supported.
            ValueError: the arrays do not fit each other, or ``scale`` is not positive.
        """
        tokens, q_heads, _ = query.shape
        kv_heads, sequences = heads.group.shape[0], batch.cu_seqlens_q.shape[0] - 1
        sees = batch.sees_of(heads)
        options = softcap > 0, sink_logits is not None, heads.chunked, sees is not None
        ready = self._asked_for(layout, q_heads, kv_heads, query.dtype, *options)
        if tokens == 0 or sequences == 0:
            return
        shape, plan = ready.shape, ready.plan
        expected = (tokens, q_heads, shape.head_dim), (tokens, q_heads, shape.value_dim)
        if (query.shape, out.shape) != expected or query.dtype != out.dtype:
            raise ValueError(
                f"query {query.shape} {query.dtype} and out {out.shape} {out.dtype} do not fit each other and "
                f"head_dim {shape.head_dim}, with values of {shape.value_dim}"
            )
        if not scale > 0:
            raise ValueError(
                f"scale {scale} is not positive: attention scores are scaled up or down, never turned around"
            )
        if sink_logits is not None and (sink_logits.shape != (q_heads,) or sink_logits.dtype != np.float32):
            raise ValueError(f"sink_logits {sink_logits.shape} {sink_logits.dtype} are not float32 [{q_heads}]")
        query_at, query_stride = _rows("query", query)
        out_at, out_stride = _rows("out", out)
        of_units = self._units(kv_heads, layout, batch)
        joint = None if batch.joint is None else plan.joint
        if joint is not None:
            self._joint.prepare(joint, q_heads)  # before anybody is told where the workspace is
        parts = self._workspace.arguments(self._splits * shape.share, shape.value_dim)
        arguments: dict[str, Argument] = {
            "query": query_at,
            "out": out_at,
            **parts,
            "sink_logits": parts["partial"] if sink_logits is None else address_of(sink_logits),
            **_arena_arguments(arena, layout),
            **self._batch_arguments(batch),
            **_head_arguments(heads),
            "query_stride": query_stride,
            "out_stride": out_stride,
            **_score_arguments(scale, softcap),
            **of_units,
        }
        longest = 1 if tokens == 1 else batch.max_query_len
        decodes = longest == 1 or sequences > 1
        if longest != 1:
            tiles = tokens // plan.tokens + sequences
            arguments["fewest_queries"] = 2 if decodes else 1
            told = () if sees is None else (address_of(sees),)
            ready.prefill((kv_heads * tiles * plan.parts, 1, 1), (*_in_order(arguments), *told))
        if decodes:
            arguments["fewest_queries"] = 1
            grid, own = (of_units["units"] + sequences, kv_heads, 1), _in_order(arguments)
            if joint is None:
                ready.decode(grid, own)
            else:
                self._joint.attend(joint, batch, arguments, own, grid)

    def attend_of_ranks(
        self,
        queries: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: Array,
    ) -> None:
        """What all ranks' heads see of the keys and values that one of them keeps, of their one KV head.

        queries: ``[ranks, tokens, heads, head_dim]``
        batch:   sequences with a query or none; their lengths, and blocks of ``layout``, are of the rank's own tokens
        out:     float32 ``[ranks, tokens, heads, value_dim + BESIDE]``: a query's mean of values, and behind it the
                 logarithm to base 2 of the sum of its weights; 0 and -inf of one that sees nothing
        """
        ranks, tokens, own_heads, _ = queries.shape
        shape = AttentionShape.of(layout, ranks * own_heads, 1, queries.dtype.name, softcap)
        variant, kernel = self.prepare_of_ranks(shape)
        arguments: dict[str, Argument] = {
            "query": address_of(queries),
            "out": address_of(out),
            **self._workspace.arguments(self._splits * shape.share, shape.value_dim),
            **_arena_arguments(arena, layout),
            **_batch_arguments(batch),
            **_head_arguments(heads),
            **_score_arguments(scale, softcap),
            **self._units(1, layout, batch),
            "tokens_of_step": tokens,
            "own_heads": own_heads,
        }
        sequences = batch.cu_seqlens_q.shape[0] - 1
        kernel((arguments["units"] + sequences, 1, 1), [arguments[name] for name, _ in variant.signature])

    def _units(self, kv_heads: int, layout: BlockLayout, batch: AttentionBatch) -> dict[str, int]:
        """Splits that a decode is cut into, of each KV head: at most, and at least."""
        sequences = batch.cu_seqlens_q.shape[0] - 1
        useful = -(-batch.block_tables.shape[1] * layout.block_size // self.tuning.min_split_tokens)
        fewest, most = (max(1, programs // kv_heads) for programs in self._programs(sequences))
        units = min(most, sequences * useful)
        return {"units": units, "fewest_units": min(fewest, units)}

    def _programs(self, sequences: int) -> tuple[int, int]:
        """Splits that all which the heads of a rank see of a batch is cut into, about: (at least, at most)."""
        tuning, sms = self.tuning, self.launcher.sms
        if sequences > tuning.few_sequences:
            return sms * tuning.fewest_programs, self._most_programs
        return sms * tuning.few_fewest, min(sms * tuning.few_programs, self._most_programs)

    @property
    def _most_programs(self) -> int:
        return self.launcher.sms * self.tuning.split_programs

    def _asked_for(
        self,
        layout: BlockLayout,
        q_heads: int,
        kv_heads: int,
        q_dtype: np.dtype[Any],
        softcap: bool,
        sink_logits: bool,
        chunked: bool,
        both_ways: bool,
    ) -> _Ready:
        """What a layer's shape has, found without making that, which takes as long as all else that `attend` does."""
        options = softcap, sink_logits, chunked, both_ways
        asked = layout, q_heads, kv_heads, q_dtype, *options
        ready = self._asked.get(asked)
        if ready is None:
            shape = AttentionShape.of(layout, q_heads, kv_heads, q_dtype.name, *options)
            ready = self._asked[asked] = self._prepared(shape)
        return ready

    def _prepared(self, shape: AttentionShape) -> _Ready:
        if shape not in self._ready:
            self._reserve(shape)
            plan = _plan(shape, self.launcher.sm, self.tuning)
            prepare = self.launcher.prepare
            self._ready[shape] = _Ready(shape, plan, prepare(plan.prefill), prepare(plan.decode))
        return self._ready[shape]

    def _reserve(self, shape: AttentionShape) -> None:
        check_shape(shape, self.launcher.sm)
        self._workspace.reserve(self._splits * shape.share, shape.value_dim)


def _rows(name: str, array: Array) -> tuple[int, int]:
    """(address, elements from token to token) of rows that the kernels can read or write."""
    (tokens, heads, head_dim), strides = array.shape, array.strides
    itemsize, address = array.itemsize, address_of(array)
    # The stride of a dimension of one says nothing.
    if (
        strides[2] != itemsize
        or (heads > 1 and strides[1] != head_dim * itemsize)
        or (tokens > 1 and strides[0] % ALIGNMENT)
        or address % ALIGNMENT
    ):
        raise ValueError(
            f"{name} with strides {strides} at {address:#x}: heads must be contiguous, tokens on multiples of "
            f"{ALIGNMENT} bytes; pass a contiguous copy"
        )
    return address, strides[0] // itemsize


def _arena_arguments(arena: Array, layout: BlockLayout) -> dict[str, Argument]:
    start, offsets = address_of(arena), layout.role_offsets
    return {
        "key": start + offsets["key"],
        "value": start + offsets["value"],
        "key_scale": start + offsets.get("key_scale", 0),
        "value_scale": start + offsets.get("value_scale", 0),
        "block_bytes": layout.block_bytes,
        "slot_bytes": layout.slot_bytes,
    }


def _batch_arguments(batch: AttentionBatch) -> dict[str, Argument]:
    return {
        "cu_seqlens_q": address_of(batch.cu_seqlens_q),
        "seq_lens": address_of(batch.seq_lens),
        "block_tables": address_of(batch.block_tables),
        "batch": batch.cu_seqlens_q.shape[0] - 1,
        "groups": batch.groups,
        "max_blocks": batch.block_tables.shape[1],
    }


def _head_arguments(heads: HeadTable) -> dict[str, Argument]:
    return {
        "head_group": address_of(heads.group),
        "head_slot": address_of(heads.slot),
        "head_window": address_of(heads.window),
        "head_sink": address_of(heads.sink),
        "kv_heads": heads.group.shape[0],
    }


def _score_arguments(scale: float, softcap: float) -> dict[str, Argument]:
    """The scaling of scores in base 2, see `attention_jit.attend`."""
    if softcap > 0:
        return {"score_scale": 2 * LOG2E * scale / softcap, "cap": LOG2E * softcap}
    return {"score_scale": LOG2E * scale, "cap": 0.0}


ATTEND_SIGNATURE = (
    "query:q", "out:q", "counters:*i32", "partial:*fp32", "partial_lse:*fp32", "sink_logits:*fp32", "key:kv",
    "value:kv", "key_scale:scale", "value_scale:scale", "cu_seqlens_q:*i32", "seq_lens:*i32", "block_tables:*i32",
    "head_group:*i32", "head_slot:*i32", "head_window:*i32", "head_sink:*i32", "batch:i32", "kv_heads:i32",
    "groups:i32", "max_blocks:i32", "block_bytes:i64", "slot_bytes:i64", "query_stride:i32", "out_stride:i32",
    "score_scale:fp32", "cap:fp32", "units:i32", "fewest_units:i32", "fewest_queries:i32",
)  # fmt: skip
_in_order: Callable[[dict[str, Argument]], tuple[Argument, ...]] = itemgetter(
    *(parameter.partition(":")[0] for parameter in ATTEND_SIGNATURE)
)

MORE_OF_RANKS = {"tokens_of_step": "i32", "own_heads": "i32"}
"""Parameters for queries of all ranks."""
OF_BOTH_WAYS = {"sees": "*i32"}
"""The last parameter of a prompt whose rows see more than up to themselves."""
NOT_OF_RANKS = {
    "sink_logits": 0,
    "kv_heads": 1,
    "query_stride": 0,
    "out_stride": 0,
    "fewest_queries": 1,
    "sees": 0,
    "BOTH_WAYS": False,
    **dict.fromkeys(OF_JOINT, 0),
    "JOINT": False,
}
"""Those that there is nothing to tell of then."""

MULTIPLES = ("query", "out", "partial", "key", "value", "block_bytes", "slot_bytes")
PACKED_MULTIPLES = (*MULTIPLES, "key_scale", "value_scale")


def _plan(shape: AttentionShape, sm: int, tuning: Tuning) -> _Plan:
    has_tma = tuning.tma and not shape.smaller_value and not shape.both_ways
    by_tma = tma_tile(shape.head_dim, shape.q_dtype, shape.kv_dtype, sm, shape.block_size) if has_tma else None
    prefill = tuning.prefill or by_tma or prefill_tile(shape.head_dim, shape.q_dtype, shape.kv_dtype, sm)
    decode = tuning.decode or decode_tile(shape.head_dim, shape.q_dtype, shape.kv_dtype, sm, shape.block_size)
    tokens = max(1, prefill.rows // shape.share)
    whole = {"BLOCK_N": prefill.keys, "MIN_SPLIT_TILES": 1, "SPLIT_TILES": 1}
    alone: dict[str, Any] = {"OF_RANKS": False, "JOINT": False, **dict.fromkeys((*MORE_OF_RANKS, *OF_JOINT), 0)}
    up_to_themselves: dict[str, Any] = {"BOTH_WAYS": False, **dict.fromkeys(OF_BOTH_WAYS, 0)}
    reaching = {"BOTH_WAYS": True} if shape.both_ways else up_to_themselves
    of_prompt = _attend_variant(shape, prefill, tokens, sm, DECODE=False, **whole, **alone, **reaching)
    if shape.both_ways:
        of_prompt = replace(of_prompt, signature=(*of_prompt.signature, *OF_BOTH_WAYS.items()))
    of_decode = _attend_variant(shape, decode, 1, sm, **_of_splits(shape, decode, tuning), **alone, **up_to_themselves)
    return _Plan(
        prefill=of_prompt,
        decode=of_decode,
        joint=joint_variants(of_prompt, of_decode, shape.q_dtype, shape.kv_dtype, sm, tuning.joint),
        tokens=tokens,
        parts=prefill.parts,
    )


def _of_ranks(shape: AttentionShape, sm: int, tuning: Tuning) -> Variant:
    """The decode for queries of all ranks, which ``shape`` has the heads of.

    Results are float32: those of several ranks may cancel out when they are merged, but for their rounding errors. It
    does not overlap what comes before, which counts the tokens that it asks for.
    """
    tile = tuning.decode or decode_tile(shape.head_dim, shape.q_dtype, shape.kv_dtype, sm, shape.block_size)
    variant = _attend_variant(shape, tile, 1, sm, **_of_splits(shape, tile, tuning), OF_RANKS=True, **NOT_OF_RANKS)
    given = {name: type_ for name, type_ in variant.signature if name not in NOT_OF_RANKS}
    return replace(variant, signature=tuple((given | {"out": "*fp32"} | MORE_OF_RANKS).items()))


def _of_splits(shape: AttentionShape, tile: Tile, tuning: Tuning) -> dict[str, Any]:
    """What is compiled into a decode."""
    tile_bytes = packed_bytes(shape.kv_dtype, tile.keys * (shape.head_dim + shape.value_dim))
    return {
        "DECODE": True,
        "BLOCK_N": tile.keys,
        "MIN_SPLIT_TILES": max(1, tuning.min_split_tokens // tile.keys),
        "SPLIT_TILES": max(1, tuning.split_bytes // tile_bytes),
    }


def _attend_variant(shape: AttentionShape, tile: Tile, tokens: int, sm: int, **constants: Any) -> Variant:
    sizes = shape.head_dim, shape.value_dim
    paired = constants["DECODE"] and all(is_read_by_words(size, shape.q_dtype, shape.kv_dtype) for size in sizes)
    constants |= {
        "SHARE": shape.share,
        "HEADS": _power_of_two(shape.share),
        **_head_constants(shape),
        "BLOCK_SIZE": shape.block_size,
        "TOKENS": tokens,
        "BLOCK_M": max(tile.rows, _power_of_two(tokens * shape.share)),
        "KV_BYTES": 2 if paired else packed_bytes(shape.kv_dtype, 1),
        "SOFTCAP": shape.softcap,
        "SINKS": shape.sink_logits,
        "QUANTISED": shape.kv_dtype in QUANTISED,
        "PACKED": shape.kv_dtype == INT4,
        "CHUNKED": shape.chunked,
        "VALUE_D": _power_of_two(shape.value_dim) // tile.parts,
        "BULK": tile.tma,
        "PAIRED": paired,
        "IS_E4M3": paired and shape.kv_dtype == "float8_e4m3fn",
        OVERLAPS: constants["DECODE"] and not constants["OF_RANKS"] and sm >= OVERLAPS_FROM,
    }
    signature = _typed(ATTEND_SIGNATURE, shape, paired)
    multiples = PACKED_MULTIPLES if shape.kv_dtype == INT4 else MULTIPLES
    return Variant("attend", signature, tuple(constants.items()), multiples, tile.warps, tile.stages)


def _head_constants(shape: AttentionShape) -> dict[str, int]:
    dim, value_dim = shape.head_dim, shape.value_dim
    return {
        "HEAD_DIM": dim, "BLOCK_D": _power_of_two(dim), "VALUE_DIM": value_dim, "BLOCK_V": _power_of_two(value_dim)
    }  # fmt: skip


def _typed(signature: tuple[str, ...], shape: AttentionShape, paired: bool) -> tuple[tuple[str, str], ...]:
    pointers = {
        "q": "*" + TRITON_TYPES[shape.q_dtype],
        "kv": "*i16" if paired else "*" + TRITON_TYPES[shape.kv_dtype],
        "scale": "*i32" if shape.kv_dtype == INT4 else "*fp32",
    }
    pairs = (parameter.split(":") for parameter in signature)
    return tuple((name, pointers.get(type_, type_)) for name, type_ in pairs)


def _power_of_two(number: int) -> int:
    """The smallest power of two not below ``number``."""
    return 1 << (number - 1).bit_length()
