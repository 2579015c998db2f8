"""The images of a client's calls: asks encoders what stands for them, before a call is routed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwise.errors import EngineDiedError, HeadwiseError, NotReadyError
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.messages import Encoded

MOST_ASKED = 2
"""Images that are asked for at a time: what comes back of each may be as large as a message may be."""

Answer = Callable[[list[EncodedImage] | HeadwiseError], None]


@dataclass
class _Image:
    """One that is wanted. waiting: who is told"""

    digest: bytes
    data: bytes
    waiting: list[Callable[[EncodedImage | HeadwiseError], None]] = field(default_factory=list)


class ImageCalls:
    """Used on the client's I/O thread. An image that several calls want at a time is asked for once.

    find: asks the scheduler for the endpoints of encoders
    ask:  asks the encoder at an endpoint for what stands for an image
    """

    def __init__(
        self,
        find: Callable[[Callable[[tuple[str, ...] | HeadwiseError], None]], None],
        ask: Callable[[str, bytes, Callable[[Encoded | HeadwiseError], None]], None],
    ) -> None:
        self._find, self._ask = find, ask
        self._images: dict[bytes, _Image] = {}
        self._queue: deque[_Image] = deque()
        self._asked = 0

    def encode(self, files: Sequence[bytes], deliver: Answer) -> None:
        """Deliver what stands for each of these, or the first error."""
        found: dict[int, EncodedImage] = {}
        is_over = False

        def take(place: int, answer: EncodedImage | HeadwiseError) -> None:
            nonlocal is_over
            if is_over:
                return
            if isinstance(answer, HeadwiseError):
                is_over = True
                deliver(answer)
                return
            found[place] = answer
            if len(found) == len(files):
                is_over = True
                deliver([found[at] for at in range(len(files))])

        for place, data in enumerate(files):
            digest = hashlib.sha256(data).digest()
            image = self._images.get(digest)
            if image is None:
                image = self._images[digest] = _Image(digest, data)
                self._queue.append(image)
            image.waiting.append(partial(take, place))
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._asked < MOST_ASKED:
            self._asked += 1
            self._find(partial(self._found, self._queue.popleft()))

    def _found(self, image: _Image, endpoints: tuple[str, ...] | HeadwiseError) -> None:
        if isinstance(endpoints, HeadwiseError):
            self._end(image, endpoints)
        else:  # the same image goes to the same encoder, which may have it still
            order = sorted(endpoints, key=lambda endpoint: hashlib.sha256(image.digest + endpoint.encode()).digest())
            self._try(image, order, 0, NotReadyError("no encoder of images serves; try again later"))

    def _try(self, image: _Image, endpoints: list[str], index: int, error: HeadwiseError) -> None:
        if index == len(endpoints):
            self._end(image, error)
        else:
            self._ask(endpoints[index], image.data, partial(self._answered, image, endpoints, index))

    def _answered(self, image: _Image, endpoints: list[str], index: int, answer: Encoded | HeadwiseError) -> None:
        if isinstance(answer, EngineDiedError):
            told = NotReadyError(
                f"the encoder of images at {endpoints[index]} is gone, or cannot be reached from here; it is started "
                "again: try again later"
            )
            self._try(image, endpoints, index + 1, told)
        elif isinstance(answer, HeadwiseError):
            self._end(image, answer)
        else:
            self._end(image, EncodedImage(answer.image, answer.embeds))

    def _end(self, image: _Image, answer: EncodedImage | HeadwiseError) -> None:
        self._asked -= 1
        del self._images[image.digest]
        for tell in image.waiting:
            tell(answer)
        self._go_on()
