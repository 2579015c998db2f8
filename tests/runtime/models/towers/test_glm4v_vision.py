"""The tower of GLM-4.1V to 4.6V makes of images what transformers makes of them, with the same random weights."""

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
from support.tiny_images import GLM4V, GLMS, SIZES, image_model, picture, references
from support.tower_parts import MANY, assert_spread, parts

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.towers.glm4v_vision import Glm4vVisionConfig, build
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.select import TowerKind, tower_of
from headwise.runtime.ops.select import make_ops


@pytest.mark.parametrize("image", SIZES)
def test_images_are_prepared_as_transformers_prepares_them(image: str) -> None:
    known = references("glm4v")["images"][image]
    config = Glm4vVisionConfig.of(GLM4V.config, GLM4V.processor, MANY)
    width, height = config.fitted(*SIZES[image])
    assert [height // 4, width // 4] == known["sizes"]
    pixels = normalised(picture(image), (width, height), config.pixels)
    squares = pixels.reshape(3, height // 8, 2, 4, width // 8, 2, 4).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = squares.reshape(-1, 3, 1, 4, 4).repeat(2, axis=2)
    assert_spread(frames.reshape(len(frames), -1), known["pixels"], 2e-6)


@pytest.mark.parametrize("ops", ["numpy", "numba", pytest.param("paddle", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", GLMS)
def test_towers_make_of_images_what_transformers_does(name: str, ops: str) -> None:
    """One of them has biases of queries, keys and values."""
    tower = build(parts(image_model(name), make_ops(ops, 1, "float32", "float32")))
    assert tower.config.has_bias == (name == "glm4v-moe")
    for image in SIZES:
        known, found = references(name)["images"][image], tower.encode(picture(image))
        rows, columns = known["sizes"]
        assert (found.tokens == GLMS[name].id_of("<|image|>")).all()
        assert (len(found.tokens), found.columns) == (rows // 2 * columns // 2, columns // 2)
        assert_spread(found.embeds, known["features"], 5e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.25)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    tower = build(parts(image_model("glm4v"), EmulatedOps(dtype, ShimPrograms())))
    known = references("glm4v")["images"]["odd"]["features"]
    found = tower.encode(picture("odd")).embeds
    np.testing.assert_allclose(found.reshape(-1)[known["at"]], known["values"], atol=tolerance)


@pytest.mark.parametrize("name", GLMS)
def test_bfloat16_weights_make_nearly_the_same(name: str) -> None:
    exact, rounded = (
        build(parts(image_model(name), make_ops("numba", 1, dtype, dtype))).encode(picture("large")).embeds
        for dtype in ("float32", "bfloat16")
    )
    difference = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("name", GLMS)
def test_models_go_by_the_tower_and_say_where_their_images_are(name: str) -> None:
    assert tower_of(GLMS[name].config) == TowerKind(build, "<|image|>", video="<|video|>")
    model = model_config(GLMS[name].config)
    assert (model.image_tokens[0], model.missing_for_images, model.axes) == ("<|image|>", "", 3)


# ---- sizes ----

PUBLISHED = {
    "text_config": {"hidden_size": 4096},
    "vision_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 13696,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
PREPARED = {
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "do_rescale": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Glm4vImageProcessor",
}


def published(most: int = MANY) -> Glm4vVisionConfig:
    return Glm4vVisionConfig.of(PUBLISHED, PREPARED, most)


def test_a_config_as_published_is_read_and_its_fields_are_what_is_taken_where_there_are_none() -> None:
    found = published()
    assert (found.hidden, found.merger, found.text_hidden, found.layers, found.heads) == (1536, 13696, 4096, 24, 12)
    assert (found.step, found.grid, found.has_bias, found.least, found.most) == (28, 24, False, 12544, 9633792)
    bare = {"text_config": {"hidden_size": 4096}, "vision_config": {}}
    assert Glm4vVisionConfig.of(bare, {"size": PREPARED["size"]}, MANY) == found
    assert Glm4vVisionConfig.of(bare, {}, MANY) == replace(found, most=15000 * 28 * 28)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (84, 84)),
        ((42, 14), (140, 56)),  # grown to a square's edge first
        ((70, 98), (56, 112)),  # halves are rounded to the even number
        ((100, 100), (112, 112)),
        ((1920, 1080), (1932, 1092)),
        ((4032, 3024), (2520, 1876)),
        ((6000, 4000), (2688, 1792)),
        ((2800, 14), (5600, 28)),
        ((32768, 200), (28084, 168)),
        ((200, 40000), (140, 31024)),
    ],
)
def test_images_are_scaled_to_whole_squares_of_so_many_pixels(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """As transformers' `smart_resize` says."""
    assert published().fitted(*size) == expected


def test_images_of_any_shape_become_no_more_numbers_than_are_asked_for() -> None:
    most = 15 << 20
    config = published(most)
    for longer, shorter, share in ((8192, 8192, 0.9), (8192, 6000, 0.9), (30000, 1500, 0.8), (32768, 200, 0.3)):
        for size in ((longer, shorter), (shorter, longer)):
            width, height = config.fitted(*size)
            tokens = width * height // config.step**2
            assert share * most < tokens * config.text_hidden <= most


def test_an_image_that_would_be_too_large_is_scaled_down_to_what_is_asked_for() -> None:
    wide, narrow = (build(parts(image_model("glm4v"), most=most)) for most in (MANY, 256 * 20))
    assert len(wide.encode(picture("large")).tokens) == 54  # 9 columns
    found = narrow.encode(picture("large"))
    assert (len(found.tokens), found.columns) == (15, 5)


@pytest.mark.parametrize("size", [(2801, 14), (14, 2801), (1, 201)])
def test_an_image_as_good_as_a_line_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="longer edge is more than 200 times its shorter one"):
        published().fitted(*size)


# ---- what cannot be served ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' of 'vision_config' must be silu, got 'gelu'"),
        ({"temporal_patch_size": 1}, "'temporal_patch_size' of 'vision_config' must be 2, got 1"),
        ({"in_channels": 4}, "'in_channels' of 'vision_config' must be 3"),
        ({"num_heads": 5}, "'hidden_size' 32 of 'vision_config' must be a multiple .* 'num_heads' 5"),
        ({"out_hidden_size": 96}, "'out_hidden_size' of 'vision_config' .* 256, got 96"),
        ({"attention_bias": "no"}, "'attention_bias' must be true or false, got 'no'"),
        ({"attention_bias": True}, "lacks the tensor 'visual.blocks.0.attn.qkv.bias'"),
        ({"intermediate_size": 64}, "'model.visual.merger.gate_proj.weight' has the shape"),
        ({"image_size": [24, 24]}, r"'image_size' must be a positive integer, got \[24, 24\]"),
        ({"image_size": 28}, "position_embedding.weight' has the shape"),
        ({"depth": 4}, "lacks the tensor 'visual.blocks.3"),
        ({"depth": 257}, "'depth' must be at most 256"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a positive number"),
        ({"patch_size": 8}, "image processor has patch_size 4, its tower takes 8"),
        ({"spatial_merge_size": 4}, "image processor has merge_size 2, its tower takes 4"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: Mapping[str, Any], says: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(image_model("glm4v"), directory)
    vision = {**GLM4V.config["vision_config"], **changes}
    (directory / "config.json").write_text(json.dumps({**GLM4V.config, "vision_config": vision}))
    with pytest.raises(ModelError, match=says):
        build(parts(directory))


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"temporal_patch_size": 1}, "image processor has temporal_patch_size 1, its tower takes 2"),
        ({"size": {"height": 64, "width": 64}}, "'shortest_edge' must be a positive integer, got None"),
        ({"size": {"shortest_edge": 64}}, "'longest_edge' must be a positive integer, got None"),
        ({"size": {"shortest_edge": 64, "longest_edge": 1 << 30}}, "'longest_edge' must be at most 67108864"),
        ({"size": {"shortest_edge": 8192, "longest_edge": 4096}}, "images of at least 8192 and at most 4096 pixels"),
        ({"do_normalize": False}, "do_normalize False: true is served"),
    ],
)
def test_preparing_that_cannot_be_served_is_told(processor: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Glm4vVisionConfig.of(GLM4V.config, processor, MANY)


def test_a_tokenizer_without_the_images_token_is_told() -> None:
    with pytest.raises(ModelError, match=r"no control token <\|image\|>"):
        build(replace(parts(image_model("glm4v")), token_id=lambda name: None))
