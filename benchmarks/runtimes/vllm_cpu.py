"""vLLM on a CPU, for `process.answer`; run by the Python of the peers' environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm

from runtimes.process import Served, answer, serve_when_due


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

    def serve(self, prompts: list[list[int]], output_tokens: int, at: list[float] | None = None) -> list[Served]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        told: dict[str, int] = {}

        def send(prompt: list[int]) -> str:
            self._sent += 1
            name = str(self._sent)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            told[name] = 0
            return name

        def step() -> list[tuple[str, Sequence[int]]] | None:
            if not self._engine.has_unfinished_requests():
                return None
            found = []
            for output in self._engine.step():
                tokens = output.outputs[0].token_ids[told[output.request_id] :]
                told[output.request_id] += len(tokens)
                if tokens:
                    found.append((output.request_id, tokens))
            return found

        return serve_when_due(prompts, at, send, step)


def _drafting(drafts: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}


def _has_code(directory: str) -> bool:
    """Whether the model's configuration is a class of its own."""
    return any(Path(directory).glob("configuration_*.py"))


if __name__ == "__main__":
    answer(Vllm)
