"""Tokenises in separate processes. Each process is replaced when it dies or hangs."""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from headwise import errors
from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.frontend.prompts import TextLimits, any_size
from headwise.runtime.frontend.tokenizer_process import LENGTH

log = logging.getLogger(__name__)

START_S = 120.0
"""Longest time for a process to load its tokenizer."""
ANSWER_S = 30.0
BYTES_PER_S = 50_000
"""Longest time for a text: `ANSWER_S`, and its bytes at this rate, a tenth of a slow core's rate."""

_LOOK_S = 0.1  # between looks at the time and at `close`


class TokenizerPool:
    """A `PromptEncoder` over ``processes`` processes that each have loaded the model's tokenizer.

    Any number of threads may use it; there is one prompt per process at a time. A process that ends, or takes too long,
    is replaced. If it ended, its prompt is tried once more: the prompt may not have been the cause. Raises
    `DeploymentError` if the second process ends too, if there is no answer in time, and once the pool is closed.

    chat_template: a file to take instead of the model's own template; empty: none
    """

    def __init__(
        self,
        directory: Path,
        limits: TextLimits,
        processes: int,
        chat_template: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arguments = (str(directory), str(limits.tokens), str(limits.token_bytes), chat_template)
        self._all = [_Process(arguments, clock) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)

    def text(self, text: str) -> NDArray[np.int32]:
        return self._encode("text", text, any_size(text, None))

    def chat(self, messages: Any) -> NDArray[np.int32]:
        return self._encode("chat", messages, any_size(None, messages))

    @property
    def pids(self) -> list[int]:
        """The ids of the present processes."""
        return [process.pid for process in self._all]

    def close(self) -> None:
        """End the processes; idempotent."""
        for process in self._all:
            process.close()

    def _encode(self, kind: str, value: Any, num_bytes: int) -> NDArray[np.int32]:
        try:
            question = msgpack.packb((kind, value))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"a prompt must be plain data: {error}") from None
        longest_s = ANSWER_S + num_bytes / BYTES_PER_S
        process = self._idle.get()
        try:
            for _ in range(2):
                with suppress(_EndedError):
                    return process.ask(question, longest_s)
                log.warning("a tokenizer process ended and is replaced")
            raise DeploymentError("the tokenizer's process ended twice over this prompt; send a shorter one")
        finally:
            self._idle.put(process)


class _EndedError(Exception):
    """The process ended before it answered."""


class _Process:
    """One tokenizer process, replaced when it fails. One thread asks at a time; any thread may close."""

    def __init__(self, arguments: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._arguments = arguments
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = self._is_ready = False
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, question: bytes, longest_s: float) -> NDArray[np.int32]:
        """Token ids; raises the process's error, `_EndedError` or `DeploymentError`."""
        try:
            if not self._is_ready:
                self._receive(START_S)
                self._is_ready = True
            self._send(question, longest_s)
            return np.frombuffer(self._receive(longest_s), np.int32)
        except (_EndedError, DeploymentError):
            self._replace()
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()

    def _replace(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._stop()
                self._start()

    def _start(self) -> None:
        """Start a fresh interpreter with the same path: a fork of this process, which has threads, is not safe."""
        self._is_ready = False
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",  # import nothing from the working directory
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OPENBLAS_NUM_THREADS": "1",  # numpy needs no threads here
        }
        command = [
            sys.executable,
            "-m",
            "headwise.runtime.frontend.tokenizer_process",
            str(theirs.fileno()),
            *self._arguments,
        ]
        with theirs:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )

    def _stop(self) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._socket.close()

    def _send(self, data: bytes, longest_s: float) -> None:
        left, until = memoryview(LENGTH.pack(len(data)) + data), self._deadline(longest_s)
        while left:
            self._wait(select.POLLOUT, until)
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._ended() from None

    def _receive(self, longest_s: float) -> bytes:
        until = self._deadline(longest_s)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
        error, value = msgpack.unpackb(self._read(length, until))
        if error:
            cls = getattr(errors, error, HeadwiseError)
            raise cls(value)
        return bytes(value)

    def _read(self, size: int, until: Callable[[], bool]) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(select.POLLIN, until)
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                raise self._ended() from None
            if not part:
                raise self._ended()
            data += part
        return bytes(data)

    def _wait(self, event: int, is_over: Callable[[], bool]) -> None:
        """Wait until the socket may be ready; raises at the deadline, and once the pool is closed."""
        if self._is_closed:
            raise self._ended()
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except (OSError, ValueError):  # closed meanwhile
            raise self._ended() from None
        if not poller.poll(1000 * _LOOK_S) and is_over():
            log.error("a tokenizer process does not answer and is replaced")
            raise DeploymentError("the prompt was not tokenised in time; send it again, or a shorter one")

    def _ended(self) -> Exception:
        return DeploymentError("the deployment is stopping") if self._is_closed else _EndedError()

    def _deadline(self, longest_s: float) -> Callable[[], bool]:
        """Returns whether so much time has passed. Time in which this process was suspended does not count."""
        clock = LivenessClock(self._clock)
        until = clock() + longest_s
        return lambda: clock() > until
