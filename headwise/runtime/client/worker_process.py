"""A worker in a process of its own, without Ray: so it and the engine do not wait for each other's interpreter."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

from headwise.errors import ConfigError, EngineDiedError, HeadwiseError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.protocol.step_channel import ZmqExecutor
from headwise.runtime.worker.device import Device, open_device
from headwise.runtime.worker.process import LAST_S, Failed, Job, Ready
from headwise.sockets.scratch import ScratchDirectory, sweep

log = logging.getLogger(__name__)

_PREFIX = "headwise-local-"
_CODE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"
    "from headwise.runtime.worker.process import main; main(int(sys.argv[1]))"
)
"""Without the current folder, which ``-c`` puts in front of what the path is told to be."""


def has_channel() -> bool:
    """Whether there is what steps go to another process by."""
    return find_spec("zmq") is not None


class WorkerProcess:
    """A worker of one rank, and the executor that reaches it. Ends with the process that made it, however that ends.

    executor:    to give steps to
    description: what the worker chose at its start
    pid:         of its process
    """

    def __init__(
        self, config: EngineConfig, model_dir: Path, open_device: Callable[[EngineConfig, int], Device] = open_device
    ) -> None:
        """Returns once the worker takes steps. ``open_device`` is a function of a module.

        Raises:
            ConfigError: pyzmq is not installed.
            HeadwiseError: what keeps the worker from starting.
        """
        if not has_channel():
            raise ConfigError("a worker in a process of its own needs pyzmq: install it, or give worker_process=False")
        sweep(tempfile.gettempdir(), _PREFIX)
        self._scratch = ScratchDirectory(tempfile.gettempdir(), _PREFIX)
        self.executor = ZmqExecutor(
            f"ipc://{self._scratch.path}/steps",
            1,
            config.step_timeout_s,
            start_timeout_s=config.start_timeout_s,
            load_timeout_s=config.load_timeout_s,
        )
        self.description = ""
        self._failure: HeadwiseError | None = None
        self._is_closing = False
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _start(theirs, threads_per_worker(config))
        self.pid = self._process.pid
        level = logging.getLogger("headwise").getEffectiveLevel()
        job = Job(config, model_dir, self.executor.endpoint, os.getpid(), level, open_device)
        self._listener = threading.Thread(target=self._listen, name="headwise-worker-process", daemon=True)
        try:
            with suppress(BrokenPipeError):  # it is over already, as the listener finds out
                self._connection.send(job)
            self._listener.start()
            self.executor.wait_ready(config.start_timeout_s, self._check)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and the channel, which must not be in use any more. May be called again."""
        self._is_closing = True
        with suppress(OSError):
            self._connection.send(None)
        try:
            self._process.wait(LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener.is_alive() and self._listener is not threading.current_thread():  # which may collect garbage
            self._listener.join()
        self._connection.close()
        self.executor.close()
        self._scratch.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _listen(self) -> None:
        """Take what the process says, until it ends."""
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if isinstance(message, logging.LogRecord):
                    logging.getLogger(message.name).handle(message)
                elif isinstance(message, Ready):
                    self.description = message.description
                elif isinstance(message, Failed):
                    self._lose(message.error)
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        self._lose(EngineDiedError(f"the worker's process {self.pid} ended with {how}"))

    def _lose(self, error: HeadwiseError) -> None:
        if self._failure is not None or self._is_closing:
            return
        self._failure = error
        self.executor.lost(str(error))


def _start(theirs: Connection, threads: int) -> subprocess.Popen[bytes]:
    """A process that finds the same modules as this one, and serves the other end of a connection.

    Neither forked, since a driver of a GPU does not outlive that, nor spawned by `multiprocessing`, which would run
    the script of whoever has no ``if __name__ == "__main__"`` once more.
    """
    # Read by the libraries at import.
    of_libraries = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    with theirs:
        descriptor = theirs.fileno()
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, str(descriptor)],
            env={**os.environ, **of_libraries, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )
