"""All layers in one compiled call give what the same operations give one after the other, and each row its own."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from support.engine.dense_oracle import DenseAttention, DictWeights
from support.other_cpus import OTHER_CPUS, assert_passes
from support.paged_steps import CacheShown, EitherWay, LayerByCall, PagedSequences, Step, only_shard
from support.random_models import BASE, CONFIGS, random_weights
from support.thread_pools import NoCoreForOthers
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.kernels.base import AttentionBatch
from headwise.kernels.cpu import decoder as module
from headwise.kernels.cpu import experts_jit
from headwise.kernels.cpu.decoder_records import ADDED, NORMED
from headwise.kernels.cpu.records import place_of
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.base import Model
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.quantised import GroupQuantised, quantise_int8
from headwise.runtime.ops.select import make_ops

LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"]}
SIZES = {
    "one head for all": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "a head each": {"hidden_size": 64, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 48},
    "more heads than hidden": {"hidden_size": 48, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32},
    "wide": {
        "hidden_size": 320,
        "intermediate_size": 704,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
MIXTURES = {
    "qwen3_moe": {
        **BASE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "ernie_moe": {
        **BASE,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "use_bias": False,
    },
    "gpt_oss": {
        **BASE,
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
MODELS = {**CONFIGS, **MIXTURES, **{name: {**LLAMA, **sizes} for name, sizes in SIZES.items()}}
MODELS["gemma3 of other sizes"] = {**CONFIGS["gemma3"], **SIZES["one head for all"]}

TINY = (
    "gemma4", "gemma4-shared", "gemma4-moe", "llama4", "qwen3-next", "qwen3.5", "qwen3.5-moe", "afmoe", "cohere2",
    "minimax-m2", "olmo3", "granite-hybrid-ssm", "granite-hybrid-moe", "arcee", "nemotron-h", "nemotron-h-moe",
    "mimo-v2", "cohere2-moe",
)  # fmt: skip
"""Heads of two sizes, shared caches, side inputs, experts beside MLPs; chunks; delta-nets, gated heads and experts;
MLPs beside attention, rows without their mean; norms of all heads as one, and none before attention; state space
models; MLPs without gates; layers without MLPs; values smaller than keys; experts
beside attention."""

WHOLE_GROUPS = {"intermediate_size": 64, "moe_intermediate_size": 32}
"""Of int8, in every weight."""

STEPS: tuple[Step, ...] = (
    [(0, 37)],
    [(1, 1), (0, 1), (2, 50)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (1, 19), (3, 9), (0, 1)],
    [(3, 30), (0, 2)],
    [(1, 1)],
)
"""First chunks, further ones and decodes, alone and mixed."""


def config_of(name: str) -> ModelConfig:
    return model_config(TINY_CONFIGS[name] if name in TINY_CONFIGS else MODELS[name])


def pattern(config: ModelConfig) -> ModelConfig:
    """The config with windows and sinks that differ by head and by layer."""
    kinds = [FULL, HeadPolicy(5, 3), HeadPolicy(9), HeadPolicy(12, 16)]
    policies = tuple(
        tuple(kinds[(layer + head * head) % len(kinds)] for head in range(config.num_kv_heads))
        for layer in range(config.num_layers)
    )
    return replace(config, policies=policies)


def patterned(name: str) -> ModelConfig:
    return config_of(name) if name in TINY else pattern(config_of(name))


def model_of(config: ModelConfig, weights_dtype: str = "float32", threads: int = 2, name: str = "") -> Model:
    """name: of a tiny model, if it is one"""
    dtype = "float32" if weights_dtype == "float32" else "bfloat16"
    ops = make_ops("numba", threads, dtype, weights_dtype)
    weights = Checkpoint(checkpoint(name)) if name in TINY_CONFIGS else random_weights(config)
    return build_model(config, weights, ops, SingleRank(), only_shard(config))


def run(model: Model, attention, steps=STEPS, kv_dtype: str = "float32") -> list[np.ndarray]:
    """Hidden states of all sequences of all steps."""
    sequences = PagedSequences(model, kv_dtype)
    return [rows for step in steps for rows in sequences.forward(model, step, attention)]


def assert_same_but_for_rounding(model: Model, kv_dtype: str, is_narrow: bool) -> None:
    fused, layered = (np.concatenate(run(model, way, kv_dtype=kv_dtype)) for way in (CacheShown, LayerByCall))
    assert np.isfinite(layered).all()
    difference = np.abs(fused - layered) / np.abs(layered).max()
    # Narrow numbers: where float32 differs in its last bit, one in thousands is rounded to the other neighbour.
    most, mean = (0.03, 1e-3) if is_narrow else (2e-5, 2e-6)
    assert difference.max() < most
    assert difference.mean() < mean


@pytest.mark.parametrize("name", [*MODELS, *TINY])
def test_fused_layers_compute_what_layers_compute_one_by_one(name: str) -> None:
    assert_same_but_for_rounding(model_of(config_of(name), name=name), "float32", is_narrow=False)


def without_gates(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """The config of such a model without gates; a shared expert is half as large again as the others."""
    monkeypatch.setattr(Decoder, "activation", "relu2")
    moe = config.moe and replace(config.moe, num_shared_experts=1, shared_expert_size=config.moe.expert_size * 3 // 2)
    return replace(config, mlp_gate=False, moe=moe)


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama_biased_tied", "wide", "ernie_moe"])
def test_fused_layers_without_gates_compute_what_layers_compute_one_by_one(
    name: str, weights_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_groups = {"intermediate_size": 64, "moe_intermediate_size": 64}
    config = without_gates(model_config({**MODELS[name], **whole_groups}), monkeypatch)
    model, is_narrow = model_of(config, weights_dtype), weights_dtype != "float32"
    assert model._fused is not None
    assert_same_but_for_rounding(model, "float32", is_narrow)
    dense = model._layers[0].mlp
    assert dense.into.weight.outputs == config.intermediate_size, "nothing stands for gates"


FEW: tuple[Step, ...] = (
    [(0, 20), (1, 9)],
    [(1, 1), (0, 1), (2, 31)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 17), (1, 1), (3, 9), (0, 1)],
    [(1, 1)],
)
"""Steps of sequences of less tokens than latents are expanded for."""
OVER_LATENTS = ("deepseek-v2", "deepseek-v3", "deepseek-v3-bias", "kimi-linear", "mistral4")


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OVER_LATENTS)
def test_layers_with_latents_compute_what_they_do_one_by_one(name: str, kv_dtype: str) -> None:
    model = model_of(config_of(name), name=name)
    fused, layered = (np.concatenate(run(model, way, FEW, kv_dtype)) for way in (CacheShown, LayerByCall))
    difference = np.abs(fused - layered).max(axis=1) / np.abs(layered).max()
    if kv_dtype == "float32":
        assert difference.max() < 1e-4
        assert np.median(difference) < 1e-5
    else:  # narrow numbers, as above; where CPUs multiply pairs of bfloat16, probabilities are, too
        assert difference.max() < 0.03
        assert np.median(difference) < 1e-3


@pytest.mark.parametrize("name", OVER_LATENTS)
def test_prompts_over_latents_are_computed_one_by_one_and_go_on_as_one(name: str) -> None:
    model = model_of(config_of(name), name=name)
    either, layered = (np.concatenate(run(model, way)) for way in (EitherWay, LayerByCall))
    np.testing.assert_allclose(either, layered, rtol=0, atol=1e-4 * np.abs(layered).max())
    sequences = PagedSequences(model, "int8")
    assert not model._fused.takes(AttentionBatch(np.arange(2), np.ones(1), np.zeros((1, 1)), 1), sequences.layouts)


@pytest.mark.parametrize("name", OVER_LATENTS)
def test_neither_threads_nor_other_sequences_change_layers_with_latents_bit_by_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (model_of(config_of(name), threads=threads, name=name) for threads in (1, 2))
    expected = run(one, CacheShown, FEW)
    monkeypatch.setattr(module, "LAYER_BYTES", 1)
    assert_equal(run(two, CacheShown, FEW), expected)
    assert_equal(run(two, partial(CacheShown, wait_layer=lambda layer: None), FEW), expected)
    members = [sequence for step in FEW for sequence, _ in step]
    alone = run(two, CacheShown, [[part for part in step if part[0] == 1] for step in FEW if 1 in dict(step)])
    assert_equal(alone, [rows for member, rows in zip(members, expected, strict=True) if member == 1])


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_not_one_call_give_the_same_and_so_does_the_layer_around_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = np.concatenate(run(model_of(config_of(name)), CacheShown))
    monkeypatch.setattr(experts_jit, "MOST_EXPERTS", 1)
    model = model_of(config_of(name))
    assert model._fused is None
    found = np.concatenate(run(model, LayerByCall))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_a_mixture_is_told_where_its_rooms_are_when_others_were_made_between_two_steps_of_a_size() -> None:
    model = model_of(config_of("ernie_moe"))
    sequences = PagedSequences(model)
    sequences.forward(model, [(0, 4)], CacheShown)
    model._fused.embedded(model._embedding, np.zeros(64, np.int32))  # as for a step that failed then
    sequences.forward(model, [(0, 4)], CacheShown)
    mixing, rooms = model._fused._mixing._records[0], model._fused._rooms
    assert (mixing["x"], mixing["out"]) == tuple(place_of(rooms.kept[place]) for place in (NORMED, ADDED))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "mistral_window", "wide", "gemma4-shared", "qwen3.5"])
def test_fused_layers_compute_the_same_over_narrow_kv(name: str, kv_dtype: str) -> None:
    assert_same_but_for_rounding(model_of(config_of(name), name=name), kv_dtype, is_narrow=True)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "wide"])
def test_fused_layers_compute_the_same_with_windows_and_sinks_by_head_and_layer(name: str, kv_dtype: str) -> None:
    assert_same_but_for_rounding(model_of(pattern(config_of(name))), kv_dtype, is_narrow=kv_dtype != "float32")


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "wide", "qwen3_moe"])
def test_fused_layers_compute_the_same_with_narrow_weights(name: str, weights_dtype: str) -> None:
    config = model_config({**MODELS[name], **WHOLE_GROUPS})
    assert_same_but_for_rounding(model_of(config, weights_dtype), "bfloat16", is_narrow=True)


@pytest.mark.parametrize("name", TINY)
def test_layers_of_all_kinds_compute_the_same_with_weights_of_bfloat16(name: str) -> None:
    """Of most rows: what is rounded otherwise may go to another one of two experts that are as good."""
    model = model_of(config_of(name), "bfloat16", name=name)
    fused, layered = (np.concatenate(run(model, way, kv_dtype="bfloat16")) for way in (CacheShown, LayerByCall))
    difference = np.abs(fused - layered).max(axis=1) / np.abs(layered).max()
    assert np.median(difference) < 0.01


class InCodes(DictWeights):
    """Weights whose projections are kept as codes of ``bits`` bits, of which kernels are ``told`` another number."""

    def __init__(self, weights: DictWeights, bits: int, told: int) -> None:
        super().__init__({name: weights.tensor(name) for name in weights.names})
        self._bits, self._told = bits, told

    def kept_rows(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        return self._codes(self.rows(name, start, stop)) if "_proj." in name else None

    def kept_columns(self, name: str, start: int, stop: int) -> GroupQuantised | None:
        return self._codes(self.columns(name, start, stop)) if "_proj." in name else None

    def _codes(self, values: np.ndarray) -> GroupQuantised:
        wide, shift = quantise_int8(values), 8 - self._bits
        return GroupQuantised(wide.codes >> shift, wide.scale * np.float32(1 << shift), None, 32, self._told)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_fused_layers_compute_from_few_bits_what_they_do_from_a_byte_for_each_code(bits: int) -> None:
    config = config_of("wide")
    found = []
    for told in (bits, 8):
        weights, ops = InCodes(random_weights(config), bits, told), make_ops("numba", 2, "bfloat16", "gguf")
        model = build_model(config, weights, ops, SingleRank(), only_shard(config))
        found.append(run(model, CacheShown))
    assert_equal(*found)


@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "mistral_window", "ernie_moe", "gpt_oss"])
def test_steps_over_a_cache_compute_what_dense_attention_computes_of_whole_sequences(name: str) -> None:
    model = model_of(pattern(config_of(name)))
    sequences = PagedSequences(model)
    parts: dict[int, list[np.ndarray]] = {}
    for step in STEPS:
        for (sequence, _), rows in zip(step, sequences.forward(model, step, CacheShown), strict=True):
            parts.setdefault(sequence, []).append(rows)
    attention = DenseAttention(model.config, only_shard(model.config), model.ops)
    for sequence, rows in parts.items():
        ids = sequences.tokens(sequence)
        expected = model.forward(ids, np.arange(len(ids), dtype=np.int32), attention)
        np.testing.assert_allclose(np.concatenate(rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [*product(("llama_biased_tied", "gemma3", "ernie_moe"), ("float32", "int8")), *product(TINY, ("float32",))],
)
def test_layers_that_are_waited_for_compute_the_same_bit_by_bit(name: str, kv_dtype: str) -> None:
    model, waited = model_of(patterned(name), name=name), []
    at_once = run(model, CacheShown, kv_dtype=kv_dtype)
    one_by_one = run(model, partial(CacheShown, wait_layer=waited.append), kv_dtype=kv_dtype)
    assert waited == list(range(model.config.num_layers)) * len(STEPS)
    assert_equal(one_by_one, at_once)


@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "gpt_oss", *TINY])
def test_layers_in_parts_compute_the_same_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks take them, but that there is nobody to sum with."""
    model, sums = model_of(patterned(name), name=name), []
    whole = run(model, CacheShown)
    decoder = model._fused
    assert isinstance(decoder, module.CpuDecoder)

    def alone(part: np.ndarray) -> np.ndarray:
        sums.append(part.copy())
        return sums[-1]

    at_once = decoder.run
    monkeypatch.setattr(decoder, "run", lambda *step, **named: at_once(*step, **named | {"sum_over_ranks": alone}))
    assert_equal(run(model, CacheShown), whole)
    if all(layer.can_be_a_part for layer in decoder._layers):
        gated_shares = sum(getattr(layer.mlp, "shared", None) is not None for layer in decoder._layers)
        mlps = sum(layer.mlp is not None for layer in decoder._layers)
        assert len(sums) == (model.config.num_layers + mlps + gated_shares) * len(STEPS)
    one_by_one = run(model, partial(CacheShown, wait_layer=lambda layer: None))
    assert_equal(one_by_one, whole)


