"""Gated delta-nets against NumPy and the bandwidth: the section delta of `gpu_checks.py`, and its kernels' proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.random_bytes import random
from gpu.rig import Array, Rig, Work
from gpu.sizes import DeltaNet
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.delta import CudaDelta, DeltaShape
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.delta_gates import gated_norm, inputs_of
from headwise.kernels.delta_reference import ReferenceDeltaKernels
from headwise.kernels.state_layout import RECURRENT, StateSizes, state_layout

EPS = 1e-6


@dataclass(frozen=True)
class DeltaStep:
    """One layer's delta-net of one step. state_bytes: that a decode reads, and as many that it writes"""

    numbers: Array
    weights: DeltaWeights
    arena: Array
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    out: Array
    state_bytes: int

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""
        where = self.arena, self.layout, self.batch, self.heads
        kernels = CudaDelta(rig.parts.launcher, rig.parts.allocate)
        return partial(kernels.attend_projected, self.numbers, self.weights, *where, out=self.out)


def sizes_of(net: DeltaNet) -> StateSizes:
    return StateSizes(net.dim, net.dim, net.share, net.convolution)


def shape_of(net: DeltaNet, block_size: int, dtype: str = "bfloat16") -> DeltaShape:
    return DeltaShape(net.key_heads, sizes_of(net), block_size, dtype)


def compile_delta(shape: DeltaShape, target: Target, directory: Path) -> int:
    """The number of kernels."""
    return len(list(precompile([], [target], directory, deltas=[shape])))


def delta_step(rig: Rig, shape: DeltaShape, sequences: Sequence[tuple[int, int]]) -> DeltaStep:
    """``sequences`` are (queries, context), each with blocks where it is read from and where it ends."""
    layout = state_layout(shape.block_size, shape.key_heads, shape.sizes)
    tables = _tables(sequences, shape.block_size, rig.seed)
    counts = np.array([count for count, _ in sequences], np.int32)
    tokens, sizes = int(counts.sum()), shape.sizes
    each = (shape.key_heads, sizes.share)
    arena = random(rig, (int(tables.max() + 1) * layout.block_bytes // 4,), "float32", salt=1).view(np.uint8)
    number = numpy_dtype(shape.dtype)
    heads = np.zeros(shape.key_heads, np.int32)
    return DeltaStep(
        numbers=random(rig, (tokens, shape.projected), shape.dtype, salt=2),
        weights=DeltaWeights(
            convolution=random(rig, (shape.key_heads, sizes.convolution, sizes.channels), "float32", salt=3),
            speed=rig.upload(np.full(each, 0.02, np.float32)),
            bias=rig.upload(np.zeros(each, np.float32)),
            norm=rig.upload(np.linspace(0.5, 1.5, sizes.value_dim, dtype=np.float32)),
            eps=EPS,
        ),
        arena=arena,
        layout=layout,
        batch=AttentionBatch(
            rig.upload(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
            rig.upload(np.array([context for _, context in sequences], np.int32)),
            rig.upload(tables),
            1,
            max_query_len=int(counts.max()),
        ),
        heads=HeadTable(*map(rig.upload, (heads, np.arange(shape.key_heads, dtype=np.int32), heads, heads))),
        out=rig.upload(np.full((tokens, shape.values), np.nan, number)),
        state_bytes=len(sequences) * shape.value_heads * sizes.key_dim * sizes.value_dim * 4,
    )


def _tables(sequences: Sequence[tuple[int, int]], block_size: int, seed: int) -> NDArray[np.int32]:
    columns = -(-max(context for _, context in sequences) // block_size)
    has = np.zeros((len(sequences), columns), np.bool_)
    for row, (count, context) in enumerate(sequences):
        has[row, (context - 1) // block_size] = True
        has[row, max(context - count - 1, 0) // block_size] |= context > count
    tables = np.full(has.shape, -1, np.int32)
    tables[has] = np.random.default_rng((seed, 5)).permutation(int(has.sum()))
    return tables


def errors_of(rig: Rig, step: DeltaStep, shape: DeltaShape) -> tuple[float, float]:
    """Relative distances from NumPy, of what comes of a step, and of the states that it leaves."""
    there: dict[str, Any] = {
        name: rig.download(getattr(step.weights, name)) for name in ("convolution", "speed", "bias", "norm")
    }
    weights = replace(step.weights, **there)
    tables: dict[str, Any] = {
        name: rig.download(getattr(step.batch, name)) for name in ("cu_seqlens_q", "seq_lens", "block_tables")
    }
    batch = replace(step.batch, **tables)
    heads = step.heads.elsewhere(rig.download)
    inputs, gates = inputs_of(rig.download(step.numbers).astype(np.float32), weights, shape.sizes)
    arena, sizes = rig.download(step.arena), shape.sizes
    seen = np.empty((len(gates), shape.key_heads, sizes.share, sizes.value_dim), np.float32)
    ReferenceDeltaKernels().attend_delta(inputs, arena, step.layout, batch, heads, out=seen)
    step.on(rig)()
    rig.synchronize()
    expected = gated_norm(seen.reshape(gates.shape), gates, weights).reshape(len(gates), -1)
    return distance(rig.download(step.out), expected), distance(*map(_floats, (rig.download(step.arena), arena)))


def _floats(arena: NDArray[np.uint8]) -> NDArray[np.float32]:
    return arena.view(np.float32)


def distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Relative distance; NaN if anything is NaN."""
    exact = expected.astype(np.float64)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))


def check_delta(bench: Bench, tolerances: dict[str, float]) -> None:
    """A step of decodes, of a prompt and of a prompt's next chunk, in each dtype."""
    size = bench.sizes.block_size
    sequences = [(1, size + 5), (2 * size + 3, 2 * size + 3), (size + 1, 2 * size + 9), (1, 1)]
    for dtype, tolerance in tolerances.items():
        with bench.rows.case(f"delta_{dtype}") as begin:
            begin()
            shape = shape_of(bench.sizes.delta, size, dtype)
            out, states = errors_of(bench.rig, delta_step(bench.rig, shape, sequences), shape)
            bench.rows.check_error(f"delta_{dtype}", out, tolerance)
            bench.rows.check_error(f"delta_states_{dtype}", states, tolerance)


def delta(bench: Bench) -> None:
    """States per second that decodes read and write, over what a copy does; and the time of prompts."""
    rig, rows, net = bench.rig, bench.rows, bench.sizes.delta
    shape = shape_of(net, bench.sizes.block_size)
    context = 10 * shape.block_size + 7  # the block that is read is written
    for batch in net.batches:
        with rows.case(f"b{batch}_of_bandwidth") as begin:
            begin()
            step = delta_step(rig, shape, [(1, context)] * batch)
            seconds = bench.seconds({"ours": step.on(rig)})["ours"]
            fills = step.state_bytes >= bench.sizes.fills_card // 4
            note = f"{seconds * 1e6:.1f} us, {RECURRENT} states of {step.state_bytes / 2**20:.0f} MiB read and written"
            share = 2 * step.state_bytes / seconds / bench.bandwidth
            rows.add(f"b{batch}_of_bandwidth", share, least=0.75 if fills else None, note=note)
    for tokens in net.prompts:
        with rows.case(f"t{tokens}") as begin:
            begin()
            step = delta_step(rig, shape, [(tokens, tokens)])
            seconds = bench.seconds({"ours": step.on(rig)})["ours"]
            rows.add(f"t{tokens}", seconds * 1e3, "ms", note=f"{tokens / seconds / 1e6:.1f} million tokens a second")
    rows.state("clocks", rig.clocks())
