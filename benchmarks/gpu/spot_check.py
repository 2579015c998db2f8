"""Whether a timed step computes what NumPy does: a head of each group of one sequence, on the very inputs of the step.

All of a step of gigabytes would take NumPy minutes; a few rows of it take milliseconds.
"""

from __future__ import annotations

import numpy as np
from gpu.cases import Step
from gpu.rig import Rig
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.reference import ReferenceKernels

CHECKED_QUERIES = 16
"""Of a prompt: its last ones, and as many at another place."""

CLOSE = 0.02
"""Relative distance of two results in bfloat16."""


class WrongError(Exception):
    """What was to be timed computes something else than it should."""


def check_step(rig: Rig, step: Step) -> float:
    """Compute the step once, and return how far the rows that are looked at are from NumPy's.

    Raises:
        WrongError: too far, or some element of the output was never written, or is NaN.
    """
    step.on(rig)()
    out = rig.download(step.out)
    broken = int(np.count_nonzero(np.isnan(out)))
    if broken:
        raise WrongError(f"{broken} of {out.size} elements of the output are NaN, or were not written")
    rng = np.random.default_rng((rig.seed, 5))
    sequence = int(rng.integers(len(step.sequences)))
    queries, context = step.sequences[sequence]
    error = 0.0
    for group in range(step.batch.groups):
        head = int(rng.choice([head for head, (other, _) in enumerate(step.places) if other == group]))
        for end in {context, int(rng.integers(context - queries, context)) + 1}:
            error = max(error, _distance(rig, step, sequence, head, end, out))
    if not error < CLOSE:
        raise WrongError(f"the output is {error:.2e} from NumPy's in sequence {sequence}, more than {CLOSE:g}")
    return error


def _distance(rig: Rig, step: Step, sequence: int, head: int, end: int, out: NDArray[np.generic]) -> float:
    """Relative distance of KV head ``head`` at the positions up to ``end``, as many as are looked at."""
    queries, context = step.sequences[sequence]
    before = context - queries
    count = min(CHECKED_QUERIES, end - before)
    first = sum(many for many, _ in step.sequences[:sequence]) + end - before - count
    share = out.shape[1] // len(step.places)
    rows, heads = slice(first, first + count), slice(head * share, (head + 1) * share)
    group, slot = step.places[head]
    arena, table = _blocks(rig, step, step.tables[sequence * step.batch.groups + group])
    window, sink = step.windows[head]
    expected = np.empty((count, share, out.shape[2]))
    ReferenceKernels().attend(
        rig.download(step.query[rows])[:, heads],
        arena,
        step.layout,
        AttentionBatch(_int32(0, count), _int32(end), table[None], 1),
        HeadTable(_int32(0), _int32(slot), _int32(window), _int32(sink)),
        scale=step.scale,
        softcap=0.0,
        out=expected,
    )
    return float(np.linalg.norm(out[rows, heads].astype(np.float64) - expected) / np.linalg.norm(expected))


def _blocks(rig: Rig, step: Step, table: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The blocks of a row of the block tables in host memory, and the row that names them there."""
    size, held = step.layout.block_bytes, table >= 0
    blocks = [rig.download(step.arena[block * size : (block + 1) * size]) for block in table[held].tolist()]
    moved = np.full(len(table), -1, np.int32)
    moved[held] = np.arange(len(blocks))
    return np.concatenate(blocks), moved


def _int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)
