"""Kimi-K2.5's tower makes of images what transformers makes of them, with the same random weights.

transformers' processor scales by torchvision, ours by Pillow, as the published one does: of a scaled image some pixels
differ by one of 256 levels.
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
from support.tiny_images import KIMI, SIZES, image_model, picture, references

from headwise import EngineConfig
from headwise.errors import ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder, Place
from headwise.runtime.models.towers.base import EncodedImage
from headwise.runtime.models.towers.moonvit import MoonVitConfig
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.stretched import stretched
from headwise.runtime.protocol.prompt_items import MAX_EMBED_BYTES

LEVEL = 2 / 255 + 1e-5
"""Of a pixel, as the tower takes it."""
UNSCALED = ("exact", "odd", "tall", "tiny")
PAD = KIMI.id_of("<|media_pad|>")
PUBLISHED_CONFIG = {
    **KIMI.config,
    "vision_config": {
        "patch_size": 4,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 2,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 48,
        "merge_kernel_size": [2, 2],
        "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": 32,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
    },
}
PUBLISHED_PROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 64,
        "patch_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 16,
        "in_patch_limit_each_frame": 4096,
    }
}


def opened(directory: Path, **changes: Any) -> ImageEncoder:
    settings = {"dtype": "float32", "tensor_ops": "numpy", "image_encoder_cpus": 1, **changes}
    return ImageEncoder.open(EngineConfig(model=str(directory), **settings), directory)


@pytest.fixture(scope="module", params=["numpy", "numba", "paddle"])
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return opened(image_model("kimi-k25"), tensor_ops=request.param)


def made(encoder: ImageEncoder, name: str) -> EncodedImage:
    return encoder._tower.encode(picture(name))


def known(name: str) -> dict[str, Any]:
    found: dict[str, Any] = references("kimi-k25")["images"][name]
    return found


def assert_spread(found: np.ndarray, expected: dict[str, Any], tolerance: float) -> None:
    assert list(found.shape) == expected["shape"]
    np.testing.assert_allclose(found.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)


@pytest.mark.parametrize("name", SIZES)
def test_images_are_scaled_and_filled_as_transformers_does(name: str) -> None:
    config = MoonVitConfig.of(KIMI.config, KIMI.processor)
    scaled, (width, height) = config.fitted(*SIZES[name])
    rows, columns = known(name)["sizes"]
    assert (height, width) == (rows * 4, columns * 4)
    assert (scaled == SIZES[name]) == (name in UNSCALED)
    pixels = normalised(picture(name), scaled, config.pixels, (width, height))
    assert (pixels[:, scaled[1] :] == -1).all()  # black
    assert (pixels[:, :, scaled[0] :] == -1).all()
    first = pixels[:, :4, :4]  # the reference is of the first patch
    assert_spread(first, known(name)["pixels"], 1e-6 if name in UNSCALED else LEVEL)


@pytest.mark.parametrize("name", SIZES)
def test_the_tower_makes_of_an_image_what_transformers_does(encoder: ImageEncoder, name: str) -> None:
    found = made(encoder, name)
    assert (found.tokens == PAD).all()
    tolerance = 5e-5 if name in UNSCALED else 0.03
    assert_spread(found.embeds, known(name)["features"], tolerance)
    assert float(np.abs(found.embeds).sum()) == pytest.approx(known(name)["features"]["sum"], rel=tolerance)


def test_configs_as_published_are_read_as_those_of_transformers(tmp_path: Path) -> None:
    ours = MoonVitConfig.of(KIMI.config, KIMI.processor)
    assert MoonVitConfig.of(PUBLISHED_CONFIG, PUBLISHED_PROCESSOR) == ours
    directory = changed(tmp_path, PUBLISHED_CONFIG, PUBLISHED_PROCESSOR)
    found, expected = made(opened(directory), "large"), made(opened(image_model("kimi-k25")), "large")
    np.testing.assert_array_equal(found.embeds, expected.embeds)


def test_what_a_config_does_not_say_is_kimi_k25_s() -> None:
    config = MoonVitConfig.of({"vision_config": {}}, {})
    assert (config.hidden, config.inner, config.heads, config.layers) == (1152, 4304, 16, 27)
    assert (config.patch, config.merge, config.grid, config.most, config.side) == (14, 2, (64, 64), 16384, 512)


@pytest.mark.parametrize(
    ("size", "scaled", "filled"),
    [
        ((100, 50), (100, 50), (112, 56)),  # never enlarged
        ((1, 1), (1, 1), (28, 28)),
        ((1792, 1792), (1792, 1792), (1792, 1792)),  # 16,384 patches
        ((3584, 3584), (1792, 1792), (1792, 1792)),
        ((32768, 10), (7168, 2), (7168, 28)),  # 512 patches of an edge
    ],
)
def test_images_are_shrunk_to_so_many_patches_in_all_and_of_an_edge(
    size: tuple[int, int], scaled: tuple[int, int], filled: tuple[int, int]
) -> None:
    assert MoonVitConfig.of({"vision_config": {}}, {}).fitted(*size) == (scaled, filled)


def test_the_largest_images_of_any_shape_are_eight_of_a_prompt() -> None:
    """Of embeddings of 7,168 numbers in bfloat16."""
    config = MoonVitConfig.of({"vision_config": {}}, {})
    for width in range(14, 7168, 97):
        for height in (7168, 16384 * 196 // width, 16384 * 196 // width + 27):
            _, filled = config.fitted(width, min(height, 32768))
            assert 8 * (filled[0] * filled[1] // 28**2) * 7168 * 2 <= MAX_EMBED_BYTES


def test_positions_are_stretched_by_cubic_convolution() -> None:
    draw = np.random.default_rng(0).standard_normal((8, 6, 5)).astype(np.float32)
    np.testing.assert_allclose(stretched(draw, 8, 6), draw, atol=1e-6)
    even = np.ones((8, 8, 2), np.float32)
    for rows, columns in ((1, 1), (3, 50), (8, 2), (17, 8)):
        assert stretched(even, rows, columns).shape == (rows, columns, 2)
        np.testing.assert_allclose(stretched(even, rows, columns), 1, atol=1e-6)
    ramp = np.arange(8, dtype=np.float32)[:, None, None] * np.ones((1, 8, 1), np.float32)
    middle = stretched(ramp, 16, 8)[4:12, 0, 0]
    # Keys' kernel with a = -0.75 does not keep lines: a quarter on, its weights of -1, 0, 1 and 2 are these.
    weights = np.array([-0.10546875, 0.87890625, 0.26171875, -0.03515625])
    assert middle[1] == pytest.approx(weights @ [1, 2, 3, 4])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.15)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    directory = image_model("kimi-k25")
    place = Place(EmulatedOps(dtype, ShimPrograms()))
    encoder = ImageEncoder.open(EngineConfig(model=str(directory), dtype=dtype), directory, place=place)
    assert_spread(made(encoder, "odd").embeds, known("odd")["features"], tolerance)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "silu"}, "'hidden_act' of 'vision_config' must be gelu_pytorch_tanh, got 'silu'"),
        ({"merge_type": "mean"}, "'merge_type' of 'vision_config' must be sd2_tpool"),
        ({"num_attention_heads": 3}, "hidden size 32 .* 3 attention heads"),
        ({"merge_kernel_size": [2, 1]}, r"'merge_kernel_size' must be a square of patches, got \[2, 1\]"),
        ({"merge_kernel_size": [4, 4]}, "image processor has merge_size 2, its tower takes 4"),
        ({"merge_kernel_size": ["2", "2"]}, "'merge_kernel_size' must be a positive integer"),
        ({"patch_size": 8}, "image processor has patch_size 4, its tower takes 8"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'vision_tower.encoder.blocks.2"),
        ({"pos_emb_height": 16}, "'vision_tower.patch_embed.pos_emb.weight' has the shape"),
        ({"pos_emb_width": 1 << 20}, "'pos_emb_width' must be at most 1024"),
        ({"intermediate_size": 64}, "fc0.weight' has the shape"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    vision = {**KIMI.config["vision_config"], **changes}
    with pytest.raises(ModelError, match=says):
        opened(changed(tmp_path, {**KIMI.config, "vision_config": vision}, KIMI.processor))


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"size": {"max_height": 16, "max_width": 8}}, "its two numbers must be equal"),
        ({"max_patches": 0}, "'max_patches' must be a positive integer"),
        ({"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens 64: null is served"),
        ({"media_proc_cfg": 5}, "'media_proc_cfg' must be an object"),
        ({"rescale_factor": 0.5}, "rescale_factor 0.5"),
    ],
)
def test_preparing_that_cannot_be_served_is_told(processor: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        MoonVitConfig.of(KIMI.config, processor)


def changed(scratch: Path, config: dict[str, Any], processor: dict[str, Any]) -> Path:
    directory = scratch / "model"
    shutil.copytree(image_model("kimi-k25"), directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory
