"""A whole engine on an emulated GPU says what one on a CPU says."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import LIBRARIES, ShimKernel
from support.gpu.emulated_gpu import EmulatedGpu
from support.gpu.tiny_engine import (
    PROMPT,
    SHORT_PROMPTS,
    answers,
    configuration,
    lose_numbers,
    tokens_and_errors,
    write_model,
    write_moe_model,
    write_other_weights,
)
from support.quantised_models import FP8, INT4, NVFP4, in_fp8, in_int4, in_nvfp4, write_quantised

from headwise import LocalEngine
from headwise.cache_controller.block_tables import TableShape
from headwise.errors import ConfigError, ModelError
from headwise.kernels.cuda.launch import Grid
from headwise.kernels.cuda.packed import PackedMatrix
from headwise.kernels.cuda.parameters import Argument
from headwise.runtime.config.decode_reads import layer_elements
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.ops.quantised import GroupQuantised
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.decode_graphs import LEAST_CHANGES
from headwise.runtime.worker.device_block_tables import DeviceBlockTables
from headwise.runtime.worker.logit_edits import LogitEdits
from headwise.runtime.worker.prefill_graphs import ENQUEUED_S, SHARE, StepGraphs
from headwise.runtime.worker.rank_graphs import told_graphs
from headwise.runtime.worker.sampler import NOT_FINITE, Draws

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")


ON_A_GPU = {"device": "cuda", "dtype": "float32", "kv_cache": "1MiB"}
"""Of engines whose pool need not be measured, by the largest step that there may be."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def libraries() -> Path:
    return LIBRARIES


