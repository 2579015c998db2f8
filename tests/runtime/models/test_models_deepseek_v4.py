"""DeepSeek-V4: its configuration in all spellings, names of weights, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.attention.base import Serving
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.compressed_config import Sides
from headwise.runtime.models.deepseek_v4_config import V4Config
from headwise.runtime.models.deepseek_v4_names import renamed
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank

NAME = "deepseek-v4"
TINY = TINY_CONFIGS[NAME]
IDS = np.arange(3, 60, dtype=np.int32)
PUBLISHED = Path(__file__).parents[2] / "support" / "published" / "deepseek-v4-flash.json"


def weights() -> dict[str, np.ndarray]:
    return draw_weights(TINY, reference(NAME)["shapes"])


def logits(given: dict[str, np.ndarray]) -> np.ndarray:
    found = run_rank(model_config(TINY), DictWeights(given), SingleRank(), IDS)
    assert found is not None
    return found


AS_PUBLISHED: dict[str, Any] = {
    "layer_types": None,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "compress_rates": None,
    "partial_rotary_factor": None,
    "qk_rope_head_dim": 16,
    "mlp_layer_types": None,
    "num_hash_layers": 1,
}
AS_TRANSFORMERS_WRITES: dict[str, Any] = {
    "rope_scaling": None,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "compress": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.0,
            "rope_theta": 40000.0, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip


def test_a_config_as_it_was_published_is_the_same_but_for_its_rates() -> None:
    found, expected = model_config({**TINY, **AS_PUBLISHED}), model_config(TINY)
    assert isinstance(found, V4Config)
    assert found.compressed is not None
    assert expected.compressed is not None
    assert found.compressed.rates == (0, 4, 128, 4, 128)
    assert (found.ropes, found.moe, found.hyper) == (expected.ropes, expected.moe, expected.hyper)
    assert found.compressed.rotated == expected.compressed.rotated == 16


def test_a_config_as_transformers_writes_it_is_the_same_model() -> None:
    found, expected = model_config({**TINY, **AS_TRANSFORMERS_WRITES}), model_config(TINY)
    assert isinstance(found, V4Config)
    assert isinstance(expected, V4Config)
    for one, other in zip((*found.ropes, found.window_rope), (*expected.ropes, expected.window_rope), strict=True):
        assert one is not None
        assert other is not None
        scaling = [{**(rope.scaling or {})} for rope in (one, other)]
        for each in scaling:
            each["rope_type"] = each.pop("type", each.get("rope_type", "default"))
            each.pop("rope_theta", None)
        assert (one.theta, one.share, scaling[0]) == (other.theta, other.share, scaling[1])
    assert found.compressed == expected.compressed


def test_numbers_beside_attention_and_experts_are_those_of_connections() -> None:
    config, drafting = model_config(TINY), model_config(TINY).with_draft_layer()
    found = {name: array.size for name, array in weights().items() if name.endswith(("_attn_fn", "_ffn_fn", ".hc_fn"))}
    assert len(found) == 2 * 5 + 1
    assert config.side_elements == sum(found.values())
    of_layer = sum(size for name, size in found.items() if ".0." in name or "head" in name)
    assert drafting.side_elements - config.side_elements == of_layer, "the layer that drafts joins streams, too"


def test_what_a_layer_keeps_lies_in_three_caches_or_four() -> None:
    config = model_config(TINY)
    assert [config.sides_of(layer) for layer in range(5)] == [(), (5, 9, 11), (6, 13), (7, 10, 12), (8, 13)]
    windows = [row[0] for row in config.policies]
    of_rows = [*[HeadPolicy(8), HeadPolicy(16)] * 2, *[HeadPolicy(8)] * 2]
    assert windows == [*[HeadPolicy(24)] * 5, *of_rows, *[FULL] * 3]
    assert config.compressed is not None
    assert config.compressed.sides(4) == Sides(rows=(8,), entries=13, place=1)


@pytest.mark.parametrize(("kv_dtype", "codes"), [("int8", 1), ("float8_e4m3fn", 1), ("bfloat16", 0)])
def test_rotated_numbers_take_two_bytes_and_rows_that_entries_are_made_of_too(kv_dtype: str, codes: int) -> None:
    """``[keys, rows, entries of one layer, entries of two]``: heads of 32, of which 16 are rotated."""
    variant = attention_of(model_config(TINY))
    kept = [variant.layout(16, 1, kv_dtype, number) for number in (0, 5, 11, 13)]
    assert [layout.roles[0].dtype for layout in kept] == [kv_dtype, "bfloat16", kv_dtype, kv_dtype]
    wide = 32 + 16 * codes
    assert [layout.roles[0].shape for layout in (kept[0], kept[2], kept[3])] == [(wide,), (wide,), (2 * wide,)]
    assert len({layout.slot_bytes for layout in kept[2:]}) == 1


def test_what_members_are_is_told_in_words() -> None:
    one, two = (attention_of(model_config(TINY).in_stages(stages)) for stages in (1, 2))
    assert one.members(7, HeadPolicy(window=24)) == two.members(7, HeadPolicy(window=24)) == "7 times keys"
    assert one.members(4, HeadPolicy(window=8)) == "4 times rows for entries"
    assert two.members(4, HeadPolicy(window=8)) == "4 times rows for entries, in pieces"
    assert one.members(3, FULL) == "3 times entries, some of several layers"


def test_of_the_published_model_entries_of_128_tokens_lie_side_by_side() -> None:
    compressed = model_config(json.loads(PUBLISHED.read_text())).compressed
    assert compressed is not None
    assert [len(cache.layers) for cache in compressed.caches if cache.kind == "entries"] == [*[1] * 21, 20]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 5}, "'layer_types' must name 5 layers, each one of sliding_attention"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' must name 5 layers"),
        (
            {"layer_types": None, "compress_ratios": [0, 4, 7, 4, 7]},
            r"'compress_ratios' must have one of \[0, 4, 128\]",
        ),
        ({"layer_types": None, "compress_ratios": [0, 4]}, "for each of 5 layers, got"),
        ({"layer_types": None, "compress_ratios": "4"}, "'compress_ratios' must have one of"),
        ({"compress_rates": {"compressed_sparse_attention": 128}}, "must be two different numbers from 2 on"),
        ({"compress_rates": {"compressed_sparse_attention": 1}}, "must be two different numbers from 2 on"),
        ({"compress_rates": [4, 128]}, "'compress_rates' must be an object"),
        ({"partial_rotary_factor": 2}, "'partial_rotary_factor' must be above 0 and up to 1"),
        ({"partial_rotary_factor": 0.1}, "3 of a head's 32 elements are rotated: both must be even"),
        ({"index_head_dim": 8}, "'index_head_dim' 8 must be even, and no less than the 16"),
        ({"o_groups": 3}, "'o_groups' 3 does not divide 'num_attention_heads' 4"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 is more than 'n_routed_experts' 8"),
        ({"mlp_layer_types": ["dense"] * 5}, "'mlp_layer_types' must name 5 layers 'hash_moe' or 'moe'"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        ({"swiglu_limit": 7.0}, "'swiglu_limit' is 7.0"),
        ({"n_group": 8}, "'n_group' is 8"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True"),
        ({"hc_mult": 0}, "'hc_mult' must be a positive integer"),
        ({"sliding_window": None, "hc_sinkhorn_iters": 1 << 20}, "'hc_sinkhorn_iters' must be at most 1024"),
        ({"head_dim": 1 << 20}, "'head_dim' must be at most"),
        ({"rope_scaling": {"type": "ntk"}}, "rope scaling 'ntk' is not supported"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**TINY, **changes})


def test_names_of_all_three_kinds_are_one() -> None:
    saved = {name: name for name in weights()}
    published = {name.removeprefix("model.").replace("embed_tokens", "embed"): name for name in saved}
    published = {name.replace("hc_head.hc_", "hc_head_"): saved for name, saved in published.items()}
    ours = {ours: name for name, ours in renamed(saved).items()}
    for given in (published, ours):
        found = renamed(given)
        assert {ours: given[name] for name, ours in found.items()} == ours
    assert "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight" in ours
    assert renamed(["mtp.0.attn.wkv.weight", "mtp.0.hc_head_fn", "mtp.0.norm.weight"]) == {
        "mtp.0.attn.wkv.weight": "mtp.0.self_attn.kv_proj.weight",
        "mtp.0.hc_head_fn": "mtp.0.hc_head.hc_fn",
        "mtp.0.norm.weight": "mtp.0.norm.weight",
    }


def test_weights_by_their_published_names_are_the_same_model() -> None:
    published = {
        name.removeprefix("model.").replace("embed_tokens", "embed"): array for name, array in weights().items()
    }
    published = {name.replace("hc_head.hc_", "hc_head_"): array for name, array in published.items()}
    saved = run_rank(model_config(TINY), Checkpoint(checkpoint(NAME)), SingleRank(), IDS)
    np.testing.assert_array_equal(logits(published), saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.0.ffn.gate.tid2eid", np.full((263, 3), 8.0, np.float32), "names experts that there are not"),
        ("model.layers.0.ffn.gate.tid2eid", np.zeros((9, 3), np.float32), r"shape \(9, 3\) where config.json says"),
        ("model.layers.1.attn.compressor.ape", np.zeros((4, 32), np.float32), r"says \(4, 64\)"),
        ("model.layers.2.attn.compressor.wkv.weight", np.zeros((64, 64), np.float32), r"says \(32, 64\)"),
        ("model.layers.1.attn.indexer.wq_b.weight", np.zeros((512, 16), np.float32), r"says \(512, 32\)"),
        ("model.layers.3.hc_attn_fn", np.zeros((8, 256), np.float32), r"says \(24, 256\)"),
        ("model.layers.3.attn.wo_a.weight", np.zeros((48, 32), np.float32), r"says \(24, 64\)"),
        ("model.layers.3.attn.wo_b.weight", np.zeros((32, 48), np.float32), r"says \(64, 24\)"),
    ],
)
def test_weights_of_another_shape_are_refused_by_name(name: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        logits({**weights(), name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype int4 cannot hold what compressed attention keeps"),
        (
            {"kv_dtype": "int8", "device": "cuda", "dtype": "float16"},
            "kv_dtype int8 of m on a GPU takes dtype bfloat16",
        ),
        ({"tp_size": 5}, "tp_size 5 is more than the 4 query heads of m: choose up to that"),
        ({"context_parallel_size": 2, "tp_size": 2}, "context_parallel_size 2: of no layer of m"),
    ],
)
def test_a_deployment_that_cannot_be_served_is_told_why(changes: dict[str, Any], message: str) -> None:
    given = {"model": "m", "tp_size": 1, "device": "cpu", "kernels": "numba", "kv_dtype": "bfloat16", **changes}
    with pytest.raises(ConfigError, match=message):
        attention_of(model_config(TINY)).check(Serving(**given))


def test_what_lies_side_by_side_is_of_one_stage() -> None:
    """Entries of layers 2 and 4, which are in one cache without stages."""
    config = model_config(TINY).in_stages(2)
    assert config.stages(2) == (range(3), range(3, 5))
    assert [config.sides_of(layer) for layer in range(1, 5)] == [(5, 9, 11), (6, 13), (7, 10, 12), (8, 14)]
    assert config.layer_of_caches == (0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 3, 1, 3, 2, 4)
    assert len(config.policies) == 15
    assert config.stream_size == 4 * config.hidden_size
    assert model_config(TINY).in_stages(1) == model_config(TINY)


def test_layers_that_look_experts_up_by_token_are_in_the_first_stage() -> None:
    given = {**TINY, "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2}
    assert len(model_config(given).stages(2)) == 2
    with pytest.raises(ValueError, match="pipeline_parallel_size 3: layer 2 looks its experts up by token, and only"):
        model_config(given).in_stages(3)


def test_the_published_model_fills_blocks_in_stages_too() -> None:
    """In codes, of two stages: each has half of all that a token leaves for good."""
    config = model_config(json.loads(PUBLISHED.read_text())).in_stages(2)
    variant = attention_of(config)
    sizes = [variant.layout(64, 1, "float8_e4m3fn", number).slot_bytes for number in range(config.cache_layers)]
    plan = plan_head_groups(
        config.policies, sizes=sizes, is_replicated=True, stages=config.stages(2), layer_of=config.layer_of_caches
    )
    full = [group for group in plan.groups if group.policy.is_full]
    assert [len(members) for group in full for members in group.members] == [11, 12]
