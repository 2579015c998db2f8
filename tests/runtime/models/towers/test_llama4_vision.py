"""Llama 4's tower makes of images what transformers makes of them, with the same random weights.

Its processor scales by torchvision, ours by Pillow: of a scaled image some pixels differ by one of 256 levels.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import LLAMA4, SIZES, image_model, picture, references

from headwise import EngineConfig
from headwise.errors import ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder, Place
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.towers.base import EncodedImage
from headwise.runtime.models.towers.pixels import PixelForm
from headwise.runtime.models.towers.tiles import best_canvas, canvases, tiles_of, within
from headwise.runtime.models.towers.tower_weights import TowerWeights

FORM = PixelForm((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 2)
LEVEL = 2 / 255 + 2e-3
"""Of a pixel, as the tower takes it, rounded to bfloat16."""
UNSCALED = ("exact", "odd", "thin")
PATCH, START, END, IMAGE = (
    LLAMA4.id_of(token) for token in ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>")
)
NEXT_COLUMN, NEXT_ROW = (LLAMA4.id_of(token) for token in ("<|tile_x_separator|>", "<|tile_y_separator|>"))


def opened(directory: Path, **changes: Any) -> ImageEncoder:
    settings = {"dtype": "float32", "tensor_ops": "numpy", "image_encoder_cpus": 1, **changes}
    return ImageEncoder.open(EngineConfig(model=str(directory), **settings), directory)


@pytest.fixture(scope="module", params=["numpy", "numba", "paddle"])
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return opened(image_model("llama4"), tensor_ops=request.param)


def made(encoder: ImageEncoder, name: str) -> EncodedImage:
    return encoder._tower.encode(picture(name))


def known(name: str) -> dict[str, Any]:
    found: dict[str, Any] = references("llama4")["images"][name]
    return found


def assert_features(found: EncodedImage, expected: dict[str, Any], tolerance: float) -> None:
    features = found.embeds[found.tokens == PATCH]
    assert list(features.shape) == expected["shape"]
    np.testing.assert_allclose(features.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)
    assert float(np.abs(features).sum()) == pytest.approx(expected["sum"], rel=tolerance)


@pytest.mark.parametrize("name", SIZES)
def test_images_are_cut_into_tiles_as_transformers_cuts_them(name: str) -> None:
    tiles, shape = tiles_of(picture(name), 16, 4, FORM)
    assert list(shape) == known(name)["sizes"]
    assert len(tiles) == shape[0] * shape[1] + 1  # and the whole image
    first = known(name)["pixels"]
    assert list(tiles[0].shape) == first["shape"]
    found = tiles[0].reshape(-1)[first["at"]]
    np.testing.assert_allclose(found, first["values"], atol=1e-6 if name in UNSCALED else LEVEL)


@pytest.mark.parametrize("name", SIZES)
def test_the_tower_makes_of_an_image_what_transformers_does(encoder: ImageEncoder, name: str) -> None:
    found = made(encoder, name)
    assert_features(found, known(name)["features"], 3e-5 if name in UNSCALED else 0.02)


def test_tiles_have_tokens_between_them_and_the_whole_image_comes_last(encoder: ImageEncoder) -> None:
    found = made(encoder, "odd")  # two by two tiles, of two by two squares of patches each
    squares = [PATCH] * 4
    row = [*squares, NEXT_COLUMN, *squares, NEXT_ROW]
    assert found.tokens.tolist() == [START, *row, *row, IMAGE, *squares, END]
    table = TowerWeights(Checkpoint(image_model("llama4")), None, ())  # type: ignore[arg-type]
    for at in (0, 5, -6, -1):
        np.testing.assert_array_equal(found.embeds[at], table.text_embedding(int(found.tokens[at])))


def test_an_image_of_one_tile_is_that_alone(encoder: ImageEncoder) -> None:
    found = encoder._tower.encode(picture("exact").crop((0, 0, 16, 16)))
    assert found.tokens.tolist() == [START, IMAGE, *[PATCH] * 4, END]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.15)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    config = EngineConfig(model=str(image_model("llama4")), dtype=dtype)
    place = Place(EmulatedOps(dtype, ShimPrograms()))
    encoder = ImageEncoder.open(config, image_model("llama4"), place=place)
    assert_features(made(encoder, "exact"), known("exact")["features"], tolerance)


def test_canvases_are_those_of_at_most_so_many_tiles_and_the_best_one_changes_an_image_least() -> None:
    assert canvases(5, 224)[:4] == [(224, 1120), (1120, 224), (224, 896), (448, 448)]
    assert len(canvases(16, 336)) == 50
    possible = [(224, 672), (672, 224), (224, 448), (448, 224), (224, 224)]
    assert best_canvas((200, 300), possible, largest=False) == (224, 448)
    assert best_canvas((50, 50), possible, largest=False) == (224, 224)
    assert best_canvas((1000, 1000), possible, largest=False) == (224, 224)
    assert best_canvas((1, 30000), possible, largest=False) == (224, 672)
    assert within((200, 300), (450, 200)) == (133, 200)
    assert within((800, 600), (450, 1300)) == (450, 337)
    assert within((1, 30000), (224, 672)) == (1, 672)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pixel_shuffle_ratio": 0.25}, "'pixel_shuffle_ratio' of 'vision_config' must be 0.5, got 0.25"),
        ({"hidden_act": "silu"}, "'hidden_act' of 'vision_config' must be gelu"),
        ({"image_size": 20}, "the checkpoint's image processor has size|must be one of two patches"),
        ({"image_size": 24}, "the checkpoint's image processor has size .* its tower tiles of 24"),
        ({"num_attention_heads": 3}, "'hidden_size' 32 for 3 heads"),
        ({"projector_input_dim": 64}, "fc1.weight' has the shape"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'vision_model.model.layers.2"),
        ({"patch_size": 2}, "'vision_model.patch_embedding.linear.weight' has the shape"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(image_model("llama4"), directory)
    vision = {**LLAMA4.config["vision_config"], **changes}
    (directory / "config.json").write_text(json.dumps({**LLAMA4.config, "vision_config": vision}))
    with pytest.raises(ModelError, match=says):
        opened(directory)