WANTED = ([], [0], [3, 4, 36], [0, 1, 19, 50, 51])
"""Rows of steps of 52 tokens."""


def rows_of_steps(model: Model, attention, wanted=()) -> list[np.ndarray]:
    """Of a mixed step, the ``wanted`` rows if those are given, and of the steps around it, all rows."""
    sequences = PagedSequences(model)
    before, step, behind = [(0, 37), (1, 3)], [(1, 1), (0, 1), (2, 50)], [(2, 2), (0, 1)]
    others = sequences.rows(model, before, attention)
    found = sequences.rows(model, step, attention, *wanted)
    return [found, others, sequences.rows(model, behind, attention)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        pytest.param(name, wanted, marks=() if name in every or len(wanted) > 3 else pytest.mark.soak)
        for every in [("llama_biased_tied", "qwen3_moe", "gpt_oss", "gemma4-shared", "qwen3.5", "granite-hybrid-ssm")]
        for name in (*every[:3], "gemma3", "ernie_moe", *TINY)
        for wanted in WANTED
    ],
)
def test_rows_that_are_not_wanted_are_left_out_and_change_nothing_bit_by_bit(name: str, wanted: list[int]) -> None:
    model, rows = model_of(patterned(name), name=name), np.array(wanted, np.int64)
    every, *others = rows_of_steps(model, CacheShown)
    found, *same = rows_of_steps(model, CacheShown, (rows,))
    if model.config.last_kept == model.config.num_layers - 1:
        assert_equal([found], [every[rows]])
    else:  # behind it, each is a sequence of one query
        np.testing.assert_allclose(found, every[rows], rtol=0, atol=2e-5 * np.abs(every).max())
    assert_equal(same, others)
    assert_equal(rows_of_steps(model, partial(CacheShown, wait_layer=lambda layer: None), (rows,)), [found, *others])


