"""What towers have in common whose patches are of two frames: an image is two equal ones, a part of a video is two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError
from headwise.runtime.models.towers.base import FRAMES, EncodedImage, VideoForm, VideoPlan
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.models.towers.pixels import PixelForm, normalised
from headwise.runtime.models.towers.tower_layers import Linear
from headwise.runtime.models.towers.tower_weights import TowerWeights
from headwise.runtime.ops.base import Tensor, TensorOps

if TYPE_CHECKING:
    from PIL.Image import Image


class Videos(Protocol):
    """How a model takes videos. pixels: how their frames become numbers"""

    pixels: PixelForm

    def plan(self, video: VideoForm, fps: float) -> VideoPlan: ...


class ImageForm(Protocol):
    """A tower's config. step: pixels of the edge of a square, which becomes one token"""

    @property
    def pixels(self) -> PixelForm: ...

    @property
    def step(self) -> int: ...

    def fitted(self, width: int, height: int) -> tuple[int, int]: ...


class FramePatches:
    """Weights of patches, of edges of ``patch`` pixels.

    An image needs those for both frames added up, and half of the work.
    """

    def __init__(self, source: TowerWeights, name: str, hidden: int, patch: int, *, has_bias: bool = True) -> None:
        self._patch = patch
        self._alike = Linear.of_frames(source, name, hidden, FRAMES, patch**2, has_bias=has_bias)
        self._each = Linear.of_each_frame(source, name, hidden, FRAMES, patch**2, has_bias=has_bias)

    def of(self, ops: TensorOps, frames: Sequence[NDArray[np.float32]], order: PatchOrder) -> Tensor:
        """Of frames ``[3, height, width]``, one for both or one each, their patches in this order: ``[T, hidden]``."""
        linears = [self._alike] if len(frames) == 1 else self._each
        first, *others = (
            linear.of(ops, ops.tensor(order.cut(pixels, self._patch)))
            for linear, pixels in zip(linears, frames, strict=True)
        )
        return sum(others, first)


class PairedFrames(ABC):
    """A `VideoTower`, but for what it computes.

    token:  of which an image's and a part's are
    videos: None: its tokenizer lacks what stands for one, ``place``
    """

    def __init__(self, form: ImageForm, token: int, videos: Videos | None, place: str) -> None:
        self._form, self._token, self._videos, self._place = form, token, videos, place

    def encode(self, image: Image) -> EncodedImage:
        form = self._form
        size = form.fitted(*image.size)
        embeds = self._features([normalised(image, size, form.pixels)])
        return EncodedImage(np.full(len(embeds), self._token, np.int32), embeds, size[0] // form.step)

    def plan(self, video: VideoForm, fps: float) -> VideoPlan:
        if self._videos is None:
            raise InvalidRequestError(f"this model takes no videos: its tokenizer has no {self._place}")
        return self._videos.plan(video, fps)

    def encode_part(self, frames: Sequence[Image], plan: VideoPlan) -> NDArray[np.float32]:
        assert self._videos is not None
        pixels = self._videos.pixels
        return self._features([normalised(each, plan.size, pixels) for each in frames])

    @abstractmethod
    def _features(self, frames: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Of frames as `FramePatches.of` takes them: each square's numbers, row by row."""
