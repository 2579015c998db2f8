"""The contract of a vision tower: an image in, tokens and their embeddings out; of some towers a video, too.

A tower serves one model. It is computed beside the engines (`headwise.runtime.encoder`), which see embeddings only. A
family of towers is a file of this package with a function that is a `BuildTower`, and a line in `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import TensorOps

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES = 2
"""That a patch is of, in towers that take videos: an image is two equal ones."""

TokenId = Callable[[str], int | None]
"""The id of a control token, by what it is written as; None: the tokenizer has no such control token."""


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """What stands for an image in a prompt.

    tokens: ``int32 [n]``, in place of the one that the chat template writes; those of the image itself and, where the
            model has some, those between its rows and around it
    embeds: ``float32 [n, hidden * (1 + levels)]``, of all of these tokens: as the model's first layer takes them, and
            behind these ``hidden`` columns those that layers 0 to ``levels - 1`` add to the residual stream. ``levels``
            is 0 but of Qwen3-VL (deepstack)
    columns: of an image whose tokens all lie on a grid, row by row, ``n / columns`` rows: how wide that is; 0: its
            tokens follow each other as text does
    is_framed: the first token and the last one stand around those on the grid: the chat template writes them beside the
            one for the image. They are here since the model computes with them as with the image's own
    """

    tokens: NDArray[np.int32]
    embeds: NDArray[np.float32]
    columns: int = 0
    is_framed: bool = False


@dataclass(frozen=True)
class VideoForm:
    """What a video's file says of it: frames, frames per second, and the size of a frame in pixels."""

    frames: int
    fps: float
    width: int
    height: int


@dataclass(frozen=True, eq=False)
class VideoPlan:
    """How a video is taken, and what stands for it in a prompt.

    frames: which of its frames, by their numbers, in their order: `FRAMES` for each part. One may be taken again
    size:   width and height to which they are scaled
    tokens: ``int32 [n]``, in place of the one that the chat template writes
    items:  which of them are each part's, without a name
    around: see `headwise.runtime.protocol.images.PromptImage`
    """

    frames: Sequence[int]
    size: tuple[int, int]
    tokens: NDArray[np.int32]
    items: tuple[ExtraKey, ...]
    around: tuple[int, ...] = ()


class Tower(Protocol):
    """Encodes one image at a time. Called by one thread."""

    def encode(self, image: Image) -> EncodedImage:
        """An image of Pillow's, of mode RGB and of any size: how it is scaled is the tower's. Raises
        `InvalidRequestError` for a shape that the model takes none of."""


@runtime_checkable
class VideoTower(Tower, Protocol):
    """A `Tower` that takes videos, too."""

    def plan(self, video: VideoForm, fps: float) -> VideoPlan:
        """How to take a video of so many frames a second. fps: 0: as many as the model's processor takes. Raises
        `InvalidRequestError` for a shape that the model takes none of."""

    def encode_part(self, frames: Sequence[Image], plan: VideoPlan) -> NDArray[np.float32]:
        """Of a part's frames, of mode RGB, ``[n, hidden * (1 + levels)]``, as `EncodedImage.embeds`."""


@dataclass(frozen=True)
class TowerParts:
    """What a tower is built of.

    config:    ``config.json``
    processor: what the checkpoint says of how images are prepared: ``preprocessor_config.json``, or the
               ``image_processor`` of ``processor_config.json``; empty: nothing
    most:      numbers of an image's embeddings, or of a video's: a tower that can, scales these down to as few. What is
               larger is refused by who asks
    videos:    what the checkpoint says of how videos are prepared: ``video_preprocessor_config.json``, or the
               ``video_processor`` of ``processor_config.json``; empty: nothing
    text_ids:  the tokens of a text without control tokens
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    weights: Weights
    ops: TensorOps
    token_id: TokenId
    most: int
    videos: Mapping[str, Any]
    text_ids: Callable[[str], Sequence[int]]


BuildTower = Callable[[TowerParts], Tower]
"""Raises `ModelError` naming what of the checkpoint cannot be served."""
