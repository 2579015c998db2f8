"""Kimi Delta Attention against NumPy and the bandwidth: the section kda of `gpu_checks.py`, and its kernels' proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.random_bytes import random
from gpu.rig import Array, Rig, Work
from gpu.sizes import KdaNet
from gpu.states import Sequences, States, distance, measure, mixed_sequences, random_states, state_distance, tokens_of

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.kda import CudaKda, KdaShape
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.kda_base import KdaProjected, KdaWeights
from headwise.kernels.kda_reference import ReferenceKdaKernels
from headwise.kernels.state_layout import StateSizes


@dataclass(frozen=True)
class KdaStep:
    """One layer's Kimi Delta Attention of one step."""

    projected: KdaProjected
    states: States
    out: Array

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""
        kernels = CudaKda(rig.parts.launcher, rig.parts.allocate)
        return partial(kernels.attend_kda, self.projected, *self.states.where, out=self.out)


def kda_shape(net: KdaNet, block_size: int, dtype: str = "bfloat16") -> KdaShape:
    sizes = StateSizes(net.dim, net.dim, 1, net.convolution)
    return KdaShape(net.heads, sizes, block_size, dtype, net.heads * (sizes.channels + 1) + 2 * net.dim)


def compile_kda(shape: KdaShape, target: Target, directory: Path) -> int:
    """The number of kernels."""
    return len(list(precompile([], [target], directory, kdas=[shape])))


def kda_step(rig: Rig, shape: KdaShape, sequences: Sequences) -> KdaStep:
    tokens, sizes, heads, dtype = tokens_of(sequences), shape.sizes, shape.heads, shape.dtype
    weights = KdaWeights(
        convolution=random(rig, (heads, sizes.convolution, sizes.channels), "float32", salt=3),
        speed=rig.upload(np.full(heads, 0.5, np.float32)),
        bias=rig.upload(np.full((heads, sizes.key_dim), -3, np.float32)),
        norm=rig.upload(np.ones(sizes.value_dim, np.float32)),
        eps=1e-5,
    )
    return KdaStep(
        projected=KdaProjected(
            numbers=random(rig, (tokens, shape.row), dtype, salt=2),
            decays=random(rig, (tokens, shape.keys), dtype, salt=6),
            gates=random(rig, (tokens, shape.values), dtype, salt=7),
            weights=weights,
        ),
        states=random_states(rig, sizes, heads, shape.block_size, sequences),
        out=rig.upload(np.full((tokens, shape.values), np.nan, numpy_dtype(dtype))),
    )


def errors_of(rig: Rig, step: KdaStep) -> tuple[float, float]:
    """Relative distances from NumPy, of what comes of a step, and of the states that it leaves."""
    projected, states = step.projected, step.states.on_host(rig)
    names = ("convolution", "speed", "bias", "norm")
    there: dict[str, Any] = {name: rig.download(getattr(projected.weights, name)) for name in names}
    rows: dict[str, Any] = {
        name: rig.download(getattr(projected, name)).astype(np.float32) for name in ("numbers", "decays", "gates")
    }
    on_host = KdaProjected(**rows, weights=replace(projected.weights, **there))
    expected = np.empty(step.out.shape, np.float32)
    ReferenceKdaKernels().attend_kda(on_host, *states.where, out=expected)
    step.on(rig)()
    rig.synchronize()
    return distance(rig.download(step.out), expected), state_distance(rig, step.states, states.arena)


def check_kda(bench: Bench, tolerances: dict[str, float]) -> None:
    """A step of decodes, of a prompt and of a prompt's next chunk, in each dtype."""
    for dtype, tolerance in tolerances.items():
        shape, row = kda_shape(bench.sizes.kda, bench.sizes.block_size, dtype), f"kda_{dtype}"
        with bench.rows.case(row) as begin:
            begin()
            out, states = errors_of(bench.rig, kda_step(bench.rig, shape, mixed_sequences(shape.block_size)))
            bench.rows.check_error(row, out, tolerance)
            bench.rows.check_error(f"kda_states_{dtype}", states, tolerance)


def kda(bench: Bench) -> None:
    """See `measure`."""
    net = bench.sizes.kda
    shape = kda_shape(net, bench.sizes.block_size)
    measure(bench, partial(kda_step, bench.rig, shape), net.batches, net.prompts)
    bench.rows.state("clocks", bench.rig.clocks())
