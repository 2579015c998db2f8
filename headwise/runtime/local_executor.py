"""The executor with its one worker in this process, on a thread of its own."""

from __future__ import annotations

import queue
import threading

from headwise.errors import EngineDiedError
from headwise.runtime.batch import BatchRequest, StepResult
from headwise.runtime.worker import ModelWorker


class LocalExecutor:
    """Runs the steps of `ModelWorker` on one thread, in order; the engine schedules meanwhile."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._batches: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | EngineDiedError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="headwise-worker", daemon=True)
        self._thread.start()

    def submit(self, batch: BatchRequest) -> None:
        self._batches.put(batch)

    def poll(self, timeout_s: float | None) -> StepResult | None:
        try:
            result = self._results.get(timeout=timeout_s) if timeout_s != 0 else self._results.get_nowait()
        except queue.Empty:
            return None
        if isinstance(result, EngineDiedError):
            raise result
        return result

    def close(self) -> None:
        self._batches.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._results.put(self._worker.execute(batch))
            except Exception as error:
                self._results.put(EngineDiedError(f"the worker failed in step {batch.step_id}: {error!r}"))
                return
