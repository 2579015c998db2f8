"""Whose tokens a step computes: of what decodes first, then of prompts in the order in which they came.

A prompt that waited for blocks of other engines keeps its place: it goes before the next chunk of those that came
later. Numbers only, one entry per sequence, in that order; `benchmarks/simulation` calls the same functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def shares(wanted: Tokens, decoding: NDArray[np.bool_], budget: int) -> tuple[NDArray[np.intp], Tokens]:
    """The sequences of which a step computes tokens, those that decode first, and how many of each.

    wanted:   tokens of each sequence that it could compute at most
    decoding: no prompt may stall these
    budget:   tokens of a step
    """
    order = np.argsort(~decoding, kind="stable")
    wanted = wanted[order]
    before = np.cumsum(wanted) - wanted
    counts = np.minimum(wanted, np.maximum(0, budget - before))
    return order[counts > 0], counts[counts > 0]


def wanted_of_stage(wanted: Tokens, decoding: NDArray[np.bool_], last_step: Tokens, most: int) -> Tokens:
    """``wanted`` of one of the steps that are on their way through a pipeline together: of ``most`` of the sequences
    that decode, those whose ``last_step`` is longest ago, the first ones of the same."""
    willing = np.flatnonzero(decoding & (wanted > 0))
    left = willing[np.argsort(last_step[willing], kind="stable")[most:]]
    taken = wanted.copy()
    taken[left] = 0
    return taken


PARTS = 4
"""Chunks of a prompt for each stage of a pipeline: of the time that it takes, stages then wait for a fifth at most."""


def chunk_of_stage(left: int, stages: int, most: int) -> int:
    """Most tokens of a prompt in a step, of ``left`` to compute: between half of ``most`` and that, so that all stages
    soon have a part of it. Smaller chunks would take longer for each token."""
    return min(most, max(-(-most // 2), -(-left // (PARTS * stages))))


def left_for(place: int, wanted: Tokens, decoding: NDArray[np.bool_], budget: int) -> int:
    """Tokens that `shares` would leave for one more prompt before the sequence at ``place``; 0 or less: none."""
    behind = ~decoding
    behind[:place] = False
    return budget - int(wanted[~behind].sum())
