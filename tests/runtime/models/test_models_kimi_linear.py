"""Kimi-Linear: its config by either of two sets of names, its checkpoint by either, and what is told of wrong ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapted_models import DrawnAdapter
from support.engine.dense_oracle import DictWeights, run_rank
from support.paged_steps import only_shard
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, reference

from headwise.cache_controller.policy import FULL, STATE
from headwise.errors import ConfigError, ModelError
from headwise.kernels.state_layout import StateSizes
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.attention.base import Serving
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.models.states_config import KdaConfig
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops

PUBLISHED = Path(__file__).parents[2] / "support" / "published" / "kimi-linear-48b-a3b.json"
TINY = TINY_CONFIGS["kimi-linear"]
OWN = TINY["linear_attn_config"]
IDS = np.arange(3, 90, dtype=np.int32)


def weights() -> dict[str, np.ndarray]:
    source = Checkpoint(checkpoint("kimi-linear"))
    return {name: source.tensor(name) for name in source.names}


def test_the_published_config() -> None:
    model = model_config(json.loads(PUBLISHED.read_text()))
    assert isinstance(model.states, KdaConfig)
    assert (model.states.members, model.states.sizes, model.states.rank) == (32, StateSizes(128, 128, 1, 4), 128)
    assert [layer for layer in range(27) if model.policies[layer] == (FULL,)] == [3, 7, 11, 15, 19, 23, 26]
    assert all(model.policies[layer] == (STATE,) * 32 for layer in model.states.layers)
    assert model.mla is not None
    assert (model.mla.width, model.mla.q_rank, model.attention_scale) == (576, None, 192**-0.5)
    assert model.moe is not None
    assert (model.moe.layers, model.moe.num_experts, model.moe.experts_per_token) == (tuple(range(1, 27)), 256, 8)
    assert model.moe.routing.scale == 2.446
    assert all(rope.is_none for rope in model.ropes)
    assert (model.max_position, model.rms_norm_eps, model.eos_token_ids) == (1 << 20, 1e-5, (163586,))
    assert valid_tp_sizes(model) == [1, 2, 4, 8, 16, 32]


def test_a_config_by_transformers_names_is_the_same() -> None:
    theirs = {
        "max_position_embeddings": 4096,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "norm_topk_prob": True,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    }
    ours = (
        "model_max_length", "num_experts", "num_experts_per_token", "num_shared_experts", "num_expert_group",
        "moe_renormalize", "linear_attn_config", "first_k_dense_replace", "mla_use_nope", "moe_router_activation_func",
    )  # fmt: skip
    left = {key: value for key, value in TINY.items() if key not in ours}
    assert model_config({**left, **theirs}) == model_config(TINY)


def test_a_dense_layer_s_mlp_is_found_by_its_published_name_and_by_the_one_that_transformers_saves() -> None:
    saved = weights()
    published = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): values for name, values in saved.items()}
    assert published.keys() != saved.keys()
    found, expected = (
        run_rank(model_config(TINY), DictWeights(each), SingleRank(), IDS) for each in (published, saved)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layer", [0, 2])
def test_what_a_layer_reads_is_its_projections(layer: int) -> None:
    shapes = reference("kimi-linear")["shapes"]
    at, variant = f"model.layers.{layer}.self_attn.", attention_of(model_config(TINY))
    expected = sum(int(np.prod(shape)) for name, shape in shapes.items() if name.startswith(at) and "_proj" in name)
    assert variant.weight_elements(layer) == expected


def test_its_geometry_is_told_in_words() -> None:
    variant = attention_of(model_config(json.loads(PUBLISHED.read_text())))
    assert variant.geometry() == (
        "20 of them Kimi Delta Attention of 32 heads of 128, the others with 32 query heads of 128 + 64 over latents "
        "of 512 + 64, values of 128"
    )
    assert (variant.members(7, FULL), variant.members(15, STATE)) == ("7 layers' latents", "15 (layer, head) pairs")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp_size": 3}, r"tp_size 3 does not divide the 32 heads of this model's Kimi .*fit: \[1, 2, 4, 8, 16, 32\]"),
        ({"tp_size": 64}, "tp_size 64 is more than the 32 query heads"),
        (
            {"device": "cuda", "tensor_ops": "paddle"},
            "tensor_ops paddle does not compute on a GPU: choose tensor_ops cu",
        ),
    ],
)
def test_what_it_cannot_be_served_with_is_told_with_the_remedy(changes: dict[str, Any], told: str) -> None:
    serving = replace(Serving("Kimi-Linear", 1, "cpu", "auto", "bfloat16"), **changes)
    with pytest.raises(ConfigError, match=told):
        attention_of(model_config(json.loads(PUBLISHED.read_text()))).check(serving)


def own(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**OWN, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": None}, "'linear_attn_config.num_heads' must be a positive integer, got None"),
        ({"linear_attn_config": [4]}, r"'linear_attn_config' must be an object, got \[4\]"),
        (own(num_heads=0), "'linear_attn_config.num_heads' must be a positive integer, got 0"),
        (own(num_heads=5000), "'linear_attn_config.num_heads' must be at most 4096, got 5000"),
        (own(head_dim="128"), "'linear_attn_config.head_dim' must be a positive integer, got '128'"),
        (own(short_conv_kernel_size=65), "'linear_attn_config.short_conv_kernel_size' must be at most 64, got 65"),
        (
            own(kda_layers=None),
            "'linear_attn_config.kda_layers' must be a list of layers from 1 to 5, got None; or 'lay",
        ),
        (
            own(kda_layers=[0, 1, 2]),
            r"'linear_attn_config.kda_layers' must be a list of layers from 1 to 5, got \[0, 1",
        ),
        (own(full_attn_layers=[3, 6]), r"'linear_attn_config.full_attn_layers' must be a list of layers from 1 to 5"),
        (own(kda_layers=[1, 2]), "layer 4 is in none of 'kda_layers' and 'full_attn_layers' of 'linear_attn_config'"),
        (own(kda_layers=[1, 2, 3, 4]), "layer 3 is in both of 'kda_layers' and 'full_attn_layers'"),
        (own(kda_layers=[1, 2, 3, 4, 5], full_attn_layers=[]), "of 5 layers 5 have Kimi Delta Attention, by 'linear_"),
        (own(kda_layers=[], full_attn_layers=[1, 2, 3, 4, 5]), "of 5 layers 0 have Kimi Delta Attention"),
        ({"layer_types": ["full_attention"] * 4}, "'layer_types' must name 5 layers, as many as 'num_hidden_layers'"),
        ({"layer_types": ["full_attention"] * 4 + ["gru"]}, r"layer types \['gru'\] are not supported; known are"),
        ({"mla_use_nope": False}, "'mla_use_nope' is False, which cannot be served"),
        ({"attention_bias": True}, "'attention_bias' is True, which cannot be served"),
        (
            {"moe_router_activation_func": "softmax"},
            "'moe_router_activation_func' is 'softmax', which cannot be served",
        ),
        ({"kv_lora_rank": None}, "'kv_lora_rank' must be a positive integer, got None"),
        ({"qk_rope_head_dim": 15}, "'qk_rope_head_dim' must be even"),
        ({"v_head_dim": -1}, "'v_head_dim' must be a positive integer, got -1"),
        ({"model_max_length": None}, "'model_max_length' must be a positive integer, got None"),
        ({"model_max_length": 0}, "'model_max_length' must be a positive integer, got 0"),
        ({"num_experts": None}, "'num_experts' must be a positive integer, got None"),
        ({"num_experts": 1 << 20}, "'num_experts' must be at most 65536, got 1048576"),
        (
            {"num_experts_per_token": 9},
            "'num_experts_per_token' 9 cannot be chosen from 'topk_group' 1 of 'num_expert_",
        ),
        ({"num_expert_group": 3}, "'num_expert_group' 3 equal groups of 'num_experts' 8"),
        ({"topk_group": 2}, "'topk_group' 2 of 'num_expert_group' 1 equal groups"),
        ({"num_expert_group": 2, "use_grouped_topk": False}, "'use_grouped_topk' is false with 2 groups of experts"),
        ({"moe_renormalize": "yes"}, "'moe_renormalize' must be true or false, got 'yes'"),
        ({"num_shared_experts": -1}, "'num_shared_experts' must be an integer of at least 0, got -1"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' must be a positive integer, got 0"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' must be 1, got 2"),
        ({"routed_scaling_factor": "x"}, "'routed_scaling_factor' must be a positive number, got 'x'"),
        ({"hidden_act": "gelu"}, "is served with the activation 'silu' only, got 'gelu'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, got 0"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model_config({**TINY, **changes})
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("A_log", r"A_log has the shape \(1, 1, 3, 1\), config.json says \(4,\)"),
        ("dt_bias", r"dt_bias has the shape \(127,\), config.json says \(4, 32\)"),
        ("o_norm.weight", r"o_norm.weight has the shape \(31,\), config.json says \(32,\)"),
        ("k_conv1d.weight", r"k_conv1d.weight has the shape \(127, 1, 4\), config.json says \(128, 1, 4\)"),
        ("v_proj.weight", "b_proj.* has the shape .* where config.json says"),
        ("f_b_proj.weight", r"f_b_proj.weight has the shape \(127, 32\) where config.json says \(128, 32\)"),
        ("o_proj.weight", r"o_proj.weight has the shape \(63, 128\) where config.json says \(64, 128\)"),
    ],
)
def test_weights_that_are_not_the_config_s_are_told_by_name(name: str, told: str) -> None:
    found, whole = weights(), f"model.layers.0.self_attn.{name}"
    found[whole] = np.delete(found[whole], 0, axis=2 if name == "A_log" else 0)
    with pytest.raises(ModelError, match=told):
        run_rank(model_config(TINY), DictWeights(found), SingleRank(), IDS)


@pytest.mark.parametrize(("module", "shape"), [("q_proj", (128, 64)), ("f_b_proj", (128, 32)), ("o_proj", (64, 128))])
def test_adapters_of_its_projections_are_refused(module: str, shape: tuple[int, int]) -> None:
    """Those of the heads with states: of layers with latents, as elsewhere, ``o_proj`` may be changed."""
    model = model_config(TINY)
    adapter = DrawnAdapter("a", {f"layers.0.self_attn.{module}": shape}, rank=4)
    with pytest.raises(ModelError, match=rf"adapter 'a' changes layers.0.self_attn.{module}, which this model has not"):
        build_model(
            model, DictWeights(weights()), make_ops("numpy"), SingleRank(), only_shard(model), adapters=[adapter]
        )
