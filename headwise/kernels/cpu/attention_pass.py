"""A pass over a cache: what its compiled KV write and attention are told, for one layer or for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import records
from headwise.kernels.cpu.attention_jit import attend_of, scratch_floats
from headwise.kernels.cpu.attention_plan import Plan
from headwise.kernels.cpu.attention_softmax import LOG2E
from headwise.kernels.cpu.kv_write_jit import write_of
from headwise.kernels.cpu.memory import from_a_line_on
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.gqa import head_dim_of, kv_dtype_of, value_dim_of
from headwise.kernels.mla import LATENT_SCALE, is_latent, latent_width
from headwise.kernels.nibbles import INT4, SCALE_DTYPE

HEAD_DIM_STEP = 16
"""Head dimensions must be a multiple of this: rows of keys are read as whole vectors."""

STORED: dict[str, Any] = {
    "float32": np.float32, "bfloat16": np.uint16, "int8": np.int8, "float8_e4m3fn": np.uint8, INT4: np.int16,
}  # fmt: skip
"""KV dtypes, and the NumPy dtype that compiled code sees them as: bfloat16 and E4M3 as their bits, int4 by fours."""


@dataclass(frozen=True)
class CacheKernels:
    """What is compiled for a cache of a layout's dtype, and what of the layout it needs to know.

    A latent is its token's key and its value at once: to compiled code its values lie where its keys do.

    dim, value_dim: numbers of a key, and of a value
    write, attend: C functions, see `kv_write_jit.write_of` and `attention_jit.attend_of`
    """

    layout: BlockLayout
    dim: int
    value_dim: int
    cache: tuple[int, ...]
    write: Any
    attend: Any

    @staticmethod
    def of(layout: BlockLayout) -> CacheKernels:
        """Compile them, or load what this machine has compiled before.

        Raises:
            ConfigError: there are no kernels for the layout's dtype or head dimension.
        """
        dim, dtype = latent_width(layout) if is_latent(layout) else head_dim_of(layout), kv_dtype_of(layout)
        value_dim = dim if is_latent(layout) else value_dim_of(layout)
        if dtype not in STORED:
            raise ConfigError(
                f"the numba kernels keep KV in {', '.join(STORED)}, got {dtype}: use one of these, or kernels "
                "'reference'"
            )
        if dim % HEAD_DIM_STEP or value_dim % HEAD_DIM_STEP or value_dim > dim:
            raise ConfigError(
                f"the numba kernels need a head_dim that is a multiple of {HEAD_DIM_STEP}, and values no larger, got "
                f"{dim} and {value_dim}: use kernels 'reference'"
            )
        at, size = layout.role_offsets, np.dtype(STORED[dtype]).itemsize
        scale_size = np.dtype(SCALE_DTYPE if dtype == INT4 else np.float32).itemsize
        cache = {
            "block_stride": layout.block_bytes // size,
            "slot_stride": layout.slot_bytes // size,
            "value_offset": at.get("value", 0) // size,
            "block_size": layout.block_size,
            "block_scales": layout.block_bytes // scale_size,
            "slot_scales": layout.slot_bytes // scale_size,
            "key_scales": at.get("key_scale", at.get(LATENT_SCALE, 0)) // scale_size,
            "value_scales": at.get("value_scale", at.get(LATENT_SCALE, 0)) // scale_size,
        }
        numbers = tuple(cache[name] for name in (records.CACHE.names or ())[2:])  # behind the arena's
        return CacheKernels(layout, dim, value_dim, numbers, write_of(dtype), attend_of(dtype))

    @property
    def expands(self) -> bool:
        """Whether keys and values are made floats before they are multiplied."""
        return kv_dtype_of(self.layout) == INT4

    @staticmethod
    def of_tokens(layout: BlockLayout) -> CacheKernels:
        """The same for tables of single tokens' latents: each "block" is one token's place, see `token_step`.

        Raises:
            ConfigError: as `of`, or the layout is not one of latents.
        """
        latent_width(layout)
        kernels, size = CacheKernels.of(layout), np.dtype(STORED[kv_dtype_of(layout)]).itemsize
        places = {"block_stride": token_step(layout) // size, "slot_stride": 0, "block_size": 1}
        names = (records.CACHE.names or ())[2:]
        cache = tuple(places.get(name, number) for name, number in zip(names, kernels.cache, strict=True))
        return replace(kernels, cache=cache)

    def a_pass(self, arena: NDArray[np.uint8], batch: AttentionBatch, **fields: Any) -> NDArray[np.int64]:
        """A `records.PASS` over this arena of this batch, with these fields besides."""
        return records.filled(records.PASS, **self.pass_fields(arena, batch), **fields)

    def pass_fields(self, arena: NDArray[np.uint8], batch: AttentionBatch) -> dict[str, Any]:
        """Those of a `records.PASS` that say where this arena and this batch are."""
        return {"cache": (address_of(arena, np.uint8), arena.nbytes, *self.cache), **batch_fields(batch)}


def batch_fields(batch: AttentionBatch) -> dict[str, int]:
    """Those of a `records.PASS` that say where a batch is."""
    tables = batch.block_tables
    return {
        "cu_seqlens": address_of(batch.cu_seqlens_q, np.int32),
        "seq_lens": address_of(batch.seq_lens, np.int32),
        "sequences": len(batch.seq_lens),
        "follows": 0 if batch.follows is None else address_of(batch.follows, np.int32),
        "tables": address_of(tables, np.int32),
        "table_columns": tables.shape[1],
        "groups": batch.groups,
    }


def token_step(layout: BlockLayout) -> int:
    """Bytes that every token's latent in an arena begins at a multiple of: places of single tokens count these."""
    return gcd(layout.block_bytes, layout.slot_bytes, layout.roles[0].token_bytes)


