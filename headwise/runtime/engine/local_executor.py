"""The executor with its one worker in this process, on a thread of its own."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.executor import Worker, death, exports_of_all


class LocalExecutor:
    """Runs a worker's steps on one thread, in order; the engine schedules meanwhile.

    thread: the worker's, for whoever must do something between two steps
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwise-worker")
        self._steps: deque[Future[StepResult]] = deque()

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        """See `Executor.exports`."""
        return exports_of_all([self._worker.exports])

    def submit(self, batch: BatchRequest) -> None:
        self._steps.append(self.thread.submit(self._worker.execute, batch))

    def poll(self, timeout_s: float | None) -> StepResult | None:
        if not self._steps or not wait([self._steps[0]], timeout_s).done:
            return None
        error = self._steps[0].exception()
        if error is not None:
            raise death(error) from error
        return self._steps.popleft().result()

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
