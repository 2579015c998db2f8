"""The towers of Qwen2-VL to Qwen 3.5 make of images what transformers makes of them, with the same random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import QWENS, SIZES, image_model, picture, references
from support.tower_parts import MANY, assert_spread, parts

from headwise import EngineConfig
from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder
from headwise.runtime.models.images import missing_for_images
from headwise.runtime.models.position_config import AXES
from headwise.runtime.models.towers import qwen_vision
from headwise.runtime.models.towers.base import TowerParts
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.qwen_vision import QwenVision
from headwise.runtime.models.towers.qwen_vision_config import (
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_VL,
    Generation,
    QwenVisionConfig,
)
from headwise.runtime.models.towers.select import TowerKind, tower_of
from headwise.runtime.models.towers.stretched import spanned
from headwise.runtime.ops.select import make_ops
from headwise.runtime.protocol.images import MAX_IMAGE_EMBED_BYTES
from headwise.runtime.protocol.prompt_items import MAX_EMBED_BYTES

BUILDS: dict[str, Callable[[TowerParts], QwenVision]] = {
    "qwen2-vl": qwen_vision.build_qwen2_vl,
    "qwen2.5-vl": qwen_vision.build_qwen2_5_vl,
    "qwen3-vl": qwen_vision.build_qwen3_vl,
    "qwen3.5": qwen_vision.build_qwen3_5,
}
GENERATIONS = {"qwen2-vl": QWEN2_VL, "qwen2.5-vl": QWEN2_5_VL, "qwen3-vl": QWEN3_VL, "qwen3.5": QWEN3_5}


@pytest.mark.parametrize("image", SIZES)
@pytest.mark.parametrize("name", QWENS)
def test_images_are_prepared_as_transformers_prepares_them(name: str, image: str) -> None:
    family, known = QWENS[name], references(name)["images"][image]
    config = QwenVisionConfig.of(GENERATIONS[name], family.config, family.processor, MANY)
    width, height = config.fitted(*SIZES[image])
    assert [height // 4, width // 4] == known["sizes"]
    pixels = normalised(picture(image), (width, height), config.pixels)
    squares = pixels.reshape(3, height // 8, 2, 4, width // 8, 2, 4).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = squares.reshape(-1, 3, 1, 4, 4).repeat(2, axis=2)
    assert_spread(frames.reshape(len(frames), -1), known["pixels"], 2e-6)


@pytest.mark.parametrize("ops", ["numpy", "numba"])
@pytest.mark.parametrize("name", QWENS)
def test_towers_make_of_images_what_transformers_does(name: str, ops: str) -> None:
    tower = BUILDS[name](parts(image_model(name), make_ops(ops, 1, "float32", "float32")))
    for image in SIZES:
        known, found = references(name)["images"][image], tower.encode(picture(image))
        rows, columns = known["sizes"]
        assert (found.tokens == QWENS[name].id_of("<|image_pad|>")).all()
        assert (len(found.tokens), found.columns) == (rows // 2 * columns // 2, columns // 2)
        assert_spread(found.embeds, known["features"], 5e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("qwen2.5-vl", "float32", 5e-5),
        ("qwen2.5-vl", "bfloat16", 0.15),
        ("qwen3-vl", "float32", 5e-5),
        ("qwen2-vl", "float32", 5e-5),
    ],
)
def test_a_gpu_s_operations_make_the_same(name: str, dtype: str, tolerance: float) -> None:
    tower = BUILDS[name](parts(image_model(name), EmulatedOps(dtype, ShimPrograms())))
    known = references(name)["images"]["odd"]["features"]
    found = tower.encode(picture("odd")).embeds
    np.testing.assert_allclose(found.reshape(-1)[known["at"]], known["values"], atol=tolerance)


@pytest.mark.parametrize("name", QWENS)
def test_bfloat16_weights_make_nearly_the_same(name: str) -> None:
    made = (
        BUILDS[name](parts(image_model(name), make_ops("numba", 1, dtype, dtype))).encode(picture("large")).embeds
        for dtype in ("float32", "bfloat16")
    )
    exact, rounded = made
    difference = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 0 < difference < 0.05


MODELS = {
    "Qwen2VLForConditionalGeneration": "qwen2-vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2.5-vl",
    "Qwen3VLForConditionalGeneration": "qwen3-vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3-vl",
    "Qwen3_5ForConditionalGeneration": "qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5",
}


@pytest.mark.parametrize("architecture", MODELS)
def test_models_go_by_their_towers_and_say_where_their_images_are(architecture: str) -> None:
    config = {**QWENS[MODELS[architecture]].config, "architectures": [architecture]}
    assert tower_of(config) == TowerKind(BUILDS[MODELS[architecture]], "<|image_pad|>", video="<|video_pad|>")
    assert missing_for_images(config, AXES) == ""


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_largest_image_fits_a_prompt_beside_another_one(dtype: str, size: int, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(image_model("qwen3-vl"), directory)
    asked = {**QWENS["qwen3-vl"].processor, "max_pixels": 1 << 26}
    (directory / "preprocessor_config.json").write_text(json.dumps(asked))
    config = EngineConfig(model=str(directory), dtype=dtype, tensor_ops="numba", image_encoder_cpus=1)
    tower = ImageEncoder.open(config, directory)._tower
    assert isinstance(tower, QwenVision)
    one = tower.config.most // tower.config.step**2 * 3 * 64 * size
    assert one <= MAX_IMAGE_EMBED_BYTES < MAX_EMBED_BYTES
    assert one > MAX_IMAGE_EMBED_BYTES - (1 << 20) or tower.config.most == 1 << 26


# ---- sizes ----

PUBLISHED: dict[str, tuple[Generation, dict[str, Any], dict[str, Any]]] = {
    "Qwen2-VL-7B": (
        QWEN2_VL,
        {
            "hidden_size": 3584,
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
                "hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            },
        },
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    ),
    "Qwen2.5-VL-7B": (
        QWEN2_5_VL,
        {
            "hidden_size": 3584,
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
        },
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    ),
    "Qwen3-VL-8B": (
        QWEN3_VL,
        {
            "text_config": {"hidden_size": 4096},
            "vision_config": {
                "deepstack_visual_indexes": [8, 16, 24],
                "depth": 27,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "in_channels": 3,
                "intermediate_size": 4304,
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": 4096,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
}


def published(name: str, most: int = MANY) -> QwenVisionConfig:
    return QwenVisionConfig.of(*PUBLISHED[name], most)


def test_configs_as_published_are_read() -> None:
    two, windowed, three = (published(name) for name in PUBLISHED)
    assert (two.hidden, two.inner, two.text_hidden, two.layers, two.step) == (1280, 5120, 3584, 32, 28)
    assert (two.window, two.grid, two.levels) == (0, 0, ())
    assert (windowed.inner, windowed.window, windowed.whole) == (3420, 4, {7, 15, 23, 31})
    assert (three.hidden, three.grid, three.levels, three.step) == (1152, 48, (8, 16, 24), 32)
    assert (three.least, three.most, three.pixels.mean) == (65536, 16777216, (0.5, 0.5, 0.5))
    assert len(two.whole) == 32
    assert len(three.whole) == 27


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("Qwen2-VL-7B", (1, 1), (56, 56)),
        ("Qwen2-VL-7B", (42, 14), (112, 56)),  # halves are rounded to the even number
        ("Qwen2-VL-7B", (70, 98), (56, 112)),
        ("Qwen2-VL-7B", (4032, 3024), (4032, 3024)),
        ("Qwen2-VL-7B", (6000, 4000), (4368, 2912)),
        ("Qwen2-VL-7B", (2800, 14), (812, 28)),
        ("Qwen2-VL-7B", (32768, 200), (32760, 196)),
        ("Qwen3-VL-8B", (4032, 3024), (4032, 3008)),
        ("Qwen3-VL-8B", (5000, 5000), (4096, 4096)),
        ("Qwen3-VL-8B", (200, 200), (256, 256)),
    ],
)
def test_images_are_scaled_to_whole_squares_of_so_many_pixels(
    name: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    """As transformers' `smart_resize` says."""
    assert published(name).fitted(*size) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_images_of_any_shape_become_no_more_numbers_than_are_asked_for(name: str) -> None:
    most = 15 << 20
    config = published(name, most)
    numbers = config.text_hidden * (1 + len(config.levels))
    for longer, shorter, share in ((8192, 8192, 0.9), (8192, 6000, 0.9), (30000, 1500, 0.8), (32768, 200, 0.3)):
        for size in ((longer, shorter), (shorter, longer)):
            width, height = config.fitted(*size)
            tokens = width * height // config.step**2
            assert share * most < tokens * numbers <= most