def test_layers_that_share_a_cache_compute_no_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = model_of(patterned("gemma4-shared"), name="gemma4-shared"), []
    run, rows = model._fused.run, np.array([0, 51])
    monkeypatch.setattr(
        model._fused,
        "run",
        lambda x, layers, *more, **named: taken.append((layers, len(x))) or run(x, layers, *more, **named),
    )
    layers, keeping = model.config.num_layers, model.config.last_kept + 1
    assert keeping < layers
    sequences = PagedSequences(model)
    sequences.rows(model, [(0, 2), (1, 50)], CacheShown, rows)
    sequences.rows(model, [(1, 20)], CacheShown, rows[:0])
    assert taken == [(range(keeping), 52), (range(keeping, layers), 2), (range(keeping), 20)]


@pytest.mark.parametrize("name", ["llama_biased_tied", "gpt_oss", "deepseek-v2", *TINY])
def test_layers_one_by_one_leave_out_rows_that_are_not_wanted(name: str) -> None:
    model = model_of(patterned(name), name=name)
    every, *others = rows_of_steps(model, LayerByCall)
    for wanted in WANTED:
        rows = np.array(wanted, np.int64)
        found, *same = rows_of_steps(model, LayerByCall, (rows,))
        np.testing.assert_allclose(found, every[rows], rtol=0, atol=2e-5 * np.abs(every).max())
        assert_equal(same, others)


