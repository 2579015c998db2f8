"""Gemma 4's config.json: heads of each layer, whose cache they use, and what is refused before weights are read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, draw_weights, reference

from headwise.errors import ModelError
from headwise.runtime.models.gemma4_config import parse
from headwise.runtime.models.model_config import LayerHeads
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import inverse_frequencies
from headwise.runtime.ops.comm import SingleRank

DENSE, SHARED, MOE = (TINY_CONFIGS[name] for name in ("gemma4", "gemma4-shared", "gemma4-moe"))
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6}
SLIDING, FULL = "sliding_attention", "full_attention"


def test_full_layers_have_heads_of_their_own() -> None:
    model = model_config(DENSE)
    sliding, full = (4, 32), (2, 64)
    found = [(heads.kv_heads, heads.head_dim) for heads in model.layer_heads]
    assert found == [sliding, sliding, full, sliding, full]
    assert [len(row) for row in model.policies] == [4, 4, 2, 4, 2]
    assert [row[0].window for row in model.policies] == [24, 24, 0, 24, 0]


def test_a_config_as_transformers_saves_it_names_them_layer_by_layer() -> None:
    saved = {key: value for key, value in DENSE.items() if "global" not in key}
    saved["per_layer_config"] = {str(layer): {"head_dim": 64, "num_key_value_heads": 2} for layer in (2, 4)}
    assert parse(saved) == parse(DENSE)


def test_fields_that_are_left_out_are_those_of_the_published_text_model() -> None:
    model = parse({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {}, "eos_token_id": [1, 106]})
    assert model.layer_heads[4:6] == (LayerHeads(4, 256, 4), LayerHeads(4, 512, 5))
    assert (model.num_layers, model.side_size, model.moe, model.eos_token_ids) == (30, 256, None, (1, 106))
    assert model.policies[0][0].window == 512


def test_the_last_layer_sees_everything_whatever_it_is_called() -> None:
    model = parse({**DENSE, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING]})
    assert model.policies[-1][0].is_full
    assert model.layer_heads[-1].head_dim == 64


def test_layers_that_share_a_cache_use_that_of_the_last_other_one_of_their_type() -> None:
    model = parse(SHARED)
    assert [heads.cache_layer for heads in model.layer_heads] == [0, 1, 2, 3, 2, 3, 2]
    assert model.policies[4:] == ((), (), ())
    assert [model.mlp_size(layer) for layer in range(7)] == [96] * 4 + [192] * 3
    assert model.by_cache_layer("abcdefg") == tuple("abcdcdc")


def test_proportional_frequencies_are_those_of_whole_heads_for_the_first_pairs() -> None:
    rope = parse(DENSE).ropes[2]
    turned = inverse_frequencies(rope, 64)
    assert turned[:8] == pytest.approx(1e6 ** -(np.arange(0, 16, 2) / 64))
    assert not turned[8:].any()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SHARED, {"num_kv_shared_layers": 7}, "leaves no sliding_attention layer"),
        (SHARED, {"num_kv_shared_layers": 5}, "leaves no full_attention layer"),
        (SHARED, {"num_kv_shared_layers": -1}, "at least 0"),
        (SHARED, {"vocab_size_per_layer_input": 9}, "'vocab_size_per_layer_input' 9 is not 'vocab_size' 263"),
        (DENSE, {"num_global_key_value_heads": 3}, "layer 2 has 4 attention heads for 3 key-value heads of 64"),
        (DENSE, {"global_head_dim": 63}, "layer 2 .*of 63.*even"),
        (DENSE, {"global_head_dim": 10**9}, "'global_head_dim' must be at most"),
        (DENSE, {"num_hidden_layers": 10**9}, "'num_hidden_layers' must be at most"),
        (DENSE, {"num_attention_heads": 10**9, "num_global_key_value_heads": 10**9}, "must be at most"),
        (DENSE, {"per_layer_config": {"0": {"sliding_window": 3}}}, "'per_layer_config' changes .*sliding_window"),
        (DENSE, {"per_layer_config": [1]}, "'per_layer_config' must be an object"),
        (DENSE, {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        (DENSE, {"rope_parameters": {FULL: {**PROPORTIONAL, "partial_rotary_factor": 9}}}, "partial_rotary_factor 9"),
        (DENSE, {"layer_types": ["chunked_attention"] * 5}, "layer types"),
        (MOE, {"top_k_experts": 5}, "'top_k_experts' 5 is more than 'num_experts' 4"),
        (MOE, {"num_experts": None}, "'num_experts' must be a positive integer"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        model_config({**config, **changes})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("gemma4-shared", "model.embed_tokens_per_layer.weight", (263, 16)),
        ("gemma4-shared", "model.layers.1.per_layer_projection.weight", (16, 64)),
        ("gemma4-moe", "model.layers.1.router.proj.weight", (3, 64)),
    ],
)
def test_weights_of_another_model_are_refused(name: str, tensor: str, shape: tuple[int, ...]) -> None:
    known = reference(name)
    weights = draw_weights(known["config"], known["shapes"])
    weights[tensor] = np.zeros(shape, np.float32)
    with pytest.raises(ModelError, match=f"{re.escape(tensor)} has the shape"):
        run_rank(model_config(known["config"]), DictWeights(weights), SingleRank(), np.zeros(1, np.int32))


def test_weights_of_a_multimodal_checkpoint_lie_deeper() -> None:
    known = reference("gemma4")
    weights = draw_weights(known["config"], known["shapes"])
    deeper = {name.replace("model.", "model.language_model."): values for name, values in weights.items()}
    model, ids = model_config(known["config"]), np.arange(3, 9, dtype=np.int32)
    plain, nested = (run_rank(model, DictWeights(source), SingleRank(), ids) for source in (weights, deeper))
    np.testing.assert_array_equal(plain, nested)
