"""Parameters of tests of many combinations: some that meet all there is to meet, and the others for the soak."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def covering(*values: Sequence[Any], pairs: Collection[tuple[int, int]] | None = None) -> list[ParameterSet]:
    """Every combination of ``values``, one of each; those are for the soak without which all is met that is to be met.

    values: of each parameter; several that go together are tuples, which the test gets one after the other
    pairs:  places of two parameters whose every pair of values is met, since what one does hangs on the other; None:
            any two. Every value is met whatever they are
    """
    chosen = range(len(values))
    together = [(place,) for place in chosen] + list(combinations(chosen, 2) if pairs is None else pairs)

    def met_by(combination: Sequence[int]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(places, tuple(combination[place] for place in places)) for places in together}

    every = list(product(*(range(len(each)) for each in values)))
    left, kept = set().union(*map(met_by, every)), set()
    while left:
        best = max(every, key=lambda combination: len(met_by(combination) & left))
        kept.add(best)
        left -= met_by(best)
    found = []
    for combination in every:
        parts = [each[index] for each, index in zip(values, combination, strict=True)]
        flat = [value for part in parts for value in (part if isinstance(part, tuple) else (part,))]
        found.append(pytest.param(*flat, marks=() if combination in kept else pytest.mark.soak))
    return found
