"""A file of requests, one a line as JSON, in the form of OpenAI's batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headwise.errors import ConfigError
from headwise.sharing_order import pieces_of

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LINE_BYTES = 256 << 20
MAX_ID = 512
"""Characters of a ``custom_id``."""
_TOLD = 5
"""Lines of which it is said what is wrong."""

_FIELDS = {"custom_id", "method", "url", "body"}
_LEADING = (
    "model",
    "cache_salt",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "system",
    "instructions",
    "messages",
    "input",
    "prompt",
)
"""What decides which cached tokens a request can use, in about the order in which prompts have it."""


@dataclass(frozen=True)
class FileRequest:
    """custom_id: by which its answer is found
    url:       the path that it is for
    body:      of the request, as JSON says it
    """

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class RequestIndex:
    """Requests of a file that are to be answered.

    offsets: where each begins
    pieces:  of what each one's prompt begins with, see `pieces_of`
    """

    offsets: list[int]
    pieces: list[bytes]


class RequestFile:
    """Reads requests from a file, which stays open; its index is in memory, and no request."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if it cannot be read at any place."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        if not self._file.seekable():
            self._file.close()
            raise ConfigError(f"{path} is no file that can be read twice: give one that is on a disk")

    def close(self) -> None:
        self._file.close()

    def index(
        self, answered: Collection[str] = (), on_read: Callable[[int, int], None] = lambda *_: None
    ) -> RequestIndex:
        """Check all requests, and find those that are not answered yet.

        on_read: told how many bytes of how many have been read

        Raises:
            ConfigError: some are none, which names the first ones, or there are answers to none of them.
        """
        index, wrong, names = RequestIndex([], []), list[str](), dict[str, int]()
        size, number = self._file.seek(0, 2), 0
        self._file.seek(0)
        while line := _next_line(self._file, self.path):
            number += 1
            on_read(self._file.tell(), size)
            if not line.strip():
                continue
            try:
                request = _parse(line)
                if names.setdefault(request.custom_id, number) != number:
                    raise ValueError(
                        f"custom_id {request.custom_id!r:.80} is that of line {names[request.custom_id]}, too"
                    )
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
                if len(wrong) > _TOLD:
                    break
                continue
            if request.custom_id not in answered:
                index.offsets.append(self._file.tell() - len(line))
                index.pieces.append(pieces_of(beginning(request.body)))
        if wrong:
            more = ", and more" if len(wrong) > _TOLD else ""
            raise ConfigError(f"{self.path} has lines that are no requests: {'; '.join(wrong[:_TOLD])}{more}")
        if not names:
            raise ConfigError(f"{self.path} has no requests")
        if unknown := next((name for name in answered if name not in names), None):
            raise ConfigError(f"there is an answer to {unknown!r:.80}, which is no request of {self.path}")
        return index

    def read(self, offset: int) -> FileRequest:
        """The request that begins there. Raises `ConfigError` if it is none any more."""
        self._file.seek(offset)
        try:
            return _parse(_next_line(self._file, self.path))
        except ValueError as error:
            raise ConfigError(f"{self.path} has changed since it was read first: {error}") from None


def beginning(body: Mapping[str, Any]) -> bytes:
    """A text that requests have as much of in common as their prompts."""
    leading = {name: body[name] for name in _LEADING if body.get(name) is not None}
    return json.dumps(leading, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _next_line(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB")
    return line


def _parse(line: bytes) -> FileRequest:
    """Raises ValueError if that is no request, which says why."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos + 1}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict) or not found.keys() >= _FIELDS - {"method"}:
        raise ValueError(f"a request is an object with {', '.join(sorted(_FIELDS))}")
    if unknown := found.keys() - _FIELDS:
        raise ValueError(f"{min(unknown)!r:.80} is no field of a request: it has {', '.join(sorted(_FIELDS))}")
    name, url, body = found["custom_id"], found["url"], found["body"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        raise ValueError(f"custom_id must be a text of 1 to {MAX_ID} characters, got {name!r:.80}")
    if found.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {found['method']!r:.80}")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {url!r:.80}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, got {body!r:.80}")
    if body.get("stream"):
        raise ValueError("body.stream: an answer in a file is whole, leave it out")
    return FileRequest(name, url, body)