def test_sums_over_ranks_are_of_the_wanted_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sums = model_of(pattern(config_of("llama"))), []
    decoder, at_once = model._fused, model._fused.run
    expected = rows_of_steps(model, CacheShown)
    monkeypatch.setattr(
        decoder,
        "run",
        lambda *step, **named: at_once(*step, **named | {"sum_over_ranks": lambda x: sums.append(x) or x}),
    )
    rows = np.array([7, 51])
    found = rows_of_steps(model, CacheShown, (rows,))
    assert_equal(found, [expected[0][rows], *expected[1:]])
    layers = model.config.num_layers
    of_step = [len(part) for part in sums][2 * layers : 4 * layers]
    assert of_step == [52] * (2 * layers - 2) + [2, 2]
    sums.clear()
    rows_of_steps(model, CacheShown, (rows[:0],))
    assert len(sums) == 6 * layers - 2, "of nothing there are none"


def test_a_layer_is_computed_over_what_was_loaded_while_it_was_waited_for() -> None:
    model = model_of(pattern(config_of("llama")))
    before, loaded = PagedSequences(model), PagedSequences(model)
    for sequences in (before, loaded):
        sequences.forward(model, [(0, 40)], CacheShown)
    loaded.arena[:] = 0xFF

    def load(layer: int) -> None:
        loaded.copy_layer(layer, before)

    source = before.forward(model, [(0, 3)], CacheShown)
    assert_equal(loaded.forward(model, [(0, 3)], partial(CacheShown, wait_layer=load)), source)


