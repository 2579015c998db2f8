"""Latent attention (MLA) on a CPU, for `kernels.py`: bytes of latents a second, against what grouped queries reach.

A latent is read once for all query heads, so decode has many times the arithmetic for each byte: it is bound by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.mla import latent_layout
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.select import make_latent_kernels

BLOCK_SIZE = 64
RANK, ROTATED, PLAIN, VALUE_DIM = 512, 64, 128, 128
"""Of all published models."""


@dataclass(frozen=True)
class LatentWorkload:
    """``batch`` sequences of ``context`` tokens, the last ``queries`` of each new in this step."""

    name: str
    batch: int
    queries: int
    context: int
    q_heads: int


WORKLOADS = [
    LatentWorkload("MLA decode 1 x 8192, 16 heads", 1, 1, 8192, 16),
    LatentWorkload("MLA decode 8 x 2048, 16 heads", 8, 1, 2048, 16),
    LatentWorkload("MLA decode 1 x 2048, 128 heads", 1, 1, 2048, 128),
    LatentWorkload("MLA prefill 512, 16 heads", 1, 512, 512, 16),
]
QUICK = [LatentWorkload("MLA decode 2 x 1024, 16 heads", 2, 1, 1024, 16)]


def measure(
    load: LatentWorkload, kv_dtype: str, threads: int, time_of: Callable[[Callable[[], object]], float], gqa_rate: float
) -> dict[str, Any]:
    """What a workload takes by ``time_of``, and its GB/s as a share of ``gqa_rate``."""
    draw = np.random.default_rng(0)
    layout = latent_layout(BLOCK_SIZE, 1, RANK + ROTATED, kv_dtype, ROTATED)
    kernels = make_latent_kernels("numba", threads)
    columns, tokens = -(-load.context // BLOCK_SIZE), load.batch * load.queries
    tables = draw.permutation(load.batch * columns).astype(np.int32).reshape(load.batch, columns)
    cu = np.arange(load.batch + 1, dtype=np.int32) * load.queries
    batch = AttentionBatch(cu, np.full(load.batch, load.context, np.int32), tables, groups=1)
    heads = HeadTable(*(np.zeros(1, np.int32) for _ in range(4)))
    arena = np.zeros(tables.size * layout.block_bytes, np.uint8)

    def random(*shape: int) -> Any:
        return draw.standard_normal(shape, dtype=np.float32)

    up = UpProjections(random(load.q_heads, PLAIN, RANK), random(load.q_heads, RANK, VALUE_DIM))
    query, out = random(tokens, load.q_heads, PLAIN + ROTATED), random(tokens, load.q_heads, VALUE_DIM)
    where = arena, layout, batch, heads
    scale = (PLAIN + ROTATED) ** -0.5
    attend_s = time_of(partial(kernels.attend_latent, query, up, *where, scale=scale, out=out))
    write_s = time_of(partial(kernels.write_latent, random(tokens, RANK + ROTATED), *where))
    rate = load.batch * load.context * sum(role.token_bytes for role in layout.roles) / attend_s / 1e9
    return {
        "workload": load.name,
        "attend_ms": round(attend_s * 1e3, 4),
        "latent_gb_s": round(rate, 2),
        "of_gqa": round(rate / gqa_rate, 3),
        "write_us": round(write_s * 1e6, 2),
    }


def as_line(row: dict[str, Any]) -> str:
    """A row for people."""
    share = f"{row['of_gqa']:.0%} of GQA's"
    return f"{row['workload']:34}{row['attend_ms']:10.3f}{row['latent_gb_s']:9.2f}{share:>20}{row['write_us']:9.1f}"
