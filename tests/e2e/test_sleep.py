"""An engine that slept in the middle of its requests says what it would have said, and gave up its memory meanwhile."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import GREEDY, LoadedModel, tiny_cache_kinds
from support.reference import Answer, answers, assert_same
from support.waiting import PATIENCE_S, eventually

from headwise import EngineConfig, LocalEngine
from headwise.errors import ConfigError, EngineDiedError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.protocol.request import GenerationResult
from headwise.runtime.worker.worker import ModelWorker

MODEL = "smollm2-135m"
FEW = 16
"""Tokens of a stream that is put to sleep after a third of them."""
SURE = "chat"
"""A prompt each of whose `FEW` tokens leads by far: what was decoded is computed as a prompt after a sleep, and with
activations that are rounded to bfloat16 others would turn on some CPUs."""
CONFIG = EngineConfig(
    model=MODEL, dtype="float32", weights_dtype="gguf", kv_cache="64MiB", max_model_len=512, block_size=16
)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


def wanted(name: str = MODEL) -> list[Answer]:
    return [answer for answer in answers(name) if len(answer.prompt_ids) <= 400][-4:]


class Serving:
    """An engine that serves the answers' requests."""

    def __init__(self, loaded: LoadedModel, engine: EngineCore) -> None:
        self.engine, self.wanted = engine, wanted(loaded.name)
        self.results = {answer.name: GenerationResult(answer.name) for answer in self.wanted}
        for answer in self.wanted:
            prepared = loaded.preprocessor.prepare(prompt=answer.prompt_ids, sampling=GREEDY, request_id=answer.name)
            engine.add(prepared)

    @property
    def tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results.values())

    def step(self) -> None:
        for delta in self.engine.step(None):
            assert delta.error is None, delta.error
            self.results[delta.request_id].add(delta)

    def operate(self, action: str) -> None:
        operation = self.engine.operate(action)
        while not operation.is_done:
            self.step()


def memory(worker: ModelWorker) -> list[weakref.ref[Any]]:
    """The worker's weights and arena."""
    served = worker.served
    return [weakref.ref(served.model), weakref.ref(served.model._layers[0]), weakref.ref(served.runner.cache.arena)]


@pytest.mark.model
@pytest.mark.parametrize("tensor_ops", ["paddle", pytest.param("numpy", marks=pytest.mark.soak)])
def test_weights_and_arena_are_given_up(tensor_ops: str) -> None:
    config = EngineConfig(model=MODEL, kv_cache="32MiB", max_model_len=128, host_cache="8MiB", tensor_ops=tensor_ops)
    with LocalEngine(config) as engine:
        few = replace(GREEDY, max_tokens=4)
        before = engine.generate(["The sky is"], few)[0].token_ids
        held = memory(engine._worker)
        assert all(reference() is not None for reference in held)
        engine.sleep()
        assert [reference() for reference in held] == [None, None, None]
        assert engine.stats()["state"] == "asleep"
        engine.wake()
        assert engine.generate(["The sky is"], few)[0].token_ids == before


@tiny_cache_kinds()
@pytest.mark.parametrize(
    "host",
    [
        pytest.param({}, id="device", marks=pytest.mark.soak),
        pytest.param({"host_cache": "128MiB", "write_policy": "write_back"}, id="host"),
    ],
)
def test_tokens_are_the_same_with_sleep_in_the_middle(loaded: LoadedModel, host: dict[str, str]) -> None:
    engine, executor = loaded.engine(
        kv_cache="128MiB" if loaded.name == MODEL else loaded.config.kv_cache,
        max_model_len=1024,
        max_batched_tokens=64,
        block_size=16,
        load_timeout_s=PATIENCE_S,
        **host,
    )
    serving = Serving(loaded, engine)
    for pause in (1, 40, 150):  # among the prompts, and twice among the tokens
        while serving.tokens < pause:
            serving.step()
        serving.operate("sleep")
        assert engine.stats()["requests"]["waiting"] > 0
        assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
        serving.operate("wake")
        # What is read there before it is written or loaded makes every logit NaN.
        loaded.worker.served.runner.cache.arena.view(np.float32)[:] = np.nan
    while engine.has_work():
        serving.step()
    executor.close()
    for answer in serving.wanted:
        assert_same(answer, serving.results[answer.name].token_ids)
    if host:
        assert engine.stats()["host"]["loaded_blocks"] > 0
        assert engine.stats()["host"]["failed_blocks"] == 0
    engine.cache.check_integrity()


@pytest.mark.model
def test_a_stream_pauses_while_another_thread_has_the_engine_sleep() -> None:
    prompt = next(answer.prompt_ids for answer in answers(MODEL) if answer.name == SURE)
    sampling = replace(GREEDY, max_tokens=FEW)
    with LocalEngine(CONFIG) as engine:
        expected = engine.generate([prompt], sampling)[0].token_ids
        result = GenerationResult("")
        paused = threading.Event()

        def read() -> None:
            for delta in engine.stream(prompt, sampling):
                result.add(delta)
                if len(result.token_ids) == 4:
                    paused.set()
                    # Else it might be through before it is told to pause.
                    eventually(lambda: engine.stats()["state"] != "awake")

        reader = threading.Thread(target=read)
        reader.start()
        assert paused.wait(PATIENCE_S)
        engine.sleep()
        assert engine.stats()["requests"]["waiting"] == 1
        engine.sleep()
        engine.wake()
        reader.join(PATIENCE_S)
        assert result.token_ids == expected


@pytest.mark.model
def test_a_stream_may_be_put_to_sleep_and_woken_by_who_reads_it() -> None:
    prompt = next(answer.prompt_ids for answer in answers(MODEL) if answer.name == SURE)
    sampling = replace(GREEDY, max_tokens=FEW)
    with LocalEngine(CONFIG) as engine:
        expected = engine.generate([prompt], sampling)[0].token_ids
        result = GenerationResult("")
        for delta in engine.stream(prompt, sampling):
            result.add(delta)
            if len(result.token_ids) == 5:
                engine.sleep()
                engine.wake()
        assert result.token_ids == expected
        assert engine.reset_cache() > 0
        assert engine.stats()["cache"]["cached_blocks"] == 0
        with pytest.raises(ConfigError, match="host_cache"):
            engine.reset_cache("host")


@pytest.mark.model
def test_a_checkpoint_that_vanished_is_the_engine_s_death(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in resolve_model(MODEL, CONFIG.cache_path).iterdir():
        (model / file.name).symlink_to(file)
    config = EngineConfig(model=str(model), kv_cache="32MiB", max_model_len=128)
    with LocalEngine(config) as engine:
        engine.sleep()
        for file in model.glob("*.safetensors"):
            file.unlink()
        with pytest.raises(EngineDiedError, match=r"rank 0 could not wake: .*safetensors"):
            engine.wake()
