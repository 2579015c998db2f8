"""LoRA adapters come from strangers: what they are is checked before anything is computed with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lora import ALPHA, write_adapter

from headwise.errors import ConfigError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.adapters import CONFIG, WEIGHTS, AdapterFile
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

AT = "model.layers.3.self_attn.q_proj"
DOWN, UP = np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(32, dtype=np.float32).reshape(8, 4)


def test_matrices_are_read_by_their_projections_and_scaled(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "x", {AT: (DOWN, UP), "model.language_model.layers.0.mlp.up_proj": (DOWN, UP)})
    adapter = AdapterFile("x", path)
    assert set(adapter.modules) == {"layers.3.self_attn.q_proj", "layers.0.mlp.up_proj"}
    np.testing.assert_array_equal(adapter.down("layers.3.self_attn.q_proj"), DOWN)
    np.testing.assert_array_equal(adapter.up("layers.3.self_attn.q_proj"), UP * np.float32(ALPHA / 4))
    stable = AdapterFile("y", write_adapter(tmp_path / "y", {AT: (DOWN, UP)}, use_rslora=True))
    np.testing.assert_array_equal(stable.up("layers.3.self_attn.q_proj"), UP * np.float32(ALPHA / 2))


def test_its_identity_is_that_of_its_content(tmp_path: Path) -> None:
    first, again, other, scaled = (
        AdapterFile("x", write_adapter(tmp_path / name, {AT: (DOWN, up)}, **config))
        for name, up, config in (("a", UP, {}), ("b", UP, {}), ("c", UP + 1, {}), ("d", UP, {"lora_alpha": 4}))
    )
    assert first.identity == again.identity
    assert len({each.identity for each in (first, other, scaled)}) == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3', which is not served"),
        ({"bias": "all"}, "'bias' is 'all', which is not served"),
        ({"use_dora": True}, "'use_dora' is True, which is not served"),
        ({"use_qalora": True}, "'use_qalora' is True, which is not served"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is \['lm_head'\], which is not served"),
        ({"rank_pattern": {"q_proj": 8}}, "'rank_pattern' is .*, which is not served"),
        ({"r": 0}, "'r' must be an integer from 1 to 512, got 0"),
        ({"r": "4"}, "'r' must be an integer from 1 to 512, got '4'"),
        ({"r": 8}, "has the shapes .*, adapter_config.json says rank 8"),
        ({"lora_alpha": "16"}, "'lora_alpha' must be a number, got '16'"),
        ({"lora_alpha": 1e300}, "'lora_alpha' must be a number"),
    ],
)
def test_what_a_config_asks_for_that_is_not_served_is_told(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    path = write_adapter(tmp_path / "x", {AT: (DOWN, UP)}, **config)
    with pytest.raises(ModelError, match=says) as caught:
        AdapterFile("mine", path)
    assert str(caught.value).startswith(f"adapter 'mine' at {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"], "it has the tensor 'base_model"),
        (["base_model.model.model.layers.0.mamba.in_proj.lora_A.weight"], "it has the tensor 'base_model"),
        (["base_model.model.backbone.layers.0.mixer.out_proj.lora_A.weight"], "it has the tensor 'base_model"),
        (["base_model.model.model.layers.0.linear_attn.out_proj.lora_A.weight"], "it has the tensor 'base_model"),
        (["base_model.model.lm_head.lora_A.weight"], "matrices A and B of projections of attention and of dense MLPs"),
        (["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], "q_proj has not both matrices, A and B"),
        ([], "it changes nothing"),
    ],
)
def test_tensors_that_are_no_such_matrices_are_told(tmp_path: Path, names: list[str], says: str) -> None:
    path = write_adapter(tmp_path / "x", {AT: (DOWN, UP)})
    (path / WEIGHTS).unlink()
    write_safetensors(
        path / WEIGHTS, {name: TensorForm("F32", DOWN.shape) for name in names}, iter([DOWN] * len(names))
    )
    with pytest.raises(ModelError, match=says):
        AdapterFile("mine", path)


def test_matrices_with_what_is_no_number_are_told(tmp_path: Path) -> None:
    for which, value in enumerate((np.nan, np.inf)):
        both = [DOWN.copy(), UP.copy()]
        both[which][0, 0] = value
        found = AdapterFile("mine", write_adapter(tmp_path / str(which), {AT: (both[0], both[1])}))
        (module,) = found.modules
        with pytest.raises(ModelError, match="q_proj has infinities or what is no number"):
            (found.down, found.up)[which](module)


def test_files_that_are_missing_or_corrupt_are_told(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "x", {AT: (DOWN, UP)})
    (path / CONFIG).write_text("{")
    with pytest.raises(ModelError, match=CONFIG):
        AdapterFile("mine", path)
    (path / CONFIG).write_text(json.dumps([]))
    with pytest.raises(ModelError, match=CONFIG):
        AdapterFile("mine", path)
    with pytest.raises(ModelError, match=f"'mine' at .*nowhere: it has no {CONFIG}: give a directory that PEFT saved"):
        AdapterFile("mine", tmp_path / "nowhere")
    path = write_adapter(tmp_path / "y", {AT: (DOWN, UP)})
    (path / WEIGHTS).write_bytes(b"short")
    with pytest.raises(ModelError, match=WEIGHTS):
        AdapterFile("mine", path)
    (path / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"it has no {WEIGHTS}"):
        AdapterFile("mine", path)


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        ("sql", "'sql' is not NAME=VALUE; write adapters such as sql=/models/sql-lora"),
        ("a=/x,a=/y", "'a' is given twice"),
        ("smollm2-135m=/x", "an adapter cannot be called 'smollm2-135m', as the model is: give it another name"),
        ("a b=/x", "an adapter is called 'a b': 1 to 64 letters, digits and any of '._:-' name one"),
        (",".join(f"a{each}=/x" for each in range(65)), "65 adapters were given; at most 64 are served"),
    ],
)
def test_a_configuration_that_names_none_is_told(adapters: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(adapters=adapters)
