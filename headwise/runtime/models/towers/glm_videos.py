"""How videos are taken for GLM-4.1V to 4.6V: which frames of them, of which size, and what stands in a prompt.

As transformers does: there are two ways to choose frames, and two to write seconds, which a checkpoint names by its
processors. A part is as an image, with the second of its first frame behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, positive
from headwise.runtime.models.towers.base import FRAMES, TowerParts, VideoForm, VideoPlan
from headwise.runtime.models.towers.pixels import pixel_form
from headwise.runtime.models.towers.tower_weights import control_tokens
from headwise.runtime.models.towers.video_parts import parts_with_texts
from headwise.runtime.models.towers.vision_fields import CLIP_MEAN, CLIP_STD, check_processor, pixel_bounds
from headwise.runtime.models.towers.whole_squares import check_shape, counted, whole_squares_of_frames
from headwise.runtime.models.values import finite_number, shown

VIDEO_PLACE = "<|video|>"
_PAD, _START, _END = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"
_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}
"""Pixels of all frames together, where the checkpoint has no others."""
_MOST_FRAMES = 768
_BY_LENGTH = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))
"""Of GLM-4.6V: up to how many seconds how many parts of a second are taken."""
_MOST_BY_LENGTH = 640
"""Frames, then."""


@dataclass(frozen=True)
class _Form:
    """What a checkpoint says of videos.

    fps:         frames of a second
    seconds:     of a longer video as many frames are taken as of one so long
    is_by_length: whether longer ones have fewer frames of a second
    has_tenths:  whether seconds are written with a tenth, and their unit, or whole
    least, most: pixels of all frames
    """

    fps: float
    seconds: int
    is_by_length: bool
    has_tenths: bool
    least: int
    most: int

    @classmethod
    def of(cls, videos: HfConfig, processor: HfConfig, patch: int, merge: int) -> _Form:
        """Raises `ModelError` naming what cannot be served."""
        check_processor(videos, patch_size=patch, merge_size=merge, temporal_patch_size=FRAMES)
        least, most = pixel_bounds(mapping(videos, "size") or _SIZE, None, None)
        fps = 2.0 if videos.get("fps") is None else finite_number(videos["fps"])
        if fps is None or not 0 < fps <= 1000:
            raise ModelError(f"the checkpoint's video processor has fps {shown(videos['fps'])}")
        seconds = positive(videos, "max_duration", 300, 1 << 20)
        by_length = videos.get("video_processor_type") == "Glm46VVideoProcessor"
        has_tenths = {**processor, **videos}.get("processor_class") == "Glm46VProcessor"
        return cls(fps, seconds, by_length, has_tenths, least, most)


class GlmVideos:
    """Plans for videos of one model.

    pixels: how their frames become numbers
    """

    def __init__(self, parts: TowerParts, patch: int, merge: int, text_hidden: int) -> None:
        """patch, merge, text_hidden: as of `Glm4vVisionConfig`. Raises `ModelError` where the checkpoint has what is
        not served, or lacks a control token."""
        self._form = _Form.of(parts.videos, parts.processor, patch, merge)
        self.pixels = pixel_form({**parts.processor, **parts.videos}, CLIP_MEAN, CLIP_STD)
        self._step, self._most_tokens = patch * merge, parts.most // text_hidden
        self._text_ids: Callable[[str], Sequence[int]] = parts.text_ids
        tokens = control_tokens(parts, (_PAD, _START, _END))
        self._token, self._around = tokens[_PAD], (tokens[_START], tokens[_END])

    def plan(self, video: VideoForm, fps: float) -> VideoPlan:
        """As of `VideoTower`."""
        frames = self._chosen(video, fps)
        parts = len(frames) // FRAMES
        size = self._size(video, len(frames), parts)
        columns, rows = (edge // self._step for edge in size)
        texts = [self._text_ids(self._written(at / video.fps)) for at in frames[::FRAMES]]
        made = parts_with_texts(texts, self._around, self._token, (rows, columns), is_text_first=False)
        return VideoPlan(frames, size, *made)

    def _written(self, second: float) -> str:
        return f"{second:.1f} seconds" if self._form.has_tenths else str(int(second))

    def _chosen(self, video: VideoForm, fps: float) -> list[int]:
        """An even number of frames: the last one may be there twice."""
        by_length = self._form.is_by_length and not fps
        found = _by_length(video) if by_length else _at_rate(video, fps or self._form.fps, self._form.seconds)
        frames = list(dict.fromkeys(found))
        if len(frames) > _MOST_FRAMES:
            frames = [frames[int(at)] for at in np.linspace(0, len(frames) - 1, _MOST_FRAMES)]
        return [*frames, *frames[-1:] * (len(frames) % FRAMES)]

    def _size(self, video: VideoForm, frames: int, parts: int) -> tuple[int, int]:
        """Of the frames. Raises `InvalidRequestError` as `check_shape`."""
        check_shape(video.width, video.height)
        fitting = max(1, self._most_tokens // parts) * self._step**2 * counted(frames)
        most = min(self._form.most, fitting)
        return whole_squares_of_frames(video.width, video.height, self._step, self._form.least, most, frames)


def _at_rate(video: VideoForm, fps: float, seconds: int) -> list[int]:
    """Frames of all of a video's seconds, or as many of a longer one."""
    last, duration = video.frames - 1, video.frames / video.fps
    if duration <= seconds:
        count = max(math.floor(duration * fps), 1)
        return [min(last, math.ceil(at * video.fps / fps)) for at in range(count)]
    count = max(1, int(seconds * fps))
    if count >= video.frames:
        return list(range(video.frames))
    return [min(last, math.ceil(at * video.fps)) for at in np.linspace(0, duration, count).tolist()]


def _by_length(video: VideoForm) -> list[int]:
    """Frames of a video, fewer of a second the longer it is."""
    whole, duration = video.frames, video.frames / video.fps
    lasts = min(duration, _BY_LENGTH[-1][0])
    rate = FRAMES * next(rate for most, rate in _BY_LENGTH if lasts <= most)
    count = max(1, min(int(lasts * rate), _MOST_BY_LENGTH))
    found = _spread(0, whole - 1, count) if whole < count else _passed(video, 1 / rate, int(duration))
    if len(found) < count:
        return _spread(found[0], found[-1], count) if found else _spread(0, whole - 1, count)
    return _spread(0, whole - 1, count) if len(found) > count else found


def _passed(video: VideoForm, interval: float, most: int) -> list[int]:
    """The first frame behind each multiple of so many seconds, up to as many seconds."""
    found, second = list[int](), 0.0
    for at in range(video.frames):
        if at * (1 / video.fps) >= second:
            second += interval
            found.append(at)
            if second >= most:
                break
    return found


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(at) for at in np.linspace(first, last, count).tolist()]
