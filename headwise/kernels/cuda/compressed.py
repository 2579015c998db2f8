"""The host half of attention to a window and to entries of several tokens each (DeepSeek-V4) on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from headwise.cache_controller.dtypes import dtype_bytes
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed_base import Entries, Kept
from headwise.kernels.compressed_rows import QUANTISED, stored_part
from headwise.kernels.cuda.attention import ALIGNMENT, FLOATS, LOG2E, OLDEST_SM, TRITON_TYPES, Tuning
from headwise.kernels.cuda.entries import SCALE_BYTES
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of, addresses_of
from headwise.kernels.cuda.mla import MOST_RANK, MULTIPLE, TUNING, check_e4m3, power_of_two
from headwise.kernels.cuda.parameters import Argument
from headwise.kernels.cuda.tiles import Tile, compressed_tile
from headwise.kernels.cuda.workspace import PartsWorkspace
from headwise.kernels.mla import LATENT, LATENT_SCALE, has_scales

MODULE = "compressed_jit"
MOST_SPLITS = 128

SIGNATURE = (
    "query:q", "out:q", "counters:*i32", "partial:*fp32", "partial_lse:*fp32", "sink_logits:*fp32", "window_rows:kv",
    "entry_rows:kv", "window_scales:*fp32", "entry_scales:*fp32", "places:*i32", "counts:*i32", "cu_seqlens_q:*i32",
    "seq_lens:*i32", "block_tables:*i32", "window_group:*i32", "window_slot:*i32", "head_window:*i32",
    "entry_group:*i32", "entry_slot:*i32", "batch:i32", "groups:i32", "max_blocks:i32",
    "block_bytes:i64", "window_slot_bytes:i64", "entry_slot_bytes:i64", "query_stride:i32", "heads:i32",
    "score_scale:fp32", "top:i32", "splits:i32", "tokens:i32", "entry_width:i32", "entry_beside:i32",
)  # fmt: skip
MULTIPLES = (
    "query", "out", "partial", "window_rows", "entry_rows", "block_bytes", "window_slot_bytes", "entry_slot_bytes",
    "query_stride", "entry_width",
)  # fmt: skip


@dataclass(frozen=True)
class CompressedShape:
    """What the machine code of a layer's attention depends on besides the card.

    heads:      query heads of the rank
    size:       numbers of a head, of a token's key and of an entry
    block_size: tokens of a block
    dtype:      of queries
    kv_dtype:   of the cache: that, int8 or E4M3
    turning:    of a row in codes the first numbers of each half, which take two bytes
    rate:       tokens of an entry; 0: the layer has none
    is_chosen:  whether an indexer chooses entries
    """

    heads: int
    size: int
    block_size: int
    dtype: str
    kv_dtype: str
    turning: int = 0
    rate: int = 0
    is_chosen: bool = False

    @classmethod
    def of(
        cls, window: BlockLayout, made: BlockLayout | None, heads: int, size: int, dtype: str, is_chosen: bool
    ) -> CompressedShape:
        """The shape of attention of ``heads`` of ``size`` numbers of ``dtype`` to tokens and entries in such blocks."""
        kept = window.roles[0].dtype
        turning = (window.roles[0].shape[0] - size) // 2 if has_scales(window) else 0
        if made is None:
            return cls(heads, size, window.block_size, dtype, kept, turning)
        return cls(heads, size, window.block_size, dtype, kept, turning, made.rate, is_chosen)


def check_compressed(shape: CompressedShape, sm: int) -> None:
    """Whether the kernels serve a layer of ``shape`` on a card of compute capability ``sm``.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    if sm < OLDEST_SM:
        raise ConfigError(f"a card of compute capability {sm / 10} is too old: {OLDEST_SM / 10} is the least")
    if shape.size % (2 * MULTIPLE) or not 0 < shape.size <= MOST_RANK:
        raise ConfigError(
            f"head_dim {shape.size} of compressed attention is not supported on a GPU: only multiples of "
            f"{2 * MULTIPLE} up to {MOST_RANK}; use device cpu"
        )
    if shape.dtype not in FLOATS:
        raise ConfigError(f"dtype {shape.dtype} is not supported on a GPU: choose one of {', '.join(FLOATS)}")
    if shape.kv_dtype not in (shape.dtype, *QUANTISED):
        raise ConfigError(
            f"kv_dtype {shape.kv_dtype} cannot keep what compressed attention of dtype {shape.dtype} sees on a GPU: "
            f"choose {shape.dtype} or {' or '.join(QUANTISED)}"
        )
    check_e4m3(shape.kv_dtype, sm)
    if shape.kv_dtype in QUANTISED and (2 * shape.turning % MULTIPLE or not shape.turning):
        raise ConfigError(
            f"{2 * shape.turning} rotated numbers of a row in {shape.kv_dtype} are not supported on a GPU: only "
            f"multiples of {MULTIPLE}; choose kv_dtype {shape.dtype}"
        )
    if shape.block_size & (shape.block_size - 1):
        raise ConfigError(f"block_size {shape.block_size} is not supported on a GPU: choose a power of two, 16 or more")
    if shape.is_chosen and shape.rate > shape.block_size:
        raise ConfigError(
            f"entries of {shape.rate} tokens, which an indexer chooses, in blocks of {shape.block_size} are not "
            f"supported on a GPU: choose a block_size of {shape.rate} or more"
        )
    if shape.rate & (shape.rate - 1):
        raise ConfigError(f"entries of {shape.rate} tokens are not supported on a GPU: only of a power of two")


