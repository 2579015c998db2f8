"""A file on its way to an encoder, and what is made of it on its way back: in parts, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import DeploymentError, HeadwiseError
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.encoder_messages import (
    PART_BYTES,
    Encode,
    Encoded,
    EncodedRows,
    FilePart,
    WantsFile,
    WantsRows,
)
from headwise.runtime.protocol.images import EncodedImage, PromptImage


@dataclass(eq=False)
class EncoderCall:
    """One question to one encoder. Called with the answer, or with the error with which it ended.

    admit:   may so many bytes of embeddings come? Raises what its callers are told, if not
    deliver: takes the answer
    """

    file: ImageFile
    admit: Callable[[int], None]
    deliver: Callable[[EncodedImage | HeadwiseError], None]
    _image: PromptImage | None = None
    _embeds: NDArray[Any] | None = None
    _rows: int = 0

    def __call__(self, answer: EncodedImage | HeadwiseError) -> None:
        self.deliver(answer)

    def question(self, key: int) -> Encode:
        data = self.file.data
        return Encode(key, data[:PART_BYTES], len(data), self.file.is_video, self.file.fps)

    def take(self, message: WantsFile | Encoded | EncodedRows) -> FilePart | WantsRows | EncodedImage:
        """What the encoder is told next, or the answer. Raises `HeadwiseError`: that is the end of it."""
        if isinstance(message, WantsFile):
            return FilePart(message.key, message.first, self.file.data[message.first : message.first + PART_BYTES])
        if isinstance(message, Encoded):
            self._begin(message)
            rows, first = message.embeds, 0
        else:
            rows, first = message.values, message.first
        if self._embeds is None or self._image is None or not self._is_next(first, rows):
            raise DeploymentError("an encoder said what was not asked for: it is of another version")
        self._embeds[self._rows : self._rows + len(rows)] = rows
        self._rows += len(rows)
        if self._rows < len(self._embeds):
            return WantsRows(message.key, self._rows)
        self._embeds.flags.writeable = False
        return EncodedImage(self._image, self._embeds)

    def _begin(self, encoded: Encoded) -> None:
        total, shape = sum(each.end - each.start for each in encoded.image.items), encoded.embeds.shape
        if len(shape) != 2 or not 0 < shape[0] <= total:
            raise DeploymentError("an encoder made embeddings of another shape than its tokens")
        self.admit(total * shape[1] * encoded.embeds.itemsize)
        self._image, self._rows = encoded.image, 0
        self._embeds = np.empty((total, shape[1]), encoded.embeds.dtype)

    def _is_next(self, first: int, rows: NDArray[Any]) -> bool:
        whole = self._embeds
        return (
            whole is not None
            and first == self._rows
            and rows.dtype == whole.dtype
            and rows.shape[1:] == whole.shape[1:]
            and 0 < len(rows) <= len(whole) - first
        )
