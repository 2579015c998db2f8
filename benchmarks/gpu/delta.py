"""Gated delta-nets against NumPy and the bandwidth: the section delta of `gpu_checks.py`, and its kernels' proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.random_bytes import random
from gpu.rig import Array, Rig, Work
from gpu.sizes import DeltaNet
from gpu.states import Sequences, States, distance, measure, mixed_sequences, random_states, state_distance, tokens_of

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.delta import CudaDelta, DeltaShape
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.delta_base import DeltaWeights
from headwise.kernels.delta_gates import gated_norm, inputs_of
from headwise.kernels.delta_reference import ReferenceDeltaKernels
from headwise.kernels.state_layout import StateSizes

EPS = 1e-6


@dataclass(frozen=True)
class DeltaStep:
    """One layer's delta-net of one step."""

    numbers: Array
    weights: DeltaWeights
    states: States
    out: Array

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""
        kernels = CudaDelta(rig.parts.launcher, rig.parts.allocate)
        return partial(kernels.attend_projected, self.numbers, self.weights, *self.states.where, out=self.out)


def sizes_of(net: DeltaNet) -> StateSizes:
    return StateSizes(net.dim, net.dim, net.share, net.convolution)


def shape_of(net: DeltaNet, block_size: int, dtype: str = "bfloat16") -> DeltaShape:
    return DeltaShape(net.key_heads, sizes_of(net), block_size, dtype)


def compile_delta(shape: DeltaShape, target: Target, directory: Path) -> int:
    """The number of kernels."""
    return len(list(precompile([], [target], directory, deltas=[shape])))


def delta_step(rig: Rig, shape: DeltaShape, sequences: Sequences) -> DeltaStep:
    tokens, sizes = tokens_of(sequences), shape.sizes
    each = (shape.key_heads, sizes.share)
    return DeltaStep(
        numbers=random(rig, (tokens, shape.projected), shape.dtype, salt=2),
        weights=DeltaWeights(
            convolution=random(rig, (shape.key_heads, sizes.convolution, sizes.channels), "float32", salt=3),
            speed=rig.upload(np.full(each, 0.02, np.float32)),
            bias=rig.upload(np.zeros(each, np.float32)),
            norm=rig.upload(np.linspace(0.5, 1.5, sizes.value_dim, dtype=np.float32)),
            eps=EPS,
        ),
        states=random_states(rig, sizes, shape.key_heads, shape.block_size, sequences),
        out=rig.upload(np.full((tokens, shape.values), np.nan, numpy_dtype(shape.dtype))),
    )


def errors_of(rig: Rig, step: DeltaStep, shape: DeltaShape) -> tuple[float, float]:
    """Relative distances from NumPy, of what comes of a step, and of the states that it leaves."""
    names = ("convolution", "speed", "bias", "norm")
    there: dict[str, Any] = {name: rig.download(getattr(step.weights, name)) for name in names}
    weights, states, sizes = replace(step.weights, **there), step.states.on_host(rig), shape.sizes
    inputs, gates = inputs_of(rig.download(step.numbers).astype(np.float32), weights, sizes)
    seen = np.empty((len(gates), shape.key_heads, sizes.share, sizes.value_dim), np.float32)
    ReferenceDeltaKernels().attend_delta(inputs, *states.where, out=seen)
    step.on(rig)()
    rig.synchronize()
    expected = gated_norm(seen.reshape(gates.shape), gates, weights).reshape(len(gates), -1)
    return distance(rig.download(step.out), expected), state_distance(rig, step.states, states.arena)


def check_delta(bench: Bench, tolerances: dict[str, float]) -> None:
    """A step of decodes, of a prompt and of a prompt's next chunk, in each dtype."""
    size = bench.sizes.block_size
    for dtype, tolerance in tolerances.items():
        with bench.rows.case(f"delta_{dtype}") as begin:
            begin()
            shape = shape_of(bench.sizes.delta, size, dtype)
            out, states = errors_of(bench.rig, delta_step(bench.rig, shape, mixed_sequences(size)), shape)
            bench.rows.check_error(f"delta_{dtype}", out, tolerance)
            bench.rows.check_error(f"delta_states_{dtype}", states, tolerance)


def delta(bench: Bench) -> None:
    """See `measure`."""
    net = bench.sizes.delta
    shape = shape_of(net, bench.sizes.block_size)
    measure(bench, partial(delta_step, bench.rig, shape), net.batches, net.prompts)
    bench.rows.state("clocks", bench.rig.clocks())
