"""Images of a chat: what stands for one in the prompt, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.chat_images import ImageLimits
from headwise.runtime.protocol.prompt_items import PromptEmbeds, PromptItem, digest
from headwise.runtime.protocol.request import GenerateRequest

MAX_IMAGES = 64
"""Of a request."""
MAX_IMAGE_BYTES = 12 << 20
"""Of an image as a file: with its envelope it is one message, and in Base64 a body of HTTP's default size."""
MAX_IMAGE_EMBED_BYTES = 62 << 20
"""Of an image's embeddings, which come from an encoder as one message."""
IMAGE_LIMITS = ImageLimits(MAX_IMAGES, MAX_IMAGE_BYTES)


@dataclass(frozen=True, eq=False)
class PromptImage:
    """What stands for an image, as an encoder says it.

    hash:    of its embeddings: see `headwise.runtime.protocol.prompt_items.digest`
    tokens:  ``int32 [n]``, in place of the one that the chat template writes for it
    columns: see `PromptItem`
    frame:   where the first token and the last one stand around the image, and the chat template writes them, too: the
             hashes of their embeddings, as they are items of their own; empty: there are none
    """

    hash: str
    tokens: NDArray[np.int32]
    columns: int = 0
    frame: tuple[str, ...] = ()

    def items(self, offset: int) -> list[PromptItem]:
        """Those that its tokens are, from ``offset`` on."""
        if not self.frame:
            return [PromptItem(offset, len(self.tokens), self.hash, columns=self.columns)]
        (first, last), within = self.frame, len(self.tokens) - 2
        return [
            PromptItem(offset, 1, first),
            PromptItem(offset + 1, within, self.hash, columns=self.columns),
            PromptItem(offset + 1 + within, 1, last),
        ]


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """The same, with ``embeds``: ``[n, hidden]``, numbers as `PromptEmbeds` has them."""

    image: PromptImage
    embeds: NDArray[np.float32] | NDArray[np.uint16]

    @property
    def parts(self) -> list[NDArray[np.float32] | NDArray[np.uint16]]:
        """Embeddings of each of its items."""
        return _parts(self.embeds, bool(self.image.frame))


def named(
    embeds: NDArray[np.float32] | NDArray[np.uint16], tokens: NDArray[np.int32], columns: int, is_framed: bool
) -> EncodedImage:
    """An image whose items are named by the digests of their embeddings. is_framed: see `PromptImage.frame`"""
    hashes = [digest(part) for part in _parts(embeds, is_framed)]
    own = hashes.pop(1 if is_framed else 0)
    return EncodedImage(PromptImage(own, tokens, columns, tuple(hashes)), embeds)


def _parts(
    embeds: NDArray[np.float32] | NDArray[np.uint16], is_framed: bool
) -> list[NDArray[np.float32] | NDArray[np.uint16]]:
    return [embeds[:1], embeds[1:-1], embeds[-1:]] if is_framed else [embeds]


def with_images(
    tokens: NDArray[np.int32], images: Sequence[PromptImage], placeholder: int | None, vocab_size: int
) -> tuple[NDArray[np.int32], list[PromptItem]]:
    """A chat's tokens ``int32 [n]`` with each image's own in place of ``placeholder``, and the items that they are.

    placeholder: None: the model takes no images

    Raises `InvalidRequestError` if the template has not written one placeholder for each image, or tokens are none.
    """
    if placeholder is None:
        raise InvalidRequestError("this model takes no images: it has no vision tower that is served")
    if len(images) > MAX_IMAGES:
        raise InvalidRequestError(f"{len(images)} images were given; at most {MAX_IMAGES} are allowed")
    places = np.flatnonzero(tokens == placeholder)
    if len(places) != len(images):
        raise InvalidRequestError(
            f"the model's chat template has a place for {len(places)} of the chat's {len(images)} images: give images "
            "in messages of the user"
        )
    parts: list[NDArray[np.int32]] = []
    items: list[PromptItem] = []
    done = length = 0
    for place, image in zip(places.tolist(), images, strict=True):
        own = image.tokens
        if own.ndim != 1 or not len(own) or int(own.min()) < 0 or int(own.max()) >= vocab_size:
            raise InvalidRequestError(f"an image's tokens must be one row of ids below {vocab_size}")
        if len(image.frame) not in (0, 2):
            raise InvalidRequestError(f"an image's frame must be two hashes, or none, got {len(image.frame)}")
        reach = 1 if image.frame else 0
        start, end = place - reach, place + 1 + reach
        if reach and (start < done or len(own) < 3 or tokens[start:end:2].tolist() != [own[0], own[-1]]):
            raise InvalidRequestError(
                f"the model's chat template must write token {own[0]} before an image's place and {own[-1]} behind it"
            )
        parts += (tokens[done:start], own)
        length += start - done
        items += image.items(length)
        length += len(own)
        done = end
    return np.concatenate([*parts, tokens[done:]]), items


def embeds_of(request: GenerateRequest, images: Sequence[EncodedImage]) -> tuple[PromptEmbeds, ...]:
    """The embeddings of a request whose items are those of images, one after the other."""
    places = [each.start for each in request.extra_keys]
    return tuple(map(PromptEmbeds, places, [part for image in images for part in image.parts]))
