"""How a token's position enters attention: what is rotated, and how much queries count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES = 3
"""Of positions where a token has several: time, row and column."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of some layers.

    scaling: the ``rope_scaling`` mapping of ``config.json``, or None
    share:   of a head's elements, the first ones, that are rotated; `inverse_frequencies` puts their pairs first
    is_long: LongRoPE for sequences longer than those that the model was first trained with
    is_none: nothing is rotated
    axes:    of each pair that is rotated, which of a token's three positions turns it (M-RoPE); empty: it has one
    """

    theta: float
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0
    is_long: bool = False
    is_none: bool = False
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class TemperConfig:
    """Queries that count more the further behind they are.

    At position ``p`` they are multiplied with ``1 + factor * log(1 + floor((p + ahead) / step))``.

    layers: those whose queries are
    """

    factor: float
    step: float
    ahead: int
    layers: frozenset[int]
