"""How videos are taken for Qwen2-VL to Qwen 3.5: which frames of them, of which size, and what stands in a prompt.

As transformers does with frames of its own choice (``do_sample_frames``), and with pixels limited as Qwen's own
``qwen-vl-utils`` limits them (``cap_pixels_per_frame``): a short video does not take as many tokens as a long one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, number, positive
from headwise.runtime.models.towers.base import FRAMES, TowerParts, VideoForm, VideoPlan
from headwise.runtime.models.towers.pixels import pixel_form
from headwise.runtime.models.towers.qwen_vision_config import QwenVisionConfig, Seconds
from headwise.runtime.models.towers.tower_weights import control_tokens
from headwise.runtime.models.towers.video_parts import parts_with_texts
from headwise.runtime.models.towers.vision_fields import CLIP_MEAN, CLIP_STD, check_processor, processor_bounds
from headwise.runtime.models.towers.whole_squares import (
    check_shape,
    counted,
    whole_squares,
    whole_squares_of_frames,
)
from headwise.runtime.models.values import finite_number, shown

VIDEO_PLACE = "<|video_pad|>"
_START, _END = "<|vision_start|>", "<|vision_end|>"
_FPS = 2.0
_MOST_FRAMES = 1 << 14
"""That a checkpoint may ask for of a video: published ones ask for 768."""
_SHARE = 0.9
"""Of the tokens of a context that a video may take."""
_SLACK = 1.05
"""Of the least pixels, what any frame may have."""


@dataclass(frozen=True)
class _Sizes:
    """What a checkpoint says of videos.

    fps:         frames of a second
    few, many:   frames, at least and at most
    least, most: pixels: of a frame, or where seconds are written of all of them
    tokens:      by which pixels are limited besides: see `_most`; 0: they are not
    """

    fps: float
    few: int
    many: int
    least: int
    most: int
    tokens: int

    @classmethod
    def of(cls, videos: HfConfig, config: QwenVisionConfig, seconds: Seconds) -> _Sizes:
        """Raises `ModelError` naming what cannot be served."""
        check_processor(videos, patch_size=config.patch, merge_size=config.merge, temporal_patch_size=FRAMES)
        square = (32 if seconds is Seconds.WRITTEN else 28) ** 2  # whatever the checkpoint's patches are
        least, most = processor_bounds(videos, 128 * square, 768 * square)
        few, many = (positive(videos, f"{name}_frames", default, _MOST_FRAMES) for name, default in _FRAME_FIELDS)
        fps = _FPS if videos.get("fps") is None else finite_number(videos["fps"])
        if fps is None or not 0 < fps <= 1000 or few > many:
            raise ModelError(
                f"the checkpoint's video processor has fps {shown(videos.get('fps'))} and {few} to {many} frames"
            )
        default = 768 if seconds is Seconds.WRITTEN else 128_000
        limit = positive(videos, "max_video_tokens", default, 1 << 24)
        return cls(fps, few, many, least, most, 0 if videos.get("cap_pixels_per_frame") is False else limit)


_FRAME_FIELDS = (("min", 4), ("max", 768))


class QwenVideos:
    """Plans for videos of one model.

    pixels: how their frames become numbers
    """

    def __init__(self, parts: TowerParts, config: QwenVisionConfig, seconds: Seconds) -> None:
        """Raises `ModelError` where the checkpoint has what is not served, or lacks a control token."""
        self._sizes = _Sizes.of(parts.videos, config, seconds)
        self._config, self._seconds = config, seconds
        self.pixels = pixel_form({**parts.processor, **parts.videos}, CLIP_MEAN, CLIP_STD)
        self._most_tokens = parts.most // (config.text_hidden * (1 + len(config.levels)))
        self._text_ids: Callable[[str], Sequence[int]] = parts.text_ids
        tokens = control_tokens(parts, (VIDEO_PLACE, _START, _END))
        self._token, self._around = tokens[VIDEO_PLACE], (tokens[_START], tokens[_END])
        self._positions_a_second = 0.0
        if seconds is Seconds.COUNTED:
            vision = parts.config["vision_config"]
            self._positions_a_second = number(vision, "tokens_per_second", 4.0)

    def plan(self, video: VideoForm, fps: float) -> VideoPlan:
        """As of `VideoTower`."""
        chosen = self._chosen(video, fps or self._sizes.fps)
        frames = [*chosen, *[chosen[-1]] * (-len(chosen) % FRAMES)]
        parts = len(frames) // FRAMES
        size = self._size(video, max(FRAMES, len(chosen)), parts)
        columns, rows = (edge // self._config.step for edge in size)
        if self._seconds is Seconds.WRITTEN:
            at = np.array(frames).reshape(parts, FRAMES).mean(axis=1) / video.fps
            texts = [self._text_ids(f"<{each:.1f} seconds>") for each in at.tolist()]
            made = parts_with_texts(texts, self._around, self._token, (rows, columns), is_text_first=True)
            return VideoPlan(frames, size, *made, self._around)
        length = rows * columns
        sampled = len(chosen) / video.frames * video.fps
        later = [-1, *np.diff(self._times(parts, sampled)).tolist()]
        items = [ExtraKey(at * length, (at + 1) * length, "", columns, each) for at, each in enumerate(later)]
        return VideoPlan(frames, size, np.full(parts * length, self._token, np.int32), tuple(items))

    def _chosen(self, video: VideoForm, fps: float) -> list[int]:
        """Frames, spread evenly over the video."""
        sizes, whole = self._sizes, video.frames
        if self._seconds is Seconds.WRITTEN:
            count = min(max(int(whole / video.fps * fps), sizes.few), sizes.many, whole)
            return [round(each) for each in np.linspace(0, whole - 1, count).tolist()]
        most = math.floor(min(sizes.many, whole) / FRAMES) * FRAMES
        wanted = min(max(whole / video.fps * fps, sizes.few), most, whole)
        count = max(1, math.floor(wanted / FRAMES) * FRAMES)
        return [int(at * (whole / count)) for at in range(count)]

    def _size(self, video: VideoForm, frames: int, parts: int) -> tuple[int, int]:
        """Of the frames. Raises `InvalidRequestError` as `check_shape`."""
        width, height = video.width, video.height
        check_shape(width, height)
        step, least, most = self._config.step, self._sizes.least, self._most(frames)
        fitting = max(1, self._most_tokens // parts) * step**2  # pixels of a frame
        if self._seconds is not Seconds.WRITTEN:
            most = min(most, fitting)
            return whole_squares(width, height, step, min(least, most), most)
        return whole_squares_of_frames(width, height, step, least, min(most, fitting * counted(frames)), frames)

    def _most(self, frames: int) -> int:
        """Pixels: of a frame, or where seconds are written of all of them together."""
        sizes, square = self._sizes, self._config.step**2
        if not sizes.tokens:
            return sizes.most
        floor = int(sizes.least * _SLACK)
        if self._seconds is Seconds.WRITTEN:
            return max(min(sizes.tokens * square, sizes.most // frames), floor) * frames
        return max(min(sizes.most, int(sizes.tokens * square * _SHARE) * FRAMES // frames), floor)

    def _times(self, parts: int, fps: float) -> NDArray[np.int64]:
        """Positions in time of parts, from the first one on, where so many frames of a second are taken."""
        if self._seconds is Seconds.IGNORED:
            return np.arange(parts)
        interval = np.float32(self._positions_a_second) * np.float32(FRAMES / fps)  # in single precision, as trained
        return (np.arange(parts, dtype=np.float32) * interval).astype(np.int64)
