"""headwise's `LocalEngine`, for `process.answer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import headwise
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import FinishReason, SamplingParams
from runtimes.process import Served, answer, serve_when_due


class Headwise:
    """options: fields of `EngineConfig`"""

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = LocalEngine(EngineConfig.from_dict(options))
        config = self._engine.config
        self.about = {
            "name": "headwise",
            "version": headwise.__version__,
            "dtype": config.dtype_name,
            "kv_dtype": config.kv_dtype_name,
            "chosen": self._engine._worker.describe(),
        }

    def serve(self, prompts: list[list[int]], output_tokens: int, at: list[float] | None = None) -> list[Served]:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

        def send(prompt: list[int]) -> str:
            request = self._engine.preprocessor.prepare(prompt=prompt, sampling=sampling)
            self._engine.core.add(request)
            return request.request_id

        return serve_when_due(prompts, at, send, self._step)

    def _step(self) -> list[tuple[str, Sequence[int]]] | None:
        if not self._engine.core.has_work():
            return None
        deltas = self._engine.core.step(None)
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise SystemExit(f"a request failed: {delta.error}")
        return [(delta.request_id, delta.token_ids) for delta in deltas if delta.token_ids]


if __name__ == "__main__":
    answer(Headwise)
