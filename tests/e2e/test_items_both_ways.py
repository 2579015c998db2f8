"""Images whose tokens see one another (Gemma 3, Gemma 4): transformers' tokens, whoever computes, in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE
from support.engine.ranks import Ranks
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import CLOSE
from support.tiny_images import FIRST_ID, encoded, image_model, picture, references

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.errors import InvalidRequestError
from headwise.runtime.encoder.image_encoder import ImageEncoder
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.prompt_items import PromptItem
from headwise.runtime.protocol.request import GenerationResult, OutputDelta

SAMPLING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
Asked = tuple[list[int], list[PromptItem]]


@cache
def embeds_of(name: str, model: str) -> np.ndarray:
    config = EngineConfig(model=str(image_model(model)), dtype="float32", tensor_ops="numpy", image_encoder_cpus=1)
    return ImageEncoder.open(config, image_model(model)).whole(ImageFile(encoded(picture(name)))).embeds


def prompt(name: str, model: str = "gemma3") -> dict[str, Any]:
    return next(each for each in references(model)["prompts"] if each["name"] == name)


def asked(name: str, model: str = "gemma3") -> Asked:
    """A prompt of the references, with its images' embeddings."""
    ids, at, items = prompt(name, model)["prompt_ids"], 0, []
    images = iter(prompt(name, model)["images"])
    for is_image, own in groupby(ids, lambda token: token == FIRST_ID):
        length = len(list(own))
        if is_image:
            items.append(PromptItem(at, length, embeds=embeds_of(next(images), model)))
        at += length
    assert len(items) == len(prompt(name, model)["images"])
    return ids, items


@contextmanager
def engine_of(model: str = "gemma3", **changes: Any) -> Iterator[tuple[EngineCore, Preprocessor]]:
    directory = image_model(model)
    sizes = {"kv_cache": "8MiB", "block_size": 16, "max_num_seqs": 8}
    config = replace(BASE, model=str(directory), **{**sizes, **changes})
    ranks, preprocessor = Ranks(config, directory), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    try:
        yield EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor), preprocessor
    finally:
        executor.close()
        ranks.close()


def serve(
    engine: EngineCore,
    preprocessor: Preprocessor,
    each: dict[str, Asked],
    sampling: SamplingParams = SAMPLING,
    step: Callable[[], list[OutputDelta]] | None = None,
) -> dict[str, GenerationResult]:
    results = {name: GenerationResult(name) for name in each}
    for name, (ids, items) in each.items():
        engine.add(preprocessor.prepare(prompt=ids, sampling=sampling, request_id=name, items=items))
    while engine.has_work():
        for delta in engine.step(None) if step is None else step():
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)
    engine.cache.check_integrity()
    return results


def assert_said(results: dict[str, GenerationResult], tokens: int = 24, model: str = "gemma3") -> None:
    for name, result in results.items():
        gaps = prompt(name, model)["gaps"][:tokens]
        stop = next((at for at, gap in enumerate(gaps) if gap < CLOSE), len(gaps))
        assert stop >= min(16, tokens), "rounding decides too early to judge anything"
        assert list(result.token_ids)[:stop] == prompt(name, model)["output_ids"][:stop]


