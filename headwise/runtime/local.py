"""The engine in this process: for scripts, tests, benchmarks and machines without Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from headwise.errors import EngineDiedError
from headwise.kernels.cuda.cards import count_cards
from headwise.runtime.block_storage import open_lookup
from headwise.runtime.comm import SingleRank
from headwise.runtime.config import EngineConfig
from headwise.runtime.device import Device, resolve_device
from headwise.runtime.engine import EngineCore
from headwise.runtime.front_door import FrontDoor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.local_executor import LocalExecutor
from headwise.runtime.memory_check import check_memory
from headwise.runtime.request import FinishReason, GenerateRequest, GenerationResult, OutputDelta, SamplingParams
from headwise.runtime.worker import ModelWorker

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LocalEngine:
    """Serves requests in this process, with one worker. Calls from several threads take turns.

    `sleep`, `wake` and `reset_cache` do not wait for their turn: they may be called while a stream is read, by any
    thread. A stream whose engine is asleep waits for `wake`.
    """

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        """``device`` is the configured one, unless another is given."""
        self.config = config = resolve_device(config, count_cards())
        self.front_door = FrontDoor.open(config)
        card, tokenizer = self.front_door.card, self.front_door.tokenizer
        check_memory(config, card)
        self._lookup = open_lookup(config, card)
        self._worker = ModelWorker(config, resolve_model(config.model, config.cache_path), 0, SingleRank(), device)
        self._worker.initialize_cache()
        card = self._worker.card  # with the pool's size, which may have been measured
        self.front_door = FrontDoor(card, tokenizer)
        logger.info("headwise: %s", self._worker.describe())
        self._executor = LocalExecutor(self._worker)
        self.core = EngineCore(config, card, tokenizer, self._executor, lookup=self._lookup)
        self._lock = threading.Lock()  # one call's requests at a time
        self._between_steps = threading.Condition()  # held by whoever uses the core
        self._operating: list[object] = []  # operations that want the core: runs let them go first
        self._early: list[OutputDelta] = []  # for the run, from steps that an operation took

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **kwargs: Any,
    ) -> list[GenerationResult]:
        """Run prompts (texts or token ids) as one batch; ``sampling`` is one for all, or one each."""
        each = [sampling] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        requests = [
            self.front_door.prepare(prompt=prompt, sampling=params, **kwargs)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        results = {request.request_id: GenerationResult(request.request_id) for request in requests}
        for delta in self._run(requests):
            results[delta.request_id].add(delta)
        return list(results.values())

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None, **kwargs: Any) -> Iterator[OutputDelta]:
        """The deltas of one prompt as they come. Closing the iterator aborts the request."""
        return self._run([self.front_door.prepare(prompt=prompt, sampling=sampling, **kwargs)])

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None, **kwargs: Any
    ) -> Iterator[OutputDelta]:
        """Like `stream`, for a chat."""
        return self._run([self.front_door.prepare(messages=messages, sampling=sampling, **kwargs)])

    def _run(self, requests: Sequence[GenerateRequest]) -> Iterator[OutputDelta]:
        with self._lock:
            try:
                with self._between_steps:
                    for request in requests:
                        self.core.add(request)
                while (deltas := self._step()) is not None:
                    for delta in deltas:
                        if delta.finish_reason is FinishReason.ERROR:
                            raise EngineDiedError(delta.error)
                        yield delta
            finally:
                self._abort(requests)

    def _step(self) -> list[OutputDelta] | None:
        """What the next step said, once the engine is awake; None when all is said."""
        with self._between_steps:
            self._between_steps.wait_for(lambda: not self._operating and self._can_go_on())
            if self._early:
                early, self._early = self._early, []
                return early
            return self.core.step(None) if self.core.has_work() else None

    def _can_go_on(self) -> bool:
        return bool(self._early) or self.core.has_work() or not self.core.has_requests

    def _abort(self, requests: Sequence[GenerateRequest]) -> None:
        with self._between_steps:
            for request in requests:
                self.core.abort(request.request_id)
            while self.core.has_work():
                self.core.step(None)
            self._early.clear()

    def sleep(self) -> None:
        """Give back the memory of weights and device cache. Requests wait until `wake`; does nothing if asleep."""
        self._operate("sleep")

    def wake(self) -> None:
        """Load the weights again and go on. Does nothing if awake. Raises `EngineDiedError` if it cannot."""
        self._operate("wake")

    def reset_cache(self, tier: str = "all") -> int:
        """Forget every cached block that no running request needs; how many those were. See `Client.reset_cache`."""
        return self._operate("reset_cache", tier)

    def _operate(self, action: str, tier: str = "all") -> int:
        me = object()
        self._operating.append(me)
        with self._between_steps:
            try:
                operation = self.core.operate(action, tier)
                while not operation.is_done:
                    self._early += self.core.step(None)
            finally:
                self._operating.remove(me)
                self._between_steps.notify_all()
        return operation.blocks

    def stats(self) -> dict[str, Any]:
        return self.core.stats()

    def close(self) -> None:
        self._executor.close()
        self._worker.close()
        if self._lookup is not None:
            self._lookup.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
