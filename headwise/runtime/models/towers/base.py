"""The contract of a vision tower: an image in, tokens and their embeddings out.

A tower serves one model. It is computed beside the engines (`headwise.runtime.encoder`), which see embeddings only. A
family of towers is a file of this package with a function that is a `BuildTower`, and a line in `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import TensorOps

if TYPE_CHECKING:
    from PIL.Image import Image

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


class Tower(Protocol):
    """Encodes one image at a time. Called by one thread."""

    def encode(self, image: Image) -> EncodedImage:
        """An image of Pillow's, of mode RGB and of any size: how it is scaled is the tower's. Raises
        `InvalidRequestError` for a shape that the model takes none of."""


@dataclass(frozen=True)
class TowerParts:
    """What a tower is built of.

    config:    ``config.json``
    processor: what the checkpoint says of how images are prepared: ``preprocessor_config.json``, or the
               ``image_processor`` of ``processor_config.json``; empty: nothing
    most:      numbers of an image's embeddings: a tower that can, scales an image down to as few. What is larger than
               a prompt may be is refused by who asks
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    weights: Weights
    ops: TensorOps
    token_id: TokenId
    most: int


BuildTower = Callable[[TowerParts], Tower]
"""Raises `ModelError` naming what of the checkpoint cannot be served."""
