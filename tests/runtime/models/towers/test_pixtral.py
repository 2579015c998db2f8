"""Pixtral's tower makes of images what transformers makes of them, with the same random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import CONFIG, IMG, IMG_BREAK, IMG_END, SIZES, encoded, image_model, picture, references
from support.tower_parts import assert_spread

from headwise import EngineConfig
from headwise.errors import ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder, Place
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.towers.base import EncodedImage
from headwise.runtime.models.towers.pixels import normalised, pixel_form
from headwise.runtime.models.towers.pixtral import PixtralConfig
from headwise.runtime.models.towers.select import tower_of


def opened(directory: Path, **changes: Any) -> ImageEncoder:
    settings = {"dtype": "float32", "tensor_ops": "numpy", "image_encoder_cpus": 1, **changes}
    return ImageEncoder.open(EngineConfig(model=str(directory), **settings), directory)


def made(encoder: ImageEncoder, image: Image.Image) -> EncodedImage:
    return encoder._tower.encode(image)


@pytest.fixture(scope="module", params=["numpy", "numba", "paddle"])
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return opened(image_model(), tensor_ops=request.param)


@pytest.mark.parametrize("name", SIZES)
def test_images_are_prepared_as_transformers_prepares_them(name: str) -> None:
    form = pixel_form({}, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    known = references()["images"][name]
    width, height = PixtralConfig.of(CONFIG, {"size": {"longest_edge": 64}}).fitted(*SIZES[name])
    assert [height, width] == known["sizes"]
    assert_spread(normalised(picture(name), (width, height), form), known["pixels"], 2e-6)


@pytest.mark.parametrize("name", SIZES)
def test_the_tower_makes_of_an_image_what_transformers_does(encoder: ImageEncoder, name: str) -> None:
    found = made(encoder, picture(name))
    assert_spread(found.embeds[found.tokens == IMG], references()["images"][name]["features"], 3e-5)


def test_rows_end_with_tokens_of_their_own_and_these_have_the_text_s_embeddings(encoder: ImageEncoder) -> None:
    found = made(encoder, picture("odd"))  # 3 rows of 5 squares
    grid = found.tokens.reshape(3, 6)
    assert (grid[:, :5] == IMG).all()
    assert grid[:, 5].tolist() == [IMG_BREAK, IMG_BREAK, IMG_END]
    table = Checkpoint(image_model()).tensor("language_model.model.embed_tokens.weight")
    np.testing.assert_array_equal(found.embeds.reshape(3, 6, -1)[:, 5], table[[IMG_BREAK, IMG_BREAK, IMG_END]])


def test_bfloat16_weights_make_nearly_the_same() -> None:
    opens = (opened(image_model(), tensor_ops="numba", dtype=dtype) for dtype in ("float32", "bfloat16"))
    exact, rounded = (made(encoder, picture("large")) for encoder in opens)
    difference = np.abs(exact.embeds - rounded.embeds).max() / np.abs(exact.embeds).max()
    assert 0 < difference < 0.05


def test_a_file_s_image_is_named_by_its_embeddings_and_made_once() -> None:
    encoder = opened(image_model())
    first, again, other = (encoder.whole(ImageFile(png(name))) for name in ("odd", "odd", "tall"))
    assert first.embeds is again.embeds
    assert first.image.items == again.image.items != other.image.items
    assert encoder.stats() | {"bytes": 0} == {"images": 2, "bytes": 0, "hits": 1, "misses": 2}
    assert first.embeds.dtype == np.float32
    half = opened(image_model(), tensor_ops="numba", dtype="bfloat16")
    assert half.whole(ImageFile(png("odd"))).embeds.dtype == np.uint16


def png(name: str) -> bytes:
    return encoded(picture(name))


def test_what_is_kept_of_images_has_a_limit_and_the_least_recent_goes() -> None:
    encoder = opened(image_model(), image_cache="11KiB")  # of 4,608 and 5,376 bytes, and no third of 2,048
    for name in ("odd", "tall", "odd", "exact", "tall"):
        encoder.whole(ImageFile(png(name)))
    stats = encoder.stats()
    assert stats["bytes"] <= 11 << 10
    assert (stats["hits"], stats["misses"]) == (1, 4)
    nothing = opened(image_model(), image_cache="0")
    assert [nothing.whole(ImageFile(png("odd"))).embeds.nbytes for _ in range(2)] == [4608] * 2
    assert nothing.stats()["images"] == 0


# ---- what cannot be served ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vision_config": {**CONFIG["vision_config"], "hidden_act": "relu"}},
            "'hidden_act' .* silu, got 'relu'",
        ),
        ({"vision_config": {**CONFIG["vision_config"], "num_attention_heads": 5}}, "'hidden_size' 32 .* 5"),
        ({"vision_config": {**CONFIG["vision_config"], "model_type": "siglip"}}, "'pixtral' only, got .*siglip"),
        ({"vision_config": {**CONFIG["vision_config"], "patch_size": 0}}, "'patch_size' must be a positive integer"),
        ({"vision_config": {**CONFIG["vision_config"], "patch_size": 8}}, "'.*patch_conv.weight' has the shape"),
        ({"vision_config": {**CONFIG["vision_config"], "num_hidden_layers": 3}}, "lacks the tensor .*layers.2"),
        ({"vision_config": {**CONFIG["vision_config"], "num_channels": 1}}, "'num_channels' must be 3, got 1"),
        ({"vision_feature_layer": [-2, -1]}, r"'vision_feature_layer' must be one of .* 2 layers, got \[-2, -1\]"),
        ({"vision_feature_layer": 3}, "'vision_feature_layer' must be one of"),
        ({"projector_hidden_act": "tanh"}, "'projector_hidden_act'"),
        ({"spatial_merge_size": 4}, "merging_layer.weight' has the shape"),
        ({"multimodal_projector_bias": True}, "lacks the tensor .*linear_1.bias"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        opened(changed(tmp_path, "config.json", {**CONFIG, **changes}))


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"image_mean": [0.5, 0.5]}, r"image_mean \[0.5, 0.5\]: it must be three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"do_resize": False}, "do_resize False: true is served"),
        ({"rescale_factor": 0.5}, "rescale_factor 0.5: 1/255 is served"),
        ({"resample": 7}, "resample 7: 1, 2 and 3 are served"),
        ({"size": {"longest_edge": "1540"}}, "'longest_edge' must be a positive integer"),
    ],
)
def test_a_processor_that_cannot_be_served_is_told(processor: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        opened(changed(tmp_path, "preprocessor_config.json", processor))


def test_a_tokenizer_without_control_tokens_for_images_is_told(tmp_path: Path) -> None:
    directory = changed(tmp_path, "config.json", CONFIG)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] != "[IMG]"
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"\[IMG\].* is no control token .*users could write it"):
        opened(directory)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "it has no vision tower"),
        (
            {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}},
            "an embedding of its own in every layer",
        ),
        (
            {
                "architectures": ["Qwen2_5OmniForConditionalGeneration"],
                "vision_config": {},
                "text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}},
            },
            "M-RoPE",
        ),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "its vision tower is not served"),
        ({"architectures": ["Mistral3ForConditionalGeneration"]}, "it has no vision tower"),
    ],
)
def test_models_without_a_tower_that_is_served_are_told_why(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"this model takes no images: .*{says}"):
        tower_of(config)


def changed(scratch: Path, name: str, content: dict[str, Any]) -> Path:
    """The model with another file."""
    directory = scratch / "model"
    shutil.copytree(image_model(), directory)
    (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.1)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    config = EngineConfig(model=str(image_model()), dtype=dtype)
    encoder = ImageEncoder.open(config, image_model(), place=Place(EmulatedOps(dtype, ShimPrograms())))
    found = made(encoder, picture("odd"))
    assert_spread(found.embeds[found.tokens == IMG], references()["images"]["odd"]["features"], tolerance)
