"""Rotary embedding: every scaling as transformers computes it, and errors for what cannot be computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.random_models import CONFIGS
from support.tiny_checkpoints import checkpoint

from headwise.errors import ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.models.mrope import axes_of, axes_of_rows_first
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import inverse_frequencies, pairs_first, rotation_scale, served_up_to, turning

REFERENCES = json.loads((Path(__file__).parents[2] / "references" / "rope.json").read_text())
PHI3 = {**CONFIGS["llama"], "architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 8}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("entry", REFERENCES, ids=[entry["name"] for entry in REFERENCES])
def test_frequencies_and_factors_are_those_of_transformers(entry: dict[str, Any]) -> None:
    config = {**PHI3, **entry["config"], "head_dim": 64, "num_key_value_heads": 2}
    kind = entry["config"]["rope_scaling"]["rope_type"]
    if kind == "yarn":  # what Phi-3 calls so is LongRoPE
        config["architectures"] = ["LlamaForCausalLM"]
    model = served_up_to(model_config(config), entry["tokens"])
    inverse, rotated = inverse_frequencies(model.ropes[0], 64), len(entry["inverse"])
    np.testing.assert_allclose(inverse[:rotated], entry["inverse"], rtol=1e-5)
    assert not inverse[rotated:].any()
    scale = rotation_scale(model.ropes[0], 64)
    assert (scale is None) == (entry["factor"] == 1.0)
    if scale is not None:
        np.testing.assert_allclose(scale[:rotated], entry["factor"], rtol=1e-6)
        assert (scale[rotated:] == 1.0).all()


def test_where_a_part_of_a_head_is_rotated_its_pairs_lie_half_a_head_apart() -> None:
    rope = replace(model_config(CONFIGS["llama"]).ropes[0], share=0.5)
    order = pairs_first(rope, 16)
    assert order is not None
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert pairs_first(replace(rope, share=1.0), 16) is None


def test_of_three_positions_each_turns_its_pairs_in_turn_or_one_after_the_other() -> None:
    assert axes_of([2, 3, 3], 8, interleaved=False) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert axes_of([4, 2, 2], 8, interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert axes_of([11, 11, 10], 32, interleaved=True)[-5:] == (0, 1, 2, 0, 1)
    assert axes_of_rows_first([3, 3, 2], 8) == (1, 2, 1, 2, 1, 2, 0, 0)
    rope = replace(model_config(CONFIGS["llama"]).ropes[0], axes=(0, 1, 2, 0, 1, 2, 0, 0))
    inverse, by_axis = inverse_frequencies(rope, 16), turning(rope, 16)
    np.testing.assert_array_equal(by_axis.sum(axis=0), inverse)
    assert [np.flatnonzero(each).tolist() for each in by_axis] == [[0, 3, 6, 7], [1, 4], [2, 5]]
    half = turning(replace(rope, share=0.5, axes=(0, 1, 2, 0)), 16)
    assert [np.flatnonzero(each).tolist() for each in half] == [[0, 3], [1], [2]]


@pytest.mark.parametrize("section", [None, [8], [4, 4], [4, 4, 4], [4, 4, -0.5], "444", [9, 0, -1], [4, 4, True]])
def test_sections_of_pairs_that_cannot_be_are_told(section: Any) -> None:
    with pytest.raises(ModelError, match="'mrope_section' must be 3 numbers of pairs, 8 together, got"):
        axes_of(section, 8, interleaved=False)
    with pytest.raises(ModelError, match="'mrope_section' must be 3 numbers of pairs, 8 together, got"):
        axes_of_rows_first(section, 8)
    if section != [4, 4, 4]:  # of which as many take turns as there are
        with pytest.raises(ModelError, match="'mrope_section' must be 3 numbers of pairs, got"):
            axes_of(section, 8, interleaved=True)


def test_rows_and_columns_that_take_turns_must_be_as_many() -> None:
    with pytest.raises(ModelError, match=r"must be as many of rows as of columns, got \[4, 2, 2\]"):
        axes_of_rows_first([4, 2, 2], 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "needs a list 'long_factor' of 8 positive"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7}}, "needs a list 'long_factor' of 8 positive numbers"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "needs a list 'short_factor' of 8 positive"),
        ({"rope_scaling": {**LONGROPE, "short_factor": "1, 2"}}, "needs a list 'short_factor' .* got '1, 2'"),
        ({"rope_scaling": {**LONGROPE, "attention_factor": -1}}, "needs a positive number 'attention_factor'"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 0}, "'original_max_position_embeddings' must"),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' must be a number above 0 and up to 1, got 1.5"),
        ({"partial_rotary_factor": 0.45}, "'partial_rotary_factor' 0.45 rotates 7 of a head's 16 elements"),
        ({"rope_scaling": {"rope_type": "su2"}}, "rope scaling 'su2' is not supported; supported are default, linear"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope scaling \['yarn'\] is not supported"),
    ],
)
def test_a_phi3_rope_that_cannot_be_computed_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**PHI3, **changes})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 0}, "needs a positive number 'factor' in config.json, got 0"),
        ({"beta_fast": "fast"}, "needs a positive number 'beta_fast' in config.json, got 'fast'"),
        ({"original_max_position_embeddings": -1}, "'original_max_position_embeddings' must be a positive integer"),
        ({"attention_factor": "1"}, "needs a positive number 'attention_factor'"),
    ],
)
def test_a_yarn_scaling_that_cannot_be_computed_says_why(scaling: dict[str, Any], message: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, **scaling}
    with pytest.raises(ModelError, match=message):
        model_config({**CONFIGS["llama"], "rope_scaling": yarn})


def test_a_yarn_of_a_theta_of_1_says_why() -> None:
    with pytest.raises(ModelError, match="yarn needs a 'rope_theta' above 1"):
        model_config({**CONFIGS["llama"], "rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})


def test_blocks_of_short_and_long_sequences_frequencies_are_not_mixed_up() -> None:
    directory = checkpoint("phi3-long")

    def card(max_model_len: int) -> ModelCard:
        return read_model_card(EngineConfig(model=str(directory), max_model_len=max_model_len), directory)

    short, long, whole = card(128), card(129), card(0)
    assert [rope.is_long for rope in short.config.ropes] == [False, False]
    assert [rope.is_long for rope in whole.config.ropes] == [True, True]
    assert short.identity != long.identity == whole.identity