EVERY = ("one", "two", "same", "none", "each")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernels": "reference", "tensor_ops": "numpy"},
        pytest.param({"tensor_ops": "paddle"}, marks=pytest.mark.soak),
        {"tp_size": 2},
        {"pipeline_parallel_size": 2, "max_batched_tokens": 48},
        {"max_batched_tokens": 18},
        {"async_scheduling": False, "max_batched_tokens": 9},
        {"speculation": 3, "max_batched_tokens": 32},
    ],
    ids=str,
)
def test_prompts_together_say_what_transformers_says(changes: dict[str, Any]) -> None:
    with engine_of(**changes) as (engine, preprocessor):
        for _ in range(2):  # and out of the cache
            assert_said(serve(engine, preprocessor, {name: asked(name) for name in EVERY}))
        assert engine.stats()["cache"]["hit_tokens"] > 100


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": "reference", "tensor_ops": "numpy", "max_batched_tokens": 200},
        {"max_batched_tokens": 140, "tp_size": 2},
        pytest.param({"max_batched_tokens": 140, "pipeline_parallel_size": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_images_longer_than_a_window_are_seen_whole_in_layers_with_windows_alone(changes: dict[str, Any]) -> None:
    with engine_of("gemma4", **changes) as (engine, preprocessor):
        for _ in range(2):
            results = serve(engine, preprocessor, {name: asked(name, "gemma4") for name in EVERY})
            assert_said(results, model="gemma4")
        assert engine.stats()["cache"]["hit_tokens"] > 300


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_cached_prefix_may_end_inside_an_image(kernels: str) -> None:
    ids, items = asked("one")
    (item,) = items
    assert item.offset < 16 < item.offset + item.length
    with engine_of(kernels=kernels) as (engine, preprocessor):
        short = ids[: item.offset + item.length + 3], items
        serve(engine, preprocessor, {"short": short}, replace(SAMPLING, max_tokens=1))
        results = serve(engine, preprocessor, {"one": (ids, items)})
        assert results["one"].usage.cached_tokens == 16
        assert_said(results)


def test_a_preempted_prompt_is_computed_again_also_from_inside_an_image() -> None:
    with engine_of(max_batched_tokens=20) as (engine, preprocessor):
        steps = 0

        def step() -> list[OutputDelta]:
            nonlocal steps
            steps += 1
            if steps % 5 == 3 and steps < 60:
                engine.resources.preempt_all()
            return engine.step(None)

        assert_said(serve(engine, preprocessor, {name: asked(name) for name in EVERY}, step=step))
        assert steps > 60


def test_images_come_back_from_the_host() -> None:
    with engine_of(host_cache="8MiB", write_policy="write_through", max_batched_tokens=64) as (engine, preprocessor):
        assert_said(serve(engine, preprocessor, {name: asked(name) for name in EVERY}))
        engine.cache.reset(("device",))
        assert_said(serve(engine, preprocessor, {name: asked(name) for name in EVERY}))
        assert engine.stats()["cache"]["host_hit_tokens"] > 100


def test_log_probabilities_within_an_image_are_the_same_whoever_computes() -> None:
    sampling = replace(SAMPLING, max_tokens=2, prompt_logprobs=0)
    found = {}
    for name, changes in {"all": {"kernels": "reference", "tensor_ops": "numpy"}, "few": {}, "chunks": {}}.items():
        with engine_of(**changes, max_batched_tokens=24 if name == "chunks" else 512) as (engine, preprocessor):
            result = serve(engine, preprocessor, {"two": asked("two")}, sampling)["two"]
            found[name] = [each.chosen for each in result.prompt_logprobs or () if each is not None]
    assert len(found["all"]) == len(asked("two")[0]) - 1
    np.testing.assert_allclose(found["few"], found["all"], atol=1e-3)
    np.testing.assert_allclose(found["chunks"], found["all"], atol=1e-3)


def test_context_parallelism_is_refused_by_name_and_text_is_served() -> None:
    with engine_of(tp_size=4, context_parallel_size=2) as (engine, preprocessor):
        assert preprocessor.card.token_parts == 2
        with pytest.raises(InvalidRequestError, match="not served with context_parallel_size 2: serve it without"):
            serve(engine, preprocessor, {"one": asked("one")})
        assert_said(serve(engine, preprocessor, {"none": asked("none")}))


@pytest.mark.parametrize("name", ["one", pytest.param("two", marks=pytest.mark.soak)])
def test_a_gpu_s_kernels_say_what_transformers_says(name: str) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    sizes = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 2, "block_size": 16, "max_batched_tokens": 48}
    config = EngineConfig(model=str(image_model("gemma3")), device="cuda", dtype="float32", **sizes)
    ids, items = asked(name)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        (result,) = engine.generate([ids], replace(SAMPLING, max_tokens=3), items=items)
    assert_said({name: result}, tokens=3)
