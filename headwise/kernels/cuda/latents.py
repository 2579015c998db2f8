"""The write of latents on a GPU: the host half of `latents.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import ALL_TOKENS, TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.elementwise import NUMBERS, VECTOR_BYTES
from headwise.kernels.cuda.launch import Array, Kernel, address_of, addresses_of
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.mla import LATENT, LATENT_SCALE, has_scales, latent_width
from headwise.kernels.mla_quantised import FLOAT8, INT8
from headwise.kernels.nibbles import GROUP, INT4

SOURCE, KERNEL = "latents.cu", "write_latents"
THREADS = 128
_QUANTISED = {INT8: "INT8", FLOAT8: "E4M3", INT4: "INT4"}


class CudaLatentWrite:
    """`LatentKernels.write_latent` on device arrays: one launch, on the current stream.

    What is given is float16, bfloat16 or float32, of the cache's dtype unless that is quantised. Arrays of the batch
    are C-contiguous but for ``block_tables``, whose rows may have gaps. The grid depends on shapes alone. Tokens beyond
    ``cu_seqlens_q[-1]`` and sequences without queries are padding.

    Raises:
        ConfigError: a dtype or layout that the kernel does not know, or an array it cannot read.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[tuple[str, str | int], ...], Kernel] = {}

    def prepare(self, layout: BlockLayout, dtype: np.dtype[Any]) -> Kernel:
        """Compile or load what calls with such arguments need, so that they only enqueue."""
        defines = variant_of(layout, dtype)
        key = tuple(defines.items())
        if key not in self._kernels:
            self._kernels[key] = self._programs(SOURCE, defines).kernel(KERNEL, THREADS)
        return self._kernels[key]

    def write(
        self,
        query: Array | None,
        compressed: Array,
        shared: Array,
        angles: tuple[Array, Array] | None,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare = ALL_TOKENS,
    ) -> None:
        """Store ``compressed [tokens, rank]`` and ``shared [tokens, rotated]``, the two parts of latents.

        angles: cosines and sines, float32 ``[tokens, rotated / 2]`` or ``[tokens, 1, rotated / 2]``, by which
                ``shared`` is rotated, and in place the last ``rotated`` numbers of ``query [tokens, heads, size]``, in
                float32, rounded to the dtype; None: nothing is
        share:  of the tokens that are stored, in blocks of these alone; what is rotated of queries is all tokens'
        """
        (tokens, rank), rotated = compressed.shape, shared.shape[1]
        if not tokens:
            return
        kernel = self.prepare(layout, compressed.dtype)
        stored = rank + rotated * (2 if has_scales(layout) else 1)
        if stored != latent_width(layout) or rotated % (2 * VECTOR_BYTES // compressed.itemsize):
            raise ConfigError(
                f"latents of {rank} + {rotated} do not fit blocks of {latent_width(layout)} numbers, or halves of what "
                f"is rotated are no whole {VECTOR_BYTES} bytes"
            )
        if angles is not None:
            check_angles(angles, tokens, rotated)
        rows = [rows_of(name, array, tokens) for name, array in (("compressed", compressed), ("shared", shared))]
        turned, (q_heads, head_dim) = (0, 0), (0, 0)
        if query is not None:
            turned, (q_heads, head_dim) = rows_of("query", query, tokens), query.shape[1:]
        places = addresses_of(
            *(angles or (None, None)), arena, batch.cu_seqlens_q, batch.seq_lens, batch.block_tables, heads.group,
            heads.slot,
        )  # fmt: skip
        at = layout.role_offsets
        offsets = (layout.block_bytes, layout.slot_bytes, at[LATENT], at.get(LATENT_SCALE, 0))
        table_stride = batch.block_tables.strides[0] // batch.block_tables.itemsize
        sizes = (batch.seq_lens.shape[0], batch.groups, table_stride, layout.block_size, q_heads, head_dim)
        every = (turned, *rows)
        kernel(
            (tokens, 1, 1),
            (
                *(address for address, _ in every), *places, *(stride for _, stride in every), *offsets, *sizes, rank,
                rotated, share.part, share.parts,
            ),
        )  # fmt: skip


def variant_of(layout: BlockLayout, dtype: np.dtype[Any]) -> Defines:
    """The macros of `latents.cu` for what is given in ``dtype`` and a cache of ``layout``.

    Raises:
        ConfigError: there is no such variant.
    """
    given, kept = str(dtype), layout.roles[0].dtype
    if given not in NUMBERS or kept not in (given, *_QUANTISED):
        raise ConfigError(
            f"latents of {given} cannot be kept as {kept} on a GPU: give {', '.join(NUMBERS)}, and keep them so or as "
            f"{' or '.join(_QUANTISED)}"
        )
    return {"NUMBER": NUMBERS[given], "CACHE": _QUANTISED.get(kept, NUMBERS[given])}


def check_groups(rank: int, rotated: int) -> None:
    """Raise ConfigError where the two parts of latents in int4 are no whole groups, each for itself."""
    for name, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", rotated)):
        if size % GROUP:
            raise ConfigError(
                f"kv_dtype {INT4} of latents (MLA) takes a {name} of a multiple of {GROUP} on a GPU, not {size}: "
                f"choose kv_dtype {INT8}"
            )


def all_variants() -> Iterator[Defines]:
    """The macros of every variant of `latents.cu`, to compile them ahead."""
    for number in NUMBERS.values():
        for cache in (number, *_QUANTISED.values()):
            yield {"NUMBER": number, "CACHE": cache}


def rows_of(name: str, array: Array, tokens: int) -> tuple[int, int]:
    """(address, bytes from token to token) of rows that a kernel can read in vectors.

    Raises:
        ConfigError: it cannot.
    """
    strides, expected = array.strides[1:], array.itemsize
    is_dense = True
    for size, stride in zip(reversed(array.shape[1:]), reversed(strides), strict=True):
        is_dense, expected = is_dense and (size == 1 or stride == expected), expected * size
    address, step = address_of(array), array.strides[0]
    if array.shape[0] != tokens or not is_dense or (address | step) % VECTOR_BYTES:
        raise ConfigError(
            f"{name} {list(array.shape)} at {address:#x} with strides {array.strides}: give {tokens} tokens whose "
            f"numbers lie side by side, each aligned to {VECTOR_BYTES} bytes"
        )
    return address, step


def check_angles(angles: tuple[Array, Array], tokens: int, rotated: int) -> None:
    """Raise ConfigError where cosines and sines are not what rotates ``rotated`` numbers of each token."""
    wanted = (tokens, rotated // 2)
    for name, array in zip(("cosines", "sines"), angles, strict=True):
        if array.shape not in (wanted, (tokens, 1, rotated // 2)) or array.dtype != np.float32:
            raise ConfigError(f"{name} are {array.dtype} {list(array.shape)}: give float32 {list(wanted)}")
