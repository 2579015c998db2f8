"""Configs of models that are variants of others: what is read of them, and what is refused in a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.quantisation import scheme_of, without_scheme
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.cohere2_moe import Cohere2MoeModelConfig
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig
from headwise.runtime.models.granite import GraniteConfig
from headwise.runtime.models.laguna import LagunaConfig
from headwise.runtime.models.mimo_v2 import MiMoV2Config
from headwise.runtime.models.mla_config import MlaConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import rotated_elements
from headwise.runtime.ops.comm import SingleRank

PUBLISHED = Path(__file__).parents[2] / "support" / "published"


def published(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((PUBLISHED / f"{name}.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm5", {"indexer_types": ["full", "none", "full"]}, "'indexer_types' must name 3 layers 'full' or 'shared'"),
        ("glm5", {"indexer_types": 3}, "'indexer_types' must name 3 layers 'full' or 'shared', got 3"),
        ("glm5", {"indexer_types": ["full", "shared"]}, "'indexer_types' must name 3 layers 'full' or 'shared', got"),
        ("glm5", {"indexer_types": ["shared", "full", "full"]}, "the first layer must have an indexer of its own"),
        ("glm5", {"index_topk_pattern": "FXF"}, "'index_topk_pattern' must be an F or S for each layer, got 'FXF'"),
        ("glm5", {"index_topk_pattern": 7}, "'index_topk_pattern' must be an F or S for each layer, got 7"),
        ("glm5", {"index_topk_pattern": "FS"}, "'indexer_types' must name 3 layers 'full' or 'shared', got"),
        ("glm5", {"index_topk_freq": "often"}, "'index_topk_freq' must be a positive integer, got 'often'"),
        (
            "glm5",
            {"index_topk_freq": 3, "index_skip_topk_offset": 0},
            "the first layer must have an indexer of its own",
        ),
        ("glm5", {"q_lora_rank": None}, "'q_lora_rank' must be a positive integer: an indexer's queries"),
        (
            "glm4-moe",
            {"partial_rotary_factor": 0},
            "'partial_rotary_factor' must be a number above 0 and up to 1, got 0",
        ),
        ("glm4-moe", {"n_routed_experts": 2}, "'num_experts_per_tok' 3 cannot be chosen from .* 'n_routed_experts' 2"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must name 3 layers 'dense' or 'sparse'"),
        ("hunyuan3", {"num_experts": 2}, "'num_experts_per_tok' 3 cannot be chosen from .* 'num_experts' 2"),
        ("hunyuan-v1", {"use_cla": True}, "'use_cla' is True, which cannot be served"),
        ("hunyuan-v1", {"use_qk_norm": False}, "'use_qk_norm' is False, which cannot be served"),
        (
            "hunyuan-v1",
            {"rope_scaling": {"type": "dynamic", "alpha": "x"}},
            "'alpha' must be a positive number",
        ),
        ("hunyuan-v1-moe", {"moe_topk": [3, 2, 3]}, "'moe_topk' must be the same number for each of 3 layers, got"),
        ("hunyuan-v1-moe", {"moe_topk": []}, "'moe_topk' must be the same number for each of 3 layers, got"),
        ("hunyuan-v1-moe", {"num_experts": 2}, "'moe_topk' must be at most 2, got 3"),
        (
            "hunyuan-v1-moe",
            {"num_shared_expert": [2, 2, 2]},
            "'num_shared_expert' is .*, and 1 in each layer is",
        ),
        ("hunyuan-v1-moe", {"moe_layer_num_skipped": 1}, "'moe_layer_num_skipped' is 1, which cannot be served"),
        ("afmoe", {"score_func": "softmax"}, "'score_func' is 'softmax', which cannot be served"),
        ("afmoe", {"num_dense_layers": "two"}, "'num_dense_layers' must be an integer of at least 0, got 'two'"),
        (
            "minimax-m2",
            {"attn_type_list": [1, 0, 1]},
            r"'attn_type_list' is \[1, 0, 1\]; MiniMaxM2ForCausalLM is served",
        ),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head', which cannot be served"),
        (
            "mimo-v2",
            {"attention_projection_layout": "fused_qkv"},
            "'attention_projection_layout' is 'fused_qkv'",
        ),
        ("mimo-v2", {"attention_bias": True}, "'attention_bias' is True, which cannot be served"),
        (
            "mimo-v2",
            {"v_head_dim": 128},
            "4 attention heads of 96 for 1 key-value heads, with values of 128, of",
        ),
        ("mimo-v2", {"v_head_dim": 0}, "'v_head_dim' must be a positive integer, got 0"),
        ("mimo-v2", {"swa_num_key_value_heads": 3}, "4 attention heads of 96 for 3 key-value heads"),
        ("mimo-v2", {"swa_head_dim": 64}, "'swa_head_dim' 64 is not 96, as that of other layers: not served"),
        ("mimo-v2", {"swa_num_attention_heads": 8}, "'swa_num_attention_heads' 8 is not 4, as that of other layers"),
        ("mimo-v2", {"sliding_window_size": 25}, "'sliding_window' 24 and 'sliding_window_size' 25 must be the same"),
        (
            "mimo-v2",
            {"hybrid_layer_pattern": [0, 2, 1, 0]},
            "'hybrid_layer_pattern' must be a 0 or 1 for each of 4",
        ),
        ("mimo-v2", {"hybrid_layer_pattern": "0110"}, "'hybrid_layer_pattern' must be a 0 or 1 for each of 4 layers"),
        ("mimo-v2", {"hybrid_layer_pattern": [1, 1, 1, 0]}, "'layer_types' and 'hybrid_layer_pattern' tell of other"),
        ("mimo-v2", {"moe_layer_freq": [1, 1, 1, 1]}, "'mlp_layer_types' and 'moe_layer_freq' tell of other experts"),
        ("mimo-v2", {"attention_value_scale": 0}, "'attention_value_scale' must be a positive number, got 0"),
        (
            "mimo-v2",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
            "with a scaling of rotary embedding for each kind of layer alone, in 'rope_parameters'",
        ),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 6]},
            "'num_attention_heads_per_layer' must have a number for each of 4",
        ),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 6, 6]}, "has 5 attention heads, which cannot share 2 key"),
        ("laguna", {"num_attention_heads_per_layer": [4, -6, 6, 6]}, "must be a positive integer, got -6"),
        ("laguna", {"num_attention_heads_per_layer": [4, 1 << 20, 6, 6]}, "'num_attention_heads_per_layer' must be at"),
        ("laguna", {"gating": False}, "'gating' is False, which cannot be served"),
        ("laguna", {"gating": "per-layer"}, "'gating' is 'per-layer', which cannot be served"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "'moe_router_logit_softcapping' is 30.0, which cannot be"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "'moe_apply_router_weight_on_input' is True, which"),
        ("laguna", {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' must be a positive int"),
        (
            "laguna",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "'rope_parameters' must have those of each kind of layer, '(full|sliding)_attention' too",
        ),
        ("laguna", {"num_experts": 2}, "'num_experts_per_tok' 3 cannot be chosen from .* 'num_experts' 2"),
        ("mistral4", {"scoring_func": "sigmoid"}, "'scoring_func' 'sigmoid' is no routing that is known here: softmax"),
        ("mistral4", {"num_experts_per_tok": 5}, "'num_experts_per_tok' 5 cannot be chosen from 'topk_group' 2 of"),
        (
            "mistral4",
            {"rope_parameters": None, "partial_rotary_factor": 0.5},
            "'partial_rotary_factor' 0.5 of a head's",
        ),
        ("mistral4", {"rope_interleave": "no"}, "'rope_interleave' must be true or false, got 'no'"),
        ("mistral4", {"qk_rope_head_dim": 0}, "'qk_rope_head_dim' must be a positive integer, got 0"),
        ("mistral4", {"sliding_window": 24}, "'sliding_window' 24, windows, which Mistral4ForCausalLM is not served"),
        ("minimax-m2", {"rotary_dim": 65}, "'partial_rotary_factor' must be a number above 0 and up to 1, got 1.0"),
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG"},
            "'sliding_window_pattern' must be a positive integer, got 'LLLG'",
        ),
        ("olmo3", {"sliding_window": 0}, "'sliding_window' must be a positive integer, got 0"),
        ("cohere2", {"use_qk_norm": True}, "'use_qk_norm' is True, which cannot be served"),
        ("cohere2", {"logit_scale": 0}, "'logit_scale' must be a positive number, got 0"),
        ("cohere2-moe", {"expert_selection_fn": "tanh"}, "'expert_selection_fn' is 'tanh', which cannot be served"),
        ("cohere2-moe", {"shared_expert_combination_strategy": "max"}, "'shared_expert_combination_strategy' is 'max'"),
        ("cohere2-moe", {"num_experts": 2}, "'num_experts_per_tok' 3 is more than 'num_experts' 2"),
        (
            "cohere2-moe",
            {"prefix_dense_intermediate_size": None},
            "'prefix_dense_intermediate_size' must be a",
        ),
        ("cohere2-moe", {"mlp_layer_types": ["sparse"]}, "'mlp_layer_types' must name 4 layers 'dense' or 'sparse'"),
        ("cohere2-moe", {"layer_norm_eps": "small"}, "'layer_norm_eps' must be a positive number, got 'small'"),
        ("granite", {"residual_multiplier": 0}, "'residual_multiplier' must be a positive number, got 0"),
        (
            "granite-swa",
            {"layer_rope_theta": [0, 1e4]},
            "'layer_rope_theta' must be 0 or a positive number",
        ),
        ("granite-swa", {"layer_rope_theta": [0, 1e4, -1, 0]}, "'layer_rope_theta' must be 0 or a positive number for"),
        ("granite-swa", {"layer_rope_theta": "fast"}, "'layer_rope_theta' must be 0 or a positive number for each of"),
        ("granite-swa", {"sliding_window": 0}, "'sliding_window' must be a positive integer, got 0"),
        ("granite-moe-swa", {"shared_intermediate_size": -1}, "'shared_intermediate_size' must be an integer of at le"),
        ("mellum", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must name 4 layers 'dense' or 'sparse'"),
        ("mellum", {"num_experts": 2}, "'num_experts_per_tok' 3 is more than 'num_experts' 2"),
        ("mellum", {"rope_parameters": {"full_attention": 3}}, "'full_attention' must be an object, got 3"),
        ("granite-hybrid", {"layer_types": None}, "none of 3 layers has attention; at least one must"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi', which cannot"),
        ("granite-hybrid", {"num_local_experts": 8}, "'num_experts_per_tok' must be a positive integer, got 0"),
        (
            "granite-hybrid-ssm",
            {"layer_types": ["attention"] * 3 + ["gru"]},
            r"layer types \['gru'\] are not",
        ),
        ("granite-hybrid-ssm", {"mamba_n_groups": 3}, "32 heads cannot be in 3 groups evenly: 'mamba_n_heads' must be"),
        ("granite-hybrid-ssm", {"mamba_n_heads": 1 << 13}, "'mamba_n_heads' must be at most 4096, got 8192"),
        ("granite-hybrid-ssm", {"mamba_d_state": 0}, "'mamba_d_state' must be a positive integer, got 0"),
        ("granite-hybrid-ssm", {"mamba_d_conv": 65}, "'mamba_d_conv' must be at most 64, got 65"),
        ("granite-hybrid-ssm", {"mamba_proj_bias": True}, "'mamba_proj_bias' is True, which cannot be served"),
        ("granite-hybrid-ssm", {"time_step_limit": [0.1, 1.0]}, r"'time_step_limit' is \[0.1, 1.0\], which cannot be"),
        ("granite-hybrid-ssm", {"time_step_limit": "none"}, "'time_step_limit' is 'none', which cannot be served"),
        ("nemotron-h", {"hybrid_override_pattern": "-M*"}, "block 0 is an MLP or experts, and no attention or states"),
        ("nemotron-h", {"hybrid_override_pattern": "M--*"}, "block 2 is an MLP or experts, and no attention or states"),
        ("nemotron-h", {"hybrid_override_pattern": "MX*"}, r"blocks \['X'\] are not supported; known are M, \*, -, E"),
        ("nemotron-h", {"hybrid_override_pattern": 7}, "'hybrid_override_pattern' or 'layers_block_type' must name 1"),
        ("nemotron-h", {"hybrid_override_pattern": ""}, "must name 1 to .* blocks, got ''"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M-"}, "none of 2 layers has attention; at least one must"),
        ("nemotron-h", {"num_hidden_layers": 9}, "'num_hidden_layers' is 9, and 10 blocks are named"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu', which cannot be served"),
        ("nemotron-h", {"sliding_window": 64}, "'sliding_window' is 64, which cannot be served"),
        ("nemotron-h-moe", {"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 cannot be chosen from"),
        ("nemotron-h-latent", {"moe_latent_size": -1}, "'moe_latent_size' must be a positive integer, got -1"),
        ("smollm3", {"no_rope_layers": [1, 2, 1]}, "'no_rope_layers' must be a 0 or 1 for 3 layers"),
        ("arcee", {"hidden_act": "silu"}, "ArceeForCausalLM is served with the activation 'relu2' only, got 'silu'"),
        ("seed-oss", {"attention_out_bias": "no"}, "'attention_out_bias' must be true or false, got 'no'"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "'original_max_position_embeddings' must be a positive integer, got None",
        ),
        ("qwen2-moe", {"shared_expert_intermediate_size": -1}, "'shared_expert_intermediate_size' must be a positive"),
    ],
)
def test_what_cannot_be_served_is_told_by_its_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**TINY_CONFIGS[name], **changes})


def test_a_command_with_experts_has_layers_by_its_fields() -> None:
    named = {**TINY_CONFIGS["cohere2-moe"], "layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 8}
    model = model_config({**named, "first_k_dense_replace": 3, "norm_topk_prob": False})
    assert isinstance(model, Cohere2MoeModelConfig)
    assert isinstance(model.moe, GroupedMoeConfig)
    assert [row[0].window for row in model.policies] == [0, 0, 0, 24, 24, 24, 0, 24]
    assert [rope.is_none for rope in model.ropes] == [False] * 6 + [True, False], "the first ones turn without windows"
    assert (model.moe.layers, model.intermediate_size, model.moe.expert_size) == ((3, 4, 5, 6, 7), 96, 32)
    assert (model.moe.is_normed, model.moe.scale, model.halves_shared) == (False, 0.5, True)
    by_two = model_config({**named, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2})
    assert [row[0].window for row in by_two.policies] == [24, 0, 24, 24, 24, 24, 0, 24]
    assert [rope.is_none for rope in by_two.ropes] == [False, True] + [False] * 4 + [True, False]
    alone = model_config({**TINY_CONFIGS["cohere2-moe"], "num_shared_experts": 0})
    assert isinstance(alone, Cohere2MoeModelConfig)
    assert not alone.halves_shared


def test_granite_swa_s_first_layer_of_four_sees_all_and_mellum_s_do_if_none_are_named() -> None:
    bare = {key: value for key, value in TINY_CONFIGS["granite-moe-swa"].items() if key != "layer_rope_theta"}
    model = model_config({**bare, "num_hidden_layers": 6})
    assert [row[0].window for row in model.policies] == [0, 24, 24, 24, 0, 24]
    assert {rope.theta for rope in model.ropes} == {10000.0}
    named = {**TINY_CONFIGS["mellum"], "layer_types": None, "mlp_layer_types": None, "rope_parameters": None}
    mellum = model_config(
        {key: value for key, value in named.items() if key != "num_experts"} | {"num_local_experts": 9}
    )
    assert mellum.moe is not None
    assert (mellum.moe.layers, mellum.moe.num_experts) == ((0, 1, 2, 3), 9)
    assert {(row, rope.theta) for row, rope in zip(mellum.policies, mellum.ropes, strict=True)} == {((FULL,) * 2, 5e5)}


def test_mimo_v2_is_read_as_it_was_published_and_as_hugging_face_writes_it() -> None:
    theirs = TINY_CONFIGS["mimo-v2"]
    gone = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "v_head_dim", "sliding_window")
    ours = {key: value for key, value in theirs.items() if key not in gone} | {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "rope_theta": 50000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "v_head_dim": 64,
        "swa_v_head_dim": 64,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 24,
        "attention_chunk_size": 24,
        "routed_scaling_factor": None,
    }
    found, expected = model_config(ours), model_config(theirs)
    assert replace(found, ropes=()) == replace(expected, ropes=())
    for one, other in zip(found.ropes, expected.ropes, strict=True):
        assert (one.theta, one.share) == (other.theta, other.share)


def test_mimo_v2_flash_has_unlike_heads_in_layers_with_windows() -> None:
    model = model_config(published("mimo-v2-flash"))
    assert isinstance(model, MiMoV2Config)
    full = [layer for layer, row in enumerate(model.policies) if row == (FULL,) * 4]
    assert full == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert model.policies[1] == (HeadPolicy(window=128),) * 8
    assert (model.heads_of(0).dims, model.heads_of(1).kv_heads) == ((192, 128), 8)
    assert [layer for layer in range(48) if not model.has_sinks(layer)] == full
    assert [(model.ropes[layer].theta, rotated_elements(model.ropes[layer], 192)) for layer in (0, 1)] == [
        (5e6, 64),
        (1e4, 64),
    ]
    assert model.moe is not None
    assert (model.moe.layers, model.moe.num_shared_experts) == (tuple(range(1, 48)), 0)
    sunk = model_config(published("mimo-v2-flash", add_full_attention_sink_bias=True, attention_value_scale=None))
    assert isinstance(sunk, MiMoV2Config)
    assert all(map(sunk.has_sinks, range(48)))
    assert (sunk.value_scale, sunk.attention_scale) == (1.0, 192**-0.5)
    bare = model_config(published("mimo-v2-flash", hybrid_layer_pattern=None, moe_layer_freq=None))
    assert (bare.policies, bare.moe) == (model.policies, model.moe), "Hugging Face's defaults"


def test_a_laguna_has_query_heads_by_kind_of_layer() -> None:
    model = model_config(published("laguna-xs-2.1"))
    full = list(range(0, 40, 4))
    assert [layer for layer in range(40) if model.policies[layer] == (FULL,) * 8] == full
    assert model.policies[1] == (HeadPolicy(window=512),) * 8
    assert (model.num_heads, {model.query_heads_of(layer) for layer in full}) == (48, {48})
    assert {model.query_heads_of(layer) for layer in range(40) if layer % 4} == {64}
    assert [(rope.theta, rotated_elements(rope, 128)) for rope in model.ropes[:2]] == [(5e5, 64), (1e4, 128)]
    assert model.moe is not None
    assert (model.moe.layers, model.moe.shared_size) == (tuple(range(1, 40)), 512)
    assert attention_of(model).geometry() == "48 or 64 query and 8 KV heads of 128"
    of_queries = [attention_of(model).weight_elements(layer) for layer in (0, 1)]
    assert of_queries == [2048 * 256 * (heads + 8) for heads in (48, 64)]
    alike = model_config(published("laguna-xs-2.1", num_attention_heads_per_layer=[64] * 40))
    assert (alike.num_heads, alike.query_heads) == (64, ())
    bare = model_config(published("laguna-xs-2.1", rope_parameters=None))
    assert [(rope.theta, rope.share, rope.scaling) for rope in bare.ropes[:2]] == [(5e5, 0.5, None), (1e4, 1.0, None)]


def test_a_laguna_s_gates_are_of_heads_unless_of_each_number() -> None:
    for gating, of_heads in ((True, True), (None, True), ("per-head", True), ("per-element", False)):
        model = model_config({**TINY_CONFIGS["laguna"], "gating": gating})
        assert isinstance(model, LagunaConfig)
        assert model.gates_heads == of_heads


@pytest.mark.parametrize("name", ["laguna", "laguna-elements", "step3"])
def test_numbers_beside_attention_and_mlps_are_those_of_gates(name: str) -> None:
    shapes = reference(name)["shapes"]
    gates = sum(int(np.prod(shape)) for weight, shape in shapes.items() if ".g_proj." in weight)
    assert model_config(TINY_CONFIGS[name]).side_elements == gates


def test_a_laguna_s_weights_by_the_names_of_hugging_face_s_classes_are_the_same_model() -> None:
    drawn = draw_weights(TINY_CONFIGS["laguna"], reference("laguna")["shapes"])
    renamed = {name.replace("experts.e_score", "gate.e_score"): array for name, array in drawn.items()}
    renamed = {name.replace(".shared_expert.", ".shared_experts."): array for name, array in renamed.items()}
    assert renamed.keys() != drawn.keys()
    model, ids = model_config(TINY_CONFIGS["laguna"]), np.arange(3, 90, dtype=np.int32)
    found, expected = (run_rank(model, DictWeights(each), SingleRank(), ids) for each in (renamed, drawn))
    np.testing.assert_array_equal(found, expected)


def test_which_layers_of_a_glm_5_share_an_indexer_is_told_in_three_ways() -> None:
    def shared(**fields: Any) -> set[int]:
        model = model_config({**TINY_CONFIGS["glm5"], "num_hidden_layers": 8, **fields})
        assert model.mla is not None
        assert model.mla.indexer is not None
        assert model.mla.indexer.layers(8) == model.layer_of_caches[8:] or not model.mla.indexer.shared
        return set(model.mla.indexer.shared)

    named = ["full", "full", "shared", "shared", "shared", "full", "shared", "shared"]
    assert shared() == set()
    assert shared(indexer_types=named) == {2, 3, 4, 6, 7}
    assert shared(index_topk_pattern="FFSSSFSS") == {2, 3, 4, 6, 7}
    assert shared(index_topk_pattern=[*"FFSSSFSS", "F"]) == {2, 3, 4, 6, 7}
    assert shared(index_topk_freq=4) == {2, 3, 4, 6, 7}, "of the layers 1 and 5"
    assert shared(index_topk_freq=4, index_skip_topk_offset=1) == {1, 2, 3, 5, 6, 7}
    assert shared(indexer_types=["full"] * 8, index_topk_freq=4) == set()


def test_stages_of_a_glm_5_begin_where_an_indexer_is() -> None:
    model = model_config({**TINY_CONFIGS["glm5"], "num_hidden_layers": 11, "index_topk_freq": 4})
    assert model.layer_of_caches == (*range(11), 0, 1, 5, 9)
    assert model.stages(1) == (range(11),)
    assert model.stages(2) == (range(5), range(5, 11))
    assert model.stages(3) == (range(5), range(5, 9), range(9, 11))
    assert [stage.start for stage in model.stages(4)] == [0, 1, 5, 9]
    assert [model.caches_of(stage) for stage in model.stages(4)[1:3]] == [(1, 2, 3, 4, 12), (5, 6, 7, 8, 13)]
    with pytest.raises(ValueError, match="can be dealt to 4 stages at most that share neither a cache nor an indexer"):
        model.stages(5)
    drafting = model.with_draft_layer()
    assert (drafting.cache_layers, drafting.layer_of_caches[12:]) == (12 + 5, (0, 1, 5, 9, 11))
    assert [stage[-1] for stage in drafting.stages(2)] == [4, 11]
    assert drafting.policies == (*model.policies, *model.policies[:2])


@pytest.mark.parametrize("name", ["hy4-preview", "glm-5"])
def test_layers_without_an_indexer_keep_a_latent_alone(name: str) -> None:
    """Of 78 layers, of which 21 choose: GLM-5.2's are so many, and named by how often they come."""
    fields = {"index_topk_freq": 4, "index_skip_topk_offset": 3} if name == "glm-5" else {}
    model = model_config({**published(name), **fields})
    attention = attention_of(model)
    layouts = [attention.layout(64, 1, "bfloat16", layer) for layer in range(model.cache_layers)]
    assert [[role.name for role in layout.roles] for layout in layouts] == [["latent"]] * 78 + [["indexer"]] * 21
    sizes = [layout.slot_bytes for layout in layouts]
    plan = plan_head_groups(model.policies, sizes=sizes, is_replicated=True, layer_of=model.layer_of_caches)
    assert (len(plan.groups), plan.padding, plan.block_bytes) == (1, 0, 64 * (78 * 576 + 21 * 128) * 2)


