"""Images cut into tiles of one size, as Llama 4's are: on the canvas that fits best, padded right and below."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.towers.pixels import PixelForm

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Height and width."""


def canvases(most: int, edge: int) -> list[Size]:
    """All that are made of at most so many tiles, those of one shape together, the largest first."""
    by_shape: dict[float, list[Size]] = {}
    for tiles in range(most, 0, -1):
        for rows in [rows for rows in range(1, tiles + 1) if tiles % rows == 0]:
            columns = tiles // rows
            by_shape.setdefault(rows / columns, []).append((rows * edge, columns * edge))
    return [canvas for found in by_shape.values() for canvas in found]


def best_canvas(size: Size, possible: list[Size], largest: bool) -> Size:
    """The one on which an image has to be enlarged least, if on any, else shrunk least; of several the smallest.

    largest: whether it is to be enlarged most instead
    """
    given = np.array(possible, np.float32)
    scales = (given / np.array(size, np.float32)).min(axis=1)
    enlarging = scales[scales >= 1]
    shrinking = scales.max()
    chosen = (enlarging.max() if largest else enlarging.min()) if len(enlarging) else shrinking
    fitting = [canvas for canvas, scale in zip(possible, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


def within(size: Size, target: Size) -> Size:
    """The largest size of an image's shape within another one; each edge has a pixel at least."""
    height, width = size
    wide, high = target[1] / width, target[0] / height
    if wide < high:
        return max(1, min(math.floor(height * wide), target[0])), target[1]
    return target[0], max(1, min(math.floor(width * high), target[1]))


def tiles_of(
    image: Image, edge: int, most: int, form: PixelForm, largest: bool = False
) -> tuple[NDArray[np.float32], Size]:
    """``float32 [tiles, 3, edge, edge]``, row by row, and how many rows and columns there are. Of several, one more
    tile behind them has the whole image, whatever its shape.

    Numbers are rounded to bfloat16 at each step, as the model was trained with.
    """
    size = image.size[1], image.size[0]
    canvas = best_canvas(size, canvases(most, edge), largest)
    target = canvas if largest else (min(max(size[0], edge), canvas[0]), min(max(size[1], edge), canvas[1]))
    height, width = within(size, target)
    padded = np.zeros((*canvas, 3), np.uint8)
    padded[:height, :width] = np.asarray(_scaled(image, (height, width), form))
    rows, columns = canvas[0] // edge, canvas[1] // edge
    cut = padded.reshape(rows, edge, columns, edge, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, edge, edge)
    if rows * columns > 1:
        whole = np.asarray(_scaled(image, (edge, edge), form)).transpose(2, 0, 1)
        cut = np.concatenate((cut, whole[None]))
    mean, std = (_rounded(np.array(each, np.float32))[:, None, None] for each in (form.mean, form.std))
    numbers = _rounded(cut.astype(np.float32) * np.float32(1 / 255))
    return _rounded(_rounded(numbers - mean) / std), (rows, columns)


def _scaled(image: Image, size: Size, form: PixelForm) -> Any:
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), form.resample)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """To bfloat16: to the nearest, and of two to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
