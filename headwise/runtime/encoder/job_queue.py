"""Images and videos that are to be encoded, in the order in which they came, each client's in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.images import EncodedImage

MAX_WAITING = 256
MAX_WAITING_BYTES = 256 << 20


@dataclass(eq=False)
class Job:
    """client: whose it is; key: of its question
    size:  bytes of its file
    file:  once it is there
    steps: as far as it is encoded; None: that has not begun
    """

    client: bytes
    key: int
    size: int
    file: ImageFile | None = None
    steps: Iterator[EncodedImage | None] | None = None


class JobQueue:
    """Safe to use from several threads. Nobody's image waits for more than one of each other client, or one step of a
    video: one that is not done is put back.

    Counted are all jobs from `admit` until `done`.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, deque[Job]] = OrderedDict()  # by client, the next one first
        self._admitted: dict[tuple[bytes, int], Job] = {}
        self._change = threading.Condition()
        self._num_bytes = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._admitted)

    def admit(self, job: Job) -> bool:
        """Let a job's file come; False if too many are here already, or too many bytes."""
        with self._change:
            if len(self._admitted) >= MAX_WAITING or self._num_bytes + job.size > MAX_WAITING_BYTES:
                return False
            self._admitted[job.client, job.key] = job
            self._num_bytes += job.size
            return True

    def put(self, job: Job) -> None:
        """Its file is there, or a step of it is done. Ignored where nobody waits for it any more."""
        with self._change:
            if self._admitted.get((job.client, job.key)) is job:
                self._jobs.setdefault(job.client, deque()).append(job)
                self._change.notify()

    def done(self, job: Job) -> bool:
        """Whether somebody still waits for it."""
        with self._change:
            is_wanted = self._admitted.get((job.client, job.key)) is job
            if is_wanted:
                self._forget(job.client, job.key)
            return is_wanted

    def get(self) -> Job | None:
        """Wait for the next one; None once the queue is closed."""
        with self._change:
            while not self._jobs and not self._is_closed:
                self._change.wait()
            if self._is_closed:
                return None
            client, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[client] = jobs
            return job

    def drop(self, client: bytes, key: int | None = None) -> None:
        """Forget what a client asked for, or one of its questions."""
        with self._change:
            keys = [each for owner, each in self._admitted if owner == client] if key is None else [key]
            for each in keys:
                self._forget(client, each)

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._jobs.clear()
            self._change.notify_all()

    def _forget(self, client: bytes, key: int) -> None:
        job = self._admitted.pop((client, key), None)
        if job is None:
            return
        self._num_bytes -= job.size
        jobs = self._jobs.get(client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[client]
