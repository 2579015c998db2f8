"""Gemma 4's tower makes of images what transformers makes of them, with the same random weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import GEMMA4, PATCH, SIZES, image_model, picture, references

from headwise import EngineConfig
from headwise.errors import ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder, Place
from headwise.runtime.models.towers.base import EncodedImage
from headwise.runtime.models.towers.gemma4_vision import Gemma4VisionConfig
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.select import image_tokens, tower_of

IMAGE = GEMMA4.id_of("<|image|>")
CONFIG = Gemma4VisionConfig.of(GEMMA4.config, GEMMA4.processor)


def opened(directory: Path, **changes: Any) -> ImageEncoder:
    settings = {"dtype": "float32", "tensor_ops": "numpy", "image_encoder_cpus": 1, **changes}
    return ImageEncoder.open(EngineConfig(model=str(directory), **settings), directory)


@pytest.fixture(scope="module", params=["numpy", "numba", pytest.param("paddle", marks=pytest.mark.soak)])
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return opened(image_model("gemma4"), tensor_ops=request.param)


def made(encoder: ImageEncoder, name: str) -> EncodedImage:
    return encoder._tower.encode(picture(name))


def known(name: str) -> dict[str, Any]:
    found: dict[str, Any] = references("gemma4")["images"][name]
    return found


def assert_features(found: EncodedImage, expected: dict[str, Any], tolerance: float) -> None:
    assert list(found.embeds.shape) == expected["shape"]
    np.testing.assert_allclose(found.embeds.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)
    assert float(np.abs(found.embeds).sum()) == pytest.approx(expected["sum"], rel=tolerance)


@pytest.mark.parametrize("name", SIZES)
def test_images_are_scaled_and_cut_as_transformers_does(name: str) -> None:
    columns, rows = (edge // PATCH for edge in CONFIG.fitted(*picture(name).size))
    assert [rows, columns] == known(name)["sizes"]
    pixels = normalised(picture(name), (columns * PATCH, rows * PATCH), CONFIG.pixels) / 2 + 0.5  # from 0 to 1
    cut = pixels.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    padded = np.zeros(known(name)["pixels"]["shape"], np.float32)
    padded[: len(cut)] = cut
    expected = known(name)["pixels"]
    np.testing.assert_allclose(padded.reshape(-1)[expected["at"]], expected["values"], atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_the_tower_makes_of_an_image_what_transformers_does(encoder: ImageEncoder, name: str) -> None:
    found = made(encoder, name)
    assert_features(found, known(name)["features"], 5e-5)
    assert found.tokens.tolist() == [IMAGE] * len(found.embeds)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    config = EngineConfig(model=str(image_model("gemma4")), dtype=dtype)
    place = Place(EmulatedOps(dtype, ShimPrograms()))
    encoder = ImageEncoder.open(config, image_model("gemma4"), place=place)
    assert_features(made(encoder, "tall"), known("tall")["features"], tolerance)


def test_images_of_any_shape_have_whole_squares_and_no_more_tokens_than_are_allowed() -> None:
    step = PATCH * 2
    for size in ((1, 1), (8, 8), (5000, 20), (3, 900), (640, 480), (17, 4001), (800, 7)):
        columns, rows = (edge // step for edge in CONFIG.fitted(*size))
        assert all(edge % step == 0 for edge in CONFIG.fitted(*size))
        assert 0 < columns * rows <= CONFIG.most
    assert CONFIG.fitted(100_000, 1) == (70 * step, step)
    assert CONFIG.fitted(1, 100_000) == (step, 70 * step)
    few = replace(CONFIG, most=1)
    assert few.fitted(9, 9) == (step, step)
    assert few.fitted(10, 9) == few.fitted(1, 700) == (step, step)


def copied(scratch: Path, content: dict[str, Any]) -> Path:
    """The model, with another config."""
    directory = scratch / "model"
    shutil.copytree(image_model("gemma4"), directory)
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "siglip"}, "'model_type' of 'vision_config' must be gemma4_vision, got 'siglip'"),
        ({"hidden_activation": "gelu"}, "'hidden_activation' of 'vision_config' must be gelu_pytorch_tanh"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' of 'vision_config' must be 4, got 2"),
        ({"head_dim": 6}, "'head_dim' 6 of 'vision_config' must be a multiple of four"),
        ({"pooling_kernel_size": 3}, "image processor has pooling_kernel_size 2, its tower 3"),
        ({"patch_size": 8}, "image processor has patch_size 4, its tower 8"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'encoder.layers.2"),
        ({"position_embedding_size": 80}, "position_embedding_table' has the shape"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    vision = {**GEMMA4.config["vision_config"], **changes}
    with pytest.raises(ModelError, match=says):
        opened(copied(tmp_path, {**GEMMA4.config, "vision_config": vision}))


def test_models_that_know_tokens_by_layer_take_no_images_and_that_is_told() -> None:
    config = {**GEMMA4.config, "text_config": {**GEMMA4.config["text_config"], "hidden_size_per_layer_input": 16}}
    assert image_tokens(GEMMA4.config) == ("<|image|>", "")
    assert image_tokens(config) == ("", "")
    with pytest.raises(ModelError, match=r"images need an embedding of its own in every layer \(E2B, E4B\)"):
        tower_of(config)
