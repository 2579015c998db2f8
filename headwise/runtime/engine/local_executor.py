"""The executor with its one worker in this process, on a thread of its own."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue

from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.executor import Worker, death, exports_of_all
from headwise.runtime.protocol.running_step import StepRunner


class LocalExecutor:
    """Runs a worker's steps on one thread, in order; the engine schedules meanwhile.

    thread: the worker's, for whoever must do something between two steps
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwise-worker")
        # No SimpleQueue: its `get` with a timeout waits for ever if the thread loses its core for as long just before
        # (CPython 3.11: what is left of the timeout is negative then, which means none).
        self._batches: Queue[BatchRequest] = Queue()
        self._results: SimpleQueue[StepResult] = SimpleQueue()
        self._runner = StepRunner(worker.begin, self._take, self._results.put)
        self._steps: deque[Future[StepResult]] = deque()

    shares_memory = False
    """It needs nothing of the kind: it has what the engine has."""

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        """See `Executor.exports`."""
        return exports_of_all([self._worker.exports])

    def submit(self, batch: BatchRequest) -> None:
        self._batches.put(batch)
        self._steps.append(self.thread.submit(self._next_result))

    def _take(self, wait_s: float) -> BatchRequest | None:
        with suppress(Empty):
            return self._batches.get(timeout=wait_s)
        return None

    def _next_result(self) -> StepResult:
        """On the worker's thread: of the oldest step that is not over, once it is."""
        while self._results.empty():
            self._runner.turn(wait_s=0.0)
        return self._results.get()

    def poll(self, timeout_s: float | None) -> StepResult | None:
        if not self._steps or not wait([self._steps[0]], timeout_s).done:
            return None
        error = self._steps[0].exception()
        if error is not None:
            raise death(error) from error
        return self._steps.popleft().result()

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
