"""Steps of which rows go by adapters: fused layers give what the same layers give one after the other, each row its
own, and other rows what they have without any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from support.adapted_models import DrawnAdapter, adapted_model, modules_served, run_adapted, weights_of
from support.other_cpus import OTHER_CPUS, assert_passes
from support.paged_steps import CacheShown, EitherWay, LayerByCall, Step
from support.random_models import BASE, CONFIGS, random_weights
from support.thread_pools import NoCoreForOthers
from support.tiny_checkpoints import TINY_CONFIGS

from headwise.kernels.cpu import decoder as module
from headwise.kernels.cpu import decoder_phases
from headwise.kernels.cpu.decoder_records import PRODUCT
from headwise.runtime.models.base import Model
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config

WIDE = {"hidden_size": 320, "intermediate_size": 704, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS = {
    **CONFIGS,
    "wide": {**CONFIGS["llama"], **WIDE, "head_dim": 64},
    "odd": {**CONFIGS["llama_biased_tied"], "hidden_size": 44, "intermediate_size": 100},
    "qwen3_moe": {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}
SOME = ("llama_biased_tied", "gemma3", "mistral_window", "wide", "odd", "qwen3_moe")
TINY = (
    "gemma4", "gemma4-moe", "llama4", "qwen3-next", "qwen3.5", "afmoe", "cohere2", "minimax-m2", "olmo3", "phi3",
    "glm4", "arcee", "granite-hybrid-ssm", "gpt-oss", "mimo-v2",
)  # fmt: skip
"""See `test_decoder.TINY`; and fused projections."""

STEPS: tuple[Step, ...] = (
    [(0, 37)],
    [(1, 1), (0, 1), (2, 50)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (1, 19), (3, 9), (0, 1)],
    [(3, 30), (0, 2)],
    [(1, 1)],
)
FEW: tuple[Step, ...] = ([(0, 20), (1, 9)], [(1, 1), (0, 1), (2, 31)], [(0, 1), (1, 1), (2, 1)], [(2, 17), (3, 9)])
"""Of less tokens than latents are expanded for."""
WHOSE = {0: 1, 1: 2, 2: 4, 3: 3}
MIXED = {0: 1, 2: 4, 3: 1}
"""Sequence 1 goes by none."""


def config_of(name: str) -> ModelConfig:
    return model_config(TINY_CONFIGS[name] if name in TINY_CONFIGS else MODELS[name])


def assert_same_but_for_rounding(model: Model, steps=STEPS, kv_dtype: str = "float32", is_narrow: bool = False) -> None:
    most, mean = (0.03, 2e-3) if is_narrow else (1e-4, 1e-5)
    for whose in (WHOSE, MIXED):
        ways = (run_adapted(model, way, steps, whose, kv_dtype) for way in (CacheShown, LayerByCall))
        fused, layered = map(np.concatenate, ways)
        assert np.isfinite(layered).all()
        difference = np.abs(fused - layered) / np.abs(layered).max()
        assert difference.mean() < mean
        assert difference.max() < most


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_differ(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert all(np.abs(mine - theirs).max() > 1e-3 for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*SOME, *TINY])
def test_fused_layers_compute_what_layers_compute_one_by_one(name: str) -> None:
    assert_same_but_for_rounding(adapted_model(config_of(name), name))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "kimi-linear"])
def test_layers_with_latents_compute_what_they_do_one_by_one(name: str) -> None:
    model = adapted_model(config_of(name), name)
    assert_same_but_for_rounding(model, FEW)
    either, layered = (np.concatenate(run_adapted(model, way, STEPS, MIXED)) for way in (EitherWay, LayerByCall))
    np.testing.assert_allclose(either, layered, rtol=0, atol=1e-4 * np.abs(layered).max())


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "wide", "qwen3_moe"])
def test_fused_layers_compute_the_same_with_narrow_weights(name: str, weights_dtype: str) -> None:
    whole_groups = {"intermediate_size": 64, "moe_intermediate_size": 32} if name != "wide" else {}
    config = model_config({**MODELS[name], **whole_groups})
    model = adapted_model(config, weights_dtype=weights_dtype)
    assert_same_but_for_rounding(model, kv_dtype="bfloat16", is_narrow=True)


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 33, 64])
def test_adapters_add_what_merged_weights_would(rank: int) -> None:
    """To each product, of prompts and of single rows, whoever is beside them."""
    config, weights = config_of("odd"), random_weights(config_of("odd"))
    adapters = [DrawnAdapter(name, modules_served(config, weights), rank) for name in ("one", "other")]
    found = run_adapted(adapted_model(config, adapters=adapters), CacheShown, STEPS, {0: 1, 2: 2, 3: 1})
    plain, *merged = (
        run_adapted(adapted_model(config, adapters=[], weights=each), CacheShown, STEPS, {})
        for each in (weights, *(_merged(config, adapter) for adapter in adapters))
    )
    members = [member for step in STEPS for member, _ in step]
    expected = [{0: merged[0], 1: plain, 2: merged[1], 3: merged[0]}[member][at] for at, member in enumerate(members)]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-5 * np.abs(theirs).max())


def _merged(config: ModelConfig, adapter: DrawnAdapter):
    weights = random_weights(config)
    for name in adapter.modules:
        weights._tensors[f"model.{name}.weight"] += adapter.up(name) @ adapter.down(name)
    return weights


@pytest.mark.parametrize("changed", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_projections_that_are_changed_alone(changed: str, weights_dtype: str) -> None:
    config = config_of("wide")
    shapes = {name: shape for name, shape in modules_served(config, random_weights(config)).items() if changed in name}
    model = adapted_model(config, adapters=[DrawnAdapter("x", shapes, 4)], weights_dtype=weights_dtype)
    ways = (run_adapted(model, way, STEPS, {0: 1, 2: 1}) for way in (CacheShown, LayerByCall))
    fused, layered = map(np.concatenate, ways)
    np.testing.assert_allclose(
        fused, layered, rtol=0, atol=(1e-4 if weights_dtype == "float32" else 0.03) * layered.max()
    )
    assert np.abs(fused - np.concatenate(run_adapted(model, CacheShown, STEPS, {}))).max() > 1e-2


@pytest.mark.parametrize("name", ["gemma3", "wide", "qwen3_moe"])
def test_steps_without_adapted_rows_are_as_of_a_model_without_adapters_bit_by_bit(name: str) -> None:
    config = config_of(name)
    found = run_adapted(adapted_model(config), CacheShown, STEPS, {})
    assert_equal(found, run_adapted(adapted_model(config, adapters=[]), CacheShown, STEPS, {}))


@pytest.mark.parametrize(
    ("name", "weights_dtype"), [*product(SOME, ("float32",)), ("wide", "bfloat16"), *product(TINY, ("bfloat16",))]
)
def test_a_sequence_has_the_same_result_alone_and_among_others_bit_by_bit(name: str, weights_dtype: str) -> None:
    model = adapted_model(config_of(name), name, weights_dtype=weights_dtype)
    together = run_adapted(model, CacheShown, STEPS, MIXED)
    members = [member for step in STEPS for member, _ in step]
    for sequence in (0, 2, 3):
        own = [[part for part in step if part[0] == sequence] for step in STEPS]
        alone = run_adapted(model, CacheShown, [step for step in own if step], MIXED)
        assert_equal(alone, [rows for member, rows in zip(members, together, strict=True) if member == sequence])


def test_rows_without_an_adapter_are_as_in_steps_without_any() -> None:
    """But for where an activation rounds, which is computed behind a product then, not with it."""
    model = adapted_model(config_of("wide"))
    found, plain = (run_adapted(model, CacheShown, STEPS, whose) for whose in (MIXED, {}))
    members = [member for step in STEPS for member, _ in step]
    for member, mine, theirs in zip(members, found, plain, strict=True):
        if member == 1:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
        else:
            assert np.abs(mine - theirs).max() > 1e-2


@pytest.mark.parametrize("name", ["gemma3", "wide", *TINY])
def test_threads_and_waits_change_nothing_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (adapted_model(config_of(name), name, threads=threads) for threads in (1, 2))
    expected = run_adapted(one, CacheShown, STEPS, WHOSE)
    monkeypatch.setattr(module, "LAYER_BYTES", 1)  # a second thread is woken for anything
    assert_equal(run_adapted(two, CacheShown, STEPS, WHOSE), expected)
    assert_equal(run_adapted(two, partial(CacheShown, wait_layer=lambda layer: None), STEPS, WHOSE), expected)
    monkeypatch.setattr(module, "pool_of_this_process", NoCoreForOthers)
    assert_equal(run_adapted(two, CacheShown, STEPS, WHOSE), expected)


@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", *TINY])
def test_layers_in_parts_compute_the_same_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks take them, but that there is nobody to sum with."""
    model = adapted_model(config_of(name), name)
    whole, at_once = run_adapted(model, CacheShown, STEPS, MIXED), model._fused.run
    alone = {"sum_over_ranks": np.copy}
    monkeypatch.setattr(model._fused, "run", lambda *step, **named: at_once(*step, **named | alone))
    assert_equal(run_adapted(model, CacheShown, STEPS, MIXED), whole)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param(name, wanted, marks=() if name in every or len(wanted) > 3 else pytest.mark.soak)
        for every in [("llama_biased_tied", "qwen3_moe", "gemma4-shared", "deepseek-v2", "qwen3.5")]
        for name in (*every[:4], "gemma3", *TINY)
        for wanted in ([], [0], [3, 4, 36], [0, 1, 19, 50, 51])
    ],
)
def test_rows_that_are_not_wanted_are_left_out_and_change_nothing(name: str, wanted: list[int]) -> None:
    model, rows = _with_served(name), np.array(wanted, np.int64)
    steps = [[(0, 17), (1, 3)], [(1, 1), (0, 1), (2, 50)], [(2, 2), (0, 1)]]
    if name == "deepseek-v2":
        steps[1] = [(1, 30), (0, 22)]
    for way in (CacheShown, LayerByCall):
        every, found = (run_adapted(model, way, steps, MIXED, wanted=each) for each in ([None] * 3, [None, rows, None]))
        assert_equal(found[::2], every[::2])
        scale = 2e-5 * np.abs(every[1]).max()
        np.testing.assert_allclose(found[1], every[1][rows], rtol=0, atol=scale)
        if way is CacheShown and model.config.last_kept == model.config.num_layers - 1:
            assert_equal(found[1:2], [every[1][rows]])