def test_a_mistral_s_text_is_a_mistral_a_ministral_3_or_a_mistral_4() -> None:
    small = model_config(published("mistral-small-3.2-24b"))
    assert (small.architecture, small.num_layers, small.temper) == ("MistralForCausalLM", 40, None)
    assert small.policies[0][0] == FULL
    ministral = model_config(published("ministral-3-8b"))
    assert ministral.architecture == "Ministral3ForCausalLM"
    assert ministral.temper is not None
    assert (ministral.temper.factor, ministral.temper.step) == (0.1, 16384)
    four = model_config(published("mistral-small-4-119b"))
    assert four.architecture == "Mistral4ForCausalLM"
    assert four.temper is not None
    assert (four.temper.factor, four.temper.step, len(four.temper.layers)) == (0.1, 8192, 36)
    assert (four.mla, four.head_dim, four.max_position) == (MlaConfig(256, 64, 64, 128, 1024), 64, 1 << 20)
    assert four.attention_scale == pytest.approx(128**-0.5 * (0.1 * np.log(128) + 1) ** 2)
    other = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral9"}}
    with pytest.raises(ModelError, match=r"served around one of 'mistral', .*'mistral4', got 'model_type' 'mistral9'"):
        model_config(other)


def test_a_mistral_4_that_leaves_fields_out_has_hugging_face_s() -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    text = published("mistral-small-4-119b")["text_config"]
    bare = {key: text[key] for key in (*sizes, "max_position_embeddings")}
    found = model_config({**bare, "architectures": ["Mistral4ForCausalLM"]})
    expected = model_config(published("mistral-small-4-119b"))
    assert (found.mla, found.moe, found.temper) == (expected.mla, expected.moe, expected.temper)
    assert found.attention_scale == expected.attention_scale
    with pytest.raises(ModelError, match="'rope_parameters' must be an object, got 3"):
        model_config({**bare, "architectures": ["Mistral4ForCausalLM"], "rope_parameters": 3})