@dataclass(frozen=True)
class PlanTable:
    """Plans of attention, one for all layers whose heads have the same windows and sinks.

    table: ``int64 [plans, numbers]``, a `records.PLAN` of each
    """

    plans: Sequence[Plan]
    table: NDArray[np.int64]

    @staticmethod
    def of(plans: Sequence[Plan], table: NDArray[np.int64] | None = None) -> PlanTable:
        """table: where they are written to; None: a new one"""
        if table is None:
            table = PlanTable.room(len(plans))
        for row, plan in zip(table, plans, strict=True):
            row[:] = (
                place_of(plan.items), len(plan.items), place_of(plan.parts), len(plan.parts), plan.rows,
                plan.is_tiled, plan.partial_rows, 0 if plan.sees is None else place_of(plan.sees),
            )  # fmt: skip
        return PlanTable(plans, table)

    @staticmethod
    def room(plans: int) -> NDArray[np.int64]:
        """For the table of so many."""
        return np.empty((plans, len(records.PLAN.names or ())), np.int64)

    @property
    def most_items(self) -> int:
        return max((len(plan.items) for plan in self.plans), default=0)  # of layers with states alone there are none

    @property
    def most_partial_rows(self) -> int:
        return max((plan.partial_rows for plan in self.plans), default=0)

    def partials(self, dim: int) -> NDArray[np.float32]:
        """Room for the partial results of any of the plans."""
        return np.empty(self.partial_floats(dim), np.float32)

    def partial_floats(self, dim: int) -> int:
        """How many `partials` has."""
        return self.most_partial_rows * (2 + dim)

    def scratch(self, threads: int, share: int, kernels: CacheKernels) -> NDArray[np.float32]:
        """``[threads, floats]``: what each thread works with."""
        each = self.scratch_floats(share, kernels)
        return from_a_line_on(threads * each, np.float32).reshape(threads, each)

    def scratch_floats(self, share: int, kernels: CacheKernels) -> int:
        """How many each thread has in `scratch`."""
        sizes = share, kernels.dim, kernels.expands
        return max(scratch_floats(plan.rows, plan.is_tiled, *sizes) for plan in self.plans)


def score_factor(scale: float, softcap: float) -> float:
    """What queries are multiplied with, for scores as powers of two; see `attention_micro.row_softcap`."""
    return scale * LOG2E * (2 / softcap if softcap else 1)
