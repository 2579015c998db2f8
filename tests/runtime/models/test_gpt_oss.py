"""gpt-oss: what its experts' numbers are as MXFP4, and files and configs that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.errors import ModelError
from headwise.kernels.cpu.matmul import pack_quantised
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.gpt_oss import GptOssWeights
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.numba_ops import NumbaOps

MXFP4 = "gpt-oss-mxfp4"
EXPERTS = "model.layers.0.mlp.experts"
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def view(changes: dict[str, np.ndarray] | None = None) -> GptOssWeights:
    known = reference(MXFP4)
    weights = {**draw_weights(known["config"], known["shapes"]), **(changes or {})}
    return GptOssWeights(DictWeights(weights), model_config(known["config"]))


def test_a_byte_is_two_numbers_and_32_share_an_exponent() -> None:
    weights = draw_weights(TINY_CONFIGS[MXFP4], reference(MXFP4)["shapes"])
    blocks, scales = weights[f"{EXPERTS}.down_proj_blocks"][2, 5], weights[f"{EXPERTS}.down_proj_scales"][2, 5]
    expected = [
        (-1 if code >= 8 else 1) * NUMBERS[code % 8] * 2.0 ** (int(exponent) - 127)
        for group, exponent in zip(blocks, scales, strict=True)
        for byte in group.tolist()
        for code in (byte % 16, byte // 16)
    ]
    np.testing.assert_array_equal(view().rows(f"{EXPERTS}.2.down_proj.weight", 5, 6)[0], expected)


def test_gate_and_up_take_turns() -> None:
    weights = view()
    gate, up = (weights.rows(f"{EXPERTS}.1.{kind}_proj.weight", 0, 96) for kind in ("gate", "up"))
    blocks = draw_weights(TINY_CONFIGS[MXFP4], reference(MXFP4)["shapes"])[f"{EXPERTS}.gate_up_proj_blocks"][1]
    low = np.array(NUMBERS)[blocks[:, 0, 0] % 8]
    assert (gate[:, 0] != 0).tolist() == (low[0::2] != 0).tolist()
    assert (up[:, 0] != 0).tolist() == (low[1::2] != 0).tolist()


def test_int8_weights_hold_mxfp4_without_loss() -> None:
    weights, ops = view(), NumbaOps(1, "int8")
    name = f"{EXPERTS}.0.down_proj.weight"
    matrix = weights.kept_columns(name, 32, 96)
    assert matrix is not None
    packed = pack_quantised(matrix.codes, matrix.scale, matrix.minimum, matrix.bits, False)
    products = ops.linear(np.eye(64, dtype=np.float32), packed)
    np.testing.assert_array_equal(products, weights.columns(name, 32, 96).T)
    assert weights.kept_columns(name, 16, 96) is None, "which cuts through a group"


def test_exponents_that_int8_weights_cannot_hold_are_computed_with_as_floats() -> None:
    name = f"{EXPERTS}.down_proj_scales"
    scales = draw_weights(TINY_CONFIGS[MXFP4], reference(MXFP4)["shapes"])[name]
    scales[0] = 60
    weights = view({name: scales})
    assert weights.kept_rows(f"{EXPERTS}.0.down_proj.weight", 0, 64) is None
    found = weights.rows(f"{EXPERTS}.0.down_proj.weight", 0, 64)
    assert 0 < np.abs(found).max() <= 6 * 2.0 ** (60 - 127)


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        ("gate_up_proj_blocks", (4, 192, 2, 8), r"has the shape \[192, 2, 8\], config.json says \[192, 2, 16\]"),
        ("gate_up_proj_scales", (4, 192, 1), r"has the shape \[192, 1\], config.json says \[192, 2\]"),
        ("down_proj_blocks", (4, 64, 2, 16), r"has the shape \[64, 2, 16\], config.json says \[64, 3, 16\]"),
    ],
)
def test_mxfp4_of_another_size_says_so(part: str, shape: tuple[int, ...], message: str) -> None:
    weights = view({f"{EXPERTS}.{part}": np.zeros(shape, np.uint8)})
    name = f"{EXPERTS}.0.{'down' if part.startswith('down') else 'gate'}_proj.weight"
    with pytest.raises(ModelError, match=f"{part} {message}"):
        weights.rows(name, 0, 1)


def test_a_file_that_is_cut_short_says_so_before_anything_is_made_of_it(tmp_path: Path) -> None:
    whole = (checkpoint(MXFP4) / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS[MXFP4]))
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt: .*fetch the model again"):
        run_rank(model_config(TINY_CONFIGS[MXFP4]), Checkpoint(tmp_path), SingleRank(), np.zeros(1, np.int32))


def test_a_router_bias_of_another_size_says_so() -> None:
    known = reference("gpt-oss")
    weights = draw_weights(known["config"], known["shapes"])
    name = "model.layers.0.mlp.router.bias"
    config = model_config(known["config"])
    with pytest.raises(ModelError, match=r"router\.bias has the shape \[3\], config\.json says 4 experts"):
        run_rank(config, DictWeights({**weights, name: weights[name][:3]}), SingleRank(), np.zeros(1, np.int32))


def test_bytes_are_no_weights_of_a_model_that_has_none() -> None:
    with pytest.raises(ModelError, match=r"down_proj_blocks' is stored as U8; F32, F16, BF16 can be read: use an unq"):
        Checkpoint(checkpoint(MXFP4)).tensor(f"{EXPERTS}.down_proj_blocks")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "'swiglu_limit' is 5.0, which cannot be served"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config' is .*awq.*, which cannot be served"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' 9 is more than 'num_local_experts' 4"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer types .* not supported"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid', which cannot be served"),
        ({"n_group": 8}, "'n_group' is 8, which cannot be served"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**TINY_CONFIGS["gpt-oss"], **changes})
