"""The images and videos of a client's calls: asks encoders what stands for them, before a call is routed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headwise.errors import EngineDiedError, HeadwiseError, NotReadyError, OverloadedError
from headwise.runtime.client.encoder_call import EncoderCall
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.images import EncodedImage
from headwise.runtime.protocol.prompt_items import check_bytes

MOST_ASKED = 2
"""Images that an encoder is asked for at a time, and as many videos: no image waits for these."""
MOST_HELD_BYTES = 1 << 30
"""Of the files of all calls that wait for encoders: strangers send them to an HTTP server, which is a client."""
MOST_KEPT_BYTES = 4 << 30
"""Of what stands for the images of all calls, until these are over: another engine may have to get it."""

Answer = Callable[[list[EncodedImage] | HeadwiseError], None]
End = Callable[[], None]
"""Ends a question to an encoder: nothing more is heard of it."""


@dataclass(eq=False)
class _Call:
    """files: that are wanted; found: what stands for them, as far as it is known, by their places"""

    files: Sequence[ImageFile]
    deliver: Answer
    found: dict[int, EncodedImage] = field(default_factory=dict)
    is_over: bool = False

    @property
    def file_bytes(self) -> int:
        return sum(len(each.data) for each in self.files)


@dataclass(eq=False)
class _Image:
    """One that is wanted.

    waiting:   whose it is, and which of theirs
    endpoints: of encoders to try yet, the first one next
    asked:     the one that is asked now; empty: none
    end:       ends that
    arriving:  bytes of what stands for it, while that comes
    """

    digest: bytes
    file: ImageFile
    waiting: list[tuple[_Call, int]] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    asked: str = ""
    end: End | None = None
    arriving: int = 0


class ImageCalls:
    """Used on the client's I/O thread. An image that several calls want at a time is asked for once.

    find: asks the scheduler for the endpoints of encoders
    ask:  asks the encoder at an endpoint
    kept: bytes of what stands for the images of calls that do not wait for encoders any more
    """

    def __init__(
        self,
        find: Callable[[Callable[[tuple[str, ...] | HeadwiseError], None]], None],
        ask: Callable[[str, EncoderCall], End],
        kept: Callable[[], int],
    ) -> None:
        self._find, self._ask, self._kept = find, ask, kept
        self._images: dict[bytes, _Image] = {}
        self._held = 0  # bytes of the files of calls that wait
        self._gathered = 0  # bytes of what stands for images of calls that wait for others
        self._asked: Counter[tuple[str, bool]] = Counter()  # by endpoint, and whether they are videos
        self._queues: defaultdict[str, deque[_Image]] = defaultdict(deque)  # what is to be asked there next

    def encode(self, files: Sequence[ImageFile], deliver: Answer) -> End:
        """Deliver what stands for each of these, or the first error. What is returned ends that: nothing is delivered
        any more, and what nobody else wants is not encoded."""
        call = _Call(files, deliver)
        if self._held and self._held + call.file_bytes > MOST_HELD_BYTES:
            call.is_over = True
            deliver(OverloadedError(f"images of {self._held} bytes wait to be encoded already; try again later"))
            return lambda: None
        self._held += call.file_bytes
        for place, file in enumerate(files):
            if call.is_over:  # one of them cannot be had
                break
            digest = file.digest
            image = self._images.get(digest)
            if image is not None:
                image.waiting.append((call, place))
                continue
            image = self._images[digest] = _Image(digest, file, [(call, place)])
            self._find(partial(self._found, image))
        return partial(self._cancel, call)

    def _cancel(self, call: _Call) -> None:
        if not call.is_over:
            self._end_call(call)
            self._leave(call)

    def _take(self, call: _Call, place: int, answer: EncodedImage | HeadwiseError) -> None:
        """One of a call's images is there, or cannot be had."""
        if call.is_over:
            return
        if not isinstance(answer, HeadwiseError):
            answer = self._fitting(answer, _num_bytes(call.found.values()))
        if not isinstance(answer, HeadwiseError):
            call.found[place] = answer
            self._gathered += answer.embeds.nbytes
            if len(call.found) < len(call.files):
                return
        self._end_call(call)
        if isinstance(answer, HeadwiseError):
            self._leave(call)
            call.deliver(answer)
        else:
            call.deliver([call.found[at] for at in range(len(call.files))])

    def _end_call(self, call: _Call) -> None:
        call.is_over = True
        self._held -= call.file_bytes
        self._gathered -= _num_bytes(call.found.values())

    def _leave(self, call: _Call) -> None:
        """A call that is over wants no images any more: those that nobody else wants are not encoded."""
        for digest in {file.digest for file in call.files}:
            image = self._images.get(digest)
            if image is None:
                continue
            image.waiting = [each for each in image.waiting if each[0] is not call]
            if not image.waiting:
                self._drop(image)

    def _drop(self, image: _Image) -> None:
        del self._images[image.digest]
        image.endpoints, image.arriving = [], 0
        for queue in self._queues.values():
            if image in queue:
                queue.remove(image)
        if image.end is not None:
            image.end()
            self._free(image)

    def _fitting(self, image: EncodedImage, before: int) -> EncodedImage | HeadwiseError:
        """An image, or why there is no room for what stands for it. before: bytes of those of the same call"""
        size = image.embeds.nbytes
        try:
            check_bytes(before + size)
            self._check_room(size)
        except HeadwiseError as error:
            return error
        return image

    def _check_room(self, size: int) -> None:
        """Raises `OverloadedError` where there is none for so many bytes of what stands for an image."""
        kept = self._gathered + self._kept() + sum(each.arriving for each in self._images.values())
        if kept + size > MOST_KEPT_BYTES:
            raise OverloadedError(f"{kept} bytes of what stands for images are kept already; try again later")

    def _admit(self, image: _Image, size: int) -> None:
        """So many bytes of what stands for it are to come. Raises why they may not."""
        check_bytes(size)
        image.arriving = 0
        self._check_room(size)
        image.arriving = size

    def _found(self, image: _Image, endpoints: tuple[str, ...] | HeadwiseError) -> None:
        if self._images.get(image.digest) is not image:
            return  # nobody wants it any more
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
        while (image := self._next(endpoint)) is not None:
            self._queues[endpoint].remove(image)
            self._asked[endpoint, image.file.is_video] += 1
            image.asked = endpoint
            call = EncoderCall(image.file, partial(self._admit, image), partial(self._answered, image))
            image.end = self._ask(endpoint, call)
        if not self._queues[endpoint]:  # endpoints come and go
            del self._queues[endpoint]

    def _next(self, endpoint: str) -> _Image | None:
        """The first one in its queue that it may be asked for now."""
        queue = self._queues[endpoint]
        return next((each for each in queue if self._asked[endpoint, each.file.is_video] < MOST_ASKED), None)

    def _free(self, image: _Image) -> None:
        """The encoder that was asked has room for another one."""
        endpoint, image.asked, image.end, image.arriving = image.asked, "", None, 0
        which = endpoint, image.file.is_video
        self._asked[which] -= 1
        if not self._asked[which]:
            del self._asked[which]
        self._go_on(endpoint)

    def _answered(self, image: _Image, answer: EncodedImage | HeadwiseError) -> None:
        endpoint = image.asked
        if isinstance(answer, EngineDiedError):
            told = NotReadyError(
                f"the encoder of images at {endpoint} is gone, or cannot be reached from here; it is started again: "
                "try again later"
            )
            self._free(image)
            self._try(image, told)
        else:
            image.arriving = 0
            self._end(image, answer)
            self._free(image)

    def _end(self, image: _Image, answer: EncodedImage | HeadwiseError) -> None:
        del self._images[image.digest]
        for call, place in image.waiting:
            self._take(call, place, answer)


def _num_bytes(images: Iterable[EncodedImage]) -> int:
    return sum(each.embeds.nbytes for each in images)


def in_order(digest: bytes, endpoints: Sequence[str]) -> list[str]:
    """The order in which encoders are asked for an image: the same one first each time, as it may have it still."""
    return sorted(endpoints, key=lambda endpoint: hashlib.sha256(digest + endpoint.encode()).digest())
