"""A demo model that is loaded once, and engines of several configurations that run on it one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from support.reference import Answer
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.request import GenerationResult, SamplingParams
from headwise.runtime.worker.model_source import ModelSource
from headwise.runtime.worker.worker import ModelWorker

MODELS = ("smollm2-135m", "gemma3-270m")
DEMO_MODELS = [pytest.param(name, marks=pytest.mark.model) for name in MODELS]
ALL_MODELS = [*DEMO_MODELS, *TINY_CONFIGS]
"""Parameters of tests: the demo models, and tiny random ones of other architectures, which need no download."""
LIKE_ANOTHER_S = {
    "qwen2", "qwen3", "qwen3-moe", "mixtral", "phi3", "phi3-long", "gemma2", "gemma4-moe", "deepseek-v2", "qwen3.5",
    "deepseek-v3-bias", "qwen3.5-moe", "gpt-oss-mxfp4", "qwen2-moe", "dots1", "smollm3", "seed-oss", "ministral3",
    "glm4", "glm4-moe", "glm4-moe-lite", "glm5", "minimax-m2", "olmo2", "exaone4", "exaone-moe", "afmoe", "hunyuan3",
    "solar-open", "mimo", "cohere2", "granite", "granite-moe", "granite-hybrid", "arcee", "granite-hybrid-moe",
    "nemotron-h-moe", "nemotron-h-latent", "bamba", "granite-swa", "granite-moe-swa", "mellum",
    "cohere2-moe", "cohere2-moe-rms", "hunyuan-v1", "hunyuan-v1-moe", "mistral4", "glm5-shared",
    "hunyuan4", "laguna-elements", "laguna", "step3", "olmo3",
}  # fmt: skip
TINY_KINDS = [pytest.param(name, marks=pytest.mark.soak if name in LIKE_ANOTHER_S else ()) for name in TINY_CONFIGS]
CACHE_KINDS = [*DEMO_MODELS, *TINY_KINDS]
"""The same for tests of what becomes of blocks: models whose caches are of the same kind as another one's are for the
soak, as their layers are not what such a test is about."""
_PLAIN = "qwen3"
"""Whose cache is of SmolLM2's kind, at a tenth of its time."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
BASE = EngineConfig(dtype="float32", kv_cache="144MiB", max_batched_tokens=512, max_model_len=3072, cpu_threads=1)
"""On one thread: several tests run at once, and threads that wait for one another's cores cost more than they save.
`tests/kernels/cpu/test_decoder.py` has any number of them."""


def all_but(*names: str) -> pytest.MarkDecorator:
    """A test of `ALL_MODELS`, of which some, slow and with little to add, are for the soak."""
    return pytest.mark.parametrize("loaded", [*_demo_models(*names), *TINY_CONFIGS], indirect=True)


def kinds_but(*names: str) -> pytest.MarkDecorator:
    """The same of `CACHE_KINDS`."""
    return pytest.mark.parametrize("loaded", [*_demo_models(*names), *TINY_KINDS], indirect=True)


def tiny_cache_kinds() -> pytest.MarkDecorator:
    """The same of `CACHE_KINDS`, of which the demo models are for the soak, and a tiny one stands for SmolLM2."""
    others = [kind for kind in TINY_KINDS if kind.values != (_PLAIN,)]
    return pytest.mark.parametrize("loaded", [*_demo_models(*MODELS), _PLAIN, *others], indirect=True)


def _demo_models(*slow: str) -> list[ParameterSet]:
    marks = {name: [pytest.mark.model, *([pytest.mark.soak] if name in slow else [])] for name in MODELS}
    return [pytest.param(name, marks=marks[name]) for name in MODELS]


class LoadedModel:
    """One loaded model, a demo model or one of `TINY_CONFIGS`; several engines run on it one after the other."""

    def __init__(self, name: str, **changes: object) -> None:
        """``changes`` of the configuration are for those by which members' places in blocks may differ."""
        self.name = name
        self.config = replace(BASE, model=name, **changes)
        if name in TINY_CONFIGS:
            self.config = replace(self.config, model=str(checkpoint(name)), kv_cache="24MiB")
        self.preprocessor = Preprocessor.open(self.config)
        directory = resolve_model(self.config.model, self.config.cache_path)
        self.worker = ModelWorker(self.config, directory, 0, SingleRank())

    def tokens(self, few: int, of_tiny: int = 24) -> int:
        """How many of each answer to ask for: of a tiny model at least ``of_tiny``, so that all begin a block."""
        return max(few, of_tiny) if self.name in TINY_CONFIGS else few

    def engine(self, **changes: object) -> tuple[EngineCore, LocalExecutor]:
        """An engine with a poisoned cache: a token read that was never written makes every logit NaN."""
        config = replace(self.config, **changes)
        directory = resolve_model(config.model, config.cache_path)
        card = read_model_card(config, directory)
        self.worker.served.source = ModelSource(config, directory, card)
        self.worker.initialize_cache()
        self.worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
        executor = LocalExecutor(self.worker)
        lookup = open_lookup(config, card)
        return EngineCore(config, card, self.preprocessor.tokenizer, executor, lookup=lookup), executor

    def run(
        self, wanted: list[Answer], sampling: Mapping[str, SamplingParams] | None = None, **changes: object
    ) -> tuple[dict[str, GenerationResult], EngineCore]:
        engine, executor = self.engine(**changes)
        try:
            return serve(engine, self.preprocessor, wanted, sampling or {}), engine
        finally:
            executor.close()


def serve(
    engine: EngineCore,
    preprocessor: Preprocessor,
    wanted: list[Answer],
    sampling: Mapping[str, SamplingParams] = MappingProxyType({}),
) -> dict[str, GenerationResult]:
    """Results by the answers' names, and so is ``sampling``: greedy where it has none."""
    results = {answer.name: GenerationResult(answer.name) for answer in wanted}
    for answer in wanted:
        params = sampling.get(answer.name, GREEDY)
        engine.add(preprocessor.prepare(prompt=answer.prompt_ids, sampling=params, request_id=answer.name))
    while engine.has_work():
        for delta in engine.step(None):
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)
    assert engine.cache.pool.num_held == 0
    engine.cache.check_integrity()
    return results