@pytest.mark.parametrize(
    ("name", "weights_dtype"),
    [
        *product(("llama_biased_tied", "gemma3", "qwen3_moe"), ("float32", "bfloat16", "int8")),
        *product(TINY, ("bfloat16",)),
    ],
)
def test_a_sequence_has_the_same_result_alone_and_among_others_bit_by_bit(name: str, weights_dtype: str) -> None:
    config = config_of(name) if name in TINY else pattern(model_config({**MODELS[name], **WHOLE_GROUPS}))
    model = model_of(config, weights_dtype, name=name)
    kv_dtype = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}[weights_dtype]
    together = run(model, CacheShown, kv_dtype=kv_dtype)
    members = [sequence for step in STEPS for sequence, _ in step]
    for sequence in sorted(set(members)):
        own_steps = [[part for part in step if part[0] == sequence] for step in STEPS]
        alone = run(model, CacheShown, [step for step in own_steps if step], kv_dtype)
        assert_equal(alone, [rows for member, rows in zip(members, together, strict=True) if member == sequence])


@pytest.mark.parametrize("name", ["gemma3", "wide", "ernie_moe", *TINY])
def test_threads_change_nothing_bit_by_bit_whether_they_have_cores_or_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (model_of(patterned(name), threads=threads, name=name) for threads in (1, 2))
    expected = run(one, CacheShown)
    monkeypatch.setattr(module, "LAYER_BYTES", 1)  # a second thread is woken for anything
    assert_equal(run(two, CacheShown), expected)
    monkeypatch.setattr(module, "pool_of_this_process", NoCoreForOthers)
    assert_equal(run(two, CacheShown), expected)