def test_a_mistral_4_may_turn_halves_of_what_is_rotated() -> None:
    neighbours = model_config(TINY_CONFIGS["mistral4"])
    halves = model_config({**TINY_CONFIGS["mistral4"], "rope_interleave": False})
    assert neighbours.mla is not None
    assert halves == replace(neighbours, mla=replace(neighbours.mla, in_halves=True))


@pytest.mark.parametrize("name", ["ministral3", "mistral4"])
def test_a_multimodal_checkpoint_of_a_mistral_has_its_decoder_s_tokens(name: str) -> None:
    """Images have weights beside it, which nobody asks for."""
    text = {key: value for key, value in TINY_CONFIGS[name].items() if key != "architectures"}
    nested = model_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    plain, ids = model_config(TINY_CONFIGS[name]), np.arange(3, 90, dtype=np.int32)
    assert nested == plain
    weights = Checkpoint(checkpoint(name))
    expected = run_rank(plain, weights, SingleRank(), ids)
    np.testing.assert_array_equal(run_rank(nested, _Nested(weights), SingleRank(), ids), expected)


class _Nested:
    """A checkpoint's weights by the names that a multimodal model gives them."""

    def __init__(self, weights: Any, plain: str = "", nested: str = "language_model.") -> None:
        self._weights, self._plain, self._nested = weights, plain, nested
        self.names = [name.replace(plain, nested, 1) for name in weights.names]

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._weights, method)
        return lambda name, *part: found(name.replace(self._nested, self._plain, 1), *part)


MROPE = {"type": "mrope", "mrope_section": [8, 12, 12]}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen2", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3", "Qwen3VLForConditionalGeneration"),
        ("qwen3-moe", "Qwen3VLMoeForConditionalGeneration"),
    ],
)
def test_the_text_of_a_qwen_vl_is_a_qwen_s(name: str, architecture: str) -> None:
    text = {key: value for key, value in TINY_CONFIGS[name].items() if key != "architectures"}
    nested = model_config({"architectures": [architecture], "text_config": {**text, "rope_scaling": MROPE}})
    plain, ids = model_config(TINY_CONFIGS[name]), np.arange(3, 90, dtype=np.int32)
    assert not nested.missing_for_images
    weights = DictWeights(draw_weights(TINY_CONFIGS[name], reference(name)["shapes"]))
    expected = run_rank(plain, weights, SingleRank(), ids)
    stored = _Nested(_joined(weights), "model.", "model.language_model.")
    np.testing.assert_array_equal(run_rank(nested, stored, SingleRank(), ids), expected)


def _joined(weights: DictWeights) -> DictWeights:
    """Experts in two tensors a layer, inputs before outputs, as Qwen3-VL has them."""
    found: dict[str, Any] = {}
    for name in weights.names:
        at, is_one, part = name.partition(".experts.")
        number, _, kind = part.partition(".")
        if not is_one:
            found[name] = weights.tensor(name)
        elif kind == "down_proj.weight":
            found.setdefault(f"{at}.experts.down_proj", {})[int(number)] = weights.tensor(name).T
        elif kind == "gate_proj.weight":
            both = [weights.tensor(name), weights.tensor(name.replace("gate_proj", "up_proj"))]
            found.setdefault(f"{at}.experts.gate_up_proj", {})[int(number)] = np.concatenate(both).T
    stacked = {
        name: np.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
        for name, each in found.items()
    }
    return DictWeights(stacked)


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        ({**TINY_CONFIGS["qwen2"], "rope_scaling": MROPE}, "three positions"),
        (published("qwen3.5-27b"), ""),
        (published("gemma-3-4b"), ""),
        (published("gemma-4-31b"), ""),
        (published("gemma-3-1b"), ""),
        (published("mistral-small-3.2-24b"), ""),
        (published("kimi-k2.5"), ""),
        (published("qwen3-8b"), ""),
    ],
)
def test_what_images_need_that_is_not_served_is_known(config: dict[str, Any], lacking: str) -> None:
    found = model_config(config).missing_for_images
    assert lacking in found
    assert bool(lacking) == bool(found)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma-3-4b", "all"),
        ("gemma-4-31b", "windows"),
        ("gemma-4-26b-a4b", "windows"),
        ("gemma-4-e2b", ""),
        ("gemma-3-1b", ""),
        ("kimi-k2.5", ""),
    ],
)
def test_layers_in_which_an_item_is_seen_in_both_directions_are_known(name: str, layers: str) -> None:
    config = model_config(published(name))
    for layer in range(config.num_layers):
        has_window = any(policy.window for policy in config.policies[config.heads_of(layer).cache_layer])
        assert config.sees_both_ways(layer) == (layers == "all" or (layers == "windows" and has_window))
    assert not config.sees_both_ways(config.num_layers)


