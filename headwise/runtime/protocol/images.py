"""Images and videos of a chat: what stands for one in the prompt, and where.

A video is an image that moves: what is said of images is said of videos, too, but where these are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.runtime.loader.chat_images import ImageLimits
from headwise.runtime.protocol.prompt_items import MAX_EMBED_BYTES, PromptEmbeds, PromptItem, digest
from headwise.runtime.protocol.request import GenerateRequest

MAX_IMAGES = 64
"""Of a request."""
MAX_IMAGE_BYTES = 12 << 20
"""Of an image as a file: in Base64 it is a body of HTTP's default size."""
MAX_VIDEO_BYTES = 128 << 20
MAX_IMAGE_EMBED_BYTES = MAX_EMBED_BYTES - (32 << 20)
"""Of an image's embeddings, or a video's: another image may stand beside it."""
IMAGE_LIMITS = ImageLimits(MAX_IMAGES, MAX_IMAGE_BYTES, MAX_VIDEO_BYTES)


@dataclass(frozen=True, eq=False)
class PromptImage:
    """What stands for an image, as an encoder says it.

    tokens:   ``int32 [n]``, in place of the one that the chat template writes for it
    items:    that some of its tokens are, one behind the other, counted from the first token; the others are text. They
              are named by the digests of their embeddings: see `headwise.runtime.protocol.prompt_items.digest`
    around:   the token that the template writes in front, and the one behind, in place of which ``tokens`` stand, too;
              empty: they are as the template has them
    is_video: whether it stands in the place of a video
    """

    tokens: NDArray[np.int32]
    items: tuple[ExtraKey, ...]
    around: tuple[int, ...] = ()
    is_video: bool = False

    def items_from(self, offset: int) -> list[PromptItem]:
        """Those that its tokens are, where the first one is at ``offset``."""
        return [
            PromptItem(offset + start, end - start, key, columns=columns, later=later)
            for start, end, key, columns, later in self.items
        ]


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """The same, with ``embeds``: ``[n, hidden]`` of the tokens of its items, numbers as `PromptEmbeds` has them."""

    image: PromptImage
    embeds: NDArray[np.float32] | NDArray[np.uint16]

    @property
    def parts(self) -> list[NDArray[np.float32] | NDArray[np.uint16]]:
        """Embeddings of each of its items."""
        ends = np.cumsum([0] + [each.end - each.start for each in self.image.items]).tolist()
        return [self.embeds[first:last] for first, last in pairwise(ends)]


def named(image: PromptImage, embeds: NDArray[np.float32] | NDArray[np.uint16]) -> EncodedImage:
    """An image whose items are named by the digests of their embeddings."""
    nameless = EncodedImage(image, embeds)
    items = [each._replace(content=digest(part)) for each, part in zip(image.items, nameless.parts, strict=True)]
    return EncodedImage(replace(image, items=tuple(items)), embeds)


@dataclass(frozen=True)
class ImagePlaces:
    """The control tokens that stand for an image, and for a video, in a chat's text; None: the model takes none."""

    image: int | None
    video: int | None = None

    def of(self, image: PromptImage) -> int:
        """Raises `InvalidRequestError` where the model takes no such images."""
        if self.image is None:
            raise InvalidRequestError("this model takes no images: it has no vision tower that is served")
        if not image.is_video:
            return self.image
        if self.video is None:
            raise InvalidRequestError("this model takes no videos, or they are not served: send frames, as images")
        return self.video


def with_images(
    tokens: NDArray[np.int32], images: Sequence[PromptImage], places: ImagePlaces, vocab_size: int
) -> tuple[NDArray[np.int32], list[PromptItem]]:
    """A chat's tokens ``int32 [n]`` with each image's own in its place, and the items that they are.

    Raises `InvalidRequestError` if the template has not written one place for each image, or tokens are none.
    """
    if len(images) > MAX_IMAGES:
        raise InvalidRequestError(f"{len(images)} images were given; at most {MAX_IMAGES} are allowed")
    wanted = [places.of(image) for image in images]
    found = np.flatnonzero(np.isin(tokens, [each for each in (places.image, places.video) if each is not None]))
    if len(found) != len(images):
        raise InvalidRequestError(
            f"the model's chat template has a place for {len(found)} of the chat's {len(images)} images: give images "
            "in messages of the user"
        )
    if tokens[found].tolist() != wanted:
        raise InvalidRequestError("the model's chat template has a place for an image where the chat has a video")
    parts: list[NDArray[np.int32]] = []
    items: list[PromptItem] = []
    done = length = 0
    for place, image in zip(found.tolist(), images, strict=True):
        _check_tokens(image, vocab_size)
        reach = 1 if image.around else 0
        start, end = place - reach, place + 1 + reach
        if reach and (start < done or tokens[start:end:2].tolist() != list(image.around)):
            raise InvalidRequestError(
                f"the model's chat template must write token {image.around[0]} before an image's place and "
                f"{image.around[1]} behind it"
            )
        parts += (tokens[done:start], image.tokens)
        length += start - done
        items += image.items_from(length)
        length += len(image.tokens)
        done = end
    return np.concatenate([*parts, tokens[done:]]), items


def _check_tokens(image: PromptImage, vocab_size: int) -> None:
    own = image.tokens
    if own.ndim != 1 or not len(own) or int(own.min()) < 0 or int(own.max()) >= vocab_size:
        raise InvalidRequestError(f"an image's tokens must be one row of ids below {vocab_size}")
    if any(not 0 <= each.start < each.end <= len(own) for each in image.items):
        raise InvalidRequestError(f"an image's items must lie in its {len(own)} tokens")
    if len(image.around) not in (0, 2):
        raise InvalidRequestError(f"an image stands between two tokens, or none, got {len(image.around)}")


def embeds_of(request: GenerateRequest, images: Sequence[EncodedImage]) -> tuple[PromptEmbeds, ...]:
    """The embeddings of a request whose items are those of images, one after the other."""
    places = [each.start for each in request.extra_keys]
    return tuple(map(PromptEmbeds, places, [part for image in images for part in image.parts]))
