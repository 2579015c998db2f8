"""headwise's `LocalEngine`, for `process.answer`."""

from __future__ import annotations

import time
from typing import Any

import headwise
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import FinishReason, SamplingParams
from runtimes.process import Served, answer


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

    def serve(self, prompts: list[list[int]], output_tokens: int) -> list[Served]:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        core, served = self._engine.core, dict[str, Served]()
        began = time.perf_counter()
        for prompt in prompts:
            request = self._engine.preprocessor.prepare(prompt=prompt, sampling=sampling)
            served[request.request_id] = Served([], -1)
            core.add(request)
        while core.has_work():
            deltas = core.step(None)
            now = time.perf_counter() - began
            for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR:
                    raise SystemExit(f"a request failed: {delta.error}")
                if delta.token_ids:
                    served[delta.request_id].add(now, delta.token_ids)
        return list(served.values())


if __name__ == "__main__":
    answer(Headwise)
