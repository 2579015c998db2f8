"""Real weights take the place of others, of tiny models: tokens are then those of an engine that started with them."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from safetensors.numpy import load_file, save_file
from support.engine.ranks import Ranks
from support.free_ports import free_ports
from support.lora import write_both
from support.small_engine import TINY
from support.tiny_checkpoints import checkpoint
from support.waiting import eventually

from headwise import Client, ClientKeys, EngineConfig, LocalEngine, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import ConfigError, HeadwiseError, InvalidRequestError, ModelError
from headwise.runtime.config.model_card import with_pool
from headwise.runtime.config.new_weights import with_weights
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult
from headwise.runtime.protocol.weights import Weights

PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 250, 60)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
CONFIG = replace(TINY, host_cache="4MiB", write_policy="write_through")


def config(name: str, seed: int, cache: Path) -> EngineConfig:
    return replace(CONFIG, model=str(checkpoint(name, seed)), cache_dir=str(cache))


def said(engine: LocalEngine) -> list[list[int]]:
    """Of two prompts at once, the second twice as long."""
    return [result.token_ids for result in engine.generate([PROMPT, PROMPT * 2], GREEDY)]


def oracle(name: str, seed: int, cache: Path) -> list[list[int]]:
    with LocalEngine(config(name, seed, cache)) as engine:
        return said(engine)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3.5", "deepseek-v3"])
def test_tokens_are_those_of_an_engine_that_was_started_with_them(name: str, tmp_path: Path) -> None:
    """Of full heads, of windows, of states, and of latents with experts: what was cached before serves nobody."""
    first, second = (oracle(name, seed, tmp_path) for seed in (0, 1))
    assert first != second
    with LocalEngine(config(name, 0, tmp_path)) as engine:
        assert said(engine) == first
        before = weakref.ref(engine._worker.served.model)
        assert engine.update_weights(str(checkpoint(name, 1)), version="second") == "second"
        assert before() is None, "there is no room for both"
        (result,) = engine.generate([PROMPT], GREEDY)
        assert (result.token_ids, result.weights) == (second[0], [(0, "second")])
        assert result.usage.cached_tokens == 0
        assert said(engine) == second
        assert engine.generate([PROMPT], GREEDY)[0].usage.cached_tokens > 0
        engine.sleep()
        engine.update_weights(str(checkpoint(name, 0)))
        engine.wake()
        assert said(engine) == first


@pytest.mark.parametrize("keep_running", [False, True])
def test_a_stream_goes_on_by_them(keep_running: bool, tmp_path: Path) -> None:
    with LocalEngine(config("qwen3", 0, tmp_path)) as engine:
        got: list[int] = []
        told: list[tuple[int, str]] = []
        for delta in engine.stream(PROMPT, replace(GREEDY, max_tokens=30)):
            if delta.weights:
                told.append((len(got), delta.weights))
            got += delta.token_ids
            if len(got) == 10:
                engine.update_weights(str(checkpoint("qwen3", 1)), version="second", keep_running=keep_running)
        ((at, version),) = told
        assert version == "second"
        assert 10 <= at <= 12
        again = engine.generate([PROMPT], GREEDY)[0]
    with LocalEngine(config("qwen3", 0, tmp_path)) as engine:
        assert engine.generate([PROMPT], replace(GREEDY, max_tokens=at))[0].token_ids == got[:at]
    with LocalEngine(config("qwen3", 1, tmp_path)) as engine:
        anew = engine.generate([PROMPT + got[:at]], replace(GREEDY, max_tokens=30 - at))[0].token_ids
        assert (got[at:] == anew) != keep_running, "kept, it goes on behind what others have computed"
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == again.token_ids, "and nobody else does"


@pytest.mark.parametrize("shape", [{"tp_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"])
def test_all_ranks_have_them(shape: dict[str, int], tmp_path: Path) -> None:
    """And keep what was computed of what runs."""
    given = replace(config("qwen3", 0, tmp_path), **shape)
    ranks = Ranks(given, checkpoint("qwen3"))
    executor, preprocessor = LocalExecutor(ranks), Preprocessor.open(given)
    core = EngineCore(given, with_pool(preprocessor.card, given, 1 << 22), preprocessor.tokenizer, executor)
    with LocalEngine(config("qwen3", 0, tmp_path)) as engine:
        expected = _changed_twice(engine.core)
    assert _changed_twice(core) == expected
    executor.close()
    ranks.close()


def _changed_twice(core: EngineCore) -> list[int]:
    """What a request says that gets other weights in the middle, keeps what was computed of it, and then does not."""
    result = GenerationResult("r")
    core.add(GenerateRequest("r", np.array(PROMPT, np.int32), replace(GREEDY, max_tokens=30)))
    for seed, count, keeps in ((1, 8, True), (2, 16, False)):
        while len(result.token_ids) < count:
            _step(core, result)
        model = str(checkpoint("qwen3", seed))
        new = NewWeights(Weights(f"v{seed}", model), with_weights(core.card, core.config, model), keeps)
        operation = core.change_weights(new)
        while not operation.is_done:
            _step(core, result)
    while core.has_work():
        _step(core, result)
    assert [version for _, version in result.weights] == ["v1", "v2"]
    return result.token_ids


def _step(core: EngineCore, result: GenerationResult) -> None:
    for delta in core.step(None):
        assert delta.error is None
        result.add(delta)


# ---- what does not fit ----


def copied(directory: Path, seed: int = 1) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3", seed), directory / "bad"))


def without(name: str) -> Callable[[Path], Path]:
    def made(directory: Path) -> Path:
        found = copied(directory)
        (found / name).unlink()
        return found

    return made


def cut_off(directory: Path) -> Path:
    found = copied(directory) / "model.safetensors"
    found.write_bytes(found.read_bytes()[:-100])
    return found.parent


def of_other_heads(directory: Path) -> Path:
    found = copied(directory)
    told = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(told | {"num_attention_heads": 8, "rope_theta": 7.0}))
    return found


def no_json(directory: Path) -> Path:
    found = copied(directory)
    (found / "config.json").write_text("{")
    return found


def a_text(directory: Path) -> Path:
    (directory / "weights.txt").write_text("none")
    return directory / "weights.txt"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such directory": (lambda directory: directory / "nowhere", "is no known model, file or directory"),
    "empty": (lambda directory: directory, "has no config.json"),
    "a file": (a_text, "is a file of an unknown kind"),
    "without config": (without("config.json"), "has no config.json"),
    "without weights": (without("model.safetensors"), "has neither model.safetensors nor"),
    "cut off": (cut_off, "model.safetensors"),
    "no JSON": (no_json, "config.json"),
    "of other heads": (of_other_heads, "differs in .*num_heads"),
    "of another model": (lambda directory: checkpoint("gemma2"), "are of another model than .*qwen3"),
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with LocalEngine(config("qwen3", 0, tmp_path_factory.mktemp("cache"))) as engine:
        yield engine, said(engine)


@pytest.mark.parametrize("kind", list(BAD))
def test_what_does_not_fit_is_told_and_changes_nothing(serving: Any, kind: str, tmp_path: Path) -> None:
    engine, first = serving
    make, says = BAD[kind]
    with pytest.raises((ModelError, ConfigError), match=says):
        engine.update_weights(str(make(tmp_path)))
    assert said(engine) == first
    assert engine.stats()["weights"] == ""


@pytest.mark.parametrize("version", ["two\nlines", "x" * 5000])
def test_a_version_is_printable_text(serving: Any, version: str) -> None:
    with pytest.raises(InvalidRequestError, match="version of weights"):
        serving[0].update_weights(str(checkpoint("qwen3", 1)), version=version)


@pytest.mark.parametrize("keep_running", [False, True])
def test_weights_that_lack_a_tensor_are_refused_while_a_stream_goes_on(tmp_path: Path, keep_running: bool) -> None:
    found = copied(tmp_path)
    tensors = load_file(found / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, found / "model.safetensors")
    with LocalEngine(config("qwen3", 0, tmp_path)) as engine:
        first = said(engine)
        got: list[int] = []
        for delta in engine.stream(PROMPT, GREEDY):
            got += delta.token_ids
            if len(got) == 5:
                with pytest.raises(ModelError, match=r"lacks the tensor 'model.layers.1.mlp.down_proj.weight'"):
                    engine.update_weights(str(found), keep_running=keep_running)
        assert got == first[0]
        assert said(engine) == first
        assert engine.generate([PROMPT], GREEDY)[0].usage.cached_tokens > 0, "what was cached serves on"


# ---- on Ray ----


def test_a_deployment_has_them_whoever_is_lost(tmp_path: Path) -> None:
    """Two engines; then one loses its process and the other its worker, and both come back with the new weights."""
    wanted = [oracle("qwen3", seed, tmp_path)[0] for seed in (0, 1, 2)]
    adapter, _ = write_both(tmp_path / "adapters", "qwen3", 1)
    there = f"{checkpoint('qwen3', 1).parent}, {adapter.parent}"
    key, http = "of-an-operator", free_ports(1)[0]
    over_http = {"http": http, "api_key": key, "http_operations": True}
    deployed = replace(config("qwen3", 0, tmp_path), weights_from=there, port=0, replicas=2, standby=False, **over_http)
    with ExitStack() as stack:
        deployment = stack.enter_context(Deployment.start(deployed))
        assert deployment.client_keys is not None
        keys = ClientKeys(deployment.client_keys.server, key)
        client = stack.enter_context(Client(deployment.client_address, keys=keys))
        assert client.generate(PROMPT, GREEDY).token_ids == wanted[0]
        client.update_weights(str(checkpoint("qwen3", 1)), version="one")
        for _ in range(4):
            result = client.generate(PROMPT, GREEDY)
            assert (result.token_ids, result.weights) == (wanted[1], [(0, "one")])
        eventually(lambda: max(tiers.get("device", 0) for tiers in _held(client)) == 56)
        with pytest.raises(ModelError, match=r"engine-0, engine-1 cannot have these weights: .*nothing has changed"):
            client.update_weights(str(checkpoint("qwen3", 1).parent / "nowhere"))
        with pytest.raises(ModelError, match=r"weights must be in .* \(weights_from\), and .*nowhere' is not"):
            client.update_weights(str(tmp_path / "nowhere"))
        with pytest.raises(HeadwiseError, match="keep_running must be True or False"):
            client.update_weights(str(checkpoint("qwen3", 2)), keep_running="yes")  # type: ignore[arg-type]
        engines = [deployment._supervisor.roles[name].handle for name in ("engine-0", "engine-1")]
        os.kill(ray.get(engines[0].__ray_call__.remote(lambda engine: os.getpid())), 9)
        os.kill(ray.get(engines[1].worker_pids.remote())[0], 9)
        assert client.generate(PROMPT, GREEDY).token_ids == wanted[1]
        eventually(lambda: _weights(client) == ["one", "one"])
        for _ in range(4):
            assert client.generate(PROMPT, GREEDY).token_ids == wanted[1]
        client.update_weights(str(checkpoint("qwen3", 2)), version="two", keep_running=True)
        assert client.generate(PROMPT, GREEDY).token_ids == wanted[2]
        assert client.stats()["weights"]["version"] == "two"
        with pytest.raises(InvalidRequestError, match="there is no adapter 'sql'"):
            client.generate(PROMPT, GREEDY, adapter="sql")
        client.update_weights(adapters={"sql": str(adapter)}, version="three")
        assert client.generate(PROMPT, GREEDY).token_ids == wanted[2], "which it had, and has"
        assert client.generate(PROMPT, GREEDY, adapter="sql").token_ids != wanted[2]
        eventually(lambda: bool(client.find_prefix(PROMPT, adapter="sql")["engines"]))
        client.update_weights(adapters={})
        with pytest.raises(InvalidRequestError, match="there is no adapter 'sql'"):
            client.generate(PROMPT, GREEDY, adapter="sql")
        asked = {"base_url": f"http://127.0.0.1:{http}", "headers": {"authorization": f"Bearer {key}"}, "timeout": 120}
        with httpx.Client(**asked) as operator:
            loaded = operator.post("/v1/load_lora_adapter", json={"lora_name": "again", "lora_path": str(adapter)})
            assert loaded.text == "Success: LoRA adapter 'again' added successfully."
            said = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
            of_both = [
                operator.post("/v1/completions", json={**said, "model": name}) for name in ("again", deployed.model)
            ]
            by_adapter, by_model = (answer.json()["choices"][0]["token_ids"] for answer in of_both)
            assert by_model == wanted[2][:4] != by_adapter
            assert operator.post("/v1/unload_lora_adapter", json={"lora_name": "again"}).status_code == 200
            assert operator.post("/v1/completions", json={**said, "model": "again"}).status_code == 404


def _held(client: Client) -> list[dict[str, int]]:
    """How much of `PROMPT` each tier of each engine is said to hold."""
    return list(client.find_prefix(PROMPT)["engines"].values()) or [{}]


def _weights(client: Client) -> list[str]:
    engines = client.stats()["engines"]
    return [engines[name].get("weights", "?") for name in sorted(engines)]
