"""The images of a client's calls: asks encoders what stands for them, before a call is routed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwise.errors import EngineDiedError, HeadwiseError, NotReadyError, OverloadedError
from headwise.runtime.protocol.encoder_messages import Encoded
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.prompt_items import check_bytes

MOST_ASKED = 2
"""Images that an encoder is asked for at a time: what comes back of each may be as large as a message may be."""
MOST_HELD_BYTES = 1 << 30
"""Of the files of all calls that wait for encoders: strangers send them to an HTTP server, which is a client."""
MOST_KEPT_BYTES = 4 << 30
"""Of what stands for the images of all calls, until these are over: another engine may have to get it."""

Answer = Callable[[list[EncodedImage] | HeadwiseError], None]


@dataclass
class _Image:
    """One that is wanted.

    waiting:   who is told
    endpoints: of encoders to try yet, the first one next
    """

    digest: bytes
    data: bytes
    waiting: list[Callable[[EncodedImage | HeadwiseError], None]] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)


class ImageCalls:
    """Used on the client's I/O thread. An image that several calls want at a time is asked for once.

    find: asks the scheduler for the endpoints of encoders
    ask:  asks the encoder at an endpoint for what stands for an image
    kept: bytes of what stands for the images of calls that do not wait for encoders any more
    """

    def __init__(
        self,
        find: Callable[[Callable[[tuple[str, ...] | HeadwiseError], None]], None],
        ask: Callable[[str, bytes, Callable[[Encoded | HeadwiseError], None]], None],
        kept: Callable[[], int],
    ) -> None:
        self._find, self._ask, self._kept = find, ask, kept
        self._images: dict[bytes, _Image] = {}
        self._held = 0  # bytes of the files of calls that wait
        self._gathered = 0  # bytes of what stands for images of calls that wait for others
        self._asked: Counter[str] = Counter()  # images, by endpoint
        self._queues: defaultdict[str, deque[_Image]] = defaultdict(deque)  # what is to be asked there next

    def encode(self, files: Sequence[bytes], deliver: Answer) -> None:
        """Deliver what stands for each of these, or the first error."""
        size = sum(map(len, files))
        if self._held and self._held + size > MOST_HELD_BYTES:
            deliver(OverloadedError(f"images of {self._held} bytes wait to be encoded already; try again later"))
            return
        self._held += size
        found: dict[int, EncodedImage] = {}
        is_over = False

        def take(place: int, answer: EncodedImage | HeadwiseError) -> None:
            nonlocal is_over
            if is_over:
                return
            before = _num_bytes(found.values())
            if not isinstance(answer, HeadwiseError):
                answer = self._fitting(answer, before)
            if not isinstance(answer, HeadwiseError):
                found[place] = answer
                if len(found) < len(files):
                    self._gathered += answer.embeds.nbytes
                    return
            is_over = True
            self._held, self._gathered = self._held - size, self._gathered - before
            deliver(answer if isinstance(answer, HeadwiseError) else [found[at] for at in range(len(files))])

        for place, data in enumerate(files):
            digest = hashlib.sha256(data).digest()
            image = self._images.get(digest)
            if image is not None:
                image.waiting.append(partial(take, place))
                continue
            image = self._images[digest] = _Image(digest, data, [partial(take, place)])
            self._find(partial(self._found, image))

    def _fitting(self, image: EncodedImage, before: int) -> EncodedImage | HeadwiseError:
        """An image, or why there is no room for what stands for it. before: bytes of those of the same call"""
        size = image.embeds.nbytes
        try:
            check_bytes(before + size)
        except HeadwiseError as error:
            return error
        kept = self._gathered + self._kept()
        if kept + size > MOST_KEPT_BYTES:
            return OverloadedError(f"{kept} bytes of what stands for images are kept already; try again later")
        return image

    def _found(self, image: _Image, endpoints: tuple[str, ...] | HeadwiseError) -> None:
        if isinstance(endpoints, HeadwiseError):
            self._end(image, endpoints)
        else:
            image.endpoints = in_order(image.digest, endpoints)
            self._try(image, NotReadyError("no encoder of images serves; try again later"))

    def _try(self, image: _Image, error: HeadwiseError) -> None:
        """Ask the next encoder, when it is free. Where there is none, the image ends with ``error``."""
        if not image.endpoints:
            self._end(image, error)
            return
        endpoint = image.endpoints.pop(0)
        self._queues[endpoint].append(image)
        self._go_on(endpoint)

    def _go_on(self, endpoint: str) -> None:
        while self._queues[endpoint] and self._asked[endpoint] < MOST_ASKED:
            image = self._queues[endpoint].popleft()
            self._asked[endpoint] += 1
            self._ask(endpoint, image.data, partial(self._answered, image, endpoint))
        if not self._queues[endpoint] and not self._asked[endpoint]:  # endpoints come and go
            del self._queues[endpoint], self._asked[endpoint]

    def _answered(self, image: _Image, endpoint: str, answer: Encoded | HeadwiseError) -> None:
        self._asked[endpoint] -= 1
        if isinstance(answer, EngineDiedError):
            told = NotReadyError(
                f"the encoder of images at {endpoint} is gone, or cannot be reached from here; it is started again: "
                "try again later"
            )
            self._try(image, told)
        elif isinstance(answer, HeadwiseError):
            self._end(image, answer)
        else:
            self._end(image, EncodedImage(answer.image, answer.embeds))
        self._go_on(endpoint)

    def _end(self, image: _Image, answer: EncodedImage | HeadwiseError) -> None:
        del self._images[image.digest]
        for tell in image.waiting:
            tell(answer)


def _num_bytes(images: Iterable[EncodedImage]) -> int:
    return sum(each.embeds.nbytes for each in images)


def in_order(digest: bytes, endpoints: Sequence[str]) -> list[str]:
    """The order in which encoders are asked for an image: the same one first each time, as it may have it still."""
    return sorted(endpoints, key=lambda endpoint: hashlib.sha256(digest + endpoint.encode()).digest())
