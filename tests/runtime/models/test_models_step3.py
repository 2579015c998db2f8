"""Step-3.5 and Step-3.7: their configuration in both spellings, names of weights, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.step3_config import Step3Config
from headwise.runtime.ops.comm import SingleRank

NAME = "step3"
TINY = TINY_CONFIGS[NAME]
TEXT = TINY["text_config"]
IDS = np.arange(3, 60, dtype=np.int32)
WRITTEN: dict[str, Any] = {
    "num_attention_groups": None,
    "num_key_value_heads": 2,
    "moe_num_experts": None,
    "n_routed_experts": 8,
    "moe_top_k": None,
    "num_experts_per_tok": 3,
    "moe_layers_enum": None,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": TEXT["layer_types"][:4],
    "attention_other_setting": None,
    "num_sliding_attention_heads": 6,
    "rope_theta": None,
    "partial_rotary_factors": None,
    "rope_scaling": None,
    "rope_parameters": {
        "full_attention": {**TEXT["rope_scaling"], "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}
"""As transformers writes it."""


def of(**changes: Any) -> Step3Config:
    found = model_config({**TINY, "text_config": {**TEXT, **changes}})
    assert isinstance(found, Step3Config)
    return found


def test_a_config_as_transformers_writes_it_is_the_same_model() -> None:
    found, expected = of(**WRITTEN), of()
    for one, other in zip(found.ropes, expected.ropes, strict=True):
        assert (one.theta, one.share) == (other.theta, other.share)
        kinds = [(each.scaling or {}).get("rope_type") for each in (one, other)]
        assert kinds[0] == kinds[1]
    assert {**vars(found), "ropes": ()} == {**vars(expected), "ropes": ()}


def test_layers_with_windows_have_query_heads_and_a_rotation_of_their_own() -> None:
    model = of()
    assert model.policies == ((FULL,) * 2, (HeadPolicy(24),) * 2, (HeadPolicy(24),) * 2, (FULL,) * 2)
    assert (model.num_heads, model.query_heads) == (4, (4, 6, 6, 4))
    assert [(rope.theta, rope.share) for rope in model.ropes[:2]] == [(5e4, 0.5), (1e4, 1.0)]
    assert [bool(rope.scaling and rope.scaling.get("rope_type") == "llama3") for rope in model.ropes[:2]] == [
        True,
        False,
    ]
    assert model.moe is not None
    assert (model.moe.layers, model.moe.shared_size) == ((1, 2, 3), 48)
    assert (model.clipped, model.shared_limits) == (frozenset({2, 3}), (2.0, 0.0, 0.0, 2.0))
    assert of(moe_layers_enum=None).moe.layers == (3,)  # type: ignore[union-attr]
    assert of(query_pre_attn_scalar=16).attention_scale == 0.25


def test_a_step_3_5_is_its_text_alone() -> None:
    alone = model_config({**TEXT, "architectures": ["Step3p5ForCausalLM"]})
    assert {**vars(alone), "missing_for_images": ""} == {**vars(of()), "missing_for_images": ""}


def test_limits_change_what_is_computed() -> None:
    """The references were made with them: without, some activations are larger."""
    weights, without = Checkpoint(checkpoint(NAME)), ({}, {"swiglu_limits": None}, {"swiglu_limits_shared": None})
    logits = [run_rank(of(**changes), weights, SingleRank(), IDS) for changes in without]
    assert all(np.abs(logits[0] - other).max() > 0.01 for other in logits[1:])


def test_experts_one_by_one_are_the_same_model() -> None:
    drawn, split = draw_weights(TINY, reference(NAME)["shapes"]), {}
    for name, array in drawn.items():
        at, is_moe, kind = name.partition(".moe.")
        if not is_moe or array.ndim < 3:
            split[name] = array
            continue
        split |= {f"{at}.mlp.experts.{expert}.{kind}": matrix for expert, matrix in enumerate(array)}
    assert len(split) > len(drawn)
    found, expected = (run_rank(of(), DictWeights(each), SingleRank(), IDS) for each in (split, drawn))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limits": [0, 0, 5, 7]}, "'swiglu_limits' .* are served where each is 0 or 7.0"),
        ({"swiglu_limits": [0, 0]}, "'swiglu_limits' must be a number or null for each of 4 layers"),
        ({"swiglu_limits_shared": [0, 0, -1, 0]}, "'swiglu_limits_shared' must be a number or null for each of 4"),
        ({"swiglu_limits_shared": 7}, "'swiglu_limits_shared' must be a number or null for each of 4 layers, got 7"),
        ({"attention_other_setting": {"head_dim": 32}}, "'attention_other_setting' has 'head_dim' 32, others 64"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "5 attention heads of layers with windows cannot sh"),
        ({"attention_other_setting": [6]}, "'attention_other_setting' must be an object"),
        ({"moe_layers_enum": "one,two"}, "'moe_layers_enum' must be layers' numbers with commas, got 'one,two'"),
        ({"moe_layers_enum": 3}, "'moe_layers_enum' must be layers' numbers with commas, got 3"),
        ({"moe_router_activation": "softmax"}, "'moe_router_activation' is 'softmax', which cannot be served"),
        ({"use_head_wise_attn_gate": False}, "'use_head_wise_attn_gate' is False, which cannot be served"),
        ({"yarn_only_types": ["sliding_attention"]}, "'yarn_only_types' is .*, which cannot be served"),
        ({"rope_theta": [1e4]}, "'rope_theta' must have a number for each layer, got"),
        ({"partial_rotary_factors": [0.5, 3, 1, 0.5]}, "'partial_rotary_factor' must be a number above 0 and up to 1"),
        ({"sliding_window": None}, "'sliding_window' must be a positive integer, got None"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must name 4 layers"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        of(**changes)
