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


def whole_squares(width: int, height: int, step: int, least: float, most: float, frames: int = 1) -> tuple[int, int]:
    """The nearest size of whole squares, of edges of ``step`` pixels, that has from ``least`` to ``most`` pixels.

    frames: of which that is the size, and which have so many pixels together; several are counted in pairs
    """
    sizes = (width, height)
    across, down = (round(size / step) for size in sizes)
    pixels = across * down * step**2 * counted(frames)
    if pixels > most:
        shrunk = math.sqrt(frames * width * height / most)
        across, down = (max(1, math.floor(size / shrunk / step)) for size in sizes)
    elif pixels < least:
        grown = math.sqrt(least / (frames * width * height))
        across, down = (math.ceil(size * grown / step) for size in sizes)
    return across * step, down * step


def whole_squares_of_frames(
    width: int, height: int, step: int, least: float, most: float, frames: int
) -> tuple[int, int]:
    """The same of several frames, which have so many pixels together: those smaller than a square are made as large
    before."""
    grown = max(1.0, step / width, step / height)
    return whole_squares(int(width * grown), int(height * grown), step, min(least, most), most, frames)


def counted(frames: int) -> int:
    """As how many frames they count: as transformers has it, an odd number is rounded to one of the even ones."""
    return frames if frames == 1 else round(frames / 2) * 2
