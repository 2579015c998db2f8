"""Gated delta-nets on a GPU: the host half of `delta_jit`.

Of each sequence with one token in a step all is done by one launch, of the others by four; which launches there are
follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.state_layout import RECURRENT, StateSizes, sizes_of, state_layout

MODULE = "delta_jit"
CHUNK = 64
"""Tokens of a prompt that are computed at once; in blocks of fewer as many, since states are left at their ends."""

CONVOLVED = 16
"""Tokens of a program that convolves, or norms."""

COLUMNS = 32
"""Of a value head's state that one program carries through a prompt."""

MOST_DIM = 256
"""Of keys, and of values: a program keeps a value head's state in registers."""

MOST_SHARE = 16
"""Value heads of a key head, all of which one program decodes."""

_TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
_IN_CACHE = (
    "cu_seqlens_q:*i32 seq_lens:*i32 block_tables:*i32 head_group:*i32 head_slot:*i32 {} groups:i32 max_blocks:i32 "
    "block_bytes:i64 slot_bytes:i64"
)
_SIGNATURES = {
    "step": "projected:x out:x arena:*fp32 convolution:*fp32 speed:*fp32 bias:*fp32 norm:*fp32 "
    + _IN_CACHE.format("") + " eps:fp32",
    "convolve": "projected:x query:x key:x value:x rate:*fp32 decay:*fp32 arena:*fp32 convolution:*fp32 speed:*fp32 "
    "bias:*fp32 " + _IN_CACHE.format("batch:i32") + " fewest_queries:i32",
    "solve": "query:x key:x rate:*fp32 decay:*fp32 among:x solved:x cu_seqlens_q:*i32 seq_lens:*i32 batch:i32 "
    "fewest_queries:i32",
    "carry": "query:x key:x value:x sums:*fp32 among:x solved:x seen:*fp32 projected:x arena:*fp32 "
    + _IN_CACHE.format("") + " fewest_queries:i32",
    "finish": "seen:*fp32 projected:x norm:*fp32 out:x tokens:i32 eps:fp32",
}  # fmt: skip
_OF_ROWS = "SHARE VALUE_DIM CHANNELS EACH ROW"
_OF_CACHE = f"{_OF_ROWS} KEY_HEADS KEY_DIM WIDTH BLOCK_K BLOCK_SIZE"
_CONSTANTS = {
    "step": f"{_OF_CACHE} BLOCK_V RECURRENT_AT QUERY_SCALE",
    "convolve": f"{_OF_CACHE} VALUE_HEADS BLOCK_V BLOCK_S TOKENS QUERY_SCALE",
    "solve": "KEY_HEADS VALUE_HEADS SHARE KEY_DIM BLOCK_K CHUNK ROWS LEVELS PRECISION",
    "carry": f"{_OF_CACHE} VALUE_HEADS COLUMNS PIECES RECURRENT_AT CHUNK ROWS PRECISION",
    "finish": f"{_OF_ROWS} VALUE_HEADS BLOCK_V TOKENS",
}
"""Of each kernel, what is compiled in."""
_WARPS = {"step": 8, "convolve": 4, "solve": 4, "carry": 4, "finish": 4}
_WARPS_BELOW_90 = {**_WARPS, "solve": 8, "carry": 8}
"""There accumulators and what is multiplied share a warp's registers."""
_STAGES = {"carry": 2}
_MULTIPLES = (
    "projected", "out", "arena", "convolution", "norm", "query", "key", "value", "among", "solved", "seen",
    "block_bytes", "slot_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class DeltaShape:
    """What the machine code of a layer depends on besides the card. key_heads: of a rank"""

    key_heads: int
    sizes: StateSizes
    block_size: int
    dtype: str

    @classmethod
    def of(cls, layout: BlockLayout, key_heads: int, dtype: str) -> DeltaShape:
        """With states in blocks of ``layout``."""
        return cls(key_heads, sizes_of(layout), layout.block_size, dtype)

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.sizes.share

    @property
    def values(self) -> int:
        """Numbers that come of a token."""
        return self.value_heads * self.sizes.value_dim

    @property
    def projected(self) -> int:
        """Numbers that are projected of a token: see `headwise.kernels.delta_base.DeltaProjected`."""
        return self.key_heads * self.sizes.channels + self.values + 2 * self.value_heads


def check_delta(shape: DeltaShape) -> None:
    """Whether the kernels serve such a layer.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    sizes, size = shape.sizes, shape.block_size
    if shape.dtype not in _TYPES:
        raise ConfigError(f"dtype {shape.dtype} is not supported on a GPU: choose one of {', '.join(_TYPES)}")
    if max(sizes.key_dim, sizes.value_dim) > MOST_DIM or sizes.share > MOST_SHARE:
        raise ConfigError(
            f"delta-nets with heads of {sizes.key_dim} and {sizes.value_dim}, {sizes.share} of which share a key head, "
            f"are not supported on a GPU: at most {MOST_DIM}, shared by {MOST_SHARE}; use device cpu"
        )
    if size & (size - 1) or size < sizes.convolution - 1:
        raise ConfigError(
            f"block_size {size} is not supported on a GPU for delta-nets with a convolution over {sizes.convolution} "
            f"tokens: choose a power of two, {max(16, sizes.convolution)} or more"
        )


class CudaDelta:
    """`ProjectedDeltaKernels` on device arrays, on the current stream.

    Reads no device array on the host: what is launched depends on the shapes of a step and its ``max_query_len`` alone,
    so decode steps can be captured in a CUDA graph and replayed with other lengths; they allocate nothing.

    ``allocate(nbytes)`` gives device memory as a flat uint8 array.
    """

    name = "cuda"

    def __init__(self, launcher: TritonLauncher, allocate: Callable[[int], Array]) -> None:
        self._launcher, self._allocate = launcher, allocate

    def prepare(self, shapes: Iterable[DeltaShape]) -> None:
        """Compile or load all that calls of ``shapes`` need, so that they only enqueue.

        Raises:
            ConfigError: a shape is not supported (`check_delta`).
        """
        for shape in shapes:
            for variant in variants_of(shape, self._launcher.sm).values():
                self._launcher.prepare(variant)

    def attend_projected(
        self,
        projected: Array,
        weights: DeltaWeights,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """See `ProjectedDeltaKernels.attend_projected`.

        Raises:
            ConfigError: the shape is not supported.
            ValueError: the arrays do not fit each other.
        """
        shape = DeltaShape.of(layout, heads.group.shape[0], projected.dtype.name)
        tokens, sequences = projected.shape[0], batch.cu_seqlens_q.shape[0] - 1
        if tokens == 0 or sequences == 0:
            return
        _check_arrays(projected, out, shape)
        arguments = {
            **_pointers(projected=projected, out=out, arena=arena),
            **_pointers(convolution=weights.convolution, speed=weights.speed, bias=weights.bias, norm=weights.norm),
            **_cache_arguments(layout, batch, heads),
            "eps": np.float32(weights.eps),
            "tokens": np.int32(tokens),
        }
        longest = 1 if tokens == 1 else batch.max_query_len
        decodes = longest == 1 or sequences > 1
        if longest != 1:
            fewest = np.int32(2 if decodes else 1)
            self._chunks(shape, tokens, sequences, arguments | {"fewest_queries": fewest})
        if decodes:  # behind the others, which norm whatever is in the rows of decodes
            self._launch(shape, "step", (sequences * shape.key_heads, 1, 1), arguments)

    def _chunks(self, shape: DeltaShape, tokens: int, sequences: int, arguments: dict[str, np.generic]) -> None:
        """All sequences of several tokens."""
        key_heads, value_heads, chunk = shape.key_heads, shape.value_heads, _chunk(shape)
        itemsize = numpy_dtype(shape.dtype).itemsize
        keys, pairs = key_heads * shape.sizes.key_dim, value_heads * _rows(shape)
        of_token = {
            "query": keys * itemsize, "key": keys * itemsize, "value": shape.values * itemsize, "rate": value_heads * 4,
            "decay": value_heads * 4, "among": pairs * itemsize, "solved": pairs * itemsize, "seen": shape.values * 4,
        }  # fmt: skip
        rooms = {name: self._allocate(tokens * nbytes) for name, nbytes in of_token.items()}
        arguments = arguments | _pointers(**rooms, sums=rooms["decay"])

        def tiles(size: int) -> int:
            return tokens // size + 2 * sequences

        self._launch(shape, "convolve", (tiles(CONVOLVED) * key_heads, 1, 1), arguments)
        self._launch(shape, "solve", (tiles(chunk) * value_heads, 1, 1), arguments)
        self._launch(shape, "carry", (value_heads * _pieces(shape), sequences, 1), arguments)
        self._launch(shape, "finish", (-(-tokens // CONVOLVED) * value_heads, 1, 1), arguments)

    def _launch(
        self, shape: DeltaShape, kernel: str, grid: tuple[int, int, int], arguments: dict[str, np.generic]
    ) -> None:
        variant = variants_of(shape, self._launcher.sm)[kernel]
        self._launcher.launch(variant, grid, [arguments[name] for name, _ in variant.signature])


@lru_cache
def variants_of(shape: DeltaShape, sm: int) -> dict[str, Variant]:
    """All that a layer of ``shape`` launches on a card of compute capability ``sm``, by the kernels' names.

    Raises:
        ConfigError: the shape is not supported (`check_delta`).
    """
    check_delta(shape)
    sized, warps = _constants(shape), _WARPS if sm >= 90 else _WARPS_BELOW_90
    return {
        name: Variant(
            kernel=name,
            signature=_typed(signature, shape.dtype),
            constants=tuple((constant, sized[constant]) for constant in _CONSTANTS[name].split()),
            multiples=tuple(parameter for parameter in _MULTIPLES if f" {parameter}:" in f" {signature}"),
            num_warps=warps[name],
            num_stages=_STAGES.get(name, 1),
            module=MODULE,
        )
        for name, signature in _SIGNATURES.items()
    }


def _constants(shape: DeltaShape) -> dict[str, int | float | str]:
    sizes, rows, values = shape.sizes, _rows(shape), shape.sizes.share * shape.sizes.value_dim
    return {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "SHARE": sizes.share,
        "KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.convolution,
        "CHANNELS": sizes.channels, "EACH": sizes.channels + values, "ROW": shape.projected,
        "BLOCK_K": _block(sizes.key_dim), "BLOCK_V": _block(sizes.value_dim), "BLOCK_S": _power_of_two(sizes.share),
        "COLUMNS": _columns(shape), "PIECES": _pieces(shape),
        "BLOCK_SIZE": shape.block_size, "CHUNK": _chunk(shape), "ROWS": rows, "LEVELS": rows.bit_length() - 1,
        "TOKENS": CONVOLVED, "RECURRENT_AT": _recurrent_at(sizes), "QUERY_SCALE": sizes.key_dim**-0.5,
        "PRECISION": "tf32x3" if shape.dtype == "float32" else "bf16x3",
    }  # fmt: skip


def _typed(signature: str, dtype: str) -> tuple[tuple[str, str], ...]:
    pairs = (parameter.split(":") for parameter in signature.split())
    return tuple((name, _TYPES[dtype] if type_ == "x" else type_) for name, type_ in pairs)


def _chunk(shape: DeltaShape) -> int:
    return min(CHUNK, shape.block_size)


def _rows(shape: DeltaShape) -> int:
    """Of the tiles that have a chunk: matrix instructions take 16 at least."""
    return max(16, _chunk(shape))


def _columns(shape: DeltaShape) -> int:
    return min(COLUMNS, _block(shape.sizes.value_dim))


def _pieces(shape: DeltaShape) -> int:
    """Programs that carry a value head's state."""
    return -(-shape.sizes.value_dim // _columns(shape))


def _block(size: int) -> int:
    """Of a tile that holds ``size`` numbers."""
    return max(16, _power_of_two(size))


def _power_of_two(number: int) -> int:
    """The smallest power of two not below ``number``."""
    return 1 << (number - 1).bit_length()


def _recurrent_at(sizes: StateSizes) -> int:
    """Where a member's matrices begin, in numbers; so in a block of any size."""
    return state_layout(1, 1, sizes).role_offsets[RECURRENT] // 4


def _check_arrays(projected: Array, out: Array, shape: DeltaShape) -> None:
    tokens = projected.shape[0]
    given, wanted = (projected.shape, out.shape), ((tokens, shape.projected), (tokens, shape.values))
    if given != wanted or out.dtype != projected.dtype:
        raise ValueError(f"projected and out are {given}, {out.dtype}; this layout's are {wanted}, {projected.dtype}")
    if not (projected.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("projected and out must have no gaps: pass contiguous copies")


def _cache_arguments(layout: BlockLayout, batch: AttentionBatch, heads: HeadTable) -> dict[str, np.generic]:
    return {
        **_pointers(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_tables=batch.block_tables),
        **_pointers(head_group=heads.group, head_slot=heads.slot),
        "batch": np.int32(batch.cu_seqlens_q.shape[0] - 1),
        "groups": np.int32(batch.groups),
        "max_blocks": np.int32(batch.block_tables.shape[1]),
        "block_bytes": np.int64(layout.block_bytes),
        "slot_bytes": np.int64(layout.slot_bytes),
    }


def _pointers(**arrays: Array) -> dict[str, np.generic]:
    return {name: np.uint64(address_of(array)) for name, array in arrays.items()}
