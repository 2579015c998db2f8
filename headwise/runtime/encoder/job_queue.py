"""Images that wait to be encoded, in the order in which they came, each client's in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

MAX_WAITING = 256
MAX_WAITING_BYTES = 256 << 20


@dataclass(frozen=True)
class Job:
    """client: whose it is; key: of its question"""

    client: bytes
    key: int
    image: bytes


class JobQueue:
    """Safe to use from several threads. Nobody's image waits for more than one of each other client."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, deque[Job]] = OrderedDict()  # by client, the next one first
        self._change = threading.Condition()
        self._num_bytes = self._num_jobs = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._num_jobs

    def put(self, job: Job) -> bool:
        """False if too many wait already, or too many bytes."""
        with self._change:
            if self._num_jobs >= MAX_WAITING or self._num_bytes + len(job.image) > MAX_WAITING_BYTES:
                return False
            self._jobs.setdefault(job.client, deque()).append(job)
            self._count(job, 1)
            self._change.notify()
            return True

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
            self._count(job, -1)
            return job

    def drop(self, client: bytes) -> None:
        """Forget what a client that has gone asked for."""
        with self._change:
            for job in self._jobs.pop(client, ()):
                self._count(job, -1)

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._jobs.clear()
            self._change.notify_all()

    def _count(self, job: Job, sign: int) -> None:
        self._num_jobs += sign
        self._num_bytes += sign * len(job.image)
