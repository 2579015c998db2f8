"""Requests with LoRA adapters say what the models say that the adapters are merged into, whoever is beside them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE, GREEDY
from support.engine.ranks import Ranks
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.lora import draw_adapter, merged, write_adapter, write_both
from support.reference import CLOSE
from support.tiny_checkpoints import checkpoint, draw_weights, reference, write_checkpoint

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.errors import EngineDiedError, InvalidRequestError, ModelError
from headwise.runtime.config.new_weights import with_weights
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.request import GenerationResult
from headwise.runtime.protocol.weights import FIRST, Weights

PROMPTS = [np.random.default_rng(5).integers(3, 259, length).tolist() for length in (9, 40, 90)]
FEW = replace(GREEDY, max_tokens=16)
SIZES = {"kv_cache": "24MiB", "max_model_len": 512, "cpu_threads": 1, "dtype": "float32"}

MODELS = [
    *("qwen2", "qwen3", "gemma2", "phi3", "glm4", "cohere2", "olmo3", "smollm3", "qwen3-moe", "gpt-oss", "qwen3.5"),
    *("deepseek-v3", "arcee"),
]
"""Biases, norms of heads, norms around, fused and interleaved projections, MLPs beside attention, whole norms, layers
without positions, experts beside dense layers and alone, gated heads beside delta-nets, what heads over latents see,
MLPs without gates."""


def judged(result: GenerationResult) -> list[int]:
    """The tokens before the first one that rounding may decide."""
    for at, each in enumerate(result.logprobs):
        (_, first), (_, second) = each.top
        if first - second < CLOSE:
            return result.token_ids[:at]
    return result.token_ids


def said(model: Path, **changes: Any) -> list[GenerationResult]:
    with LocalEngine(EngineConfig(model=str(model), **{**SIZES, **changes})) as engine:
        return engine.generate(PROMPTS, replace(FEW, logprobs=2))


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, list[list[GenerationResult]]]:
    """A model, the option that names two adapters of it, and what it says without, with the one, and with the other."""
    name: str = request.param
    first, second = (write_both(tmp_path, name, seed) for seed in (1, 2))
    expected = [said(checkpoint(name)), said(first[1]), said(second[1])]
    assert len({tuple(results[2].token_ids) for results in expected}) == 3, "they say different things"
    return name, f"one={first[0]},other={second[0]}", expected


def assert_as(expected: list[GenerationResult], found: list[GenerationResult]) -> None:
    sure = [judged(result) for result in expected]
    assert sum(map(len, sure)) > 12
    for wanted, result in zip(sure, found, strict=True):
        assert result.token_ids[: len(wanted)] == wanted


def all_at_once(engine: LocalEngine) -> list[list[GenerationResult]]:
    """What requests say that are served together, some without an adapter, and some with either."""
    core, preprocessor = engine.core, engine.preprocessor
    results: dict[str, GenerationResult] = {}
    for place, adapter in enumerate(("", "one", "other")):
        for index, prompt in enumerate(PROMPTS):
            name = f"{place}-{index}"
            results[name] = GenerationResult(name)
            core.add(preprocessor.prepare(prompt=prompt, sampling=FEW, request_id=name, adapter=adapter))
    while core.has_work():
        for delta in core.step(None):
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)
    core.cache.check_integrity()
    return [[results[f"{place}-{index}"] for index in range(len(PROMPTS))] for place in range(3)]


LIKE_OTHERS = ("qwen3", "gemma2", "glm4", "olmo3", "smollm3", "qwen3-moe", "arcee")
"""Whose projections lie as those of others: for the soak."""


@pytest.mark.parametrize(
    "two",
    [pytest.param(name, marks=[pytest.mark.soak] if name in LIKE_OTHERS else []) for name in MODELS],
    indirect=True,
)
def test_batches_of_all_kinds_say_what_merged_models_do(two: Any) -> None:
    name, adapters, expected = two
    config = EngineConfig(model=str(checkpoint(name)), adapters=adapters, max_batched_tokens=64, **SIZES)
    with LocalEngine(config) as engine:
        for _ in range(2):
            for wanted, found in zip(expected, all_at_once(engine), strict=True):
                assert_as(wanted, found)


@pytest.mark.parametrize("two", ["qwen3"], indirect=True)
@pytest.mark.parametrize("changes", [{"tensor_ops": "numpy"}, {"tensor_ops": "paddle"}, {"speculation": 4}])
def test_other_operations_and_drafts_say_the_same(two: Any, changes: dict[str, Any]) -> None:
    if changes.get("tensor_ops") == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    name, adapters, expected = two
    with LocalEngine(EngineConfig(model=str(checkpoint(name)), adapters=adapters, **SIZES, **changes)) as engine:
        for wanted, found in zip(expected, all_at_once(engine), strict=True):
            assert_as(wanted, found)


def served(engine: EngineCore, preprocessor: Preprocessor, adapter: str) -> list[GenerationResult]:
    """All prompts with this adapter, at once."""
    results = [GenerationResult(str(index)) for index in range(len(PROMPTS))]
    for index, prompt in enumerate(PROMPTS):
        engine.add(preprocessor.prepare(prompt=prompt, sampling=FEW, request_id=str(index), adapter=adapter))
    while engine.has_work():
        for delta in engine.step(None):
            assert delta.error is None, delta.error
            results[int(delta.request_id)].add(delta)
    return results


@pytest.mark.parametrize(
    ("two", "ranks"),
    [
        ("qwen3", {"tp_size": 2}),
        ("phi3", {"tp_size": 2}),
        ("olmo3", {"tp_size": 2}),
        ("qwen3", {"pipeline_parallel_size": 3, "max_batched_tokens": 64}),
        ("deepseek-v3", {"pipeline_parallel_size": 2}),
        ("olmo3", {"pipeline_parallel_size": 2, "tp_size": 2, "tensor_ops": "numpy"}),
    ],
    indirect=["two"],
)
def test_ranks_say_the_same(two: Any, ranks: dict[str, Any]) -> None:
    name, adapters, expected = two
    directory = checkpoint(name)
    config = replace(BASE, model=str(directory), adapters=adapters, **{**SIZES, **ranks})
    preprocessor, workers = Preprocessor.open(config), Ranks(config, directory)
    executor = LocalExecutor(workers)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    with closing(workers), closing(executor):
        for place, adapter in enumerate(("", "one", "other")):
            assert_as(expected[place], served(engine, preprocessor, adapter))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_stage_of_which_an_adapter_changes_nothing_is_beside_one_of_which_it_does(layer: int, tmp_path: Path) -> None:
    name = "qwen3"  # three layers: two and one
    known = reference(name)
    config, shapes = known["config"], known["shapes"]
    drawn = draw_adapter(shapes, 1)
    matrices = {module: both for module, both in drawn.items() if f"layers.{layer}." in module}
    assert 0 < len(matrices) < len(drawn)
    whole = write_checkpoint(tmp_path / "merged", config, shapes, merged(draw_weights(config, shapes), matrices))
    expected, plain = said(whole), said(checkpoint(name))
    assert [each.token_ids for each in expected] != [each.token_ids for each in plain]
    adapters = f"one={write_adapter(tmp_path / 'adapter', matrices)}"
    staged = replace(BASE, model=str(checkpoint(name)), adapters=adapters, pipeline_parallel_size=2, **SIZES)
    preprocessor, workers = Preprocessor.open(staged), Ranks(staged, checkpoint(name))
    executor = LocalExecutor(workers)
    engine = EngineCore(staged, preprocessor.card, preprocessor.tokenizer, executor)
    with closing(workers), closing(executor):
        for adapter, wanted in (("one", expected), ("", plain), ("one", expected)):
            assert_as(wanted, served(engine, preprocessor, adapter))


def test_an_adapter_that_changes_what_no_stage_has_is_told(tmp_path: Path) -> None:
    down, up = draw_adapter(reference("qwen3")["shapes"], 1)["model.layers.0.self_attn.q_proj"]
    for module in ("model.layers.7.self_attn.q_proj", "model.layers.2.mlp.router"):
        path = write_adapter(tmp_path / module, {module: (down, up)})
        config = replace(BASE, model=str(checkpoint("qwen3")), adapters=f"x={path}", pipeline_parallel_size=2, **SIZES)
        with pytest.raises(ModelError, match=rf"changes {module.removeprefix('model.')}, which this model has not"):
            Ranks(config, checkpoint("qwen3"))


@pytest.mark.parametrize("two", ["qwen3"], indirect=True)
def test_a_gpu_s_operations_say_the_same(two: Any) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    name, adapters, expected = two
    given = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", "device": "cuda"}
    config = EngineConfig(model=str(checkpoint(name)), adapters=adapters, **given)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        few = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        for place, options in enumerate(({}, {"adapter": "one"}, {"adapter": "other"})):
            results = engine.generate(PROMPTS[:2], few, **options)
            assert [each.token_ids for each in results] == [each.token_ids[:3] for each in expected[place][:2]]


@pytest.mark.parametrize("two", ["qwen3"], indirect=True)
def test_the_cache_serves_an_adapter_s_prefixes_to_it_alone(two: Any) -> None:
    name, adapters, _ = two
    with LocalEngine(EngineConfig(model=str(checkpoint(name)), adapters=adapters, block_size=16, **SIZES)) as engine:
        cached = []
        for adapter in ("", "one", "other", "", "one", "other"):
            options = {"adapter": adapter} if adapter else {}
            cached.append(engine.generate([PROMPTS[2]], GREEDY, **options)[0].usage.cached_tokens)
        assert cached == [0, 0, 0, 80, 80, 80]
        with pytest.raises(InvalidRequestError, match="there is no adapter 'third'; served are one, other"):
            engine.generate(["x"], GREEDY, adapter="third")


def test_an_adapter_that_does_not_fit_is_told_before_anything_is_served(tmp_path: Path) -> None:
    shapes = reference("qwen3")["shapes"]
    matrices = draw_adapter(shapes, 1)
    down, up = matrices["model.layers.0.self_attn.q_proj"]
    cases = {
        "wide": ({"model.layers.0.self_attn.q_proj": (np.pad(down, ((0, 0), (0, 8))), up)}, "has 72 inputs and 256"),
        "tall": ({"model.layers.0.self_attn.o_proj": (up.T, np.zeros((65, 4), np.float32))}, "256 inputs and 65 "),
        "deep": ({"model.layers.7.self_attn.q_proj": (down, up)}, "changes layers.7.self_attn.q_proj, which this "),
        "else": ({"model.layers.0.mlp.router": (down, up)}, "changes layers.0.mlp.router, which this model has not"),
    }
    for name, (wrong, says) in cases.items():
        path = write_adapter(tmp_path / name, wrong)
        with pytest.raises(ModelError, match=says):
            LocalEngine(EngineConfig(model=str(checkpoint("qwen3")), adapters=f"x={path}", **SIZES))


def test_what_latents_are_made_by_is_not_adapted(tmp_path: Path) -> None:
    known = reference("deepseek-v3")["shapes"]["model.layers.0.self_attn.q_b_proj.weight"]
    matrices = {"model.layers.0.self_attn.q_b_proj": (np.zeros((4, known[1])), np.zeros((known[0], 4)))}
    path = write_adapter(tmp_path / "x", {name: tuple(np.float32(m) for m in both) for name, both in matrices.items()})
    with pytest.raises(ModelError, match=r"changes layers.0.self_attn.q_b_proj, which this model has not, or is not"):
        LocalEngine(EngineConfig(model=str(checkpoint("deepseek-v3")), adapters=f"x={path}", **SIZES))


@pytest.mark.parametrize("two", ["qwen3", "deepseek-v3"], indirect=True)
def test_adapters_come_and_go_while_an_engine_serves(
    two: tuple[str, str, list[list[GenerationResult]]], tmp_path: Path
) -> None:
    """Its weights stay, and what was cached for whom nothing changes."""
    name, option, (bare, first, second) = two
    one, other = (pair.partition("=")[2] for pair in option.split(","))
    wrong = str(write_both(tmp_path / "wrong", "gemma2", 1)[0])
    with LocalEngine(EngineConfig(model=str(checkpoint(name)), **SIZES)) as engine:

        def saying(adapter: str) -> list[GenerationResult]:
            return engine.generate(PROMPTS, replace(FEW, logprobs=2), adapter=adapter)

        assert_as(bare, saying(""))
        weights = dict(engine._worker.served._prepared._made)
        with pytest.raises(InvalidRequestError, match="there is no adapter 'one'; none is served"):
            saying("one")
        engine.update_weights(adapters={"one": one}, version="with one")
        again = engine._worker.served._prepared._made
        assert weights
        assert all(again[name] is weight for name, weight in weights.items()), "they were not loaded again"
        assert_as(first, saying("one"))
        again = saying("")
        assert_as(bare, again)
        assert again[2].usage.cached_tokens > 0
        assert again[2].weights == [(0, "with one")]
        for bad, says in ((wrong, "adapter 'two'"), (str(tmp_path / "nowhere"), "adapter 'two'.*adapter_config.json")):
            with pytest.raises(ModelError, match=says):
                engine.update_weights(adapters={"one": other, "two": bad})
        assert_as(first, saying("one"))
        assert saying("one")[2].usage.cached_tokens > 0
        engine.update_weights(adapters={"two": other, "one": one})
        assert saying("one")[2].usage.cached_tokens > 0, "by another place among them"
        assert_as(second, saying("two"))
        engine.update_weights(add_adapters={"one": other}, drop_adapters=["two"])
        assert_as(second, saying("one"))
        with pytest.raises(InvalidRequestError, match="there is no adapter 'two'"):
            saying("two")
        stream = engine.stream(PROMPTS[2], replace(FEW, max_tokens=60), adapter="one")
        next(stream)
        engine.update_weights(adapters={})
        with pytest.raises(EngineDiedError, match="adapter 'one' is served no more"):
            list(stream)
        assert_as(bare, saying(""))


def test_a_scheduler_that_knows_of_none_has_those_of_the_start_again(tmp_path: Path) -> None:
    adapter, model = write_both(tmp_path, "qwen3", 1)
    config = EngineConfig(model=str(checkpoint("qwen3")), adapters=f"one={adapter}", **SIZES)
    with LocalEngine(config) as engine:
        engine.update_weights(adapters={})
        first = NewWeights(FIRST, with_weights(engine.core.card, config, ""))
        engine._calls.change_weights(first)
        engine.preprocessor.naming = first.card.naming
        assert_as(said(model), engine.generate(PROMPTS, replace(FEW, logprobs=2), adapter="one"))


def test_ranks_have_other_adapters_or_none_has(tmp_path: Path) -> None:
    adapter, model = write_both(tmp_path, "qwen3", 1)
    wrong = write_both(tmp_path / "wrong", "gemma2", 1)[0]
    config = EngineConfig(model=str(checkpoint("qwen3")), tp_size=2, **SIZES)
    ranks = Ranks(config, checkpoint("qwen3"))
    preprocessor = Preprocessor.open(config)
    core = EngineCore(config, preprocessor.card, preprocessor.tokenizer, LocalExecutor(ranks))
    with closing(ranks):
        for adapters, refuses in ((f"one={adapter}", False), (f"one={wrong}", True)):
            weights = Weights(adapters, "", adapters)
            card = with_weights(core.card, config, "", adapters)
            operation = core.change_weights(NewWeights(weights, card))
            while not operation.is_done:
                core.step(None)
            assert bool(operation.refusal) == refuses
            result = GenerationResult("r")
            preprocessor.naming = core.card.naming
            sampling = replace(FEW, logprobs=2)
            core.add(preprocessor.prepare(prompt=PROMPTS[1], sampling=sampling, request_id="r", adapter="one"))
            while core.has_work():
                for delta in core.step(None):
                    result.add(delta)
            assert_as(said(model)[1:2], [result])
