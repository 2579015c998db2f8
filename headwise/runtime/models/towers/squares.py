"""Sizes of images that are whole squares of patches, each of which becomes one token: Qwen's models, and ERNIE's."""

from __future__ import annotations

import math

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, positive

_LARGEST = 1 << 26
"""Most pixels that a checkpoint may ask for: published ones ask for 2^24."""
_MOST_RATIO = 200
"""Of an image's longer edge to its shorter one."""


def fitted(size: tuple[int, int], step: int, least: int, most: int) -> tuple[int, int]:
    """The size to which an image is scaled: whole squares with edges of ``step`` pixels, from ``least`` to ``most``
    pixels in all. Raises `InvalidRequestError` for an image that is as good as a line, which these models were not
    trained with."""
    width, height = size
    if max(size) > _MOST_RATIO * min(size):
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels: this model takes none whose longer edge is more than "
            f"{_MOST_RATIO} times its shorter one"
        )
    across, down = (round(edge / step) for edge in size)
    if across * down * step**2 > most:
        shrunk = math.sqrt(width * height / most)
        across, down = (max(1, math.floor(edge / shrunk / step)) for edge in size)
    elif across * down * step**2 < least:
        grown = math.sqrt(least / (width * height))
        across, down = (math.ceil(edge * grown / step) for edge in size)
    return across * step, down * step


def pixel_bounds(processor: HfConfig, least_default: int, most_default: int) -> tuple[int, int]:
    """Least and most pixels of an image: of fields of their own, or of a ``size`` that names edges and means these."""
    size = mapping(processor, "size")
    least = None if size else least_default
    most = None if size else most_default
    least = positive({**size, **_given(processor, "min_pixels", "shortest_edge")}, "shortest_edge", least, _LARGEST)
    most = positive({**size, **_given(processor, "max_pixels", "longest_edge")}, "longest_edge", most, _LARGEST)
    if least > most:
        raise ModelError(f"the checkpoint's image processor has images of at least {least} and at most {most} pixels")
    return least, most


def _given(processor: HfConfig, key: str, name: str) -> HfConfig:
    return {} if processor.get(key) is None else {name: processor[key]}
