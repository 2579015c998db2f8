"""Head patterns: their files, the policies made of them, and how the planner packs the published one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headwise.cache_controller.block_hash import hash_seed
from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.head_pattern import (
    HeadPattern,
    check_streaming,
    format_pattern,
    parse_pattern,
    policies_from_scores,
    streaming_heads,
)
from headwise.cache_controller.planner import MAX_PADDING, MAX_ROUNDED_UP, plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ConfigError, DeploymentError, ModelError
from headwise.runtime.config.block_storage import check_agrees
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import requests_that_fit
from headwise.runtime.config.model_card import NUMERICS_VERSION, ModelCard, check_unchanged, read_model_card
from headwise.runtime.frontend.preprocessor import Preprocessor

PUBLISHED = Path(__file__).parents[2].parent / "shared" / "data" / "duo-llama-3.1-8b-full-attention-heads.tsv"
STREAMING = HeadPolicy(window=256, sink=64)
SCORES = np.array([[0.9, 0.1], [0.2, 0.8]])

needs_published = pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"the published pattern is not at {PUBLISHED}")


def rounded_up(plan: HeadGroupPlan, policies) -> int:
    """Members in a group that keeps more than they need."""
    return sum(
        policies[member.layer][member.kv_head] != group.policy
        for group in plan.groups
        for rank in group.members
        for member in rank
    )


# ---- files ----


def test_a_tab_separated_table_is_read_as_layers_by_heads() -> None:
    pattern = parse_pattern("1.000e+00\t0.25\n0\t0.5\n\n", "duo.tsv")
    assert pattern.scores.tolist() == [[1.0, 0.25], [0.0, 0.5]]
    assert (pattern.model, pattern.source) == ("", "duo.tsv")


def test_json_survives_being_written_and_read() -> None:
    pattern = HeadPattern(SCORES, "p.json", "smollm2-135m", "abc", "headwise 1")
    again = parse_pattern(format_pattern(pattern), "p.json")
    np.testing.assert_array_equal(again.scores, SCORES)
    assert replace(again, scores=None) == replace(pattern, scores=None)


def _json(**changes: object) -> str:
    return json.dumps({"format": "headwise-pattern/1", "model": "m", "scores": [[0.1, 0.2]], **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", r"p is empty; a pattern has one row of scores per layer"),
        ("1\t2\n\n1\t2\t3\n", r"p, line 3: 3 scores, line 1 has 2; every layer needs one score per KV head"),
        ("1\t2\n1\tnan\n", r"p, line 2: score 1 is 'nan'; scores are finite and not negative: measure"),
        ("1\tinf\n", r"p, line 1: score 1 is 'inf'; scores are finite"),
        ("1\t-0.5\n", r"p, line 1: score 1 is '-0.5'; scores are finite and not negative"),
        ("1\thigh\n", r"p, line 1: score 1 is 'high', which is no number"),
        ("0.1 0.2\n", r"p, line 1: score 0 is '0.1 0.2', which is no number"),
        ("{", r"p is not valid JSON: .*; write it again with `headwise calibrate`"),
        (_json(format="duo"), r"p: 'format' must be 'headwise-pattern/1', got 'duo'"),
        (_json(scores=[]), r"p: 'scores' must be a list with one list of scores per layer"),
        (_json(scores=[[]]), r"p, layer 0: a layer needs at least one score"),
        (_json(scores=[1, 2]), r"p: 'scores' must be a list with one list of scores per layer"),
        (_json(scores=[[1], [1, 2]]), r"p, layer 1: 2 scores, layer 0 has 1"),
        (_json(scores=[[1], [None]]), r"p, layer 1: score 0 is None, which is no number"),
        (_json(scores=[[True]]), r"p, layer 0: score 0 is True; scores are finite"),
        (_json(model=7), r"p: 'model' must be text, got 7"),
    ],
)
def test_a_broken_file_is_named_with_its_row_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pattern(text, "p")


def test_a_pattern_of_another_shape_says_both_shapes() -> None:
    with pytest.raises(
        ConfigError, match=r"p: the pattern has 2 rows \(layers\) of 2 .* m has 30 layers of 3 KV heads"
    ):
        HeadPattern(SCORES, "p").check_fits((30, 3), "m", "id")


@pytest.mark.parametrize(("model", "identity"), [("m", "other"), ("other", "id"), ("m", "id"), ("", "")])
def test_a_pattern_fits_if_it_names_no_model_or_agrees_in_name_or_identity(model: str, identity: str) -> None:
    HeadPattern(SCORES, "p", model, identity).check_fits((2, 2), "m", "id")


def test_a_pattern_of_another_model_names_both_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"p: the pattern was measured on gemma, the model to serve is m; .*remove"):
        HeadPattern(SCORES, "p", "gemma", "g").check_fits((2, 2), "m", "id")


# ---- policies ----


def test_the_lowest_scores_stream_and_the_rest_stay_full() -> None:
    assert policies_from_scores(SCORES, 0.5, 64, 256) == ((FULL, STREAMING), (STREAMING, FULL))


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("heads", [7, 90, 101, 256])
def test_as_many_heads_stream_as_lie_below_the_quantile(sparsity: float, heads: int) -> None:
    scores = np.random.default_rng(heads).permutation(heads).astype(float)[None]
    below = scores < np.quantile(scores, sparsity) - 1e-6
    np.testing.assert_array_equal(streaming_heads(scores, sparsity), below)


def test_a_sparsity_of_one_spares_no_head() -> None:
    assert policies_from_scores(SCORES, 1.0, 64, 256) == ((STREAMING,) * 2,) * 2


def test_of_equal_scores_the_first_layers_and_heads_stream() -> None:
    assert streaming_heads(np.zeros((2, 3)), 0.5).tolist() == [[True, True, True], [False, False, False]]


def test_a_head_that_the_model_windows_keeps_the_tighter_of_both() -> None:
    narrow, wide, sunk = HeadPolicy(100), HeadPolicy(512), HeadPolicy(512, sink=4)
    own = ((narrow, wide), (sunk, FULL))
    got = policies_from_scores(np.zeros((2, 2)), 1.0, 64, 256, own)
    assert got == ((HeadPolicy(100), HeadPolicy(256)), (HeadPolicy(256, sink=4), STREAMING))
    assert policies_from_scores(np.zeros((2, 2)), 0.0, 64, 256, own) == own


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-0.1, 64, 256), "sparsity is the share of heads that stream, from 0 to 1, got -0.1"),
        ((1.5, 64, 256), "sparsity is the share .* got 1.5"),
        ((float("nan"), 64, 256), "sparsity is the share .* got nan"),
        ((0.5, -1, 256), "sink must not be negative, got -1"),
        ((0.5, 0, 0), "window must be at least 1, a token sees itself, got 0"),
        ((0.5, 257, 256), "sink 257 is more than window 256: lower sink or raise window"),
        ((0.5, 0, 32), "window 32 is less than block_size 64: memory is freed in whole blocks"),
    ],
)
def test_bad_sizes_are_refused(values: tuple[float, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_streaming(*values, block_size=64)


# ---- the configuration ----


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def card(model: Path, scores: str = "0.9\t0.1\n0.2\t0.8\n", **changes: object) -> ModelCard:
    path = model / "pattern.tsv"
    path.write_text(scores)
    return read_model_card(EngineConfig(model="tiny", head_pattern=str(path), **changes), model)


def test_the_model_card_has_the_patterns_policies_and_groups(model: Path) -> None:
    got = card(model, sink=16, window=128)
    streaming = HeadPolicy(128, 16)
    assert got.config.policies == ((FULL, streaming), (streaming, FULL))
    assert got.plan.policies == (FULL, streaming)


def test_a_pattern_lets_more_long_requests_fit_and_longer_ones(model: Path) -> None:
    config = EngineConfig(model="tiny", kv_cache="960KiB", sink=64, window=128, max_batched_tokens=64)
    got = card(model, kv_cache="960KiB", sink=64, window=128, max_batched_tokens=64)
    blocks = got.spec.num_blocks  # of 64 tokens, for one of two groups
    assert blocks == 60
    # 1,024 tokens: 16 blocks of the full group, and 1 + 4 that sink, window and the tokens in flight reach into
    assert requests_that_fit(config, got, 1024) == (60 // 21, 60 // 32)
    assert got.max_model_len == (60 - 5) * 64
    assert card(model, kv_cache="960KiB", recycling=False).max_model_len == 60 // 2 * 64


def test_a_host_cache_of_less_than_a_block_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"host_cache 1KiB does not hold one block of 16384 bytes"):
        card(model, host_cache="1KiB")
    assert card(model, host_cache="16KiB").spec.num_host_blocks == 1


def test_blocks_of_different_policies_never_share_an_identity(model: Path) -> None:
    plain = read_model_card(EngineConfig(model="tiny"), model)
    cards = [plain, card(model), card(model, window=128), card(model, sink=32), card(model, sparsity=0.75)]
    cards.append(card(model, "0.1\t0.9\n0.2\t0.8\n"))
    assert len({c.identity for c in cards}) == len(cards)


def test_models_that_differ_in_a_few_weights_only_never_share_an_identity(model: Path) -> None:
    weights = np.zeros(3_000_000, dtype=np.float32)
    identities = set()
    for changed in (slice(0, 0), slice(1_000_000, 1_010_000), slice(2_990_000, None)):
        tuned = weights.copy()
        tuned[changed] = 1e-6
        save_file({"w": tuned}, model / "model.safetensors")
        identities.add(card(model).identity)
    assert len(identities) == 3


def test_models_that_differ_in_one_weight_never_share_an_identity(model: Path) -> None:
    weights = np.zeros(3_000_000, dtype=np.float32)
    identities = set()
    for changed in (0, 271_828, 1_414_213, 2_999_999):
        weights[changed] = 1e-6
        save_file({"w": weights}, model / "model.safetensors")
        identities.add(read_model_card(EngineConfig(model="tiny"), model).identity)
    assert len(identities) == 4


def test_what_computes_in_another_precision_never_shares_an_identity(model: Path) -> None:
    def identity(**config: object) -> str:
        return read_model_card(EngineConfig(model="tiny", **config), model).identity

    gpu = {"device": "cuda"}
    differ = [
        identity(),
        identity(**gpu),
        identity(**gpu, dtype="float16"),
        identity(**gpu, dtype="float32"),
        identity(**gpu, tensor_ops="paddle"),
    ]
    assert len(set(differ)) == len(differ)
    assert identity(**gpu, tensor_ops="cupy", dtype="bfloat16") == identity(**gpu)


def test_the_identity_does_not_depend_on_whose_kernels_compute(model: Path) -> None:
    expected = read_model_card(EngineConfig(model="tiny"), model).identity
    others = EngineConfig(model="tiny", kernels="reference", tensor_ops="numpy")
    assert read_model_card(others, model).identity == expected


def test_another_version_of_our_numerics_shares_no_blocks_with_this_one(model: Path, monkeypatch) -> None:
    before = read_model_card(EngineConfig(model="tiny"), model)
    monkeypatch.setattr("headwise.runtime.config.model_card.NUMERICS_VERSION", NUMERICS_VERSION + 1)
    after = read_model_card(EngineConfig(model="tiny"), model)
    assert before.identity != after.identity
    assert before.weights == after.weights


def test_the_geometry_is_read_without_the_weights_and_hashes_no_blocks(model: Path) -> None:
    (model / "model.safetensors").mkdir()  # reading it would fail
    got = read_model_card(EngineConfig(model="tiny"), model, identify=False)
    with pytest.raises(ValueError, match="identity is known"):
        hash_seed(got.identity)
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        read_model_card(EngineConfig(model="tiny"), model)


def test_a_model_that_was_replaced_is_not_taken_for_the_one_that_is_served(model: Path) -> None:
    config = EngineConfig(model="tiny")
    save_file({"w": np.zeros(4, dtype=np.float32)}, model / "model.safetensors")
    got = read_model_card(config, model)
    check_unchanged(got, config, model)
    save_file({"w": np.ones(4, dtype=np.float32)}, model / "model.safetensors")
    with pytest.raises(ModelError, match="no longer the one that the deployment was started with"):
        check_unchanged(got, config, model)


def test_an_engine_whose_files_differ_from_the_schedulers_is_refused(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model="tiny")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((model / "config.json").read_bytes())
    for directory, value in ((model, 0.0), (other, 1.0)):
        save_file({"w": np.full(4, value, dtype=np.float32)}, directory / "model.safetensors")
    scheduler, engine, same = (
        Preprocessor(read_model_card(config, directory), None).namespace for directory in (model, other, model)
    )
    check_agrees("engine-0", same, scheduler)
    with pytest.raises(DeploymentError, match="engine-0 has another model than the scheduler"):
        check_agrees("engine-0", engine, scheduler)


def test_a_pattern_that_names_the_weights_fits_however_they_are_computed(model: Path) -> None:
    weights = read_model_card(EngineConfig(model="tiny"), model).weights
    path = model / "pattern.json"
    path.write_text(format_pattern(HeadPattern(SCORES, "", "another name", weights)))
    for config in ({}, {"device": "cuda"}):
        for identify in (True, False):
            read_model_card(EngineConfig(model="tiny", head_pattern=str(path), **config), model, identify=identify)


def test_a_pattern_that_changes_no_policy_keeps_the_cache_usable(model: Path) -> None:
    plain = read_model_card(EngineConfig(model="tiny"), model)
    assert card(model, sparsity=0.0).identity == plain.identity


def test_a_missing_or_binary_file_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read head pattern .*absent\.tsv: No such file"):
        read_model_card(EngineConfig(head_pattern=str(model / "absent.tsv")), model)
    (model / "p.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"p\.bin is no head pattern: it is not text"):
        read_model_card(EngineConfig(head_pattern=str(model / "p.bin")), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 48}, "window 48 is less than block_size 64"),
        ({"sink": 300}, "sink 300 is more than window 256"),
        ({"sparsity": -0.5}, "sparsity must be from 0 to 1, got -0.5"),
        ({"sink": -1}, "sink must be at least 0, got -1"),
    ],
)
def test_the_configuration_refuses_what_cannot_work(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(head_pattern="p.tsv", **changes)


def test_sizes_are_judged_only_where_there_is_a_pattern() -> None:
    assert EngineConfig(block_size=512).window == 256


# ---- packing ----


@needs_published
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_published_pattern_at_half_is_two_groups_without_padding(tp_size: int) -> None:
    scores = parse_pattern(PUBLISHED.read_text(), PUBLISHED.name).scores
    policies = policies_from_scores(scores, 0.5, 64, 256)
    plan = plan_head_groups(policies, tp_size)
    assert plan.policies == (FULL, STREAMING)
    assert (plan.slots, plan.padding, rounded_up(plan, policies)) == (128 // tp_size, 0.0, 0)


@needs_published
@pytest.mark.parametrize("sparsity", [tenth / 20 for tenth in range(2, 19)])
def test_the_published_pattern_takes_2_to_20_groups_at_any_sparsity(sparsity: float) -> None:
    scores = parse_pattern(PUBLISHED.read_text(), PUBLISHED.name).scores
    policies = policies_from_scores(scores, sparsity, 64, 256)
    plan = plan_head_groups(policies)
    assert 2 <= len(plan.groups) <= 20
    assert plan.padding <= MAX_PADDING
    assert rounded_up(plan, policies) <= MAX_ROUNDED_UP * scores.size


geometries = st.sampled_from([(16, 8), (28, 8), (32, 8), (36, 16), (48, 8), (62, 16), (80, 8)])


@given(geometries, st.floats(0, 1), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]))
def test_any_pattern_packs_with_little_waste_on_any_number_of_ranks(
    geometry: tuple[int, int], sparsity: float, seed: int, tp_size: int
) -> None:
    scores = np.random.default_rng(seed).random(geometry)
    policies = policies_from_scores(scores, sparsity, 64, 256)
    plan = plan_head_groups(policies, tp_size)
    assert plan.padding <= MAX_PADDING
    forced = tp_size - 1  # ranks share the tables: the last full slot of each is full on all
    assert rounded_up(plan, policies) <= max(MAX_ROUNDED_UP * scores.size, forced)


@given(geometries, st.floats(0, 1), st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 8]))
def test_ranks_get_equal_shares_of_full_heads(
    geometry: tuple[int, int], sparsity: float, seed: int, tp_size: int
) -> None:
    policies = policies_from_scores(np.random.default_rng(seed).random(geometry), sparsity, 64, 256)
    plan = plan_head_groups(policies, tp_size)
    full = [
        sum(policies[layer][head].is_full for layer, heads in enumerate(plan.kv_heads(rank)) for head in heads)
        for rank in range(tp_size)
    ]
    assert max(full) - min(full) <= 1
