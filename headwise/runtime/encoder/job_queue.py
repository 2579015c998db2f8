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
MOST_VIDEOS = 4
"""Under way at a time; of a client half as many."""


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
    is_video: bool = False
    file: ImageFile | None = None
    steps: Iterator[EncodedImage | None] | None = None


class JobQueue:
    """Safe to use from several threads. Nobody's image waits for more than one of each other client, or one step of a
    video: one that is not done is put back. Of videos so many are under way, and others wait until one is done: each
    takes as much memory as a prompt's embeddings do.

    Counted are all jobs from `admit` until `done`.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, deque[Job]] = OrderedDict()  # by client, the next one first
        self._admitted: dict[tuple[bytes, int], Job] = {}
        self._change = threading.Condition()
        self._under_way: set[Job] = set()  # videos
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

    def is_wanted(self, job: Job) -> bool:
        """Whether somebody still waits for it."""
        with self._change:
            return self._admitted.get((job.client, job.key)) is job

    def done(self, job: Job) -> None:
        """It is answered."""
        with self._change:
            if self._admitted.get((job.client, job.key)) is job:
                self._forget(job.client, job.key)

    def get(self) -> Job | None:
        """Wait for the next one; None once the queue is closed."""
        with self._change:
            while (job := self._next()) is None and not self._is_closed:
                self._change.wait()
            if job is None or self._is_closed:
                return None
            jobs = self._jobs.pop(job.client)
            jobs.remove(job)
            if jobs:
                self._jobs[job.client] = jobs
            if job.is_video:
                self._under_way.add(job)
            return job

    def _next(self) -> Job | None:
        """The first one that may go on, of the first client that has one."""
        return next((job for jobs in self._jobs.values() for job in jobs if self._may_go_on(job)), None)

    def _may_go_on(self, job: Job) -> bool:
        if not job.is_video or job in self._under_way:
            return True
        own = sum(each.client == job.client for each in self._under_way)
        return own < MOST_VIDEOS // 2 and len(self._under_way) < MOST_VIDEOS

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
        self._under_way.discard(job)
        self._change.notify()  # another video may begin
        jobs = self._jobs.get(client)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._jobs[client]
