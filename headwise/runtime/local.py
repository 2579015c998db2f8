"""The engine in this process: for scripts, tests, benchmarks and machines without Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from headwise.errors import EngineDiedError
from headwise.runtime.comm import SingleRank
from headwise.runtime.config import EngineConfig
from headwise.runtime.engine import EngineCore
from headwise.runtime.front_door import FrontDoor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.local_executor import LocalExecutor
from headwise.runtime.request import FinishReason, GenerateRequest, GenerationResult, OutputDelta, SamplingParams
from headwise.runtime.worker import ModelWorker

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LocalEngine:
    """Serves requests in this process, with one worker. Calls from several threads take turns."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.front_door = FrontDoor.open(config)
        self._worker = ModelWorker(config, resolve_model(config.model, config.cache_path), 0, SingleRank())
        self._worker.initialize_cache()
        logger.info("headwise: %s", self._worker.describe())
        self._executor = LocalExecutor(self._worker)
        self.core = EngineCore(config, self.front_door.card, self.front_door.tokenizer, self._executor)
        self._lock = threading.Lock()

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
            for request in requests:
                self.core.add(request)
            try:
                while self.core.has_work():
                    for delta in self.core.step(None):
                        if delta.finish_reason is FinishReason.ERROR:
                            raise EngineDiedError(delta.error)
                        yield delta
            finally:
                for request in requests:
                    self.core.abort(request.request_id)
                while self.core.has_work():
                    self.core.step(None)

    def stats(self) -> dict[str, Any]:
        return self.core.stats()

    def close(self) -> None:
        self._executor.close()
        self._worker.close()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
