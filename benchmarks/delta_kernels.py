"""Gated delta-nets on a CPU, for `kernels.py`: bytes of states a second, against what grouped queries reach.

A step reads each sequence's states and writes them, whatever its length. So decode's bytes are few and its arithmetic
little; a chunk of a prompt is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu.delta_attention import NumbaDeltaKernels
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.state_layout import StateSizes, state_layout

BLOCK_SIZE = 64
SIZES, KEY_HEADS = StateSizes(key_dim=128, value_dim=128, share=2, convolution=4), 16
"""Of a layer of Qwen3-Next-80B: 2.1 MiB of states a sequence."""


@dataclass(frozen=True)
class DeltaWorkload:
    """``batch`` sequences with ``tokens`` each in this step; those of one token have others behind them."""

    name: str
    batch: int
    tokens: int


WORKLOADS = [
    DeltaWorkload("delta-net decode 1", 1, 1),
    DeltaWorkload("delta-net decode 16", 16, 1),
    DeltaWorkload("delta-net prefill 512", 1, 512),
]
QUICK = [DeltaWorkload("delta-net decode 2", 2, 1)]


def measure(
    load: DeltaWorkload, threads: int, time_of: Callable[[Callable[[], object]], float], gqa_rate: float
) -> dict[str, Any]:
    """What a workload takes by ``time_of``, and its GB/s, read and written, as a share of ``gqa_rate``."""
    draw = np.random.default_rng(0)
    kernels, layout = NumbaDeltaKernels(threads), state_layout(BLOCK_SIZE, KEY_HEADS, SIZES)
    end = 2 if load.tokens == 1 else load.tokens
    tables = np.full((load.batch, -(-end // BLOCK_SIZE)), -1, np.int32)
    tables[:, -1] = draw.permutation(load.batch)  # the live states, and no checkpoint
    cu = np.arange(load.batch + 1, dtype=np.int32) * load.tokens
    batch = AttentionBatch(cu, np.full(load.batch, end, np.int32), tables, groups=1)
    none = np.zeros(KEY_HEADS, np.int32)
    heads = HeadTable(none, np.arange(KEY_HEADS, dtype=np.int32), none, none)
    arena, rows = np.zeros(load.batch * layout.block_bytes, np.uint8), load.batch * load.tokens

    def random(*shape: int) -> Any:
        return draw.standard_normal(shape, dtype=np.float32)

    values = SIZES.share * SIZES.value_dim
    projected = random(rows, KEY_HEADS * (SIZES.channels + values + 2 * SIZES.share))
    each = np.full((KEY_HEADS, SIZES.share), 0.1, np.float32)
    convolution, norm = random(KEY_HEADS, SIZES.convolution, SIZES.channels), np.ones(SIZES.value_dim, np.float32)
    weights, out = DeltaWeights(convolution, each, each, norm, eps=1e-6), random(rows, KEY_HEADS * values)
    attend_s = time_of(partial(kernels.attend_projected, projected, weights, arena, layout, batch, heads, out=out))
    rate = 2 * load.batch * layout.slot_bytes * KEY_HEADS / attend_s / 1e9
    return {
        "workload": load.name,
        "attend_ms": round(attend_s * 1e3, 4),
        "state_gb_s": round(rate, 2),
        "of_gqa": round(rate / gqa_rate, 3),
    }


def as_line(row: dict[str, Any]) -> str:
    """A row for people."""
    share = f"{row['of_gqa']:.0%} of GQA's"
    return f"{row['workload']:34}{row['attend_ms']:10.3f}{row['state_gb_s']:9.2f}{share:>20}"
