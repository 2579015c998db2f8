"""State space models on a GPU: the host half of `ssm_jit`.

Of each sequence with one token in a step all is done by one launch, of the others by three; which launches there are
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
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes, sizes_of

MODULE = "ssm_jit"

COLUMNS, STATE_NUMBERS = 128, 16384
"""Of a member's states that a program decodes at a time, at most: columns that the lanes of a warp have in vectors, and
numbers, which are 64 registers of each thread, and as many on their way. As many values are convolved at a time."""

_WEIGHTS = "convolution:*fp32 convolution_bias:*fp32 speed:*fp32 bias:*fp32"
_OF_TOKEN = f"projected:x out:x arena:*fp32 {_WEIGHTS} skip:*fp32 group:*i32 "
_SIGNATURES = {
    "step": _OF_TOKEN + IN_CACHE.format(""),
    "walk": _OF_TOKEN + "follows:*i32 " + IN_CACHE.format("batch:i32"),
    "convolve": f"projected:x query:x key:x value:x rate:*fp32 decay:*fp32 arena:*fp32 {_WEIGHTS} group:*i32 "
    + IN_CACHE.format("batch:i32") + " fewest_queries:i32",
    "relate": "query:x key:x rate:*fp32 decay:*fp32 among:x projected:x arena:*fp32 group:*i32 "
    + IN_CACHE.format("batch:i32") + " fewest_queries:i32",
    "carry": "query:x key:x value:x before:*fp32 behind:*fp32 among:x projected:x skip:*fp32 out:x arena:*fp32 "
    + IN_CACHE.format("") + " fewest_queries:i32",
}  # fmt: skip
_OF_ROWS = "MEMBERS GROUPS SHARE KEY_DIM VALUE_DIM ROW BLOCK_SIZE BLOCK_K"
_OF_INPUTS = f"{_OF_ROWS} CHANNELS WIDTH"
_CONSTANTS = {
    "step": f"{_OF_INPUTS} COLUMNS RECURRENT_AT",
    "walk": f"{_OF_INPUTS} COLUMNS RECURRENT_AT",
    "convolve": f"{_OF_INPUTS} BLOCK_S CONVOLVED_COLUMNS TOKENS",
    "relate": f"{_OF_INPUTS} CHUNK ROWS PRECISION",
    "carry": f"{_OF_ROWS} CARRIED PIECES RECURRENT_AT CHUNK ROWS PRECISION",
}
"""Of each kernel, what is compiled in."""
_WARPS = {"step": 8, "walk": 8, "convolve": 4, "relate": 4, "carry": 4}
_WARPS_BELOW_90 = {**_WARPS, "relate": 8, "carry": 8}
"""There accumulators and what is multiplied share a warp's registers."""


@dataclass(frozen=True)
class SsmShape:
    """What the machine code of a layer depends on besides the card. members, groups: of a rank"""

    members: int
    groups: int
    sizes: StateSizes
    block_size: int
    dtype: str

    @classmethod
    def of(cls, layout: BlockLayout, members: int, groups: int, dtype: str) -> SsmShape:
        """With states in blocks of ``layout``."""
        return cls(members, groups, sizes_of(layout), layout.block_size, dtype)

    @property
    def heads(self) -> int:
        return self.members * self.sizes.share

    @property
    def values(self) -> int:
        """Numbers that come of a token."""
        return self.heads * self.sizes.value_dim

    @property
    def projected(self) -> int:
        """Numbers that are projected of a token: see `headwise.kernels.ssm_base.SsmProjected`."""
        return self.groups * 2 * self.sizes.key_dim + 2 * self.values + self.heads


