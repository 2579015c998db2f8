"""Images on grids, whose tokens have three positions each, on ranks, stages and a GPU, with guesses, and preempted:
what is said stays what transformers says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drafting_checkpoints import DRAFTING
from support.engine.given_guesses import GivenGuesses
from support.engine.ranks import Ranks
from support.engine.watched_drafts import engine_of
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import CLOSE
from support.tiny_images import FAMILIES, GLMS, encoded, image_model, picture, references, write_image_model

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.runtime.encoder.image_encoder import ImageEncoder
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol.images import embeds_of
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, OutputDelta

SMALL = EngineConfig(dtype="float32", kv_cache="8MiB", cpu_threads=1, block_size=16, image_encoders=1)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAFTING_AS = {"qwen3.5": "qwen3.5", "glm4v-moe": "glm4-moe"}
"""By which names checkpoints have the layer that drafts: those of a model of `DRAFTING`."""


def chat_of(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image"} for _ in prompt["images"]]
    text = {"type": "text", "text": f"Look at {prompt['name']}, the image."}
    return [{"role": "user", "content": [*parts, text] if parts else "Look at none."}]


def requests_of(name: str, config: EngineConfig, preprocessor: Preprocessor) -> dict[str, GenerateRequest]:
    """Those of the references, as an engine gets them."""
    encoder, found = ImageEncoder.open(config, image_model(name)), {}
    for prompt in references(name)["prompts"]:
        images = [encoder.whole(ImageFile(encoded(picture(image)))) for image in prompt["images"]]
        asked = preprocessor.prepare(
            messages=chat_of(prompt),
            images=[each.image for each in images],
            sampling=GREEDY,
            request_id=prompt["name"],
        )
        found[prompt["name"]] = replace(asked, embeds=embeds_of(asked, images))
    return found


def serve(
    engine: EngineCore, requests: dict[str, GenerateRequest], step: Callable[[], list[OutputDelta]] | None = None
) -> dict[str, list[int]]:
    results = {name: GenerationResult(name) for name in requests}
    for request in requests.values():
        engine.add(request)
    while engine.has_work():
        for delta in engine.step(None) if step is None else step():
            assert delta.error is None, delta.error
            results[delta.request_id].add(delta)
    engine.cache.check_integrity()
    return {name: result.token_ids for name, result in results.items()}


def assert_said(name: str, found: dict[str, list[int]], least: int = 24) -> None:
    for prompt in references(name)["prompts"]:
        tokens = found[prompt["name"]]
        stop = next((at for at, gap in enumerate(prompt["gaps"][: len(tokens)]) if gap < CLOSE), len(tokens))
        assert stop >= least, "rounding decides too early to judge anything"
        assert tokens[:stop] == prompt["output_ids"][:stop]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2.5-vl", {"tp_size": 2, "max_batched_tokens": 40}),
        ("qwen3-vl", {"pipeline_parallel_size": 3, "tensor_ops": "numpy"}),
        ("qwen3-vl", {"pipeline_parallel_size": 2, "tp_size": 2, "max_batched_tokens": 40}),
        ("qwen3.5", {"tp_size": 2}),
        ("glm4v-moe", {"tp_size": 2, "max_batched_tokens": 40}),
        pytest.param("glm4v", {"tp_size": 2}, marks=pytest.mark.soak),
        ("ernie4.5-vl", {"tp_size": 2, "max_batched_tokens": 40}),
        pytest.param("ernie4.5-vl", {"pipeline_parallel_size": 2, "tensor_ops": "numpy"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_ranks_and_stages_say_the_reference_tokens(name: str, changes: dict[str, Any]) -> None:
    """What is added behind a stage's last layer, too."""
    config = replace(SMALL, model=str(image_model(name)), **changes)
    ranks, preprocessor = Ranks(config, image_model(name)), Preprocessor.open(config)
    executor = LocalExecutor(ranks)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    assert_said(name, serve(engine, requests_of(name, config, preprocessor)))
    executor.close()
    ranks.close()


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5", "ernie4.5-vl"])
def test_guesses_and_preemption_change_no_token(name: str) -> None:
    known = {prompt["name"]: prompt["output_ids"] for prompt in references(name)["prompts"]}
    config, steps = replace(SMALL, model=str(image_model(name)), speculation=3, max_batched_tokens=48), 0
    with LocalEngine(config) as engine:
        requests = requests_of(name, config, engine.preprocessor)
        engine.core.resources.speculator = GivenGuesses(known, 3)

        def step() -> list[OutputDelta]:
            nonlocal steps
            steps += 1
            if steps in (3, 16):  # within prompts, and within answers
                engine.core.resources.preempt_all()
            return engine.core.step(None)

        found = serve(engine.core, requests, step)
        assert steps > 16
        assert engine.core.stats()["speculation"]["accepted"] > 20
    assert_said(name, found)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("glm4v-moe", marks=pytest.mark.soak)])
def test_a_layer_that_drafts_goes_on_behind_images(name: str, tmp_path: Path) -> None:
    family, shapes = FAMILIES[name], references(name)["shapes"]
    hidden, layers = (family.config["text_config"][key] for key in ("hidden_size", "num_hidden_layers"))
    inside = "model.language_model."
    names = {part: text.format(layer=layers) for part, text in DRAFTING[DRAFTING_AS[name]].items()}
    names = {part: text.replace("model.", inside, 1) for part, text in names.items()}
    last = f"{inside}layers.{layers - 1}."
    drafting = {names["layer"] + key.removeprefix(last): shapes[key] for key in shapes if key.startswith(last)}
    norms = {f"{names[part]}.weight": [hidden] for part in ("embedding_norm", "hidden_norm", "final_norm")}
    model = write_image_model(
        tmp_path / "m", family, shapes, {**drafting, **norms, f"{names['join']}.weight": [hidden, 2 * hidden]}
    )
    config = replace(SMALL, model=str(model), speculation=3, max_batched_tokens=48)
    with engine_of(config) as (engine, executor, preprocessor):
        found = serve(engine, requests_of(name, config, preprocessor))
        assert sum(map(len, executor.proposed.values())) > 20
    assert_said(name, found)


@pytest.mark.parametrize(
    "name", ["qwen3-vl", *(pytest.param(name, marks=pytest.mark.soak) for name in ("qwen3.5", "ernie4.5-vl", *GLMS))]
)
def test_a_gpu_says_the_reference_tokens(name: str) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    config = replace(SMALL, model=str(image_model(name)), device="cuda", max_model_len=256, max_num_seqs=4)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        some = dict(list(requests_of(name, config, engine.preprocessor).items())[:4])
        some = {key: replace(each, sampling=replace(each.sampling, max_tokens=4)) for key, each in some.items()}
        found = serve(engine.core, some)
        graphs = engine._worker.served.runner.graphs
        assert graphs is not None
        assert graphs.captured, "of tokens with three positions"
    for prompt in references(name)["prompts"][:4]:
        assert found[prompt["name"]] == prompt["output_ids"][:4]
