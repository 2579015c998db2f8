"""Sizes to which images are scaled: of whole squares of patches, and of so many pixels in all."""

from __future__ import annotations

import math

from headwise.errors import InvalidRequestError

_MOST_RATIO = 200
"""Of an image's longer edge to its shorter one."""


def check_shape(width: int, height: int) -> None:
    """Raises `InvalidRequestError` for an image that is as good as a line, which models were not trained with."""
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels: this model takes none whose longer edge is more than "
            f"{_MOST_RATIO} times its shorter one"
        )


def whole_squares(width: int, height: int, step: int, least: float, most: float) -> tuple[int, int]:
    """The nearest size of whole squares, of edges of ``step`` pixels, that has from ``least`` to ``most`` pixels."""
    sizes = (width, height)
    across, down = (round(size / step) for size in sizes)
    if across * down * step**2 > most:
        shrunk = math.sqrt(width * height / most)
        across, down = (max(1, math.floor(size / shrunk / step)) for size in sizes)
    elif across * down * step**2 < least:
        grown = math.sqrt(least / (width * height))
        across, down = (math.ceil(size * grown / step) for size in sizes)
    return across * step, down * step
