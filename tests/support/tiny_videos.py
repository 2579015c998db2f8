"""Small videos: their frames, their files, and what transformers made of them with tiny models."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from support.tiny_images import REFERENCES

ASKED = 2.0
"""Frames a second that are taken."""


@dataclass(frozen=True)
class Form:
    """As `headwise.runtime.models.towers.base.VideoForm`."""

    frames: int
    fps: float
    width: int
    height: int


FILMS = {
    "exact": Form(12, 4.0, 32, 24),
    "odd": Form(9, 2.0, 24, 32),
    "single": Form(1, 25.0, 40, 24),
}
"""Their frames need not be scaled: they are whole squares of patches, and neither too small nor too large."""
FORMS = {
    **FILMS,
    "long": Form(3000, 30.0, 40, 24),
    "wide": Form(100, 25.0, 300, 20),
    "large": Form(61, 29.97, 640, 480),
    "tiny": Form(7, 3.0, 9, 5),
    "slow": Form(5, 0.5, 32, 24),
    "fast": Form(240, 240.0, 32, 24),
    "two": Form(2, 1.0, 32, 24),
    "endless": Form(200_000, 30.0, 64, 48),
}
"""Forms alone, of which it is told how they are taken."""


@cache
def frames(name: str) -> list[Image.Image]:
    """Of one of `FILMS`: random blocks of colour, others in each."""
    form = FILMS[name]
    draw = np.random.default_rng([form.frames, form.width, form.height])
    shape = (form.frames, form.height // 8, form.width // 8, 3)
    whole = draw.integers(0, 256, shape, dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    return [Image.fromarray(np.ascontiguousarray(each), "RGB") for each in whole]


def written(
    images: list[Image.Image],
    fps: float,
    *,
    container: str = "mp4",
    codec: str = "libx264rgb",
    pixels: str = "rgb24",
    times: list[int] | None = None,
    **options: str,
) -> bytes:
    """A file of these frames; as it is, without loss. times: of each frame, as multiples of ``1 / fps``"""
    import av

    assert codec != "libx265" or min(images[0].size) >= 64, "x265 writes past its memory for frames of fewer pixels"
    file = io.BytesIO()
    with av.open(file, "w", format=container) as opened:
        stream = opened.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = images[0].size
        stream.pix_fmt = pixels
        stream.options = options or ({"qp": "0"} if codec == "libx264rgb" else {})
        stream.codec_context.thread_count = 1
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_image(image)
            frame.pts = number if times is None else times[number]
            frame.time_base = 1 / Fraction(fps).limit_denominator(1001)
            opened.mux(stream.encode(frame))
        opened.mux(stream.encode(None))
    return file.getvalue()


@cache
def film(name: str) -> bytes:
    """The file of one of `FILMS`."""
    return written(frames(name), FILMS[name].fps)


@cache
def video_references(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REFERENCES / f"videos-{name}.json").read_text())
    return found
