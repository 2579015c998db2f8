"""Images and videos in a user's messages: taken out of them as files, before the messages are checked and sent.

OpenAI's parts have a data: URL; those of videos are like them. In Python a part may also have the file's bytes, a
`pathlib.Path`, or an image of Pillow's. A text is never taken for a path, and nothing is fetched: messages may come
from strangers.
"""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.chat import IMAGE_PART, VIDEO_PART
from headwise.runtime.loader.plain_data import shown

MIME_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
VIDEO_TYPES = ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska")
_KINDS = {"image_url": False, "image": False, "video_url": True, "video": True}
"""Types of parts with images, which are those of the field that has one, and whether it is a video."""
MAX_FPS = 100.0
"""Frames of a second of a video that may be asked for."""
_HEAD_CHARACTERS = 200
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Of Pillow's images, that a PNG keeps as they are."""


@dataclass(frozen=True)
class ImageLimits:
    """most: images of a chat, and videos; most_bytes, most_video_bytes: of each as a file"""

    most: int
    most_bytes: int
    most_video_bytes: int

    def bytes_of(self, is_video: bool) -> int:
        return self.most_video_bytes if is_video else self.most_bytes


@dataclass(frozen=True)
class ImageFile:
    """An image, or a video.

    fps: frames of a second that are to be taken of a video; 0: as many as the model's processor takes
    """

    data: bytes
    is_video: bool = False
    fps: float = 0.0

    @cached_property
    def digest(self) -> bytes:
        """Names it, and how it is to be taken."""
        form = f"video {self.fps!r} " if self.is_video else "image "
        return sha256(form.encode() + sha256(self.data).digest()).digest()


def has_files(chat: Any) -> bool:
    """Whether a chat, or its messages, has parts with images or videos."""
    messages = chat.get("messages") if isinstance(chat, Mapping) else chat
    contents = [each.get("content") for each in messages or () if isinstance(each, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and str(part.get("type")) in _KINDS for part in parts)


def take_images(chat: Any, limits: ImageLimits) -> tuple[Any, tuple[ImageFile, ...]]:
    """A chat, or its messages, with `IMAGE_PART` in place of each image, `VIDEO_PART` of each video, and their files in
    their order.

    Raises `InvalidRequestError` naming the part that has no such image. What else is wrong with messages is not told.
    """
    return _changed(chat, limits, keeps=False)


def with_files(chat: Any, limits: ImageLimits) -> Any:
    """A chat, or its messages, with each image as its file, so that it is decoded once however often it is sent. Raises
    as `take_images`.
    """
    return _changed(chat, limits, keeps=True)[0]


def _changed(chat: Any, limits: ImageLimits, keeps: bool) -> tuple[Any, tuple[ImageFile, ...]]:
    """keeps: whether images stay in the chat"""
    if isinstance(chat, Mapping) and "messages" in chat:
        messages, files = _changed(chat["messages"], limits, keeps)
        return ({**chat, "messages": messages} if files else chat), files
    if isinstance(chat, str | bytes | Mapping) or not isinstance(chat, Sequence):
        return chat, ()
    found: list[ImageFile] = []
    changed = [_of_message(f"messages[{at}]", message, found, limits, keeps) for at, message in enumerate(chat)]
    return (changed if found else chat), tuple(found)


def _of_message(name: str, message: Any, files: list[ImageFile], limits: ImageLimits, keeps: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_video = _KINDS.get(kind) if isinstance(kind, str) else None
        if is_video is None:
            parts.append(part)
            continue
        if len(files) == limits.most:
            raise InvalidRequestError(f"more than {limits.most} images were given; at most {limits.most} are allowed")
        files.append(_file(f"{name}['content'][{at}]", part, is_video, limits.bytes_of(is_video)))
        place = VIDEO_PART if is_video else IMAGE_PART
        parts.append({**place, place["type"]: files[-1]} if keeps else dict(place))
    return {**message, "content": parts}


def _file(name: str, part: Mapping[str, Any], is_video: bool, most_bytes: int) -> ImageFile:
    """Of a user's part, or as `with_files` has put it there."""
    given = part.get(part["type"])
    if isinstance(given, ImageFile) and given.is_video == is_video:
        return given
    data = _checked(name, _file_of(name, given, most_bytes, is_video), most_bytes, _noun(is_video))
    file = ImageFile(data, is_video, _fps(name, part.get("fps")) if is_video else 0.0)
    _ = file.digest  # by this thread, not by one that all calls share
    return file


def _noun(is_video: bool) -> str:
    return "a video" if is_video else "an image"


def _fps(name: str, given: Any) -> float:
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= MAX_FPS:
        raise InvalidRequestError(
            f"{name} has fps {shown(given)}: it must be frames of a second, above 0 and up to {MAX_FPS:g}"
        )
    return float(given)


def _file_of(name: str, given: Any, most_bytes: int, is_video: bool) -> bytes:
    given = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str):
        return _of_url(name, given, most_bytes, is_video)
    if isinstance(given, Path):
        return _of_path(name, given, most_bytes, _noun(is_video))
    if not is_video and hasattr(given, "save") and hasattr(given, "mode"):
        return _of_pillow(given)
    python = "bytes or a pathlib.Path" if is_video else "bytes, a pathlib.Path or an image of Pillow's"
    raise InvalidRequestError(
        f"{name} must have {_noun(is_video)}: a data: URL, and in Python {python}; got {shown(given)}"
    )


def _of_url(name: str, url: str, most_bytes: int, is_video: bool) -> bytes:
    types, noun = VIDEO_TYPES if is_video else MIME_TYPES, _noun(is_video)
    head = re.match(r"data:([^;,]*)((?:;[^;,]*)*),", url[:_HEAD_CHARACTERS], re.IGNORECASE)
    if head is None:
        raise InvalidRequestError(
            f"{name} must have a data: URL such as data:{types[0]};base64,...: other URLs are not fetched; got "
            f"{shown(url)}"
        )
    mime = head[1].strip().lower().replace("image/jpg", "image/jpeg")
    if mime not in types:
        raise InvalidRequestError(f"{name} has {noun} of type {shown(mime)}; {', '.join(types)} are served")
    if "base64" not in head[2].lower().split(";"):
        raise InvalidRequestError(f"{name} has a data: URL that is not in Base64: write data:{mime};base64,...")
    return of_base64(name, url[head.end() :], most_bytes, noun)


def of_base64(name: str, text: str, most_bytes: int, noun: str = "an image") -> bytes:
    """Raises `InvalidRequestError` for what is no Base64, and before it is decoded for what is too long."""
    if len(text) // 4 * 3 > most_bytes + 3:
        raise InvalidRequestError(f"{name} has {noun} of {len(text) // 4 * 3} bytes; at most {most_bytes} are allowed")
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"{name} has {noun} whose Base64 is broken: {error}") from None


def _of_path(name: str, path: Path, most_bytes: int, noun: str) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        raise InvalidRequestError(f"{name} has {noun} that cannot be read: {path}: {error.strerror}") from None


def _of_pillow(image: Any) -> bytes:
    """As a PNG, which loses nothing that a tower sees."""
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    file = io.BytesIO()
    (turned if turned.mode in _MODES else turned.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _checked(name: str, data: bytes, most_bytes: int, noun: str) -> bytes:
    if not data:
        raise InvalidRequestError(f"{name} has {noun} that is empty: it has no bytes")
    if len(data) > most_bytes:
        raise InvalidRequestError(f"{name} has {noun} of more than {most_bytes} bytes, which are allowed at most")
    return data