def test_a_kimi_k2_5_is_the_kimi_k2_in_it_and_so_is_how_its_weights_are_stored() -> None:
    config = published("kimi-k2.5")
    found, plain = model_config(config), model_config(published("kimi-k2"))
    longer = {"ropes": plain.ropes, "max_position": plain.max_position, "attention_scale": plain.attention_scale}
    assert found.image_tokens[0] == "<|media_pad|>"
    assert replace(found, **longer, image_tokens=("", "")) == plain
    stored = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": True}}},
    }
    nested = {**config, "text_config": {**config["text_config"], "quantization_config": stored}}
    scheme = scheme_of(nested)
    assert scheme is not None
    assert scheme.is_int4
    assert without_scheme(nested) == config
    model_config(without_scheme(nested))
    with pytest.raises(ModelError, match=r"'quantization_config' is .*, which cannot be served"):
        model_config(nested)


@pytest.mark.parametrize(
    ("name", "window", "every", "rotated"),
    [
        ("olmo-3-32b", 4096, 4, "all"),
        ("exaone-4.0-32b", 4096, 4, "windows"),
        ("command-a", 4096, 4, "windows"),
        ("smollm3-3b", 0, 4, "three of four"),
    ],
)
def test_every_fourth_layer_sees_all_and_may_rotate_nothing(name: str, window: int, every: int, rotated: str) -> None:
    model = model_config(published(name))
    for layer, (policies, rope) in enumerate(zip(model.policies, model.ropes, strict=True)):
        is_fourth = (layer + 1) % every == 0
        assert policies[0] == (FULL if is_fourth or not window else HeadPolicy(window))
        assert rope.is_none == (is_fourth and rotated != "all")


