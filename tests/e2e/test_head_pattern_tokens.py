"""SmolLM2 under a head pattern says what dense attention, masked per head in NumPy, makes it say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.reference import CLOSE, Answer, answers, assert_same

from headwise.cache_controller.head_pattern import HeadPattern, format_pattern
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

pytestmark = pytest.mark.model

PROMPT, OUTPUT = 112, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)


KeysValues = dict[int, tuple[np.ndarray, np.ndarray]]
"""Per layer, of all tokens so far."""


class MaskedAttention:
    """An `AttentionLayer` in NumPy: all keys of the sequence so far, and a mask per KV head.

    Every line of it is meant to be obvious: ``see[h, i, j]`` is whether head ``h`` lets query ``i`` look at key ``j``.
    """

    def __init__(self, worker: ModelWorker, positions: np.ndarray, kv: KeysValues, is_masked: bool) -> None:
        self.worker, self.positions, self.kv, self.is_masked = worker, positions, kv, is_masked

    def __call__(self, layer, query, key, value, rotation, sink_logits=None, wanted=None):
        ops, config = self.worker._device.ops, self.worker.card.config
        query, key = (ops.rope(x, *rotation) for x in (query, key))
        q, k, v = (ops.kernel_array(x).astype(np.float64) for x in (query, key, value))
        if layer in self.kv:
            k, v = (np.concatenate([old, new]) for old, new in zip(self.kv[layer], (k, v), strict=True))
        self.kv[layer] = k, v
        i, j = self.positions[:, None], np.arange(len(k))[None]
        see = np.stack(
            [
                (j <= i) & ((not self.is_masked) | (policy.window == 0) | (i - j < policy.window) | (j < policy.sink))
                for policy in config.policies[layer]
            ]
        )
        share = config.num_heads // config.num_kv_heads
        q, k, v = (x.swapaxes(0, 1) for x in (q, np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)))
        scores = config.attention_scale * (q @ k.swapaxes(1, 2))
        scores = np.where(np.repeat(see, share, axis=0), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        return ops.from_kernel_array(np.ascontiguousarray(out.swapaxes(0, 1), dtype=np.float32))


def oracle(worker: ModelWorker, name: str, prompt: list[int], is_masked: bool = True) -> Answer:
    """Greedy tokens of the worker's own model under masked attention, and by how much each was the best."""
    kv: KeysValues = {}
    tokens, gaps, step = list(prompt), [], np.array(prompt, dtype=np.int32)
    for _ in range(OUTPUT):
        positions = np.arange(len(tokens) - len(step), len(tokens), dtype=np.int32)
        hidden = worker.served.model.forward(step, positions, MaskedAttention(worker, positions, kv, is_masked))
        logits = worker.served.model.logits(worker._device.ops.take_rows(hidden, np.array([len(step) - 1])))[0]
        second, best = np.sort(logits)[-2:]
        gaps.append(float(best - second))
        step = np.array([logits.argmax()], dtype=np.int32)
        tokens.append(int(step[0]))
    return Answer(name, list(prompt), tokens[len(prompt) :], gaps, [], [], [], [])


