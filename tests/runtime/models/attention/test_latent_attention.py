"""What latent attention (MLA) refuses of deployments, each in one line, and what its members are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, reference

from headwise.errors import ConfigError
from headwise.runtime.calibration.calibrate import DenseModel
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.registry import model_config

V3 = TINY_CONFIGS["deepseek-v3"]

CONFIG = EngineConfig(dtype="float32", kv_cache="1MiB", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda", "dtype": "bfloat16", "tensor_ops": "paddle"}, r"MLA.*tensor_ops paddle.*tensor_ops cupy"),
        ({"tp_size": 5}, r"tp_size 5 is more than the 4 query heads of .*: choose up to that"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    directory = checkpoint("deepseek-v3")
    with pytest.raises(ConfigError, match=message):
        read_model_card(replace(CONFIG, model=str(directory), **changes), directory, identify=False)


def test_latents_of_no_whole_vectors_need_the_reference_kernels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V3, "kv_lora_rank": 40}))
    with pytest.raises(ConfigError, match=r"multiple of 16.*56.*kernels reference"):
        read_model_card(replace(CONFIG, model=str(tmp_path)), tmp_path, identify=False)
    card = read_model_card(replace(CONFIG, model=str(tmp_path), kernels="reference"), tmp_path, identify=False)
    assert card.layout.roles[0].shape == (56,)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_has_two_bytes_for_each_rotated_number(tmp_path: Path, kv_dtype: str) -> None:
    directory = checkpoint("deepseek-v3")
    card = read_model_card(replace(CONFIG, model=str(directory), kv_dtype=kv_dtype), directory, identify=False)
    assert [(role.name, role.shape) for role in card.layout.roles] == [("latent", (48 + 2 * 16,)), ("latent_scale", ())]
    (tmp_path / "config.json").write_text(json.dumps({**V3, "kv_lora_rank": 40, "qk_rope_head_dim": 24}))
    with pytest.raises(ConfigError, match=r"multiple of 16.*88.*kernels reference"):
        read_model_card(replace(CONFIG, model=str(tmp_path), kv_dtype=kv_dtype), tmp_path, identify=False)


def test_latents_in_four_bits_whose_parts_are_no_whole_groups_are_refused_on_a_gpu(tmp_path: Path) -> None:
    config = replace(CONFIG, model=str(tmp_path), device="cuda", dtype="bfloat16", kv_dtype="int4")
    (tmp_path / "config.json").write_text(json.dumps({**V3, "kv_lora_rank": 64, "qk_rope_head_dim": 64}))
    assert read_model_card(config, tmp_path, identify=False).layout.roles[0].shape == (64 + 2 * 64,)
    (tmp_path / "config.json").write_text(json.dumps(V3))
    with pytest.raises(ConfigError, match=r"int4 .*kv_lora_rank of a multiple of 32.*not 48: choose kv_dtype int8$"):
        read_model_card(config, tmp_path, identify=False)


def test_there_is_no_head_pattern_of_latents_to_measure() -> None:
    directory = checkpoint("deepseek-v2")
    with pytest.raises(ConfigError, match=r"MLA.*no head pattern"):
        DenseModel.load(replace(CONFIG, model=str(directory)), directory)


def test_a_layer_has_one_member_that_every_rank_keeps_whole() -> None:
    directory = checkpoint("deepseek-v3")
    card = read_model_card(replace(CONFIG, model=str(directory), tp_size=2), directory, identify=False)
    assert [[len(heads) for heads in card.plan.kv_heads(rank)] for rank in range(2)] == [[1, 1, 1]] * 2
    assert [role.name for role in card.layout.roles] == ["latent"]
    assert card.layout.slot_bytes == card.layout.block_size * (48 + 16) * 4


def test_the_elements_of_a_layers_matrices_are_those_of_its_weights() -> None:
    for name in ("deepseek-v2", "deepseek-v3"):
        shapes = reference(name)["shapes"]
        held = sum(
            shape[0] * shape[1]
            for weight, shape in shapes.items()
            if ".layers.0.self_attn." in weight and len(shape) == 2
        )
        assert attention_of(model_config(TINY_CONFIGS[name])).weight_elements() == held
