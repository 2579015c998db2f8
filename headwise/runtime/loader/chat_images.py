"""Images in a user's messages: taken out of them as files, before the messages are checked and sent.

OpenAI's parts have a data: URL. In Python a part may also have the file's bytes, a `pathlib.Path`, or an image of
Pillow's. A text is never taken for a path, and nothing is fetched: messages may come from strangers.
"""

from __future__ import annotations

import io
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.chat import IMAGE_PART
from headwise.runtime.loader.plain_data import shown

MIME_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_KINDS = {"image_url": "image_url", "image": "image"}
"""Types of parts with images, and their field that has one."""
_HEAD_CHARACTERS = 200
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Of Pillow's images, that a PNG keeps as they are."""


@dataclass(frozen=True)
class ImageLimits:
    """most: images of a chat; most_bytes: of each as a file"""

    most: int
    most_bytes: int


def take_images(chat: Any, limits: ImageLimits) -> tuple[Any, tuple[bytes, ...]]:
    """A chat, or its messages, with `IMAGE_PART` in place of each image, and the images' files in their order.

    Raises `InvalidRequestError` naming the part that has no such image. What else is wrong with messages is not told.
    """
    return _changed(chat, limits, keeps=False)


def with_files(chat: Any, limits: ImageLimits) -> Any:
    """A chat, or its messages, with each image as a file's bytes, so that it is decoded once however often it is sent.
    Raises as `take_images`.
    """
    return _changed(chat, limits, keeps=True)[0]


def _changed(chat: Any, limits: ImageLimits, keeps: bool) -> tuple[Any, tuple[bytes, ...]]:
    """keeps: whether images stay in the chat"""
    if isinstance(chat, Mapping) and "messages" in chat:
        messages, files = _changed(chat["messages"], limits, keeps)
        return ({**chat, "messages": messages} if files else chat), files
    if isinstance(chat, str | bytes | Mapping) or not isinstance(chat, Sequence):
        return chat, ()
    found: list[bytes] = []
    changed = [_of_message(f"messages[{at}]", message, found, limits, keeps) for at, message in enumerate(chat)]
    return (changed if found else chat), tuple(found)


def _of_message(name: str, message: Any, files: list[bytes], limits: ImageLimits, keeps: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _KINDS.get(kind) if isinstance(kind, str) else None
        if field is None:
            parts.append(part)
            continue
        if len(files) == limits.most:
            raise InvalidRequestError(f"more than {limits.most} images were given; at most {limits.most} are allowed")
        where = f"{name}['content'][{at}]"
        files.append(_checked(where, _file_of(where, part.get(field), limits.most_bytes), limits.most_bytes))
        parts.append({**IMAGE_PART, "image": files[-1]} if keeps else dict(IMAGE_PART))
    return {**message, "content": parts}


def _file_of(name: str, given: Any, most_bytes: int) -> bytes:
    given = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str):
        return _of_url(name, given, most_bytes)
    if isinstance(given, Path):
        return _of_path(name, given, most_bytes)
    if hasattr(given, "save") and hasattr(given, "mode"):
        return _of_pillow(given)
    raise InvalidRequestError(
        f"{name} must have an image: a data: URL, and in Python bytes, a pathlib.Path or an image of Pillow's; got "
        f"{shown(given)}"
    )


def _of_url(name: str, url: str, most_bytes: int) -> bytes:
    head = re.match(r"data:([^;,]*)((?:;[^;,]*)*),", url[:_HEAD_CHARACTERS], re.IGNORECASE)
    if head is None:
        raise InvalidRequestError(
            f"{name} must have a data: URL such as data:image/png;base64,iVBO...: other URLs are not fetched; got "
            f"{shown(url)}"
        )
    mime = head[1].strip().lower().replace("image/jpg", "image/jpeg")
    if mime not in MIME_TYPES:
        raise InvalidRequestError(f"{name} has an image of type {shown(mime)}; {', '.join(MIME_TYPES)} are served")
    if "base64" not in head[2].lower().split(";"):
        raise InvalidRequestError(f"{name} has a data: URL that is not in Base64: write data:{mime};base64,...")
    return of_base64(name, url[head.end() :], most_bytes)


def of_base64(name: str, text: str, most_bytes: int) -> bytes:
    """Raises `InvalidRequestError` for what is no Base64, and before it is decoded for what is too long."""
    if len(text) // 4 * 3 > most_bytes + 3:
        raise InvalidRequestError(
            f"{name} has an image of {len(text) // 4 * 3} bytes; at most {most_bytes} are allowed"
        )
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"{name} has an image whose Base64 is broken: {error}") from None


def _of_path(name: str, path: Path, most_bytes: int) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        raise InvalidRequestError(f"{name} has an image that cannot be read: {path}: {error.strerror}") from None


def _of_pillow(image: Any) -> bytes:
    """As a PNG, which loses nothing that a tower sees."""
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    file = io.BytesIO()
    (turned if turned.mode in _MODES else turned.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _checked(name: str, data: bytes, most_bytes: int) -> bytes:
    if not data:
        raise InvalidRequestError(f"{name} has an image that is empty: it has no bytes")
    if len(data) > most_bytes:
        raise InvalidRequestError(f"{name} has an image of more than {most_bytes} bytes, which are allowed at most")
    return data