def check_ssm(shape: SsmShape) -> None:
    """Whether the kernels serve such a layer.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    check_states(shape.sizes, shape.block_size, shape.dtype, "state space models")


class CudaSsm(StateLaunches[SsmShape]):
    """`SsmKernels` on a GPU."""

    def variants(self, shape: SsmShape) -> Mapping[str, Variant]:
        return variants_of(shape, self.launcher.sm)

    def attend_ssm(
        self,
        projected: Array,
        weights: SsmWeights,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """See `SsmKernels.attend_ssm`.

        Raises:
            ConfigError: the shape is not supported.
            ValueError: the arrays do not fit each other.
        """
        shape = SsmShape.of(layout, heads.group.shape[0], weights.groups, projected.dtype.name)
        tokens, sequences = projected.shape[0], batch.cu_seqlens_q.shape[0] - 1
        if tokens == 0 or sequences == 0:
            return
        check_rows(projected, out, shape.projected, shape.values)
        _check_weights(weights, shape)
        arguments = {
            **pointers(projected=projected, out=out, arena=arena),
            **pointers(convolution=weights.convolution, convolution_bias=weights.convolution_bias, group=weights.group),
            **pointers(speed=weights.speed, bias=weights.bias, skip=weights.skip),
            **cache_arguments(layout, batch, heads),
        }
        self.take_on(shape, batch, tokens, shape.members, arguments)

    def chunks(self, shape: SsmShape, tokens: int, sequences: int, arguments: dict[str, np.generic]) -> None:
        """See `StateLaunches.chunks`."""
        size, itemsize = shape.block_size, numpy_dtype(shape.dtype).itemsize
        keys = shape.members * shape.sizes.key_dim * itemsize
        of_token = {
            "query": keys, "key": keys, "value": shape.values * itemsize, "rate": shape.heads * 4,
            "decay": shape.heads * 4, "among": shape.heads * rows_of(size) * itemsize,
        }  # fmt: skip
        rooms = self.rooms(tokens, of_token)
        arguments = arguments | pointers(**rooms, before=rooms["decay"], behind=rooms["rate"])
        convolved, chunks = (tiles_of(tokens, sequences, each) for each in (CONVOLVED, chunk_of(size)))
        self.launch(shape, "convolve", (convolved * shape.members, 1, 1), arguments)
        self.launch(shape, "relate", (chunks * shape.members, 1, 1), arguments)
        self.launch(shape, "carry", (shape.heads * pieces_of(shape.sizes), sequences, 1), arguments)


@lru_cache
def variants_of(shape: SsmShape, sm: int) -> dict[str, Variant]:
    """All that a layer of ``shape`` launches on a card of compute capability ``sm``, by the kernels' names.

    Raises:
        ConfigError: the shape is not supported (`check_ssm`).
    """
    check_ssm(shape)
    sized, warps = _constants(shape), _WARPS if sm >= 90 else _WARPS_BELOW_90
    return variants_of_kernels(MODULE, _SIGNATURES, _CONSTANTS, sized, shape.dtype, warps)


def _constants(shape: SsmShape) -> dict[str, int | float | str]:
    sizes, block_k = shape.sizes, block_of(shape.sizes.key_dim)
    of_member = block_of(sizes.share * sizes.value_dim)
    return {
        "MEMBERS": shape.members, "GROUPS": shape.groups, "SHARE": sizes.share, "KEY_DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim, "WIDTH": sizes.convolution, "CHANNELS": sizes.channels, "ROW": shape.projected,
        "BLOCK_K": block_k, "BLOCK_S": power_of_two(sizes.share), "CONVOLVED_COLUMNS": min(COLUMNS, of_member),
        "COLUMNS": min(COLUMNS, STATE_NUMBERS // block_k, of_member), "CARRIED": columns_of(sizes),
        "PIECES": pieces_of(sizes), "BLOCK_SIZE": shape.block_size, "CHUNK": chunk_of(shape.block_size),
        "ROWS": rows_of(shape.block_size), "TOKENS": CONVOLVED, "RECURRENT_AT": recurrent_at(sizes),
        "PRECISION": "tf32x3" if shape.dtype == "float32" else "bf16x3",
    }  # fmt: skip


def _check_weights(weights: SsmWeights, shape: SsmShape) -> None:
    sizes, members = shape.sizes, shape.members
    each = (members, sizes.share)
    wanted = {
        "convolution": (members, sizes.convolution, sizes.channels), "convolution_bias": (members, sizes.channels),
        "speed": each, "bias": each, "skip": each, "group": (members,),
    }  # fmt: skip
    for name, size in wanted.items():
        if getattr(weights, name).shape != size:
            raise ValueError(f"weights.{name} is {getattr(weights, name).shape}; this layout's is {size}")
