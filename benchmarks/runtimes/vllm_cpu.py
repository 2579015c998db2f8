"""vLLM on a CPU, for `process.answer`; run by the Python of the peers' environment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import vllm

from runtimes.process import Served, answer


class Vllm:
    """options: `directory` of the model, `dtype`, `max_model_len`; `drafts`, by the model's own layer, if any;
    `stages` of a pipeline and `chunk`, tokens of a step, if not one and its own"""

    def __init__(self, options: dict[str, Any]) -> None:
        llm = vllm.LLM(
            model=options["directory"],
            dtype=options["dtype"],
            max_model_len=options["max_model_len"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            trust_remote_code=_has_code(options["directory"]),
            pipeline_parallel_size=options.get("stages", 1),
            max_num_batched_tokens=options.get("chunk"),
            **_drafting(options.get("drafts", 0)),
        )
        self._engine = llm.llm_engine
        self._sent = 0
        self.about = {
            "name": "vLLM",
            "version": vllm.__version__,
            "dtype": options["dtype"],
            "threads": torch.get_num_threads(),
        }

    def serve(self, prompts: list[list[int]], output_tokens: int) -> list[Served]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        served: dict[str, Served] = {}
        began = time.perf_counter()
        for prompt in prompts:
            self._sent += 1
            name = str(self._sent)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            served[name] = Served([], -1)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                one = served[output.request_id]
                one.add(now, output.outputs[0].token_ids[one.count :])
        return list(served.values())


def _drafting(drafts: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}


def _has_code(directory: str) -> bool:
    """Whether the model's configuration is a class of its own."""
    return any(Path(directory).glob("configuration_*.py"))


if __name__ == "__main__":
    answer(Vllm)
