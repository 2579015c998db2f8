"""A process that only tokenises, for `headwise.runtime.frontend.tokenizer_pool`.

``tokenizers`` holds Python's global lock for most of a text: in the scheduler's process a long text would stop all.

    parent -> child    [kind, value]        "text" and a string, or "chat" and a chat (`plain_chat`)
    child -> parent    [error, value]       "" and the bytes of token ids int32 [n], or an error's class and its message

Each message is msgpack behind its length in four bytes. The child sends ["", b""] when it is ready. It ends when its
parent ends: the kernel kills it when the other end of its standard input is closed, whatever it is doing.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from headwise.errors import HeadwiseError, ModelError
from headwise.runtime.frontend.prompts import LocalPromptEncoder, TextLimits
from headwise.runtime.loader.tokenizer import Tokenizer

LENGTH = struct.Struct("<I")

_F_SETSIG = 10  # of Linux; the fcntl module does not name it


def main() -> None:
    """Arguments: the socket's file descriptor, the model's directory, the two numbers of `TextLimits`, and the file of
    a chat template; empty: the model's own.
    """
    descriptor, directory, tokens, token_bytes, chat_template = sys.argv[1:]
    _end_with_parent()
    _be_first_to_go()
    with socket.socket(fileno=int(descriptor)) as connection:
        _serve(connection, Path(directory), TextLimits(int(tokens), int(token_bytes)), chat_template)


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process when it ends
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    if sys.platform == "linux":
        fcntl.fcntl(0, _F_SETSIG, signal.SIGKILL)  # elsewhere it is SIGIO, which ends the process unless it is stopped
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it has ended already
        sys.exit()


def _be_first_to_go() -> None:
    """When memory runs out, the kernel shall kill a tokenizer first: it is easily replaced."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve(connection: socket.socket, directory: Path, limits: TextLimits, chat_template: str) -> None:
    try:
        encoder = LocalPromptEncoder(Tokenizer.from_directory(directory, chat_template), limits)
    except ModelError as error:
        _send(connection, ("ModelError", str(error)))
        return
    _send(connection, ("", b""))
    while (question := _receive(connection)) is not None:
        _send(connection, _answer(encoder, question))


def _answer(encoder: LocalPromptEncoder, question: Any) -> tuple[str, str | bytes]:
    kind, value = question
    try:
        tokens = encoder.text(value) if kind == "text" else encoder.chat(value)
    except HeadwiseError as error:
        return type(error).__name__, str(error)
    except Exception as error:  # a defect, here or in a chat template: the next text may work
        return "HeadwiseError", f"the prompt could not be tokenised: {type(error).__name__}: {error}"
    return "", tokens.tobytes()


def _send(connection: socket.socket, message: tuple[str, str | bytes]) -> None:
    data = msgpack.packb(message)
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    """The next message; None when the parent has closed the connection."""
    header = _read(connection, LENGTH.size)
    data = _read(connection, LENGTH.unpack(header)[0]) if header else b""
    return msgpack.unpackb(data, strict_map_key=False) if data else None


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