def test_a_decoder_takes_caches_of_several_dtypes_in_turn() -> None:
    model = model_of(config_of("llama"))
    before = run(model, CacheShown)
    run(model, CacheShown, kv_dtype="int8")
    assert_equal(run(model, CacheShown), before)


@pytest.mark.parametrize(
    ("name", "weights_dtype"), [("gemma3", "float32"), ("gemma3", "int8"), ("ernie_moe", "float32")]
)
def test_a_step_of_the_same_size_allocates_no_array(
    name: str, weights_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the look-up of embeddings to the final norm: neither by NumPy's functions, nor within an operation."""
    model = model_of(pattern(model_config({**MODELS[name], **WHOLE_GROUPS, "hidden_size": 1024})), weights_dtype)
    sequences, peaks = PagedSequences(model), []
    sequences.forward(model, [(0, 40), (1, 3)], CacheShown)
    sequences.forward(model, [(0, 16), (1, 16)], CacheShown)
    forward = model.forward

    def measured(*arguments):
        with monkeypatch.context() as patch:
            for name in ("empty", "zeros", "ones", "full", "array", "asarray", "ascontiguousarray", "concatenate"):
                patch.setattr(np, name, None)
            tracemalloc.start()
            hidden = forward(*arguments)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return hidden

    monkeypatch.setattr(model, "forward", measured)
    (found, _), bytes_of_x = sequences.forward(model, [(0, 16), (1, 16)], CacheShown), 32 * 1024 * 4
    assert np.isfinite(found).all()
    assert peaks[0] < bytes_of_x / 2, "objects take less, and the residual stream more"


def test_scores_of_a_step_take_the_memory_of_the_one_before() -> None:
    model = model_of(config_of("llama"))
    hidden = np.random.default_rng(1).standard_normal((500, model.config.hidden_size)).astype(np.float32)
    expected = model.scores(hidden)
    model.step_scores(hidden[:3])
    first = model.step_scores(hidden)
    np.testing.assert_array_equal(first, expected)
    tracemalloc.start()
    second = model.step_scores(hidden[::-1].copy())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.shares_memory(first, second)
    np.testing.assert_array_equal(second, expected[::-1])
    assert peak < expected.nbytes + hidden.nbytes


def test_arrays_that_compiled_code_would_misread_are_refused() -> None:
    def misread(sequences, batch):
        return CacheShown(sequences, replace(batch, seq_lens=batch.seq_lens.astype(np.int64)))

    with pytest.raises(TypeError, match="contiguous array of int32, got int64"):
        run(model_of(config_of("llama")), misread)


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.soak
@pytest.mark.parametrize("cpu", OTHER_CPUS)
def test_decoders_compiled_for_other_cpus_pass_all_tests(cpu: str) -> None:
    assert_passes(__file__, cpu)