def test_a_factor_on_what_goes_into_the_residual_stream_is_one_on_what_it_begins_with() -> None:
    for name, mlp_size, logits in (("granite-3.3-8b", 12800, 16), ("granite-4.0-micro", 8192, 10)):
        config = published(name)
        model = model_config(config)
        assert isinstance(model, GraniteConfig)
        assert (model.attention_scale, model.mlp_size(0)) == (config["attention_multiplier"], mlp_size)
        assert model.logit_scale == 1 / logits
        assert model.entering_scale == pytest.approx(12 / 0.22)
        assert model.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)


def test_a_scaling_of_an_olmo_3_is_of_its_full_layers() -> None:
    model = model_config(published("olmo-3-7b"))
    scaled = [rope.scaling is not None for rope in model.ropes]
    assert scaled == [policies[0] == FULL for policies in model.policies]


def test_an_exaone_without_a_window_sees_and_rotates_everything() -> None:
    model = model_config(published("exaone-4.0-32b", sliding_window=None, layer_types=None))
    assert {policies[0] for policies in model.policies} == {FULL}
    assert not any(rope.is_none for rope in model.ropes)


def test_a_norm_of_all_heads_that_is_of_another_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Checkpoint(checkpoint("olmo2"))
    read = weights.tensor
    monkeypatch.setattr(
        weights, "tensor", lambda name: read(name)[:64] if name.endswith("q_norm.weight") else read(name)
    )
    with pytest.raises(ModelError, match=r"q_norm.weight has the shape \[64\], config.json says 4 heads of 64"):
        run_rank(model_config(TINY_CONFIGS["olmo2"]), weights, SingleRank(), np.zeros(1, np.int32))


@pytest.mark.parametrize("ops_name", ["numpy", "numba"])
def test_granites_shared_mlp_may_be_no_whole_number_of_experts(ops_name: str) -> None:
    """One with columns besides, which nothing comes of, computes what it does without these."""
    config, more = TINY_CONFIGS["granite-hybrid-moe"], 8
    wider = {**config, "shared_intermediate_size": config["shared_intermediate_size"] + more}
    ids = np.random.default_rng(2).integers(3, 259, 20).astype(np.int32)
    weights = draw_weights(config, reference("granite-hybrid-moe")["shapes"])
    padded = dict(weights)
    for name, values in weights.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            halves = np.split(values, 2)
            padded[name] = np.concatenate([np.concatenate([half, half[:more]]) for half in halves])
        elif name.endswith("shared_mlp.output_linear.weight"):
            padded[name] = np.pad(values, ((0, 0), (0, more)))
    expected, found = (
        run_rank(model_config(own), DictWeights(of), SingleRank(), ids, ops_name)
        for own, of in ((config, weights), (wider, padded))
    )
    moe = model_config(wider).moe
    assert moe is not None
    assert (moe.shared_size, moe.shared_parts) == (72, 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
