"""A worker in a process of its own, for whoever started it: its side. The other one is `client.worker_process`.

Both hold an end of a `Connection`. What comes first is a `Job`; what goes back, in this order: log records, any number,
at any time; `Ready` once the worker takes steps, which go over the step channel; `Failed`, and then nothing more.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from headwise import heap
from headwise.errors import HeadwiseError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.executor import death
from headwise.runtime.protocol.step_channel import serve_steps
from headwise.runtime.worker.device import Device, open_device
from headwise.runtime.worker.worker import ModelWorker

_LOOK_S = 0.5
"""How often a process looks whether the one that started it still lives."""

LAST_S = 10.0
"""Time for a worker that is to stop: for the step under way, and for copies to the host."""


@dataclass(frozen=True)
class Job:
    """What a worker's process is to do.

    endpoint:    of the step channel
    owner:       process id of who started it, without whom it ends
    log_level:   of headwise's loggers
    open_device: a function of a module, which can be found there, too
    """

    config: EngineConfig
    model_dir: Path
    endpoint: str
    owner: int
    log_level: int
    open_device: Callable[[EngineConfig, int], Device] = open_device


@dataclass(frozen=True)
class Ready:
    """The worker is loaded. description: what was chosen, for the log"""

    description: str


@dataclass(frozen=True)
class Failed:
    """Why the worker's process ends, though nobody asked it to."""

    error: HeadwiseError


def main(descriptor: int) -> None:
    """Serve the job that comes over the socket ``descriptor``, until it closes or says so, or its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to its owner, too, who then ends it in order
    connection = Connection(descriptor)
    job: Job = connection.recv()
    outbox, stopping = _Outbox(connection), threading.Event()
    logger = logging.getLogger("headwise")
    logger.handlers, logger.propagate = [_ToOwner(outbox)], False
    logger.setLevel(job.log_level)
    threading.Thread(target=_watch, args=(connection, job.owner, stopping), name="headwise-owner", daemon=True).start()
    try:
        _serve(job, outbox, stopping.is_set)
    except Exception as error:
        if not isinstance(error, HeadwiseError):
            logger.error("the worker failed", exc_info=True)
        outbox.put(Failed(error if isinstance(error, HeadwiseError) else death(error)))
        raise SystemExit(1) from None


def _serve(job: Job, outbox: _Outbox, should_stop: Callable[[], bool]) -> None:
    device = job.open_device(job.config, threads_per_worker(job.config))
    heap.settle()
    worker = ModelWorker(job.config, job.model_dir, 0, SingleRank(), device)
    worker.initialize_cache()
    outbox.put(Ready(worker.describe()))
    serve_steps(worker, job.endpoint, 0, should_stop)
    worker.close()


class _Outbox:
    """What goes to the owner, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def put(self, message: Any) -> None:
        with self._lock, suppress(OSError):  # an owner that is gone hears nothing
            self._connection.send(message)


class _ToOwner(logging.handlers.QueueHandler):
    """Log records, made such that another process can read them."""

    def __init__(self, outbox: _Outbox) -> None:
        super().__init__(SimpleQueue())
        self._outbox = outbox

    def enqueue(self, record: logging.LogRecord) -> None:
        self._outbox.put(record)


def _watch(connection: Connection, owner: int, stopping: threading.Event) -> None:
    """Wait until the owner says that this is over, or lets go of its end; end the process where it does not end itself.

    A process that the owner forked may hold the other end, too: so it is looked for by its number.
    """
    with suppress(OSError, EOFError):
        while os.getppid() == owner and not connection.poll(_LOOK_S):
            pass
    stopping.set()
    threading.Event().wait(LAST_S if os.getppid() == owner else _LOOK_S)
    os._exit(1)
