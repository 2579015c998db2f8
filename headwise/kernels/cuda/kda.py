"""Kimi Delta Attention on a GPU: the host half of `kda_jit`.

Of each sequence with one token in a step all is done by one launch, of the others by five; which launches there are
follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.launch import Array, Variant
from headwise.kernels.cuda.states import (
    CONVOLVED,
    IN_CACHE,
    StateLaunches,
    block_of,
    cache_arguments,
    check_rows,
    check_states,
    chunk_of,
    columns_of,
    pieces_of,
    pointers,
    recurrent_at,
    rows_of,
    tiles_of,
    variants_of_kernels,
)
from headwise.kernels.kda_base import KdaProjected, KdaWeights
from headwise.kernels.state_layout import StateSizes, sizes_of

MODULE = "kda_jit"
PART = 16
"""`kda_jit.PART`"""

WALKED_BY_TWO, REGISTERS_OF_TWO = 128 * 128, 128
"""Numbers of a state, at most, of which two programs fit a multiprocessor, and a thread's registers so: one reads while
the other writes. `kda_jit.step` takes as many by itself; on cards from sm_100 on neither does."""

_IN_STEP = "cu_seqlens_q:*i32 seq_lens:*i32 batch:i32 fewest_queries:i32"
_OF_TOKEN = "projected:x decays:x gates:x out:x arena:*fp32 convolution:*fp32 speed:*fp32 bias:*fp32 norm:*fp32 "
_SIGNATURES = {
    "step": _OF_TOKEN + IN_CACHE.format("") + " eps:fp32",
    "walk": _OF_TOKEN + "follows:*i32 " + IN_CACHE.format("batch:i32") + " eps:fp32",
    "convolve": "projected:x query:x key:x value:x rate:*fp32 arena:*fp32 convolution:*fp32 "
    + IN_CACHE.format("batch:i32") + " fewest_queries:i32",
    "pair": "decays:x query:x key:x started:x lasting:x totals:*fp32 rate:*fp32 among:x alike:*fp32 speed:*fp32 "
    "bias:*fp32 " + _IN_STEP,
    "solve": "rate:*fp32 alike:*fp32 solved:x " + _IN_STEP,
    "carry": "query:x started:x lasting:x value:x totals:*fp32 among:x solved:x seen:*fp32 projected:x arena:*fp32 "
    + IN_CACHE.format("") + " fewest_queries:i32",
    "finish": "seen:*fp32 gates:x norm:*fp32 out:x tokens:i32 eps:fp32",
}  # fmt: skip
_OF_CACHE = "HEADS KEY_DIM VALUE_DIM CHANNELS ROW WIDTH BLOCK_SIZE BLOCK_K"
_CONSTANTS = {
    "step": f"{_OF_CACHE} BLOCK_V RECURRENT_AT QUERY_SCALE",
    "walk": f"{_OF_CACHE} BLOCK_V RECURRENT_AT QUERY_SCALE",
    "convolve": f"{_OF_CACHE} BLOCK_V TOKENS QUERY_SCALE",
    "pair": "HEADS KEY_DIM BLOCK_K CHUNK ROWS PRECISION",
    "solve": "HEADS CHUNK ROWS LEVELS PRECISION",
    "carry": f"{_OF_CACHE} COLUMNS PIECES RECURRENT_AT CHUNK ROWS PRECISION",
    "finish": "HEADS VALUE_DIM BLOCK_V TOKENS",
}
"""Of each kernel, what is compiled in."""
_WARPS = {"step": 8, "walk": 8, "convolve": 4, "pair": 4, "solve": 4, "carry": 8, "finish": 4}
_WARPS_BELOW_90 = {**_WARPS, "pair": 8, "solve": 8}
"""There accumulators and what is multiplied share a warp's registers."""


@dataclass(frozen=True)
class KdaShape:
    """What the machine code of a layer depends on besides the card.

    heads: of a rank
    row:   numbers of a row of `KdaProjected.numbers`
    """

    heads: int
    sizes: StateSizes
    block_size: int
    dtype: str
    row: int

    @classmethod
    def of(cls, layout: BlockLayout, heads: int, dtype: str, behind: int) -> KdaShape:
        """With states in blocks of ``layout``. behind: numbers of a row that kernels are not asked for"""
        sizes = sizes_of(layout)
        return cls(heads, sizes, layout.block_size, dtype, heads * (sizes.channels + 1) + behind)

    @property
    def keys(self) -> int:
        """Channels of all heads' keys."""
        return self.heads * self.sizes.key_dim

    @property
    def values(self) -> int:
        """Numbers that come of a token."""
        return self.heads * self.sizes.value_dim


