"""State space models against NumPy and the bandwidth: the section ssm of `gpu_checks.py`, and its kernels' proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.random_bytes import random
from gpu.rig import Array, Rig, Work
from gpu.sizes import Sizes, SsmNet
from gpu.states import Sequences, States, distance, measure, mixed_sequences, random_states, state_distance, tokens_of

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.cuda.ssm import CudaSsm, SsmShape
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.ssm_reference import ReferenceSsmKernels
from headwise.kernels.state_layout import StateSizes


@dataclass(frozen=True)
class SsmStep:
    """One layer's state space model of one step."""

    numbers: Array
    weights: SsmWeights
    states: States
    out: Array

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""
        kernels = CudaSsm(rig.parts.launcher, rig.parts.allocate)
        return partial(kernels.attend_ssm, self.numbers, self.weights, *self.states.where, out=self.out)


def shape_of(net: SsmNet, block_size: int, dtype: str = "bfloat16") -> SsmShape:
    sizes = StateSizes(net.key_dim, net.value_dim, net.share, net.convolution)
    return SsmShape(net.members, net.groups, sizes, block_size, dtype)


def ssm_shapes(sizes: Sizes, dtypes: list[str]) -> Iterator[tuple[str, SsmShape]]:
    """What is shown to be right, by the nets' names: the first in all ``dtypes``, the others in the last of them."""
    for index, net in enumerate(sizes.ssm):
        for dtype in dtypes if index == 0 else dtypes[-1:]:
            yield net.name, shape_of(net, sizes.block_size, dtype)


def compile_ssm(shape: SsmShape, target: Target, directory: Path) -> int:
    """The number of kernels."""
    return len(list(precompile([], [target], directory, ssms=[shape])))


def ssm_step(rig: Rig, shape: SsmShape, sequences: Sequences) -> SsmStep:
    tokens, sizes, members = tokens_of(sequences), shape.sizes, shape.members
    each = (members, sizes.share)
    return SsmStep(
        numbers=random(rig, (tokens, shape.projected), shape.dtype, salt=2),
        weights=SsmWeights(
            convolution=random(rig, (members, sizes.convolution, sizes.channels), "float32", salt=3),
            convolution_bias=random(rig, (members, sizes.channels), "float32", salt=4),
            speed=rig.upload(np.full(each, 0.5, np.float32)),
            bias=rig.upload(np.full(each, -3, np.float32)),
            skip=rig.upload(np.ones(each, np.float32)),
            group=rig.upload((np.arange(members) * shape.groups // members).astype(np.int32)),
            groups=shape.groups,
        ),
        states=random_states(rig, sizes, members, shape.block_size, sequences),
        out=rig.upload(np.full((tokens, shape.values), np.nan, numpy_dtype(shape.dtype))),
    )


def errors_of(rig: Rig, step: SsmStep) -> tuple[float, float]:
    """Relative distances from NumPy, of what comes of a step, and of the states that it leaves."""
    names = ("convolution", "convolution_bias", "speed", "bias", "skip", "group")
    there: dict[str, Any] = {name: rig.download(getattr(step.weights, name)) for name in names}
    weights, states = replace(step.weights, **there), step.states.on_host(rig)
    numbers = rig.download(step.numbers).astype(np.float32)
    expected = np.empty(step.out.shape, np.float32)
    ReferenceSsmKernels().attend_ssm(numbers, weights, *states.where, out=expected)
    step.on(rig)()
    rig.synchronize()
    return distance(rig.download(step.out), expected), state_distance(rig, step.states, states.arena)


def check_ssm(bench: Bench, tolerances: dict[str, float]) -> None:
    """A step of decodes, of a prompt and of a prompt's next chunk, in each dtype."""
    for name, shape in ssm_shapes(bench.sizes, list(tolerances)):
        row = f"ssm_{name}_{shape.dtype}"
        with bench.rows.case(row) as begin:
            begin()
            out, states = errors_of(bench.rig, ssm_step(bench.rig, shape, mixed_sequences(shape.block_size)))
            bench.rows.check_error(row, out, tolerances[shape.dtype])
            bench.rows.check_error(f"ssm_{name}_states_{shape.dtype}", states, tolerances[shape.dtype])


def ssm(bench: Bench) -> None:
    """See `measure`, of each net."""
    for net in bench.sizes.ssm:
        shape = shape_of(net, bench.sizes.block_size)
        measure(bench, partial(ssm_step, bench.rig, shape), net.batches, net.prompts, f"{net.name}_")
    bench.rows.state("clocks", bench.rig.clocks())
