"""What gated delta-nets refuse of deployments and configs, each in one line, and what their members are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.errors import ConfigError, ModelError
from headwise.runtime.calibration.calibrate import DenseModel
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank

NEXT, DENSE, MOE = (TINY_CONFIGS[name] for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe"))
CONFIG = EngineConfig(dtype="float32", kv_cache="1MiB", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"device": "cuda", "dtype": "bfloat16", "tensor_ops": "paddle"},
            r"recurrent states.*tensor_ops paddle.*choose tensor_ops cupy, or device cpu",
        ),
        ({"tp_size": 4}, r"tp_size 4 does not divide the 2 key heads of .* delta-nets, .* fit: \[1, 2\]"),
        ({"tp_size": 3}, r"tp_size 3 does not divide the 2 key heads .* sizes that fit: \[1, 2\]"),
        ({"head_grouping": "per_head_index"}, "per_head_index.*choose auto"),
        ({"head_pattern": "heads.tsv"}, "keeps states in some layers.*no head pattern"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    directory = checkpoint("qwen3-next")
    with pytest.raises(ConfigError, match=message) as refused:
        read_model_card(replace(CONFIG, model=str(directory), **changes), directory, identify=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ({"linear_key_head_dim": 1 << 20}, "'linear_key_head_dim' must be at most"),
        ({"linear_num_value_heads": 1 << 20}, "at most 16384 can be served"),
        ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' must be a positive integer"),
        ({"partial_rotary_factor": "half"}, "'partial_rotary_factor' must be a number"),
        ({"partial_rotary_factor": 0.02}, "'partial_rotary_factor'.*must be an even number"),
        ({"layer_types": ["linear_attention"] * 3}, "'layer_types' must name 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "layer types .*mamba.* are not supported"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 is more than 'num_experts' 8"),
        ({"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' must be a positive integer"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_weights_are_read(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**NEXT, **changes})


@pytest.mark.parametrize(
    ("weight", "shape", "message"),
    [
        ("layers.0.linear_attn.conv1d.weight", (320, 1, 3), r"conv1d.weight has the shape .*320, 1, 4"),
        ("layers.0.linear_attn.A_log", (5,), r"A_log has the shape .*\(4,\)"),
        ("layers.0.linear_attn.norm.weight", (32,), r"norm.weight has the shape .*\(48,\)"),
        ("layers.0.linear_attn.in_proj_z.weight", (90, 64), "in_proj_z.weight has too few rows"),
    ],
)
def test_weights_that_do_not_belong_to_the_config_are_refused(
    weight: str, shape: tuple[int, ...], message: str
) -> None:
    shapes = reference("qwen3.5")["shapes"]
    weights = {**draw_weights(DENSE, shapes), f"model.{weight}": np.zeros(shape, np.float32)}
    with pytest.raises(ModelError, match=message):
        run_rank(model_config(DENSE), DictWeights(weights), SingleRank(), np.zeros(1, np.int32))


def test_the_text_of_a_multimodal_checkpoint_is_served() -> None:
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**DENSE, "architectures": None}}
    assert replace(model_config(nested), missing_for_images="") == model_config(DENSE)


def test_the_text_of_a_multimodal_checkpoint_with_experts_is_served_by_the_published_fields_alone() -> None:
    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {**MOE, "architectures": None}}
    assert replace(model_config(nested), missing_for_images="") == model_config(MOE)
    known = model_config({key: value for key, value in MOE.items() if "expert" not in key and key != "head_dim"})
    assert known.moe is not None
    assert (known.moe.num_experts, known.moe.experts_per_token, known.moe.expert_size) == (256, 8, 32)
    assert (known.moe.gated_shared_size, known.moe.layers, known.head_dim) == (512, (0, 1, 2, 3), 256)
    assert model_config({**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2}) == model_config(MOE)  # not its own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 is more than 'num_experts' 8"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' must be a positive integer, got 0"),
        ({"shared_expert_intermediate_size": -1}, "'shared_expert_intermediate_size' must be a positive integer"),
    ],
)
def test_experts_that_cannot_be_served_are_refused_before_weights_are_read(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**MOE, **changes})


def test_a_layers_experts_in_two_tensors_are_those_one_by_one() -> None:
    weights = draw_weights(MOE, reference("qwen3.5-moe")["shapes"])
    joined = {name: array for name, array in weights.items() if ".experts." not in name}
    for layer in range(4):
        at, projections = f"model.layers.{layer}.mlp.experts", ("gate", "up", "down")
        gate, up, down = (
            np.stack([weights[f"{at}.{expert}.{name}_proj.weight"] for expert in range(8)]) for name in projections
        )
        joined |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    ids = np.arange(3, 43, dtype=np.int32)
    one_by_one, together = (
        run_rank(model_config(MOE), DictWeights(each), SingleRank(), ids) for each in (weights, joined)
    )
    np.testing.assert_array_equal(one_by_one, together)


def test_layers_without_names_have_attention_in_every_fourth() -> None:
    delta = model_config({**DENSE, "num_hidden_layers": 9}).states
    assert delta is not None
    assert delta.layers == (0, 1, 2, 4, 5, 6, 8)


def test_ranks_may_share_kv_heads_but_not_key_heads() -> None:
    wide = {**DENSE, "linear_num_key_heads": 4}
    for kv_heads in (1, 2, 4):
        assert valid_tp_sizes(model_config({**wide, "num_key_value_heads": kv_heads})) == [1, 2, 4]
        assert valid_tp_sizes(model_config({**DENSE, "num_key_value_heads": kv_heads})) == [1, 2]


def test_there_is_no_head_pattern_of_states_to_measure() -> None:
    directory = checkpoint("qwen3.5")
    with pytest.raises(ConfigError, match="keeps states in some layers"):
        DenseModel.load(replace(CONFIG, model=str(directory)), directory)


def test_the_elements_of_a_layers_matrices_are_those_of_its_weights() -> None:
    variant, shapes = attention_of(model_config(NEXT)), reference("qwen3-next")["shapes"]
    for layer, name in ((0, "linear_attn"), (3, "self_attn")):
        matrices = (shape for weight, shape in shapes.items() if f".layers.{layer}.{name}." in weight)
        assert variant.weight_elements(layer) == sum(shape[0] * shape[1] for shape in matrices if len(shape) == 2)


def test_info_shows_states_by_sequence_and_tokens_by_token(tmp_path: Path) -> None:
    published = {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", kv_cache="64GiB", device="cpu")
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert "36 of them gated delta-nets of 16 key heads of 128 and 32 value heads of 128" in rows["geometry"]
    assert rows["head groups"].startswith("49 x 12 or 25 slots per rank")
    assert rows["  group 0"] == "full attention, 24 (layer, KV head) pairs, 24 KiB a token"
    assert rows["  groups 1 to 48"] == "states, 12 (layer, key head) pairs, 1.57 MiB a sequence each"
    states = rows["states of a sequence"]
    assert states.startswith("75.38 MiB over all ranks, however long it is; as much again for each checkpoint")
    assert "every 8192 tokens" in states
    assert card.bytes_per_sequence == 48 * card.layout.block_bytes
    assert card.bytes_per_token == card.layout.block_bytes / 64
    assert card.plan.padding < 0.05