class LoadedModel:
    """SmolLM2 under a pattern that makes half of its heads streaming; engines run on it one after the other."""

    def __init__(self, path: Path) -> None:
        scores = np.random.default_rng(3).random((30, 3))
        path.write_text(format_pattern(HeadPattern(scores, str(path), "smollm2-135m")))
        self.config = EngineConfig(
            model="smollm2-135m", head_pattern=str(path), sparsity=0.5, sink=16, window=64, block_size=16,
            kv_cache="64MiB", max_model_len=512, max_batched_tokens=128, cpu_threads=1, dtype="float32",
            weights_dtype="float32",  # of a file's blocks rows are rounded: logits of a prompt cut otherwise differ
        )  # fmt: skip
        self.directory = resolve_model(self.config.model, self.config.cache_path)
        self.preprocessor = Preprocessor.open(self.config)
        self.worker = ModelWorker(self.config, self.directory, 0, SingleRank())
        text = max((answer.prompt_ids for answer in answers("smollm2-135m")), key=len)
        texts = [text[:PROMPT], text[PROMPT : 2 * PROMPT], text[: PROMPT // 2] + text[-PROMPT // 2 :]]
        self.wanted = [oracle(self.worker, f"text {i}", text) for i, text in enumerate(texts)]

    def run(self, rounds: int = 1, urgent: bool = False, **changes: object) -> EngineCore:
        """Serve all prompts, ``rounds`` times over, in a poisoned cache; the tokens must be the oracle's.

        With a host cache the device forgets all between the rounds.
        """
        config = replace(self.config, **changes)
        card = read_model_card(config, self.directory)
        self.worker.served.source = ModelSource(config, self.directory, card)
        self.worker.initialize_cache()
        self.worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
        executor = LocalExecutor(self.worker)
        engine = EngineCore(config, self.worker.card, self.preprocessor.tokenizer, executor)
        try:
            for _ in range(rounds):
                self.serve(engine, urgent)
                if engine.cache.host.is_there:
                    engine.cache.pool.evict_all()
        finally:
            executor.close()
        assert engine.cache.pool.num_held == 0
        engine.cache.check_integrity()
        return engine

    def serve(self, engine: EngineCore, urgent: bool) -> None:
        """All prompts at once; or, if ``urgent``, the first alone until it speaks, then the others before it."""
        results = {answer.name: GenerationResult(answer.name) for answer in self.wanted}

        def add(wanted: list[Answer], priority: int) -> None:
            for answer in wanted:
                prompt = {"prompt": answer.prompt_ids, "request_id": answer.name, "priority": priority}
                engine.add(self.preprocessor.prepare(sampling=GREEDY, **prompt))

        first, others = self.wanted[:1], self.wanted[1:]
        add(first if urgent else self.wanted, priority=1)
        while engine.has_work():
            for delta in engine.step(None):
                assert delta.error is None, delta.error
                results[delta.request_id].add(delta)
            if urgent and len(results[first[0].name].token_ids) >= 3:
                add(others, priority=0)
                urgent = False
        for answer in self.wanted:
            assert_same(answer, results[answer.name].token_ids)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(tmp_path_factory.mktemp("pattern") / "pattern.json")


def test_the_oracle_judges_most_tokens_and_the_pattern_changes_some(loaded: LoadedModel) -> None:
    assert sum(len(answer.judged) for answer in loaded.wanted) >= 0.8 * OUTPUT * len(loaded.wanted), (
        CLOSE,
        loaded.wanted,
    )
    assert any(
        oracle(loaded.worker, answer.name, answer.prompt_ids, is_masked=False).output_ids != answer.output_ids
        for answer in loaded.wanted
    )


def test_tokens_with_recycling_are_those_of_masked_dense_attention(loaded: LoadedModel) -> None:
    engine = loaded.run(prefix_caching=False)
    assert engine.stats()["cache"]["recycled_blocks"] > 0


def test_prefixes_from_the_cache_change_no_token(loaded: LoadedModel) -> None:
    engine = loaded.run(rounds=2)
    assert engine.stats()["cache"]["hit_tokens"] > 0
    assert engine.stats()["cache"]["recycled_blocks"] > 0


def test_prefixes_from_the_host_change_no_token(loaded: LoadedModel) -> None:
    engine = loaded.run(rounds=2, host_cache="64MiB", write_policy="write_through")
    assert engine.stats()["cache"]["host_hit_tokens"] > 0
    assert engine.stats()["cache"]["recycled_blocks"] > 0


def test_preemption_changes_no_token(loaded: LoadedModel) -> None:
    card = loaded.preprocessor.card
    columns = -(-(PROMPT + OUTPUT) // card.layout.block_size)
    blocks = 2 * columns  # one request's full group, its window group and some more: no room for two requests
    assert len(card.plan.groups) == 2
    engine = loaded.run(urgent=True, kv_cache=f"{blocks * card.layout.block_bytes}B", max_model_len=0)
    assert engine.stats()["requests"]["preemptions"] > 0
    assert engine.stats()["cache"]["recycled_blocks"] > 0
