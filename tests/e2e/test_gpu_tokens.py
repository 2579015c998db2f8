"""All models through the kernels of a GPU, emulated, give the tokens of Hugging Face transformers."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from support.engine.given_guesses import GivenGuesses
from support.engine.loaded_model import GREEDY, MODELS, serve
from support.engine.ranks import Ranks
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import answers, assert_same
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise import EngineConfig, LocalEngine
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.cuda.compressed import TritonCompressed
from headwise.kernels.cuda.expanded import ExpandedLatents
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.worker.worker import ModelWorker

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

SHOWN_BY_OTHERS = (
    "gpt-oss-mxfp4", "qwen3-moe", "qwen3", "phi3-long", "qwen3-next", "qwen3.5-moe", "deepseek-v2", "deepseek-v3.2",
    "gemma2", "gemma4", "gemma4-moe", "qwen2", "mimo", "mixtral", "phi3", "deepseek-v3-bias",
    "llama4", "dots1", "glm4-moe-lite", "qwen2-moe", "glm4", "seed-oss", "smollm3", "olmo2", "granite",
    "granite-hybrid", "granite-hybrid-moe", "nemotron-h", "nemotron-h-latent", "bamba", "granite-swa",
    "granite-moe-swa", "mellum", "cohere2-moe-rms", "hunyuan-v1", "mistral4", "laguna-elements", "glm5",
    "hunyuan-v1-moe", "exaone-moe", "solar-open", "hunyuan3", "glm5-shared", "granite-moe", "nemotron-h-moe", "step3",
    "afmoe", "exaone4", "olmo3", "ministral3", "deepseek-v4", "cohere2-moe", "laguna", "minimax-m2", "glm4-moe",
    "cohere2",
)  # fmt: skip
"""They run the kernels of the others; each takes the interpreter its time."""
NOT_ON_GPUS = ("hunyuan4",)
FEW = replace(GREEDY, max_tokens=9)
OVER_LATENTS = ("deepseek-v2", "deepseek-v3", "deepseek-v3-bias", "glm4-moe-lite", "kimi-linear", "mistral4")
PROMPTS = {"qwen3.5": 1, "llama4": 4}
"""Longer ones of the one take long, and `tests/kernels` has them; the other's last is longer than a chunk."""


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[HostLengths]:
    """The lengths of steps whose prompts are attended to in the expanded form."""
    seen, attend = [], ExpandedLatents.attend

    def watched(self: ExpandedLatents, *given: Any, **more: Any) -> None:
        seen.append(next(each.on_host for each in given if isinstance(each, AttentionBatch)))
        attend(self, *given, **more)

    monkeypatch.setattr(ExpandedLatents, "attend", watched)
    return seen


@pytest.mark.parametrize(
    ("model", "prompts", "tokens"),
    [
        *(pytest.param(model, 3, 4, marks=[pytest.mark.model, pytest.mark.soak]) for model in MODELS),
        *(
            pytest.param(model, PROMPTS.get(model, 3), 3, marks=[pytest.mark.soak] if model in SHOWN_BY_OTHERS else [])
            for model in TINY_CONFIGS
            if model not in NOT_ON_GPUS
        ),
    ],
)
def test_greedy_tokens_of_several_prompts_at_once(
    model: str, prompts: int, tokens: int, expanded: list[HostLengths]
) -> None:
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:prompts]
    directory = str(checkpoint(model)) if model in TINY_CONFIGS else model
    given = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 4}
    config = EngineConfig(model=directory, device="cuda", dtype="float32", **given)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        results = engine.generate([answer.prompt_ids for answer in wanted], replace(GREEDY, max_tokens=tokens))
        layer = engine._worker.served.model._layers[0]
        weights = layer.attention
        adds = model.startswith("gpt-oss")
        assert not adds or (
            weights.out.added is not None and weights.out.bias is None and layer.mlp.router.bias is None
        )
        has_bias = model in ("qwen2", "qwen2-moe", "glm4", "seed-oss", "gpt-oss", "gpt-oss-mxfp4")
        assert not has_bias or (weights.bias is not None and weights.qkv.bias is None), "added where heads are rotated"
    for answer, result in zip(wanted, results, strict=True):
        assert_same(answer.first(tokens), result.token_ids)
    assert bool(expanded) == (model in OVER_LATENTS), "prompts of latent attention are expanded"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "size"),
    [("gpt-oss", 4), ("gpt-oss", 3), ("gemma4", 4), ("mimo-v2", 4), ("laguna", 4), ("deepseek-v3", 3)],
)
def test_ranks_that_share_heads_say_the_reference_tokens(model: str, size: int) -> None:
    """Their kernels are those that were made ready at start."""
    directory, tokens = checkpoint(model), 3
    config = EngineConfig(
        model=str(directory), device="cuda", dtype="float32", kv_cache="64MiB", max_model_len=256, tp_size=size
    )
    ranks = Ranks(config, directory, device=lambda: EmulatedGpu(LIBRARIES, "float32"))
    kernels = [worker._device.kernels for worker in ranks.workers]
    plans = [each._latents._prepared if model == "deepseek-v3" else each._attention._ready for each in kernels]
    made_ready, preprocessor, executor = list(map(copy, plans)), Preprocessor.open(config), LocalExecutor(ranks)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:2]
    greedy = replace(GREEDY, max_tokens=tokens)
    results = serve(engine, preprocessor, wanted, {answer.name: greedy for answer in wanted})
    for answer in wanted:
        assert_same(answer.first(tokens), results[answer.name].token_ids)
    assert plans == made_ready
    executor.close()


