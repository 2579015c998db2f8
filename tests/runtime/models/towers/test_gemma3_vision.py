"""Gemma 3's tower makes of images what transformers makes of them, with the same random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import GEMMA3, SIZES, image_model, picture, references

from headwise import EngineConfig
from headwise.errors import ModelError
from headwise.runtime.encoder.image_encoder import ImageEncoder, Place
from headwise.runtime.loader.safetensors_file import SafetensorsFile, TensorForm, write_safetensors
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.towers.base import EncodedImage
from headwise.runtime.models.towers.gemma3_vision import Gemma3VisionConfig
from headwise.runtime.models.towers.pixels import normalised

IMAGE, START, END = (GEMMA3.id_of(token) for token in GEMMA3.tokens)


def opened(directory: Path, **changes: Any) -> ImageEncoder:
    settings = {"dtype": "float32", "tensor_ops": "numpy", "image_encoder_cpus": 1, **changes}
    return ImageEncoder.open(EngineConfig(model=str(directory), **settings), directory)


@pytest.fixture(scope="module", params=["numpy", "numba", pytest.param("paddle", marks=pytest.mark.soak)])
def encoder(request: pytest.FixtureRequest) -> ImageEncoder:
    return opened(image_model("gemma3"), tensor_ops=request.param)


def made(encoder: ImageEncoder, name: str) -> EncodedImage:
    return encoder._tower.encode(picture(name))


def known(name: str) -> dict[str, Any]:
    found: dict[str, Any] = references("gemma3")["images"][name]
    return found


def assert_features(found: EncodedImage, expected: dict[str, Any], tolerance: float) -> None:
    assert list(found.embeds.shape) == expected["shape"]
    np.testing.assert_allclose(found.embeds.reshape(-1)[expected["at"]], expected["values"], atol=tolerance)
    assert float(np.abs(found.embeds).sum()) == pytest.approx(expected["sum"], rel=tolerance)


@pytest.mark.parametrize("name", SIZES)
def test_images_are_scaled_as_transformers_scales_them(name: str) -> None:
    config, expected = Gemma3VisionConfig.of(GEMMA3.config, GEMMA3.processor), known(name)["pixels"]
    pixels = normalised(picture(name), (config.edge, config.edge), config.pixels)
    assert list(pixels.shape) == expected["shape"]
    np.testing.assert_allclose(pixels.reshape(-1)[expected["at"]], expected["values"], atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_the_tower_makes_of_an_image_what_transformers_does(encoder: ImageEncoder, name: str) -> None:
    found = made(encoder, name)
    assert_features(found, known(name)["features"], 3e-5)
    assert found.tokens.tolist() == [IMAGE] * 9


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("bfloat16", 0.1)])
def test_a_gpu_s_operations_make_the_same(dtype: str, tolerance: float) -> None:
    config = EngineConfig(model=str(image_model("gemma3")), dtype=dtype)
    place = Place(EmulatedOps(dtype, ShimPrograms()))
    encoder = ImageEncoder.open(config, image_model("gemma3"), place=place)
    assert_features(made(encoder, "exact"), known("exact")["features"], tolerance)


def test_names_as_they_are_published_are_read_too(tmp_path: Path) -> None:
    directory = copied(tmp_path)
    saved = SafetensorsFile(directory / "model.safetensors")
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): saved.read(name) for name in saved.names}
    forms = {name: TensorForm("F32", array.shape) for name, array in published.items()}
    (directory / "model.safetensors").unlink()
    write_safetensors(directory / "model.safetensors", forms, iter(published.values()))
    assert_features(made(opened(directory), "odd"), known("odd")["features"], 3e-5)


def test_what_stands_around_an_image_is_written_before_it_is_tokenised() -> None:
    tokenizer = Tokenizer.from_directory(image_model("gemma3"))
    parts = [{"type": "text", "text": "Look\n"}, {"type": "image"}, {"type": "text", "text": " <start_of_image> here"}]
    rendered = tokenizer.render([{"role": "user", "content": parts}])
    around = "Look\n\n\n<start_of_image><image_soft_token><end_of_image>\n\n <start_of_image> here"
    assert around in rendered.text
    tokens = tokenizer.encode_chat(rendered)
    at = tokens.index(IMAGE)
    assert tokens[at - 1 : at + 2] == [START, IMAGE, END]
    assert [tokens.count(token) for token in (START, IMAGE, END)] == [1, 1, 1]  # what a user writes is text
    assert "Look\n\n\n" in tokenizer.decode(tokens[:at])


def copied(scratch: Path, name: str = "config.json", content: dict[str, Any] | None = None) -> Path:
    """The model, with another file."""
    directory = scratch / "model"
    shutil.copytree(image_model("gemma3"), directory)
    if content is not None:
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "clip"}, "'model_type' of 'vision_config' must be siglip_vision_model, got 'clip'"),
        ({"hidden_act": "gelu"}, "'hidden_act' of 'vision_config' must be gelu_pytorch_tanh"),
        ({"image_size": 30}, "'image_size' 30, which must be one of patches of 4"),
        ({"image_size": 32}, "'image_size' 32, .* of the 3 squares"),
        ({"image_size": 36}, "the checkpoint's image processor has size .* its tower images of 36"),
        ({"num_attention_heads": 3}, "'hidden_size' 32 for 3 heads"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'encoder.layers.2"),
        ({"intermediate_size": 64}, "mlp.fc1.weight' has the shape"),
    ],
)
def test_a_tower_that_cannot_be_served_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    vision = {**GEMMA3.config["vision_config"], **changes}
    with pytest.raises(ModelError, match=says):
        opened(copied(tmp_path, content={**GEMMA3.config, "vision_config": vision}))


def test_pan_and_scan_and_images_of_no_square_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do_pan_and_scan true: false is served"):
        opened(copied(tmp_path / "a", "preprocessor_config.json", {**GEMMA3.processor, "do_pan_and_scan": True}))
    with pytest.raises(ModelError, match="whose square 'mm_tokens_per_image' 8 must be"):
        opened(copied(tmp_path / "b", content={**GEMMA3.config, "mm_tokens_per_image": 8}))
