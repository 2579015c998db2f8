"""GLM-4.1V to 4.6V are GLM-4's and GLM-4.5's decoders, whose tokens have three positions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import ModelError
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config

DENSE, MOE = "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"
AXES = (0,) * 8 + (1,) * 12 + (2,) * 12
TEXT: dict[str, Any] = {
    "model_type": "glm4v_text",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338, 151348],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    "rope_theta": 10000.0,
    "vocab_size": 151552,
}
"""GLM-4.1V-9B's."""


def dense(**changes: Any) -> ModelConfig:
    given = {key: value for key, value in {**TEXT, **changes}.items() if value != "absent"}
    return model_config({"architectures": [DENSE], "text_config": given})


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[2] / "support/published" / f"{name}.json").read_text())
    return found


def test_a_dense_one_is_a_glm_4() -> None:
    found = dense()
    plain = model_config({**TEXT, "architectures": ["Glm4ForCausalLM"]})
    rope = found.ropes[-1]
    assert (rope.axes, rope.share, found.head_dim, found.missing_for_images) == (AXES, 0.5, 128, "")
    assert replace(found, ropes=plain.ropes, missing_for_images="") == replace(plain, missing_for_images="")


def test_fields_of_a_dense_one_are_what_hugging_face_has_for_missing_ones() -> None:
    absent = dict.fromkeys(("attention_bias", "rms_norm_eps"), "absent")
    assert dense(**absent, rope_scaling="absent") == replace(
        dense(), ropes=dense(**absent, rope_scaling="absent").ropes
    )
    assert dense(rope_scaling="absent").ropes[0].axes == AXES
    assert dense(attention_bias=False) == dense()
    whole = dense(partial_rotary_factor="absent", rope_scaling={"mrope_section": [16, 24, 24]}).ropes[0]
    assert (whole.share, len(whole.axes)) == (1.0, 64)
    assert dense(hidden_size=2048, rope_scaling={"mrope_section": [4, 6, 6]}).head_dim == 64
    parameters = {**TEXT["rope_scaling"], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    newer = dense(
        rope_parameters=parameters, rope_theta="absent", partial_rotary_factor="absent", rope_scaling="absent"
    )
    assert [(each.theta, each.share, each.axes) for each in newer.ropes] == [(10000.0, 0.5, AXES)] * 40


def test_one_with_experts_is_a_glm_4_5_air() -> None:
    air = published("glm-4.5-air")
    text = {**air, "rope_scaling": TEXT["rope_scaling"]}
    del text["attention_bias"]
    found = model_config({"architectures": [MOE], "text_config": text})
    plain = model_config(air)
    rope = found.ropes[-1]
    assert (rope.axes, rope.share, found.missing_for_images) == (AXES, 0.5, "")
    assert replace(found, ropes=plain.ropes) == plain


@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_sections_that_are_not_those_of_what_is_rotated_are_told(architecture: str) -> None:
    text = TEXT if architecture == DENSE else published("glm-4.5-air")
    wrong = {**text, "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
    with pytest.raises(
        ModelError, match=r"'mrope_section' must be 3 numbers of pairs, 32 together, got \[16, 24, 24\]"
    ):
        model_config({"architectures": [architecture], "text_config": wrong})