def check_kda(shape: KdaShape) -> None:
    """Whether the kernels serve such a layer.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    check_states(shape.sizes, shape.block_size, shape.dtype, "Kimi Delta Attention")


class CudaKda(StateLaunches[KdaShape]):
    """`KdaKernels` on a GPU."""

    def variants(self, shape: KdaShape) -> Mapping[str, Variant]:
        return variants_of(shape, self.launcher.sm)

    def attend_kda(
        self,
        projected: KdaProjected,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """See `KdaKernels.attend_kda`.

        Raises:
            ConfigError: the shape is not supported.
            ValueError: the arrays do not fit each other.
        """
        numbers, weights, count = projected.numbers, projected.weights, heads.group.shape[0]
        (tokens, row), sequences = numbers.shape, batch.cu_seqlens_q.shape[0] - 1
        behind = row - count * (sizes_of(layout).channels + 1)
        shape = KdaShape.of(layout, count, numbers.dtype.name, behind)
        if tokens == 0 or sequences == 0:
            return
        check_rows(numbers, out, max(row, row - behind), shape.values)
        check_rows(projected.decays, projected.gates, shape.keys, shape.values)
        _check_weights(weights, shape)
        arguments = {
            **pointers(projected=numbers, decays=projected.decays, gates=projected.gates, out=out, arena=arena),
            **pointers(convolution=weights.convolution, speed=weights.speed, bias=weights.bias, norm=weights.norm),
            **cache_arguments(layout, batch, heads),
            "eps": np.float32(weights.eps),
            "tokens": np.int32(tokens),
        }
        self.take_on(shape, batch, tokens, shape.heads, arguments)

    def chunks(self, shape: KdaShape, tokens: int, sequences: int, arguments: dict[str, np.generic]) -> None:
        """See `StateLaunches.chunks`."""
        heads, itemsize, rows = shape.heads, numpy_dtype(shape.dtype).itemsize, rows_of(shape.block_size)
        pairs = heads * rows
        keys, values = shape.keys * itemsize, shape.values * itemsize
        of_token = {
            "query": keys, "key": keys, "started": keys, "lasting": keys, "value": values, "rate": heads * 4,
            "among": pairs * itemsize, "alike": pairs * 4, "solved": pairs * itemsize, "seen": shape.values * 4,
        }  # fmt: skip
        convolved, chunks = (tiles_of(tokens, sequences, each) for each in (CONVOLVED, chunk_of(shape.block_size)))
        # Rooms are there until all is enqueued.
        rooms = self.rooms(tokens, of_token) | self.rooms(chunks, {"totals": shape.keys * 4})
        arguments = arguments | pointers(**rooms)
        self.launch(shape, "convolve", (convolved * heads, 1, 1), arguments)
        self.launch(shape, "pair", (chunks * (rows // PART) * heads, 1, 1), arguments)
        self.launch(shape, "solve", (chunks * heads, 1, 1), arguments)
        self.launch(shape, "carry", (heads * pieces_of(shape.sizes), sequences, 1), arguments)
        self.launch(shape, "finish", (-(-tokens // CONVOLVED) * heads, 1, 1), arguments)


@lru_cache
def variants_of(shape: KdaShape, sm: int) -> dict[str, Variant]:
    """All that a layer of ``shape`` launches on a card of compute capability ``sm``, by the kernels' names.

    Raises:
        ConfigError: the shape is not supported (`check_kda`).
    """
    check_kda(shape)
    sized, warps = _constants(shape), _WARPS if sm >= 90 else _WARPS_BELOW_90
    variants = variants_of_kernels(MODULE, _SIGNATURES, _CONSTANTS, sized, shape.dtype, warps)
    if sm < 100 and block_of(shape.sizes.key_dim) * block_of(shape.sizes.value_dim) <= WALKED_BY_TWO:
        variants["walk"] = replace(variants["walk"], most_registers=REGISTERS_OF_TWO)
    return variants


def _constants(shape: KdaShape) -> dict[str, int | float | str]:
    sizes, rows = shape.sizes, rows_of(shape.block_size)
    return {
        "HEADS": shape.heads, "KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim, "CHANNELS": sizes.channels,
        "ROW": shape.row, "WIDTH": sizes.convolution, "BLOCK_SIZE": shape.block_size,
        "BLOCK_K": block_of(sizes.key_dim), "BLOCK_V": block_of(sizes.value_dim), "COLUMNS": columns_of(sizes),
        "PIECES": pieces_of(sizes), "CHUNK": chunk_of(shape.block_size), "ROWS": rows, "LEVELS": rows.bit_length() - 1,
        "TOKENS": CONVOLVED, "RECURRENT_AT": recurrent_at(sizes), "QUERY_SCALE": sizes.key_dim**-0.5,
        "PRECISION": "tf32x3" if shape.dtype == "float32" else "bf16x3",
    }  # fmt: skip


def _check_weights(weights: KdaWeights, shape: KdaShape) -> None:
    sizes, heads = shape.sizes, shape.heads
    wanted = {
        "convolution": (heads, sizes.convolution, sizes.channels), "speed": (heads,), "bias": (heads, sizes.key_dim),
        "norm": (sizes.value_dim,),
    }  # fmt: skip
    for name, size in wanted.items():
        if getattr(weights, name).shape != size:
            raise ValueError(f"weights.{name} is {getattr(weights, name).shape}; this layout's is {size}")