def test_an_image_that_would_be_too_large_is_scaled_down_to_what_is_asked_for() -> None:
    wide, narrow = (BUILDS["qwen3-vl"](parts(image_model("qwen3-vl"), most=most)) for most in (MANY, 64 * 3 * 20))
    assert len(wide.encode(picture("large")).tokens) == 54  # 9 columns
    found = narrow.encode(picture("large"))
    assert (len(found.tokens), found.columns) == (15, 5)


def test_an_image_as_good_as_a_line_is_refused() -> None:
    config = published("Qwen2-VL-7B")
    for size in ((2801, 14), (14, 2801), (1, 201)):
        with pytest.raises(InvalidRequestError, match="longer edge is more than 200 times its shorter one"):
            config.fitted(*size)


def test_positions_span_an_image_from_corner_to_corner() -> None:
    draw = np.random.default_rng(0).standard_normal((4, 4, 3)).astype(np.float32)
    np.testing.assert_allclose(spanned(draw, 4, 4), draw, atol=1e-6)
    found = spanned(draw, 7, 10)
    np.testing.assert_allclose(found[::6, ::9], draw[::3, ::3], atol=1e-6)
    np.testing.assert_allclose(found[1, 0], (draw[0, 0] + draw[1, 0]) / 2, atol=1e-6)
    np.testing.assert_allclose(spanned(draw, 1, 2)[0], draw[0, ::3], atol=1e-6)


