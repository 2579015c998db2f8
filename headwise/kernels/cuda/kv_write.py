"""KV write on a GPU: the host half of `kv_write.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import HEAD_DIMS
from headwise.kernels.cuda.elementwise import is_dense
from headwise.kernels.cuda.launch import Kernel, address_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.gqa import QUANTISED, head_dim_of, kv_dtype_of, value_dim_of
from headwise.kernels.latest import OfLatest
from headwise.kernels.nibbles import INT4

Array = Any

FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
NUMBERS = {**FLOATS, "int8": "INT8", "float8_e4m3fn": "E4M3", INT4: "INT4"}
"""What `kv_write.cu` calls each dtype."""

SCALED = (*QUANTISED, INT4)
"""The dtypes that a cache may have whatever its input has."""

SOURCE, KERNEL = "kv_write.cu", "write_kv"
THREADS = 128
MOST_BLOCKS = 512
"""Of a launch whose tokens have several each."""
VECTOR_BYTES = 16
"""Rows are read and written in vectors of this size, and aligned to it."""


@dataclass(frozen=True)
class _Variant:
    """The kernel for one layout and input dtype, with the arguments that these alone decide."""

    input: np.dtype[Any]
    head_dim: int
    value_dim: int
    kernel: Kernel
    places: tuple[int, ...]
    """In bytes: blocks, slots, and roles in these."""

    def parts_of(self, tokens: int, rows: int) -> int:
        """Blocks for a token of so many rows: where tokens are few, none of them has two of its rows wait in turn."""
        together = THREADS // max(8, 1 << (self.head_dim // (8 if self.head_dim <= 256 else 16) - 1).bit_length())
        return max(1, min(-(-rows // together), MOST_BLOCKS // tokens))


class CudaKvWrite:
    """`AttentionKernels.write_kv` on device arrays: one launch for keys and values, on the current stream.

    Inputs are float16, bfloat16 or float32 ``[tokens, heads, size]``, a token's heads side by side (slices of a fused
    projection are fine). The cache has the same dtype, or is quantised. Arrays of the batch are C-contiguous
    but for ``block_tables``, whose rows may have gaps. The grid depends on shapes alone. Tokens beyond
    ``cu_seqlens_q[-1]`` and sequences without queries are padding. With a ``share``, tokens are stored that are of it,
    in blocks of these alone; what is rotated of queries is all tokens'.

    Raises:
        ConfigError: a head size, dtype or layout that the kernel does not know, or an array it cannot read.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[tuple[str, str | int], ...], Kernel] = {}
        self._variants: dict[tuple[BlockLayout, np.dtype[Any]], _Variant] = {}
        self._of_batch = OfLatest(_batch_arguments)

    def prepare(self, layout: BlockLayout, input_dtype: np.dtype[Any]) -> None:
        """Compile or load what calls with such arguments need, so that they only enqueue."""
        self._variant(layout, input_dtype)

    def _variant(self, layout: BlockLayout, input_dtype: np.dtype[Any]) -> _Variant:
        variant = self._variants.get((layout, input_dtype))
        if variant is None:
            variant = self._variants[layout, input_dtype] = self._made(layout, input_dtype)
        return variant

    def _made(self, layout: BlockLayout, input_dtype: np.dtype[Any]) -> _Variant:
        defines = variant_of(layout, input_dtype)
        key = tuple(defines.items())
        if key not in self._kernels:
            self._kernels[key] = self._programs(SOURCE, defines).kernel(KERNEL, THREADS)
        at = layout.role_offsets
        roles = (at["value"], at.get("key_scale", 0), at.get("value_scale", 0))
        places = (layout.block_bytes, layout.slot_bytes, *roles)
        return _Variant(input_dtype, head_dim_of(layout), value_dim_of(layout), self._kernels[key], places)

    def write_kv(
        self,
        key: Array,
        value: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """See `AttentionKernels.write_kv`, and `SharedKernels.write_own`."""
        self._launch(None, key, value, None, None, None, arena, layout, batch, heads, share)

    def write_kv_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        bias: Array | None = None,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """See `BiasingKernels.write_kv_rope`; what is rotated is rounded to its dtype before it is quantised."""
        tokens, _, head_dim = key.shape
        for name, angles in (("cosines", cosines), ("sines", sines)):
            wanted = (tokens, head_dim // 2)
            if angles.shape not in (wanted, (tokens, 1, head_dim // 2)) or angles.dtype != np.float32:
                raise ConfigError(f"{name} are {angles.dtype} {list(angles.shape)}: give float32 {list(wanted)}")
        projected = (query.shape[1] + key.shape[1]) * head_dim + value.shape[1] * value.shape[2]
        if bias is not None and not (is_dense(bias, (projected,), key.dtype)):
            raise ConfigError(
                f"a bias of {bias.dtype} {list(bias.shape)}: give {key.dtype} {[projected]}, aligned to "
                f"{VECTOR_BYTES} bytes"
            )
        self._launch(query, key, value, cosines, sines, bias, arena, layout, batch, heads, share)

    def _launch(
        self,
        query: Array | None,
        key: Array,
        value: Array,
        cosines: Array | None,
        sines: Array | None,
        bias: Array | None,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        tokens = key.shape[0]
        if not tokens:
            return
        variant = self._variant(layout, key.dtype)
        kv_heads, q_heads = heads.group.shape[0], 0 if query is None else query.shape[1]
        dim, value_dim, given = variant.head_dim, variant.value_dim, variant.input
        query_at, query_stride = _rows("query", query, (tokens, q_heads, dim), given)
        key_at, key_stride = _rows("key", key, (tokens, kv_heads, dim), given)
        value_at, value_stride = _rows("value", value, (tokens, kv_heads, value_dim), given)
        arena_at = address_of(arena)
        if arena_at % VECTOR_BYTES:
            raise ConfigError(f"the arena begins at {arena_at:#x}: align it to {VECTOR_BYTES} bytes")
        batch_at, batch_sizes = self._of_batch(batch)
        variant.kernel(
            (tokens, variant.parts_of(tokens, q_heads + 2 * kv_heads), 1),
            (
                query_at, key_at, value_at, _address(cosines), _address(sines), _address(bias), arena_at, *batch_at,
                address_of(heads.group), address_of(heads.slot), query_stride, key_stride, value_stride,
                *variant.places, *batch_sizes, layout.block_size, q_heads, kv_heads, share.part, share.parts,
            ),
        )  # fmt: skip


def variant_of(layout: BlockLayout, input_dtype: np.dtype[Any]) -> Defines:
    """The macros of `kv_write.cu` for rows of ``input_dtype`` and a cache of ``layout``.

    Raises:
        ConfigError: there is no such variant.
    """
    head_dim, value_dim = head_dim_of(layout), value_dim_of(layout)
    cache, given = kv_dtype_of(layout), str(input_dtype)
    if head_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS or value_dim > head_dim:
        sizes = f"{head_dim}" if value_dim == head_dim else f"{head_dim}, of values {value_dim},"
        raise ConfigError(
            f"head size {sizes} is not supported on a GPU: choose one of {', '.join(map(str, HEAD_DIMS))}, of values "
            "no larger"
        )
    if given not in FLOATS or cache not in (given, *SCALED):
        raise ConfigError(
            f"keys and values of {given} cannot be kept as {cache} on a GPU: give float16, bfloat16 or float32, and "
            f"keep them so or as {' or '.join(SCALED)}"
        )
    if layout.alignment % VECTOR_BYTES:
        raise ConfigError(f"blocks aligned to {layout.alignment} bytes: a GPU needs a multiple of {VECTOR_BYTES}")
    defines: Defines = {"HEAD_DIM": head_dim, "INPUT": NUMBERS[given], "CACHE": NUMBERS[cache]}
    return defines if value_dim == head_dim else {**defines, "VALUE_DIM": value_dim}


def all_variants(head_dims: tuple[int, ...] = HEAD_DIMS) -> Iterator[Defines]:
    """The macros of every variant of `kv_write.cu`, to compile them ahead."""
    for head_dim in head_dims:
        for given in FLOATS:
            for cache in (given, *SCALED):
                yield {"HEAD_DIM": head_dim, "INPUT": NUMBERS[given], "CACHE": NUMBERS[cache]}


def _batch_arguments(batch: AttentionBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Addresses, and sizes."""
    tables = batch.block_tables
    addresses = address_of(batch.cu_seqlens_q), address_of(batch.seq_lens), address_of(tables)
    return addresses, (batch.seq_lens.shape[0], batch.groups, tables.strides[0] // tables.dtype.itemsize)


def _address(array: Array | None) -> int:
    return 0 if array is None else address_of(array)


def _rows(name: str, array: Array | None, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
    """(address, bytes from token to token) of rows of this shape that the kernel can read."""
    if array is None:
        return 0, 0
    if array.shape != shape or array.dtype != dtype:
        raise ConfigError(f"{name} is {array.dtype} {list(array.shape)}: give {dtype} {list(shape)}")
    address, (stride, *within) = address_of(array), array.strides
    if within != [shape[2] * dtype.itemsize, dtype.itemsize] or (address | stride) % VECTOR_BYTES:
        raise ConfigError(
            f"{name} at {address:#x} with strides {array.strides}: a token's heads must lie side by side, each token "
            f"aligned to {VECTOR_BYTES} bytes"
        )
    return address, stride