def test_tokens_are_those_of_a_cpu(model: Path, libraries: Path) -> None:
    expected = answers(LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")))
    assert expected[-1][1] > 0, "a prefix is served from the cache"
    gpu = LocalEngine(configuration(model, device="cuda", dtype="float32"), EmulatedGpu(libraries, "float32"))
    steps = steps_in_pieces(gpu)
    assert answers(gpu) == expected
    assert steps[0] == (64, [9, 32, 23]), "a chunk of the longest prompt between two others"
    assert any(tokens > sum(queries) and min(queries) == 1 < max(queries) for tokens, queries in steps), "mixed, padded"
    assert gpu._worker.served.prefill.sizes == [16, 24, 32, 48, 64]
    assert "graphs=11 of decode steps" in gpu._worker.describe()
    assert "15 of 5 sizes of prefill, from 16 to 64 tokens" in gpu._worker.describe()
    card = gpu._worker.card
    assert card.spec.num_blocks == gpu._worker._device.spare_bytes() // card.layout.block_bytes, "the pool is measured"
    assert gpu.core.card.spec == card.spec


def test_prefills_sizes_are_those_for_which_the_host_would_be_slower_than_the_card(
    model: Path, libraries: Path
) -> None:
    given = {**ON_A_GPU, "max_batched_tokens": 512, "cuda_graphs": True}
    sizes = []
    for asked in (-1, 24):
        gpu = EmulatedGpu(libraries, "float32")
        card = read_model_card(configuration(model, **given), model)
        of_token = layer_elements(card.config) / card.config.num_layers / SHARE
        gpu.products_per_s = 330 * of_token / ENQUEUED_S
        with LocalEngine(configuration(model, **given, prefill_graphs=asked), gpu) as engine:
            assert engine._worker.served.prefill is not None
            sizes.append(engine._worker.served.prefill.sizes[-1])
    assert sizes == [320, 24]


def test_experts_are_chosen_on_the_device_and_steps_with_them_are_graphs(tmp_path: Path, libraries: Path) -> None:
    model = write_moe_model(tmp_path)
    expected = answers(LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")))
    gpu = LocalEngine(configuration(model, **ON_A_GPU), EmulatedGpu(libraries, "float32"))
    steps = steps_in_pieces(gpu)
    assert answers(gpu) == expected
    assert any(tokens > sum(queries) for tokens, queries in steps), "padding asks nothing of experts"


def steps_in_pieces(engine: LocalEngine) -> list[tuple[int, list[int]]]:
    """Of the steps that run by prefill's graphs from now on: padded tokens, and tokens of each sequence."""
    found: list[tuple[int, list[int]]] = []
    assert engine._worker.served.prefill is not None
    for graphs in engine._worker.served.prefill._recorded:
        watch(graphs, found)
    return found


def watch(graphs: StepGraphs, found: list[tuple[int, list[int]]]) -> None:
    real = graphs.upload

    def upload(*arrays: np.ndarray, wanted: np.ndarray | None) -> tuple[np.ndarray, ...]:
        found.append((graphs.tokens, np.diff(arrays[2]).tolist()))
        return real(*arrays, wanted=wanted)

    graphs.upload = upload


@pytest.mark.parametrize(
    ("name", "weights_dtype", "scheme"),
    [
        pytest.param("qwen3", "int4", (INT4, in_int4), marks=pytest.mark.soak),
        ("qwen3-moe", "int4", (INT4, in_int4)),
        ("deepseek-v3", "fp8", (FP8, in_fp8)),
        ("qwen3-moe", "int8", (NVFP4, in_nvfp4)),
    ],
)
def test_a_checkpoints_own_codes_are_computed_from_by_decodes_and_by_prompts(
    name: str, weights_dtype: str, scheme: Any, tmp_path: Path, libraries: Path
) -> None:
    quantised, expanded = write_quantised(tmp_path, name, *scheme)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
    with LocalEngine(configuration(expanded, device="cpu", tensor_ops="numpy", kernels="reference")) as cpu:
        expected = cpu.generate([PROMPT], params)[0]
    given = {**ON_A_GPU, "weights_dtype": weights_dtype, "max_batched_tokens": 128}
    with LocalEngine(configuration(quantised, **given), EmulatedGpu(libraries, "float32", weights_dtype)) as gpu:
        layer = gpu._worker.served.model._layers[1]
        mixed = getattr(layer.mlp, "experts", None)
        experts = mixed and mixed.stacked
        into = getattr(layer.attention, "into", layer.attention.out)  # which latent attention puts together of two
        every = (into.weight, layer.attention.out.weight, *((experts.into, experts.down) if experts else ()))
        for weight in every:
            assert isinstance(weight, PackedMatrix)
            form = {"int4": (4, False), "fp8": (8, True), "int8": (8, False)}[weights_dtype]
            assert (weight.form.bits, weight.form.is_float) == form
            assert weight.form.group == 16 or weights_dtype == "fp8"
        found = gpu.generate([PROMPT], params)[0]
    assert found.token_ids == expected.token_ids
    of_tokens = ([entry.chosen for entry in result.logprobs] for result in (found, expected))
    # With int8 the embedding and the LM head, which the checkpoint has as floats, are rounded to it.
    np.testing.assert_allclose(*of_tokens, atol=0.05 if weights_dtype == "int8" else 1e-4, rtol=0)


def test_weights_rounded_to_8_bits_say_nearly_the_same(tmp_path: Path, libraries: Path) -> None:
    model = write_model(tmp_path / "dense")
    given = {**ON_A_GPU, "weights_dtype": "int8"}
    with LocalEngine(configuration(model, **given), EmulatedGpu(libraries, "float32", "int8")) as gpu:
        weight = gpu._worker.served.model._layers[0].mlp.down.weight
        assert isinstance(weight, PackedMatrix)
        assert (weight.form.bits, weight.form.group, weight.minimum) == (8, 32, None)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
        found = gpu.generate([PROMPT], params)[0].logprobs[0].chosen
    with LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")) as cpu:
        assert found == pytest.approx(cpu.generate([PROMPT], params)[0].logprobs[0].chosen, abs=0.05)


def test_fp8_that_is_no_number_is_refused(libraries: Path) -> None:
    codes = np.full((16, 32), 0xFF, np.uint8)
    matrix = GroupQuantised(codes, np.ones((16, 1), np.float32), None, 32, 8, is_float=True)
    with pytest.raises(ModelError, match=r"a matrix in FP8 has numbers that are none \(NaN\): fetch the model again"):
        EmulatedGpu(libraries, "float32", "fp8").ops.linear_weight(matrix)


def test_experts_that_groups_do_not_divide_are_refused_before_weights_are_read(tmp_path: Path, libraries: Path) -> None:
    model = write_moe_model(tmp_path)
    (model / "model.safetensors").write_bytes(b"never read")
    given = {**ON_A_GPU, "weights_dtype": "int8"}
    with pytest.raises(ConfigError, match=r"int8: an expert of .* has rows of 12 numbers on each of 1 ranks, .* of 32"):
        LocalEngine(configuration(model, **given), EmulatedGpu(libraries, "float32", "int8"))


def test_blocks_come_back_from_the_host(model: Path, libraries: Path) -> None:
    tiers = {"host_cache": "8MiB", "write_policy": "write_through"}
    gpu = EmulatedGpu(libraries, "float32")
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LocalEngine(configuration(model, **ON_A_GPU, **tiers), gpu) as engine:
        first = engine.generate([PROMPT], greedy)[0]
        assert engine.reset_cache("device") > 0
        seen, copies = ["load"], engine._worker._copies
        tell(seen, "piece", gpu.ops, "add_rms_norm")
        tell(seen, "wait", copies, "wait_layer")
        steps = steps_in_pieces(engine)
        again = engine.generate([PROMPT], greedy)[0]
        layer = ["wait", "piece", "piece"]
        assert seen[: 1 + 2 * len(layer)] == ["load", *layer, *layer], "layer by layer, each before its attention"
        assert steps[0] == (16, [6])
        assert again.token_ids == first.token_ids
        assert again.usage is not None
        assert again.usage.cached_tokens >= 56
        assert engine.stats()["transfers"]["load"]["bytes"] > 0


def tell(seen: list[str], name: str, owner: Any, method: str) -> None:
    """Note each call of an object's method by a name."""
    real = getattr(owner, method)
    setattr(owner, method, lambda *arguments: seen.append(name) or real(*arguments))


def test_a_decode_step_sends_numbers_of_its_sequences_and_of_some_blocks_at_once_however_long_the_context(
    model: Path, libraries: Path
) -> None:
    gpu, sent = EmulatedGpu(libraries, "float32"), []
    real = gpu.ops.step_upload

    def counting(capacity: int = 0) -> Any:
        upload = real(capacity)
        return lambda *arrays: sent.append(sum(array.size for array in arrays)) or upload(*arrays)

    gpu.ops.step_upload = counting
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with LocalEngine(configuration(model, **ON_A_GPU), gpu) as engine:
        engine.generate([PROMPT * 2], greedy)
    assert 140 // 8 * 2 > 30, "block ids that this context has"
    assert set(sent[-8:]) == {6 + 4 * LEAST_CHANGES}, "numbers of the sequence, and new blocks, if there are any"


def test_no_two_block_tables_take_the_devices_memory_at_once_and_none_does_asleep(model: Path, libraries: Path) -> None:
    gpu, made = EmulatedGpu(libraries, "float32"), []
    real = gpu.block_tables

    def watched(shape: TableShape) -> DeviceBlockTables:
        assert all(tables() is None for tables in made)
        tables = real(shape)
        made.append(weakref.ref(tables))
        return tables

    gpu.block_tables = watched
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LocalEngine(configuration(model, device="cuda", dtype="float32"), gpu) as engine:
        first = engine.generate([PROMPT[:20]], greedy)[0]
        engine.sleep()
        assert [tables() for tables in made] == [None, None], "to measure the pool, and to serve"
        engine.wake()
        again = engine.generate([PROMPT[:20]], greedy)[0]
    assert again.token_ids == first.token_ids
    assert len(made) == 3


@pytest.mark.parametrize("keep_running", [False, True])
def test_other_weights_have_graphs_of_their_own_and_leave_blocks_as_they_are(
    model: Path, libraries: Path, tmp_path: Path, keep_running: bool
) -> None:
    other = str(write_other_weights(tmp_path, model))

    def said(engine: LocalEngine) -> list[list[int]]:
        """By a stream that gets them in the middle, and by another request then."""
        greedy, got = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), list[int]()
        with engine:
            for delta in engine.stream(PROMPT, greedy):
                got += delta.token_ids
                if len(got) == 6:
                    engine.update_weights(other, keep_running=keep_running)
            return [got, engine.generate([PROMPT], greedy)[0].token_ids]

    gpu = LocalEngine(configuration(model, **ON_A_GPU, cuda_graphs=True), EmulatedGpu(libraries, "float32"))
    graphs = told_graphs(gpu._worker.served.runner.graphs, gpu._worker.served.prefill)
    before = weakref.ref(gpu._worker.served.model), weakref.ref(gpu._worker.served.prefill)
    on_gpu = said(gpu)
    assert [each() for each in before] == [None, None]
    assert told_graphs(gpu._worker.served.runner.graphs, gpu._worker.served.prefill) == graphs
    on_cpu = configuration(model, device="cpu", tensor_ops="numpy", kernels="reference", kv_cache="1MiB")
    assert on_gpu == said(LocalEngine(on_cpu))


def test_tokens_are_drawn_where_the_scores_are_and_are_those_of_a_cpu(tmp_path: Path, libraries: Path) -> None:
    """Greedy and drawn together, and one that asks for log-probabilities, in one batch; by graphs and without."""
    model = write_model(tmp_path, eos_token_id=2)
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=1),
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.5, top_k=20, top_p=0.9, seed=2, logprobs=2),
        SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, repetition_penalty=1.5, presence_penalty=1),
        SamplingParams(
            max_tokens=6,
            ignore_eos=True,
            seed=3,
            frequency_penalty=2,
            logit_bias={7: 4, 8: 4},
            logprobs=1,
            prompt_logprobs=1,
        ),
        SamplingParams(max_tokens=6, temperature=0.9, seed=4, guided={"regex": "[a-f]{5}[0-9]{3}"}),
    ]
    prompts = [PROMPT[:30], PROMPT[:9], PROMPT[5:40], PROMPT[:20], PROMPT[:20], PROMPT[:9]]
    with LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")) as engine:
        expected = engine.generate(prompts, params)
    gpu = EmulatedGpu(libraries, "float32")
    seen = count_draws(gpu)
    with LocalEngine(configuration(model, **ON_A_GPU), gpu) as engine:
        found = engine.generate(prompts, params)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert re.fullmatch("[a-f]{5}[0-9]", found[5].text)
    assert sum(seen) >= 36 - 6, "all but prompts that are done in steps of their own"
    assert len(found[2].logprobs) == len(found[4].logprobs) == 6
    assert len(found[4].prompt_logprobs) == 20
    told, right = (of[2].logprobs + of[4].logprobs + of[4].prompt_logprobs[1:] for of in (found, expected))
    for one, other in zip(told, right, strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_graphs_of_decode_steps_have_the_likeliest_tokens_and_nothing_else_of_sampling(
    model: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do steps of greedy sequences launch anything else of it beside their graphs."""
    gpu = EmulatedGpu(libraries, "float32")
    launched: set[tuple[str, bool]] = set()
    real = ShimKernel.__call__

    def noted(kernel: ShimKernel, grid: Grid, arguments: Sequence[Argument]) -> None:
        launched.add((kernel.name, gpu.ops.is_recorded))
        real(kernel, grid, arguments)

    monkeypatch.setattr(ShimKernel, "__call__", noted)
    sampling = {"likeliest", "survey", "bin_all", "bin_range", "draw", "edit"}
    with LocalEngine(configuration(model, **ON_A_GPU), gpu) as engine:
        engine.generate([PROMPT[:9]], SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0))
        assert {name for name, _ in launched} & sampling == {"likeliest"}
        drawn = SamplingParams(max_tokens=5, ignore_eos=True, top_k=5, top_p=0.9, seed=1, presence_penalty=1)
        engine.generate([PROMPT[:9]], drawn)
    assert {name for name, is_recorded in launched if is_recorded} & sampling == {"likeliest"}
    assert {name for name, is_recorded in launched if not is_recorded} & sampling == sampling


@pytest.mark.parametrize(
    ("device", "temperature"),
    [("cpu", 0.0), ("cpu", 0.8), ("cuda", 0.8), pytest.param("cuda", 0.0, marks=pytest.mark.soak)],
)
def test_a_row_without_numbers_fails_its_request_alone(
    model: Path, libraries: Path, device: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=1, logprobs=None)
    if device == "cpu":
        engine = LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference"))
    else:
        gpu = EmulatedGpu(libraries, "float32")
        engine = LocalEngine(configuration(model, **ON_A_GPU), gpu)
    with engine:
        expected = engine.generate(SHORT_PROMPTS, params)
        lose_numbers(engine._worker)
        found = tokens_and_errors(engine, params)
    assert found == [
        (expected[0].token_ids, None),
        (expected[1].token_ids[: len(found[1][0])], NOT_FINITE),
        (expected[2].token_ids, None),
    ]
    assert len(found[1][0]) < 6


def count_draws(gpu: EmulatedGpu) -> list[int]:
    """Rows that the device's sampler drew for, a call at a time, as they come."""
    seen: list[int] = []
    real = gpu.sampler.draw

    def counted(scores: np.ndarray, cap: float, draws: Draws, edits: LogitEdits | None) -> Any:
        drawn = real(scores, cap, draws, edits)
        seen.append(0 if drawn is None else len(drawn[0]))
        return drawn

    gpu.sampler.draw = counted
    return seen


@pytest.mark.parametrize(
    ("changes", "kept", "tokens"),
    [
        ({"dtype": "bfloat16"}, "float32", 70),
        ({"dtype": "float16", "kv_dtype": "int8"}, "float32", 70),
        ({"dtype": "bfloat16", "kv_dtype": "int4"}, "int4", 70),
        ({"dtype": "bfloat16", "overlap_kernels": True}, "float32", 12),
    ],
)
def test_narrow_numbers_give_nearly_the_same_logits(
    model: Path, libraries: Path, changes: dict[str, Any], kept: str, tokens: int
) -> None:
    """``kept``: the dtype of the cache that they are compared with; ``tokens``: of the prompt."""
    wanted = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    wide = configuration(model, device="cpu", tensor_ops="numpy", kernels="reference", kv_dtype=kept)
    with LocalEngine(wide) as engine:
        expected = engine.generate([PROMPT[:tokens]], wanted)[0]
    config = configuration(model, **{**ON_A_GPU, **changes})
    gpu = EmulatedGpu(libraries, changes["dtype"], own_products=config.overlap_kernels)
    with LocalEngine(config, gpu) as engine:
        found = engine.generate([PROMPT[:tokens]], wanted)[0]
    assert expected.logprobs is not None
    assert found.logprobs is not None
    close = dict(expected.logprobs[0].top)
    told = [(token, value) for token, value in found.logprobs[0].top if token in close]
    assert len(told) >= 15
    assert max(abs(value - close[token]) for token, value in told) < 0.15