def made_ready(worker: ModelWorker) -> list[set[Any]]:
    """The shapes of grouped-query attention, or of that to entries, that a rank's kernels are there for."""
    attention = getattr(worker._device.kernels, "_attention", None)
    if isinstance(attention, TritonCompressed):
        return [set(attention._prepared)]
    return [] if attention is None else [set(attention._ready), set(attention._of_ranks)]


def assert_ranks_say_the_reference_tokens(model: str, size: int, **options: Any) -> None:
    """By kernels that were made ready at start."""
    directory, tokens = checkpoint(model), 3
    given = {"kv_cache": "64MiB", "max_model_len": 256, "tp_size": size, **options}
    config = EngineConfig(model=str(directory), device="cuda", dtype="float32", **given)
    ranks = Ranks(config, directory, device=lambda: EmulatedGpu(LIBRARIES, "float32"))
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(ranks)
    ready = list(map(made_ready, ranks.workers))
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:3]
    greedy = replace(GREEDY, max_tokens=tokens)
    results = serve(engine, preprocessor, wanted, {answer.name: greedy for answer in wanted})
    for answer in wanted:
        assert_same(answer.first(tokens), results[answer.name].token_ids)
    assert list(map(made_ready, ranks.workers)) == ready
    executor.close()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_that_all_have_tokens_and_entries_say_the_reference_tokens(size: int) -> None:
    assert_ranks_say_the_reference_tokens("deepseek-v4", size)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", "float8_e4m3fn"),
        pytest.param("bfloat16", "auto", marks=pytest.mark.soak),
        pytest.param("bfloat16", "int8", marks=pytest.mark.soak),
        pytest.param("float16", "auto", marks=pytest.mark.soak),
    ],
)
def test_entries_of_several_tokens_say_the_reference_tokens_in_16_bits_and_8(dtype: str, kv_dtype: str) -> None:
    """Those of which the reference, in float32, is sure; behind them a router is not, who chooses between experts."""
    (wanted,) = (answer for answer in answers("deepseek-v4") if len(answer.prompt_ids) == 9)
    assert min(wanted.gaps[:2]) > 0.15
    given: dict[str, Any] = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 4, "kv_dtype": kv_dtype}
    config = EngineConfig(model=str(checkpoint("deepseek-v4")), device="cuda", dtype=dtype, **given)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, dtype)) as engine:
        (result,) = engine.generate([wanted.prompt_ids], replace(GREEDY, max_tokens=2))
    assert list(result.token_ids) == wanted.output_ids[:2]


def test_steps_over_entries_of_several_tokens_are_graphs() -> None:
    """Prompts in chunks, which end within entries, and decodes, from which entries come, too."""
    wanted = [answer for answer in answers("deepseek-v4") if len(answer.prompt_ids) in (9, 40, 90)]
    given = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 4, "max_batched_tokens": 48}
    config = EngineConfig(model=str(checkpoint("deepseek-v4")), device="cuda", dtype="float32", **given)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        served = engine._worker.served
        assert served.prefill is not None
        assert served.prefill.captured > 0
        by_graphs, decode = list[int](), served.runner.decode
        served.runner.decode = lambda graphs, batch: by_graphs.append(batch.num_tokens) or decode(graphs, batch)
        results = engine.generate([answer.prompt_ids for answer in wanted], FEW)
    for answer, result in zip(wanted, results, strict=True):
        assert_same(answer.first(9), result.token_ids)
    assert len(by_graphs) >= 6


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_with_states_beside_latents_that_all_have_say_the_reference_tokens(size: int) -> None:
    assert_ranks_say_the_reference_tokens("kimi-linear", size)