def _with_served(name: str) -> Model:
    """Keys and values of layers that have others' are in checkpoints, and not of models."""
    config = config_of(name)
    shapes = modules_served(config, weights_of(config, name))
    if name == "gemma4-shared":
        shapes = {module: shape for module, shape in shapes.items() if not module.endswith(("k_proj", "v_proj"))}
        return adapted_model(config, name, [DrawnAdapter(each, shapes, 4) for each in ("a", "b", "c", "d")])
    return adapted_model(config, name)


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_what_overflows_in_one_adapter_is_no_other_row_s(weights_dtype: str) -> None:
    config = config_of("wide")
    shapes = modules_served(config, random_weights(config))
    tame = [DrawnAdapter("tame", shapes, 16), DrawnAdapter("other", shapes, 4)]
    wild = [tame[0], replace(tame[1], factor=1e38)]
    steps, whose = [[(0, 3), (1, 2), (2, 4)], [(1, 1), (0, 1), (2, 1)]], {0: 1, 1: 2}
    expected, found = (
        run_adapted(adapted_model(config, adapters=each, weights_dtype=weights_dtype), CacheShown, steps, whose)
        for each in (tame, wild)
    )
    assert not np.isfinite(found[1]).all()
    calm = [0, 2, 4, 5]
    assert_equal([found[at] for at in calm], [expected[at] for at in calm])


