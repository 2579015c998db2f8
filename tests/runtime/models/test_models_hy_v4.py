"""Hunyuan 4: its configuration, names of weights, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.attention.base import Serving
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.hy_v4_config import HyV4Config
from headwise.runtime.models.mla_config import IndexerConfig, MlaConfig
from headwise.runtime.models.registry import drafting_config, model_config
from headwise.runtime.ops.comm import SingleRank

NAME = "hunyuan4"
TINY = TINY_CONFIGS[NAME]
IDS = np.arange(3, 60, dtype=np.int32)
PUBLISHED = Path(__file__).parents[2] / "support" / "published" / "hy4-preview.json"


def weights() -> dict[str, np.ndarray]:
    return draw_weights(TINY, reference(NAME)["shapes"])


def logits(given: dict[str, np.ndarray]) -> np.ndarray:
    found = run_rank(model_config(TINY), DictWeights(given), SingleRank(), IDS)
    assert found is not None
    return found


def test_the_published_model_has_indexers_in_21_of_78_layers() -> None:
    model = model_config(json.loads(PUBLISHED.read_text()))
    assert isinstance(model, HyV4Config)
    shared = frozenset(range(78)) - {0, *range(1, 78, 4)}
    assert len(shared) == 57
    assert model.mla == MlaConfig(512, 64, 192, 256, 2048, IndexerConfig(32, 128, 2048, shared), in_halves=True)
    assert model.moe is not None
    assert (model.moe.layers, model.moe.num_experts, model.moe.shared_size) == (tuple(range(1, 78)), 256, 2048)
    assert model.hyper is not None
    assert (model.hyper.streams, model.hyper.magnitude, model.hyper.norm_eps) == (4, 2.0, 1e-5)
    assert (model.attention_scale, model.sink_logits, model.eos_token_ids) == (1 / 16, True, (120025,))
    left_out = {key: value for key, value in json.loads(PUBLISHED.read_text()).items() if key != "indexer_types"}
    assert model_config(left_out) == model, "Hugging Face's default"
    assert model_config({**left_out, "layer_types": None, "mlp_layer_types": None}) == model


def test_layers_that_share_an_indexer_have_no_weights_of_one() -> None:
    attention = attention_of(model_config(TINY))
    own, shared = attention.weight_elements(2), attention.weight_elements(3)
    assert own - shared == 32 * 16 * 32 + 64 * (32 + 16)


def test_numbers_beside_attention_and_mlps_are_those_of_gates_and_connections() -> None:
    beside = [".self_attn.linear_gate.", "_pre.hc_fn", ".hc_head_fn"]
    found = sum(array.size for name, array in weights().items() if any(part in name for part in beside))
    assert model_config(TINY).side_elements == found


def test_weights_as_transformers_writes_them_are_the_same_model() -> None:
    written = {name.replace(".hc_pre.hc_", ".hc_"): array for name, array in weights().items()}
    written = {name.replace(".mlp.gate_proj.", ".mlp.linear_gate."): array for name, array in written.items()}
    saved = run_rank(model_config(TINY), Checkpoint(checkpoint(NAME)), SingleRank(), IDS)
    np.testing.assert_array_equal(logits(written), saved)


def test_experts_one_by_one_are_the_same_model() -> None:
    split: dict[str, np.ndarray] = {}
    for name, array in weights().items():
        at, is_one, kind = name.partition(".experts.")
        if not is_one:
            split[name] = array
            continue
        for expert, matrix in enumerate(array):
            parts = (
                {"down": matrix} if kind == "down_proj" else dict(zip(("gate", "up"), np.split(matrix, 2), strict=True))
            )
            split.update({f"{at}.experts.{expert}.{part}_proj.weight": each for part, each in parts.items()})
    assert len(split) > len(weights())
    np.testing.assert_array_equal(logits(split), logits(weights()))


def test_a_layer_that_drafts_is_left_out() -> None:
    config = model_config(TINY)
    assert drafting_config(config, ["model.mtp_layers.0.eh_proj.weight", "model.layers.4.eh_proj.weight"]) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_ihc": False}, "'enable_ihc' is False, which cannot be served"),
        ({"learnable_sink": False}, "'learnable_sink' is False, which cannot be served"),
        ({"gating_type": "headwise"}, "'gating_type' is 'headwise', which cannot be served"),
        ({"swiglu_limit": 7.0}, "'swiglu_limit' is 7.0, which cannot be served"),
        ({"attention_bias": True}, "'attention_bias' is True, which cannot be served"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True, which cannot be served"),
        ({"rope_interleave": True}, "'rope_interleave' is True, which cannot be served"),
        ({"hc_mult": 0}, "'hc_mult' must be a positive integer, got 0"),
        ({"hc_mult": 1 << 20}, "'hc_mult' must be at most 64"),
        ({"hc_magnitude": "two"}, "'hc_magnitude' must be a positive number, got 'two'"),
        ({"layer_types": ["full_attention"] * 4}, r"layer types \['full_attention'\] are not supported"),
        ({"layer_types": ["deepseek_sparse_attention"]}, "'layer_types' must name 4 layers"),
        ({"indexer_types": ["shared"] * 4}, "the first layer must have an indexer of its own"),
        ({"index_head_dim": 8}, "'index_head_dim' 8 is less than 'qk_rope_head_dim' 16"),
        ({"q_lora_rank": None}, "'q_lora_rank' must be a positive integer"),
        ({"n_group": 3}, "'num_experts_per_tok' 3 cannot be chosen from"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**TINY, **changes})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.2.hc_attn_layer.hc_pre.hc_fn", (24, 256), r"attn_hc.fn has the shape \(24, 256\) .* \(8, 256\)"),
        ("model.layers.2.hc_mlp_layer.hc_pre.hc_scale", (3,), r"ffn_hc.scale has the shape \(3,\) .* says \(2,\)"),
        ("model.hc_head.hc_head_base", (8,), r"hc_head.hc_base has the shape \(8,\) .* says \(4,\)"),
        ("model.layers.1.self_attn.learnable_sink_param", (8,), r"sinks has the shape \(8,\) .* says \(4,\)"),
        ("model.layers.0.self_attn.indexer.wk.weight", (16, 64), r"wk.weight has the shape \(16, 64\)"),
        ("model.layers.2.mlp.gate.weight", (4, 64), r"gate.weight has the shape \(4, 64\)"),
    ],
)
def test_weights_of_another_shape_are_refused_by_name(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        logits({**weights(), name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"device": "cuda", "kernels": "auto"},
            "m has sinks in its latent attention, .* of a GPU yet: choose device cpu",
        ),
        ({"tp_size": 5}, "tp_size 5 is more than the 4 query heads of m: choose up to that"),
    ],
)
def test_a_deployment_that_cannot_be_served_is_told_why(changes: dict[str, Any], message: str) -> None:
    given = {"model": "m", "tp_size": 1, "device": "cpu", "kernels": "numba", "kv_dtype": "bfloat16", **changes}
    with pytest.raises(ConfigError, match=message):
        attention_of(model_config(TINY)).check(Serving(**given))


def test_stages_begin_where_an_indexer_does() -> None:
    assert model_config(TINY).stages(2) == (range(2), range(2, 4))
    assert model_config(TINY).stages(1) == (range(4),)
