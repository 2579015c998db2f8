"""ERNIE-4.5-VL's tower makes of images what transformers makes of them, with the same random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_checkpoints import draw_weights
from support.tiny_images import ERNIE_VL, SIZES, image_model, picture, references

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.towers.base import TowerParts
from headwise.runtime.models.towers.ernie_vision import ErnieVision, ErnieVisionConfig, build
from headwise.runtime.models.towers.patch_order import PatchOrder
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.select import TowerKind, tower_of
from headwise.runtime.models.towers.whole_squares import whole_squares
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.select import make_ops

PUBLISHED = Path(__file__).parents[3] / "support" / "published" / "ernie-4.5-vl-28b-a3b.json"
START, PAD, END = (ERNIE_VL.id_of(f"<|IMAGE_{name}|>") for name in ("START", "PLACEHOLDER", "END"))
MANY = 1 << 30
"""Numbers of an image: more than any has."""


def parts(directory: Path, ops: TensorOps | None = None, most: int = MANY) -> TowerParts:
    return TowerParts(
        read_json(directory / "config.json"),
        read_json(directory / "preprocessor_config.json"),
        open_weights(directory),
        ops or make_ops("numpy", 1, "float32", "float32"),
        Tokenizer.from_directory(directory).control_token,
        most,
        {},
        list,
    )


def tower(ops: TensorOps | None = None, most: int = MANY) -> ErnieVision:
    return build(parts(image_model(ERNIE_VL.name), ops, most))


def assert_spread(found: np.ndarray, expected: dict[str, Any], tolerance: float) -> None:
    assert list(found.shape) == expected["shape"]
    np.testing.assert_allclose(found.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)
    assert float(np.abs(found.astype(np.float64)).sum()) == pytest.approx(expected["sum"], rel=10 * tolerance)


@pytest.mark.parametrize("image", SIZES)
def test_images_are_prepared_as_transformers_prepares_them(image: str) -> None:
    known = references(ERNIE_VL.name)["images"][image]
    config = ErnieVisionConfig.of(ERNIE_VL.config, ERNIE_VL.processor, MANY)
    width, height = whole_squares(*SIZES[image], config.step, config.least, config.most)
    assert [height // 4, width // 4] == known["sizes"]
    order = PatchOrder.of(height // 4, width // 4, 2, window=0)
    assert_spread(order.cut(normalised(picture(image), (width, height), config.pixels), 4), known["pixels"], 2e-6)


@pytest.mark.parametrize("ops", ["numpy", "numba"])
def test_it_makes_of_images_what_transformers_does_between_the_tokens_around_them(ops: str) -> None:
    made = tower(make_ops(ops, 1, "float32", "float32"))
    weights = draw_weights(ERNIE_VL.config["text_config"], references(ERNIE_VL.name)["shapes"])
    for image in SIZES:
        known, found = references(ERNIE_VL.name)["images"][image], made.encode(picture(image))
        rows, columns = known["sizes"]
        within = rows // 2 * columns // 2
        assert found.tokens.tolist() == [START, *[PAD] * within, END]
        assert (found.columns, found.is_framed) == (columns // 2, True)
        assert_spread(found.embeds[1:-1], known["features"], 5e-5)
        around = weights["model.embed_tokens.weight"][[START, END]]
        np.testing.assert_array_equal(found.embeds[[0, -1]], around)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.15)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    known = references(ERNIE_VL.name)["images"]["odd"]["features"]
    found = tower(EmulatedOps(dtype, ShimPrograms())).encode(picture("odd")).embeds[1:-1]
    np.testing.assert_allclose(found.reshape(-1)[known["at"]], known["values"], atol=tolerance)


def test_the_published_config_is_read_and_images_become_no_more_numbers_than_are_asked_for() -> None:
    published = json.loads(PUBLISHED.read_text())
    assert tower_of(published) == TowerKind(build, "<|IMAGE_PLACEHOLDER|>")
    config = ErnieVisionConfig.of(published, {}, MANY)
    assert (config.hidden, config.inner, config.text_hidden, config.layers, config.step) == (1280, 5120, 2560, 32, 28)
    assert (config.least, config.most, config.eps, config.text_eps) == (3136, 28 * 28 * 6177, 1e-6, 1e-5)
    most = 15 << 20
    less = ErnieVisionConfig.of(published, {}, most)
    for size in ((8192, 8192), (1500, 30000)):
        width, height = whole_squares(*size, less.step, less.least, less.most)
        assert 0.8 * most < (width * height // less.step**2 + 2) * 2560 <= most
    few = tower(most=256 * 22).encode(picture("large"))
    assert (len(few.tokens), few.columns) == (17, 5)


def test_an_image_as_good_as_a_line_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="longer edge is more than 200 times its shorter one"):
        tower().encode(picture("tiny").resize((1, 201)))


@pytest.mark.parametrize(
    ("config", "vision", "says"),
    [
        ({}, {"hidden_act": "gelu"}, "'hidden_act' of 'vision_config' must be quick_gelu, got 'gelu'"),
        ({}, {"temporal_merge_size": 4}, "'temporal_merge_size' of 'vision_config' must be 2, got 4"),
        ({}, {"embed_dim": 64}, "'embed_dim' of 'vision_config' must be 32, got 64"),
        ({}, {"in_channels": 4}, "'in_channels' of 'vision_config' must be 3"),
        ({}, {"num_heads": 5}, "'hidden_size' 32 of 'vision_config' must be a multiple of four times"),
        ({}, {"patch_size": 8}, "image processor has patch_size 4, its tower takes 8"),
        ({}, {"spatial_merge_size": 4}, "image processor has merge_size 2, its tower takes 4"),
        ({}, {"intermediate_size": 64}, "'model.vision_model.blocks.0.mlp.fc1.weight' has the shape"),
        ({}, {"depth": 4}, "lacks the tensor 'vision_model.blocks.3"),
        ({"temporal_conv_size": 3}, {}, "'temporal_conv_size' must be 2, got 3"),
        ({"spatial_conv_size": 4}, {}, "'spatial_conv_size' must be 2, got 4"),
        ({"use_temporal_conv": False}, {}, "'use_temporal_conv' must be True, got False"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(
    config: Mapping[str, Any], vision: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(image_model(ERNIE_VL.name), directory)
    changed = {**ERNIE_VL.config, **config, "vision_config": {**ERNIE_VL.config["vision_config"], **vision}}
    (directory / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=says):
        build(parts(directory))


def test_a_tokenizer_without_the_tokens_around_an_image_is_told() -> None:
    given = parts(image_model(ERNIE_VL.name))
    known = {"<|IMAGE_PLACEHOLDER|>": PAD, "<|IMAGE_START|>": START}
    with pytest.raises(ModelError, match=r"no control token <\|IMAGE_END\|>"):
        build(replace(given, token_id=known.get))
