"""Prompts of random tokens, for benchmarks in which it does not matter what they say."""

from __future__ import annotations

import numpy as np


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Ordinary tokens of every demo model's vocabulary."""
    return [int(token) for token in rng.integers(1000, 30000, count)]
