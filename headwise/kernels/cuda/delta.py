"""Gated delta-nets on a GPU: the host half of `delta_jit`.

Of each sequence with one token in a step all is done by one launch, of the others by four; which launches there are
follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    power_of_two,
    recurrent_at,
    rows_of,
    tiles_of,
    variants_of_kernels,
)
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.state_layout import StateSizes, sizes_of

MODULE = "delta_jit"
_OF_TOKEN = "projected:x out:x arena:*fp32 convolution:*fp32 speed:*fp32 bias:*fp32 norm:*fp32 "
_SIGNATURES = {
    "step": _OF_TOKEN + IN_CACHE.format("") + " eps:fp32",
    "walk": _OF_TOKEN + "follows:*i32 " + IN_CACHE.format("batch:i32") + " eps:fp32",
    "convolve": "projected:x query:x key:x value:x rate:*fp32 decay:*fp32 arena:*fp32 convolution:*fp32 speed:*fp32 "
    "bias:*fp32 " + IN_CACHE.format("batch:i32") + " fewest_queries:i32",
    "solve": "query:x key:x rate:*fp32 decay:*fp32 among:x solved:x cu_seqlens_q:*i32 seq_lens:*i32 batch:i32 "
    "fewest_queries:i32",
    "carry": "query:x key:x value:x sums:*fp32 among:x solved:x seen:*fp32 projected:x arena:*fp32 "
    + IN_CACHE.format("") + " fewest_queries:i32",
    "finish": "seen:*fp32 projected:x norm:*fp32 out:x tokens:i32 eps:fp32",
}  # fmt: skip
_OF_ROWS = "SHARE VALUE_DIM CHANNELS EACH ROW"
_OF_CACHE = f"{_OF_ROWS} KEY_HEADS KEY_DIM WIDTH BLOCK_K BLOCK_SIZE"
_CONSTANTS = {
    "step": f"{_OF_CACHE} BLOCK_V RECURRENT_AT QUERY_SCALE",
    "walk": f"{_OF_CACHE} BLOCK_V RECURRENT_AT QUERY_SCALE",
    "convolve": f"{_OF_CACHE} VALUE_HEADS BLOCK_V BLOCK_S TOKENS QUERY_SCALE",
    "solve": "KEY_HEADS VALUE_HEADS SHARE KEY_DIM BLOCK_K CHUNK ROWS LEVELS PRECISION",
    "carry": f"{_OF_CACHE} VALUE_HEADS COLUMNS PIECES RECURRENT_AT CHUNK ROWS PRECISION",
    "finish": f"{_OF_ROWS} VALUE_HEADS BLOCK_V TOKENS",
}
"""Of each kernel, what is compiled in."""
_WARPS = {"step": 8, "walk": 8, "convolve": 4, "solve": 4, "carry": 4, "finish": 4}
_WARPS_BELOW_90 = {**_WARPS, "solve": 8, "carry": 8}
"""There accumulators and what is multiplied share a warp's registers."""


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
    check_states(shape.sizes, shape.block_size, shape.dtype, "delta-nets")


class CudaDelta(StateLaunches[DeltaShape]):
    """`ProjectedDeltaKernels` on a GPU."""

    def variants(self, shape: DeltaShape) -> Mapping[str, Variant]:
        return variants_of(shape, self.launcher.sm)

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
        check_rows(projected, out, shape.projected, shape.values)
        arguments = {
            **pointers(projected=projected, out=out, arena=arena),
            **pointers(convolution=weights.convolution, speed=weights.speed, bias=weights.bias, norm=weights.norm),
            **cache_arguments(layout, batch, heads),
            "eps": np.float32(weights.eps),
            "tokens": np.int32(tokens),
        }
        self.take_on(shape, batch, tokens, shape.key_heads, arguments)

    def chunks(self, shape: DeltaShape, tokens: int, sequences: int, arguments: dict[str, np.generic]) -> None:
        """See `StateLaunches.chunks`."""
        key_heads, value_heads, size = shape.key_heads, shape.value_heads, shape.block_size
        itemsize = numpy_dtype(shape.dtype).itemsize
        keys, pairs = key_heads * shape.sizes.key_dim, value_heads * rows_of(size)
        of_token = {
            "query": keys * itemsize, "key": keys * itemsize, "value": shape.values * itemsize, "rate": value_heads * 4,
            "decay": value_heads * 4, "among": pairs * itemsize, "solved": pairs * itemsize, "seen": shape.values * 4,
        }  # fmt: skip
        rooms = self.rooms(tokens, of_token)
        arguments = arguments | pointers(**rooms, sums=rooms["decay"])
        convolved, chunks = (tiles_of(tokens, sequences, each) for each in (CONVOLVED, chunk_of(size)))
        self.launch(shape, "convolve", (convolved * key_heads, 1, 1), arguments)
        self.launch(shape, "solve", (chunks * value_heads, 1, 1), arguments)
        self.launch(shape, "carry", (value_heads * pieces_of(shape.sizes), sequences, 1), arguments)
        self.launch(shape, "finish", (-(-tokens // CONVOLVED) * value_heads, 1, 1), arguments)


@lru_cache
def variants_of(shape: DeltaShape, sm: int) -> dict[str, Variant]:
    """All that a layer of ``shape`` launches on a card of compute capability ``sm``, by the kernels' names.

    Raises:
        ConfigError: the shape is not supported (`check_delta`).
    """
    check_delta(shape)
    sized, warps = _constants(shape), _WARPS if sm >= 90 else _WARPS_BELOW_90
    return variants_of_kernels(MODULE, _SIGNATURES, _CONSTANTS, sized, shape.dtype, warps)


def _constants(shape: DeltaShape) -> dict[str, int | float | str]:
    sizes, rows, values = shape.sizes, rows_of(shape.block_size), shape.sizes.share * shape.sizes.value_dim
    return {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "SHARE": sizes.share,
        "KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.convolution,
        "CHANNELS": sizes.channels, "EACH": sizes.channels + values, "ROW": shape.projected,
        "BLOCK_K": block_of(sizes.key_dim), "BLOCK_V": block_of(sizes.value_dim), "BLOCK_S": power_of_two(sizes.share),
        "COLUMNS": columns_of(sizes), "PIECES": pieces_of(sizes),
        "BLOCK_SIZE": shape.block_size, "CHUNK": chunk_of(shape.block_size), "ROWS": rows,
        "LEVELS": rows.bit_length() - 1, "TOKENS": CONVOLVED, "RECURRENT_AT": recurrent_at(sizes),
        "QUERY_SCALE": sizes.key_dim**-0.5, "PRECISION": "tf32x3" if shape.dtype == "float32" else "bf16x3",
    }  # fmt: skip
