"""An image as the numbers that a tower takes: scaled, and normalised by channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig
from headwise.runtime.models.values import finite_number, shown

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_FILTERS = (1, 2, 3)
"""Pillow's Lanczos, bilinear and bicubic."""


@dataclass(frozen=True)
class PixelForm:
    """mean, std: of each channel, of numbers from 0 to 1
    resample: Pillow's number of the filter by which images are scaled
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


def pixel_form(processor: HfConfig, mean: tuple[float, ...], std: tuple[float, ...]) -> PixelForm:
    """What a checkpoint says of it, or where it says nothing these. Raises `ModelError` for what is not served."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if processor.get(name, True) not in (True, None):
            raise ModelError(f"the checkpoint's image processor has {name} {shown(processor[name])}: true is served")
    factor = finite_number(processor.get("rescale_factor") or 1 / 255)
    if factor is None or abs(factor - 1 / 255) > 1e-9:
        raise ModelError(f"the checkpoint's image processor has rescale_factor {factor}: 1/255 is served")
    resample = processor.get("resample", 3)
    if resample not in _FILTERS or isinstance(resample, bool):
        raise ModelError(f"the checkpoint's image processor has resample {shown(resample)}: 1, 2 and 3 are served")
    return PixelForm(
        _channels(processor, "image_mean", mean, least=-1e3),
        _channels(processor, "image_std", std, least=1e-6),
        resample,
    )


def normalised(
    image: Image, size: tuple[int, int], form: PixelForm, padded: tuple[int, int] | None = None
) -> NDArray[np.float32]:
    """``float32 [3, height, width]`` of an image of mode RGB, scaled to ``size``, its width and height.

    padded: width and height of the whole, black right of the image and below; None: ``size``
    """
    scaled: Any = image.resize(size, form.resample)
    width, height = size
    whole = np.zeros((*(padded or size)[::-1], 3), np.float32)
    whole[:height, :width] = np.asarray(scaled)
    pixels = whole.transpose(2, 0, 1) * np.float32(1 / 255)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (form.mean, form.std))
    return np.ascontiguousarray((pixels - mean) / std)


def _channels(processor: HfConfig, key: str, default: tuple[float, ...], least: float) -> tuple[float, ...]:
    given = processor.get(key) or default
    found = [finite_number(each) for each in given] if isinstance(given, list | tuple) else []
    numbers = tuple(each for each in found if each is not None and least <= each <= 1e3)
    if len(numbers) != 3 or len(found) != 3:
        raise ModelError(f"the checkpoint's image processor has {key} {shown(given)}: it must be three numbers")
    return numbers
