"""Which of a token's three positions turns a pair of elements: in time, in rows or in columns.

M-RoPE: Wang et al., arXiv 2409.12191; interleaved: Bai et al., arXiv 2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import AXES, RopeConfig
from headwise.runtime.models.rope import rotated_elements
from headwise.runtime.models.values import shown


def with_axes(config: ModelConfig, default: Sequence[int], *, interleaved: bool) -> ModelConfig:
    """A model that gives a token three positions. default: ``mrope_section``, where the config has none"""
    return with_axes_by(partial(axes_of, interleaved=interleaved), config, default)


def with_axes_by(
    axes: Callable[[Any, int], tuple[int, ...]], config: ModelConfig, default: Sequence[int]
) -> ModelConfig:
    """The same, of a section and a number of pairs that ``axes`` takes as `axes_of` does."""

    def turned(rope: RopeConfig) -> RopeConfig:
        section = (rope.scaling or {}).get("mrope_section", default)
        return replace(rope, axes=axes(section, rotated_elements(rope, config.head_dim) // 2))

    return replace(config, ropes=tuple(map(turned, config.ropes)))


def axes_of(section: Any, pairs: int, *, interleaved: bool) -> tuple[int, ...]:
    """`RopeConfig.axes` of so many pairs, by a config's ``mrope_section``: how many are of time, of rows, of columns.

    interleaved: pairs take turns, as far as rows and columns have some, and the others are of time; else they follow
                 one another

    Raises:
        ModelError: these are no three numbers of pairs, or where they follow one another not of all.
    """
    sizes = _sizes(section, 0 if interleaved else pairs)
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    return tuple(pair % AXES if pair < AXES * sizes[pair % AXES] else 0 for pair in range(pairs))


def axes_of_rows_first(section: Any, pairs: int) -> tuple[int, ...]:
    """The same of ERNIE's ``mrope_section``, how many are of rows, of columns and of time: the first two, which must be
    equally many, take turns, and those of time follow."""
    rows, columns, time = _sizes(section, pairs)
    if rows != columns:
        raise ModelError(f"config.json: 'mrope_section' must be as many of rows as of columns, got {shown(section)}")
    return (1, 2) * rows + (0,) * time


def _sizes(section: Any, together: int) -> Sequence[int]:
    """together: of how many pairs; 0: of any number"""
    sizes = section if isinstance(section, list | tuple) else []
    are_numbers = len(sizes) == AXES and all(type(each) is int and each >= 0 for each in sizes)
    if not are_numbers or together not in (0, sum(sizes)):
        told = f", {together} together" if together else ""
        raise ModelError(f"config.json: 'mrope_section' must be {AXES} numbers of pairs{told}, got {shown(section)}")
    return sizes