@pytest.mark.parametrize(
    ("model", "size", "parts"),
    [
        ("deepseek-v3.2", 2, 2),  # with an indexer
        pytest.param("deepseek-v3", 2, 2, marks=pytest.mark.soak),
        pytest.param("deepseek-v2", 4, 2, marks=pytest.mark.soak),
        pytest.param("deepseek-v3.2", 4, 4, marks=pytest.mark.soak),
        pytest.param("glm5-shared", 2, 2, marks=pytest.mark.soak),  # that layers share
        pytest.param("kimi-linear", 2, 2, marks=pytest.mark.soak),  # beside states
        pytest.param("qwen3", 4, 2, marks=pytest.mark.soak),  # two KV heads
        ("gpt-oss", 4, 2),  # of layers without a window alone; learned sinks, biases
        pytest.param("gemma4", 4, 2, marks=pytest.mark.soak),  # heads of two sizes, half of them on two ranks
    ],
)
def test_ranks_that_keep_tokens_together_say_the_reference_tokens(model: str, size: int, parts: int) -> None:
    assert_ranks_say_the_reference_tokens(model, size, context_parallel_size=parts)


@pytest.mark.parametrize("model", ["kimi-linear", pytest.param("qwen3.5", marks=pytest.mark.soak)])
def test_states_are_resumed_at_checkpoints_that_a_prompt_left(model: str) -> None:
    answer = next(answer for answer in answers(model) if len(answer.prompt_ids) == 40)
    config = EngineConfig(
        model=str(checkpoint(model)),
        device="cuda",
        dtype="float32",
        kv_cache="64MiB",
        max_model_len=256,
        block_size=16,
    )
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        first, again = (engine.generate([answer.prompt_ids], replace(GREEDY, max_tokens=3))[0] for _ in range(2))
    assert_same(answer.first(3), first.token_ids)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 32


@pytest.mark.parametrize(
    "model",
    [
        "gemma4-shared",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                "qwen3-next",
                "gpt-oss",
                "deepseek-v3",
                "deepseek-v4",
                "kimi-linear",
                "nemotron-h",
                "granite-hybrid-ssm",
            )  # those with states: of stages, too, and in `test_drafted_tokens`
        ),
    ],
)
def test_guesses_change_no_token(model: str) -> None:
    """Greedy or drawn; also where layers behind the last one that keeps anything compute wanted rows alone, and where
    layers keep states, which must forget wrong ones."""
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:3]
    drawn = replace(GREEDY, max_tokens=9, temperature=0.8, seed=5)
    sampling = {answer.name: params for answer, params in zip(wanted, (drawn, FEW, FEW), strict=True)}
    given = {"kv_cache": "64MiB", "max_model_len": 256, "max_num_seqs": 8}
    config = EngineConfig(model=str(checkpoint(model)), device="cuda", dtype="float32", **given)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        expected = serve(engine.core, engine.preprocessor, wanted, sampling)
    for answer in wanted[1:]:
        assert_same(answer.first(9), expected[answer.name].token_ids)
    with LocalEngine(replace(config, speculation=3), EmulatedGpu(LIBRARIES, "float32")) as engine:
        guesses = GivenGuesses({name: result.token_ids for name, result in expected.items()}, 3)
        engine.core.resources.speculator = guesses
        runner, by_graphs = engine._worker.served.runner, list[int]()
        decode = runner.decode
        runner.decode = lambda graphs, batch: by_graphs.append(int(batch.drafts.sum())) or decode(graphs, batch)
        results = serve(engine.core, engine.preprocessor, wanted, sampling)
        assert 0 < sum(by_graphs) < guesses.drafted, (
            "as decodes of more sequences, and where there are too many by pieces"
        )
        assert engine._worker.served.prefill is not None
        assert {graphs.wanted for graphs in engine._worker.served.prefill._recorded} == {0, 32}, "4 rows of each of 8"
    assert {name: result.token_ids for name, result in results.items()} == {
        name: result.token_ids for name, result in expected.items()
    }
    found = engine.core.stats()["speculation"]
    assert found["drafted"] > found["accepted"] > 0