# ---- what cannot be served ----


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen2-vl", {"hidden_act": "gelu"}, "'hidden_act' of 'vision_config' must be quick_gelu, got 'gelu'"),
        ("qwen2.5-vl", {"hidden_act": "quick_gelu"}, "'hidden_act' of 'vision_config' must be silu"),
        ("qwen3-vl", {"temporal_patch_size": 1}, "'temporal_patch_size' of 'vision_config' must be 2, got 1"),
        ("qwen3-vl", {"in_channels": 4}, "'in_channels' of 'vision_config' must be 3"),
        ("qwen2-vl", {"in_chans": 1}, "'in_chans' of 'vision_config' must be 3"),
        ("qwen2-vl", {"num_heads": 5}, "'embed_dim' 32 of 'vision_config' must be a multiple .* 'num_heads' 5"),
        ("qwen3.5", {"num_heads": 16}, "'hidden_size' 32 of 'vision_config' must be a multiple of four times"),
        ("qwen2-vl", {"hidden_size": 64}, "'hidden_size' of 'vision_config' must be the text's 'hidden_size' 256"),
        ("qwen3-vl", {"out_hidden_size": 96}, "'out_hidden_size' of 'vision_config' .* 64, got 96"),
        ("qwen2-vl", {"mlp_ratio": 1 << 20}, "'mlp_ratio' must be at most 64"),
        ("qwen2-vl", {"mlp_ratio": 4}, "'visual.blocks.0.mlp.fc1.weight' has the shape"),
        ("qwen2.5-vl", {"window_size": 4}, "'window_size' must be a square of patches at least, 8 pixels, got 4"),
        ("qwen2.5-vl", {"fullatt_block_indexes": [3]}, "'fullatt_block_indexes' must be a list of the 3 layers"),
        ("qwen2.5-vl", {"intermediate_size": 64}, "gate_proj.weight' has the shape"),
        (
            "qwen3-vl",
            {"num_position_embeddings": 35},
            "'num_position_embeddings' must be those of a square grid, got 35",
        ),
        ("qwen3-vl", {"num_position_embeddings": 49}, "pos_embed.weight' has the shape"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 3]}, "'deepstack_visual_indexes' must be a list of the 3 layers"),
        ("qwen3-vl", {"deepstack_visual_indexes": [2, 0]}, "must name each layer once, in their order"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 1, 2]}, "lacks the tensor 'visual.deepstack_merger_list.2"),
        ("qwen3.5", {"deepstack_visual_indexes": [1]}, "must be empty of this architecture"),
        ("qwen3.5", {"depth": 4}, "lacks the tensor 'visual.blocks.3"),
        ("qwen3.5", {"depth": 257}, "'depth' must be at most 256"),
        ("qwen3.5", {"patch_size": 8}, "image processor has patch_size 4, its tower takes 8"),
        ("qwen3.5", {"spatial_merge_size": 4}, "image processor has merge_size 2, its tower takes 4"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(
    name: str, changes: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    family, directory = QWENS[name], tmp_path / "model"
    shutil.copytree(image_model(name), directory)
    vision = {**family.config["vision_config"], **changes}
    (directory / "config.json").write_text(json.dumps({**family.config, "vision_config": vision}))
    with pytest.raises(ModelError, match=says):
        BUILDS[name](parts(directory))


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"temporal_patch_size": 1}, "image processor has temporal_patch_size 1, its tower takes 2"),
        ({"size": {"height": 64, "width": 64}}, "'shortest_edge' must be a positive integer, got None"),
        ({"size": {"shortest_edge": 64}}, "'longest_edge' must be a positive integer, got None"),
        ({"max_pixels": 1 << 30}, "'longest_edge' must be at most 67108864"),
        ({"min_pixels": 0}, "'shortest_edge' must be a positive integer, got 0"),
        ({"min_pixels": 8192, "max_pixels": 4096}, "images of at least 8192 and at most 4096 pixels"),
        ({"do_resize": False}, "do_resize False: true is served"),
        ({"image_std": [0.5]}, "image_std .* must be three numbers"),
    ],
)
def test_preparing_that_cannot_be_served_is_told(processor: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        QwenVisionConfig.of(QWEN3_VL, QWENS["qwen3-vl"].config, processor, MANY)


def test_a_tokenizer_without_the_images_token_is_told() -> None:
    with pytest.raises(ModelError, match=r"no control token <\|image_pad\|>"):
        qwen_vision.build_qwen2_vl(replace(parts(image_model("qwen2-vl")), token_id=lambda name: None))
