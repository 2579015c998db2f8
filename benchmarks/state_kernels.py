"""Layers with recurrent states on a CPU, for `kernels.py`: bytes of states a second, against what attention reaches.

A step reads each sequence's states and writes them, whatever its length. So decode's bytes are few and its arithmetic
little; a chunk of a prompt is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu.delta_attention import NumbaDeltaKernels
from headwise.kernels.cpu.kda_attention import NumbaKdaKernels
from headwise.kernels.cpu.ssm_attention import NumbaSsmKernels
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.kda_base import KdaProjected, KdaWeights
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes, state_layout

BLOCK_SIZE = 64
DELTA_SIZES, KEY_HEADS = StateSizes(key_dim=128, value_dim=128, share=2, convolution=4), 16
"""Of a layer of Qwen3-Next-80B: 2.1 MiB of states a sequence."""
SSM_SIZES, MEMBERS, GROUPS = StateSizes(key_dim=128, value_dim=64, share=4, convolution=4), 16, 8
"""Of a layer of Nemotron 3 Nano: 64 heads, 2.1 MiB of states a sequence."""
KDA_SIZES, HEADS = StateSizes(key_dim=128, value_dim=128, share=1, convolution=4), 32
"""Of a layer of Kimi-Linear: 2.1 MiB of states a sequence."""

Rule = Literal["delta", "kda", "ssm"]
_SIZES: dict[Rule, tuple[StateSizes, int]] = {
    "delta": (DELTA_SIZES, KEY_HEADS),
    "kda": (KDA_SIZES, HEADS),
    "ssm": (SSM_SIZES, MEMBERS),
}
Draw = Callable[..., Any]


@dataclass(frozen=True)
class StateWorkload:
    """``batch`` sequences with ``tokens`` each in this step; those of one token have others behind them."""

    name: str
    batch: int
    tokens: int
    rule: Rule = "delta"

    @property
    def sizes(self) -> StateSizes:
        return _SIZES[self.rule][0]

    @property
    def members(self) -> int:
        return _SIZES[self.rule][1]


WORKLOADS = [
    StateWorkload("delta-net decode 1", 1, 1),
    StateWorkload("delta-net decode 16", 16, 1),
    StateWorkload("delta-net prefill 512", 1, 512),
    StateWorkload("Kimi Delta Attention decode 1", 1, 1, "kda"),
    StateWorkload("Kimi Delta Attention decode 16", 16, 1, "kda"),
    StateWorkload("Kimi Delta Attention prefill 512", 1, 512, "kda"),
    StateWorkload("state space decode 1", 1, 1, "ssm"),
    StateWorkload("state space decode 16", 16, 1, "ssm"),
    StateWorkload("state space prefill 512", 1, 512, "ssm"),
]
QUICK = [
    StateWorkload("delta-net decode 2", 2, 1),
    StateWorkload("Kimi Delta Attention decode 2", 2, 1, "kda"),
    StateWorkload("state space decode 2", 2, 1, "ssm"),
]


def measure(
    load: StateWorkload, threads: int, time_of: Callable[[Callable[[], object]], float], gqa_rate: float
) -> dict[str, Any]:
    """What a workload takes by ``time_of``, and its GB/s, read and written, as a share of ``gqa_rate``."""
    draw = np.random.default_rng(0)
    sizes, members, layout = load.sizes, load.members, state_layout(BLOCK_SIZE, load.members, load.sizes)
    end = 2 if load.tokens == 1 else load.tokens
    tables = np.full((load.batch, -(-end // BLOCK_SIZE)), -1, np.int32)
    tables[:, -1] = draw.permutation(load.batch)  # the live states, and no checkpoint
    cu = np.arange(load.batch + 1, dtype=np.int32) * load.tokens
    batch = AttentionBatch(cu, np.full(load.batch, end, np.int32), tables, groups=1)
    none = np.zeros(members, np.int32)
    heads = HeadTable(none, np.arange(members, dtype=np.int32), none, none)
    arena, rows = np.zeros(load.batch * layout.block_bytes, np.uint8), load.batch * load.tokens

    def random(*shape: int) -> Any:
        return draw.standard_normal(shape, dtype=np.float32)

    out = random(rows, members * sizes.share * sizes.value_dim)
    call = {"delta": _delta, "kda": _kda, "ssm": _ssm}[load.rule](threads, rows, random)
    attend_s = time_of(partial(call, arena=arena, layout=layout, batch=batch, heads=heads, out=out))
    rate = 2 * load.batch * layout.slot_bytes * members / attend_s / 1e9
    return {
        "workload": load.name,
        "attend_ms": round(attend_s * 1e3, 4),
        "state_gb_s": round(rate, 2),
        "of_gqa": round(rate / gqa_rate, 3),
    }


def _delta(threads: int, rows: int, random: Draw) -> Callable[..., object]:
    """The kernels' call for so many tokens, but for the cache and where what comes out goes."""
    sizes = DELTA_SIZES
    each = np.full((KEY_HEADS, sizes.share), 0.1, np.float32)
    convolution, norm = random(KEY_HEADS, sizes.convolution, sizes.channels), np.ones(sizes.value_dim, np.float32)
    weights = DeltaWeights(convolution, each, each, norm, eps=1e-6)
    kernels, values = NumbaDeltaKernels(threads), sizes.share * sizes.value_dim
    width = KEY_HEADS * (sizes.channels + values + 2 * sizes.share)
    return partial(kernels.attend_projected, random(rows, width), weights)


def _kda(threads: int, rows: int, random: Draw) -> Callable[..., object]:
    """The same of Kimi Delta Attention."""
    sizes = KDA_SIZES
    weights = KdaWeights(
        convolution=random(HEADS, sizes.convolution, sizes.channels),
        speed=np.full(HEADS, 0.1, np.float32),
        bias=np.full((HEADS, sizes.key_dim), 0.1, np.float32),
        norm=np.ones(sizes.value_dim, np.float32),
        eps=1e-5,
    )
    width = HEADS * (sizes.channels + 1) + 2 * sizes.key_dim
    told = random(rows, HEADS * sizes.key_dim), random(rows, HEADS * sizes.value_dim)
    return partial(NumbaKdaKernels(threads).attend_kda, KdaProjected(random(rows, width), *told, weights))


def _ssm(threads: int, rows: int, random: Draw) -> Callable[..., object]:
    """The same of a state space model."""
    sizes = SSM_SIZES
    each = np.full((MEMBERS, sizes.share), 0.1, np.float32)
    weights = SsmWeights(
        convolution=random(MEMBERS, sizes.convolution, sizes.channels),
        convolution_bias=random(MEMBERS, sizes.channels),
        speed=each,
        bias=each,
        skip=each,
        group=(np.arange(MEMBERS) * GROUPS // MEMBERS).astype(np.int32),
        groups=GROUPS,
    )
    width = GROUPS * 2 * sizes.key_dim + MEMBERS * sizes.share * (2 * sizes.value_dim + 1)
    return partial(NumbaSsmKernels(threads).attend_ssm, random(rows, width), weights)


def as_line(row: dict[str, Any]) -> str:
    """A row for people."""
    share = f"{row['of_gqa']:.0%} of GQA's"
    return f"{row['workload']:34}{row['attend_ms']:10.3f}{row['state_gb_s']:9.2f}{share:>20}"
