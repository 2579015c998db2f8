"""ERNIE-4.5-VL's configs, in both forms, and its experts by kind of token; its tokens are compared in `tests/e2e`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights
from support.tiny_checkpoints import draw_weights
from support.tiny_images import ERNIE_VL, references

from headwise.errors import ModelError
from headwise.kernels.fused import MixedLayer
from headwise.runtime.models.ernie45_vl import Ernie45Vl
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops

TEXT = ERNIE_VL.config["text_config"]
PUBLISHED = Path(__file__).parents[2] / "support" / "published" / "ernie-4.5-vl-28b-a3b.json"
FLAT = {
    **{key: value for key, value in TEXT.items() if key not in ("model_type", "rope_parameters", "mlp_layer_types")},
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "model_type": "ernie4_5_moe_vl",
    "moe_num_experts": [8, 8],
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [29, 28],
    "moe_layer_interval": 1,
    "rope_theta": 10000.0,
    "freq_allocation": 10,
    "vision_config": ERNIE_VL.config["vision_config"],
}
"""The tiny model's config with the fields of checkpoints that have code of their own."""


def nested(**changes: Any) -> dict[str, Any]:
    return {**ERNIE_VL.config, "text_config": {**TEXT, **changes}}


def without_scaling(config: ModelConfig) -> ModelConfig:
    return replace(config, ropes=tuple(replace(rope, scaling=None) for rope in config.ropes))


def test_published_fields_are_read_like_those_that_transformers_writes() -> None:
    ours = without_scaling(model_config(ERNIE_VL.config))
    for config in (
        FLAT,
        {**FLAT, "rope_scaling": {"rope_type": "ernie_3d", "freq_allocation": 10}, "freq_allocation": None},
        {**FLAT, "rope_scaling": {"type": "default", "mrope_section": [11, 11, 10]}, "freq_allocation": None},
        {**FLAT, "architectures": ["Ernie4_5_VL_MoeForConditionalGeneration"]},
    ):
        assert without_scaling(model_config(config)) == ours


def test_the_published_model_is_read() -> None:
    model = model_config(json.loads(PUBLISHED.read_text()))
    assert isinstance(model.moe, MoeConfig)
    assert model.moe.layers == tuple(range(1, 28))
    sizes = model.moe.expert_size, model.moe.image_expert_size, model.moe.shared_size
    assert (model.moe.num_experts, model.moe.experts_per_token, *sizes) == (64, 6, 1536, 512, 3072)
    assert model.ropes[0].axes == (1, 2) * 22 + (0,) * 20
    assert (model.axes, model.image_tokens[0], model.missing_for_images) == (3, "<|IMAGE_PLACEHOLDER|>", "")


def test_published_configs_that_do_not_name_them_have_no_shared_experts_and_untied_embeddings() -> None:
    own = {key: value for key, value in FLAT.items() if key not in ("moe_num_shared_experts", "tie_word_embeddings")}
    model = model_config(own)
    assert model.moe is not None
    assert (model.moe.shared_size, model.tie_embeddings) == (0, False)
    written = {key: value for key, value in ERNIE_VL.config.items() if key != "tie_word_embeddings"}
    assert model_config(written).tie_embeddings


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {**FLAT, "moe_num_experts": [8, 4]},
            r"'moe_num_experts' must be as many for text as for images, got \[8, 4\]",
        ),
        ({**FLAT, "moe_num_experts": [8]}, "'moe_num_experts' must be two numbers, of text and of images"),
        ({**FLAT, "moe_num_experts": [8, "8"]}, "'moe_num_experts' must be a positive integer, got '8'"),
        ({**FLAT, "moe_layer_start_index": [1, 2]}, "to the same layers, got"),
        ({**FLAT, "moe_layer_end_index": [2, 1]}, "to the same layers, got"),
        ({**FLAT, "moe_use_hard_gate": False}, "'moe_use_hard_gate' is False, which cannot be served"),
        ({**FLAT, "mm_vocab_size": 16}, "'mm_vocab_size' is 16, which cannot be served"),
        ({**FLAT, "rope_3d": False}, "'rope_3d' is False, which cannot be served"),
        ({**FLAT, "freq_allocation": "many"}, "'freq_allocation' must be an integer of at least 0, got 'many'"),
        (nested(rope_parameters={"mrope_section": [12, 10, 10]}), "as many of rows as of columns"),
        (nested(rope_parameters={"mrope_section": [11, 11, 11]}), "must be 3 numbers of pairs, 32 together"),
        (nested(mlp_layer_types=["dense"]), "'mlp_layer_types' must name 3 layers"),
        (nested(moe_intermediate_size=[64, 0]), "'moe_intermediate_size' must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_served_is_told(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        model_config(config)


def built(ops: str, **weights: np.ndarray) -> Ernie45Vl:
    own = {**draw_weights(TEXT, references(ERNIE_VL.name)["shapes"]), **weights}
    config = model_config(ERNIE_VL.config)
    shard = Shard(0, 1, tuple(range(2) for _ in range(config.num_layers)))
    model = build_model(config, DictWeights(own), make_ops(ops, 1, "float32", "float32"), SingleRank(), shard)
    assert isinstance(model, Ernie45Vl)
    return model


def test_both_kinds_have_the_same_shared_experts_in_memory_once() -> None:
    model = built("numba")
    assert model._fused is not None, "steps of text are one call"
    for layer in model._layers[1:]:
        assert isinstance(model.fusible_mlp(layer.mlp), MixedLayer)
        text, images = layer.mlp.text.experts, layer.mlp.images.experts
        assert text.shared is not None
        assert images.shared is text.shared
        assert not np.array_equal(text.mixture.correction, images.mixture.correction)


def test_a_correction_of_one_kind_alone_is_told() -> None:
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    with pytest.raises(ModelError, match="one row for text and one for images"):
        built("numpy", **{name: np.zeros((1, 8), np.float32)})


def test_a_row_s_experts_are_those_of_its_kind() -> None:
    model, rows = built("numpy"), np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    mlp, made = model._layers[1].mlp, {}
    for kind, of_images in (("text", None), ("images", np.ones(5, np.bool_)), ("both", np.arange(5) % 2 == 1)):
        model._of_images, model._tokens = of_images, None
        made[kind] = np.asarray(model.feed_forward(mlp, rows))
    assert np.abs(made["text"] - made["images"]).max() > 0.1
    np.testing.assert_allclose(made["both"][::2], made["text"][::2], atol=2e-5)
    np.testing.assert_allclose(made["both"][1::2], made["images"][1::2], atol=2e-5)