def test_where_products_are_computed_in_tiles_adapters_are_given_rows_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What attention and activations leave in tiles elsewhere, prepared for the next product, no adapter could read."""
    monkeypatch.setattr(decoder_phases, "is_in_tiles", lambda weight: weight.dtype == "bfloat16")
    config = config_of("wide")
    shapes = modules_served(config, random_weights(config))
    for changed, prepared in {"o_proj": 1, "down_proj": 1, "gate_proj": 1, "q_proj": 2, "_proj": 0}.items():
        some = {name: shape for name, shape in shapes.items() if changed in name and "layers.1." in name}
        decoder = adapted_model(config, adapters=[DrawnAdapter("x", some, 4)], weights_dtype="bfloat16")._fused
        plain, adapted = (
            [phases.table[start:stop] for start, stop in pairwise(phases.starts)]
            for phases in (decoder._phases, decoder._adapted.phases)
        )
        for layer, (mine, theirs) in enumerate(zip(adapted, plain, strict=True)):
            counts = [_prepared(phases) for phases in (mine, theirs)]
            assert counts[1] == 2, "heads seen, and what comes of an activation"
            assert counts[0] == (2 if layer != 1 else prepared)
        decoder._adapted.tell(decoder._table)
        words = decoder._adapted.table["out_words"]
        assert (words[[0, 2]] == decoder._table["out_words"][[0, 2]]).all()
        assert decoder._table["out_words"].all()
        assert bool(words[1]) == (changed not in ("o_proj", "_proj"))


def _prepared(phases: np.ndarray) -> int:
    """Products of a layer whose rows were prepared where they were computed."""
    return int(((phases["kind"] == PRODUCT) & (phases["prepared"] >= 0)).sum())


@pytest.mark.soak
@pytest.mark.parametrize("cpu", OTHER_CPUS)
def test_adapters_compiled_for_other_cpus_pass_all_tests(cpu: str) -> None:
    assert_passes(__file__, cpu)
