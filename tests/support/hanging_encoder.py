"""An encoder of images in a process of its own that says when it is asked, and never answers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from headwise.runtime.encoder.reports import Reporting
from headwise.runtime.encoder.server import EncoderServer
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.images import EncodedImage


class _Hanging:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def encode(self, file: ImageFile) -> Iterator[EncodedImage | None]:
        self._pipe.send(file.data)
        time.sleep(3600)
        raise AssertionError("nobody waits so long")

    def stats(self) -> dict[str, int]:
        return {}


def _serve(pipe: Connection, reporting: Reporting) -> None:
    server = EncoderServer(_Hanging(pipe), "tcp://127.0.0.1:*", reporting=reporting)
    server.start()
    pipe.send(server.endpoint)
    time.sleep(3600)


class HangingEncoder:
    """endpoint: where it serves"""

    def __init__(self, reporting: Reporting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: Any = context.Process(target=_serve, args=(theirs, reporting), daemon=True)
        self._process.start()
        self.endpoint: str = self.told()

    def told(self) -> Any:
        """The next image that it was asked for."""
        assert self._pipe.poll(60)
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