@lru_cache
def variant_of(shape: CompressedShape, sm: int, tile: Tile | None = None) -> Variant:
    """What attention of ``shape`` launches on a card of compute capability ``sm``; tile: another than the card's"""
    tile = tile or compressed_tile(shape.heads, shape.dtype, shape.kv_dtype, sm)
    constants = {
        "SIZE": shape.size, "BLOCK_D": power_of_two(shape.size), "NUMBER_BYTES": dtype_bytes(shape.kv_dtype),
        "SCALED": shape.kv_dtype in QUANTISED, "TURNING": shape.turning,
        "BLOCK_T": power_of_two(2 * shape.turning), "BLOCK_SIZE": shape.block_size, "RATE": shape.rate,
        "BLOCK_ENTRIES": max(1, shape.block_size // max(1, shape.rate)), "CHOSEN": shape.is_chosen,
        "HEADS": min(shape.heads, tile.rows), "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
    }  # fmt: skip
    types = {"q": "*" + TRITON_TYPES[shape.dtype], "kv": "*" + TRITON_TYPES[shape.kv_dtype]}
    pairs = (parameter.split(":") for parameter in SIGNATURE)
    signature = tuple((name, types.get(type_, type_)) for name, type_ in pairs)
    return Variant("attend_compressed", signature, tuple(constants.items()), MULTIPLES, tile.warps, tile.stages, MODULE)


class TritonCompressed:
    """Attention on a GPU or in the interpreter. What `TritonAttention` says of launches and memory holds.

    allocate: see `GpuParts`
    """

    def __init__(self, launcher: TritonLauncher, allocate: Callable[[int], Array], tuning: Tuning = TUNING) -> None:
        self._launcher, self._tuning = launcher, tuning
        self._programs = launcher.sms * tuning.split_programs
        self.workspace = PartsWorkspace(allocate, 2 * self._programs)
        self._prepared: set[CompressedShape] = set()

    def prepare(self, shape: CompressedShape) -> None:
        """Compile and load what ``shape`` needs, and make its workspace: no call does either later.

        Raises:
            ConfigError: it is not supported (`check_compressed`).
        """
        if shape not in self._prepared:
            check_compressed(shape, self._launcher.sm)
            self.workspace.reserve(2 * self._programs * shape.heads, shape.size)
            self._launcher.prepare(self._variant(shape))
            self._prepared.add(shape)

    def _variant(self, shape: CompressedShape) -> Variant:
        return variant_of(shape, self._launcher.sm, self._tuning.decode)

    def attend(
        self,
        query: Array,
        arena: Array,
        window: Kept,
        entries: Entries | None,
        chosen: tuple[Array, Array] | None,
        batch: AttentionBatch,
        *,
        scale: float,
        sink_logits: Array,
        out: Array,
    ) -> None:
        """See `CompressedKernels.attend`. chosen: places and counts of entries that are, see `indexer.cu`

        A visible token or entry whose block is ``-1`` is treated as not visible. Rows of padding are left alone.

        Raises:
            ValueError: the arrays do not fit each other, or the kernels cannot read them.
        """
        tokens, heads, size = query.shape
        made = None if entries is None else entries.made.layout
        shape = CompressedShape.of(window.layout, made, heads, size, query.dtype.name, chosen is not None)
        self.prepare(shape)
        _check_arrays(query, out, sink_logits, shape, scale)
        variant = self._variant(shape)
        pieces = -(-heads // dict(variant.constants)["HEADS"])
        splits = self._splits(tokens * pieces, window, entries, chosen, batch)
        arguments: dict[str, Argument] = {
            **_batch_arguments(batch),
            **_where(arena, window, entries, size),
            **self.workspace.arguments(2 * self._programs * heads, size),
            **dict(zip(("query", "out", "sink_logits"), addresses_of(query, out, sink_logits), strict=True)),
            **dict(zip(("places", "counts"), addresses_of(*(chosen or (None, None))), strict=True)),
            "query_stride": query.strides[0] // query.itemsize,
            "heads": heads,
            "score_scale": LOG2E * scale,
            "top": 0 if chosen is None else chosen[0].shape[1],
            "splits": splits,
            "tokens": tokens,
        }
        every = [arguments[name] for name, _ in variant.signature]
        self._launcher.launch(variant, (tokens * splits * pieces, 1, 1), every)

    def _splits(
        self,
        programs: int,
        window: Kept,
        entries: Entries | None,
        chosen: tuple[Array, Array] | None,
        batch: AttentionBatch,
    ) -> int:
        """Parts that what each query sees is cut into, by what it may see at most."""
        about = USUAL_WINDOW
        if chosen is not None:
            about += chosen[0].shape[1]
        elif entries is not None:
            about += batch.block_tables.shape[1] * window.layout.block_size // entries.making.rate
        useful = -(-about // self._tuning.min_split_tokens)
        return max(1, min(self._programs // programs, useful, MOST_SPLITS))


USUAL_WINDOW = 128
"""Tokens; how long a layer's is, the device alone knows."""


def _batch_arguments(batch: AttentionBatch) -> dict[str, Argument]:
    names = ("cu_seqlens_q", "seq_lens", "block_tables")
    places = addresses_of(batch.cu_seqlens_q, batch.seq_lens, batch.block_tables)
    return {
        **dict(zip(names, places, strict=True)),
        "batch": batch.cu_seqlens_q.shape[0] - 1,
        "groups": batch.groups,
        "max_blocks": batch.block_tables.strides[0] // batch.block_tables.itemsize,
    }


def _where(arena: Array, window: Kept, entries: Entries | None, size: int) -> dict[str, Argument]:
    """Where rows lie."""
    start, layout, heads = address_of(arena), window.layout, window.heads
    found: dict[str, Argument] = {
        "window_rows": start + layout.role_offsets[LATENT],
        "window_scales": start + layout.role_offsets.get(LATENT_SCALE, 0),
        "block_bytes": layout.block_bytes,
        "window_slot_bytes": layout.slot_bytes,
    }
    places = addresses_of(heads.group, heads.slot, heads.window)
    found |= dict(zip(("window_group", "window_slot", "head_window"), places, strict=True))
    if entries is None:
        nothing = ("rows", "scales", "slot_bytes", "group", "slot", "width", "beside")
        return found | {f"entry_{name}": 0 for name in nothing}
    made = entries.made
    if made.layout.block_bytes != layout.block_bytes:
        raise ValueError(f"entries in {made.layout.identity} and tokens in {layout.identity} are not of one arena")
    role, at, begin = made.layout.roles[0], made.layout.role_offsets, entries.making.begin
    part, beside = stored_part(made.layout, size, begin), 0
    if has_scales(made.layout):
        (beside,) = made.layout.roles[1].shape
    found |= dict(zip(("entry_group", "entry_slot"), addresses_of(made.heads.group, made.heads.slot), strict=True))
    found |= {
        "entry_width": role.shape[0],
        "entry_beside": beside,
        "entry_rows": start + at[LATENT] + part.start * dtype_bytes(role.dtype),
        "entry_scales": start + at.get(LATENT_SCALE, 0) + begin // size * SCALE_BYTES,
        "entry_slot_bytes": made.layout.slot_bytes,
    }
    return found


def _check_arrays(query: Array, out: Array, sink_logits: Array, shape: CompressedShape, scale: float) -> None:
    itemsize, aligned = query.itemsize, ALIGNMENT * query.itemsize
    dense = query.strides[1:] == (shape.size * itemsize, itemsize)
    if not dense or query.strides[0] % aligned or (address_of(query) | address_of(out)) % ALIGNMENT:
        raise ValueError(
            f"query with strides {query.strides} at {address_of(query):#x}: a token's heads must lie side by side, "
            f"tokens a multiple of {ALIGNMENT} numbers apart, at multiples of {ALIGNMENT} bytes; pass a copy"
        )
    if (
        out.shape != query.shape
        or out.dtype != query.dtype
        or not out.flags.c_contiguous
        or query.shape[2] != shape.size
    ):
        raise ValueError(f"query {query.shape}, out {out.shape} and rows of {shape.size} do not fit each other")
    if sink_logits.shape != query.shape[1:2] or sink_logits.dtype.name != "float32":
        raise ValueError(f"sinks {sink_logits.dtype} {sink_logits.shape} are not float32 of {query.shape[1]} heads")
    if not scale > 0:
        raise ValueError(f"scale {scale} is not positive: attention scores are scaled up or down, never turned around")
