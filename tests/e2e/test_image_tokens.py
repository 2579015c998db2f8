"""A whole model with images in its chats says what transformers says, whoever computes, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reference import CLOSE
from support.tiny_checkpoints import checkpoint
from support.tiny_images import FAMILIES, IMG, encoded, image_model, picture, references

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.runtime.encoder.image_encoder import check_images
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.loader.safetensors_file import SafetensorsFile
from headwise.runtime.protocol.request import OutputDelta, Usage

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
LEAST_BATCHED = {"gemma4": 140}
"""Of models whose images are computed whole, and have more tokens than half of what others are tried with."""
SMALL = EngineConfig(dtype="float32", kv_cache="8MiB", cpu_threads=1, block_size=16, image_encoders=1)


def engine_of(model: Path, **changes: Any) -> LocalEngine:
    return LocalEngine(replace(SMALL, model=str(model), **changes))


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with engine_of(image_model()) as engine:
        yield engine


def chat_of(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture(name)} for name in prompt["images"]]
    text = {"type": "text", "text": f"Look at {prompt['name']}, the image."}
    return [{"role": "user", "content": [*parts, text] if parts else "Look at none."}]


def said(deltas: Iterator[OutputDelta]) -> tuple[list[int], Usage]:
    found = list(deltas)
    assert found[-1].usage is not None
    return [token for delta in found for token in delta.token_ids], found[-1].usage


def assert_judged(prompt: dict[str, Any], tokens: list[int]) -> None:
    stop = next((at for at, gap in enumerate(prompt["gaps"]) if gap < CLOSE), len(prompt["gaps"]))
    assert stop >= 32, "rounding decides too early to judge anything"
    assert tokens[:stop] == prompt["output_ids"][:stop]


CHANGES: tuple[dict[str, Any], ...] = ({}, {"tensor_ops": "numpy", "max_batched_tokens": 24})
LIKE_OTHERS = ("glm4v-moe", *LEAST_BATCHED)
IN_PARTS_TOO = ("gemma3", "qwen3-vl")
"""Images that are seen both ways, and on a grid with what layers add."""


def _is_slow_to_tell_more(name: str, changes: dict[str, Any]) -> bool:
    return name in LIKE_OTHERS or bool(changes and name not in IN_PARTS_TOO)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            pytest.param(name, changes, marks=pytest.mark.soak if _is_slow_to_tell_more(name, changes) else ())
            for changes in CHANGES
            for name in FAMILIES
        ),
        pytest.param("ernie4.5-vl", {"tensor_ops": "paddle"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_chats_with_images_say_what_transformers_says_and_hit_the_cache_when_they_come_again(
    name: str, changes: dict[str, Any]
) -> None:
    if changes.get("tensor_ops") == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    if "max_batched_tokens" in changes and name in LEAST_BATCHED:
        changes = {**changes, "max_batched_tokens": LEAST_BATCHED[name]}
    with engine_of(image_model(name), **changes) as engine:
        for round_ in range(2):
            for prompt in references(name)["prompts"]:
                tokens, usage = said(engine.stream_chat(chat_of(prompt), GREEDY))
                assert usage.prompt_tokens == len(prompt["prompt_ids"])
                assert_judged(prompt, tokens)
                assert not round_ or usage.cached_tokens >= len(prompt["prompt_ids"]) // 16 * 16 - 16
        assert engine._encoder is not None
        stats = engine._encoder.stats()
        assert stats["misses"] == len({image for prompt in references(name)["prompts"] for image in prompt["images"]})
        engine.core.cache.check_integrity()


def test_bytes_paths_and_urls_are_the_same_image(engine: LocalEngine, tmp_path: Path) -> None:
    from base64 import b64encode

    data = encoded(picture("large"))
    (tmp_path / "a.png").write_bytes(data)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": data},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    asked = [[{"role": "user", "content": [form, {"type": "text", "text": "Which?"}]}] for form in forms]
    (first, cold), *others = (said(engine.stream_chat(chat, GREEDY)) for chat in asked)
    assert cold.cached_tokens < 16
    for tokens, usage in others:
        assert tokens == first
        assert usage.cached_tokens >= 48


def test_another_image_in_the_same_place_is_no_hit_and_changes_the_answer(engine: LocalEngine) -> None:
    def asked(seed: int) -> list[dict[str, Any]]:
        image = {"type": "image", "image": encoded(picture("large", seed))}
        return [{"role": "user", "content": [{"type": "text", "text": "x" * 40}, image]}]

    engine.reset_cache()
    one, _ = said(engine.stream_chat(asked(1), GREEDY))
    other, usage = said(engine.stream_chat(asked(2), GREEDY))
    assert one != other
    assert 32 <= usage.cached_tokens <= 64  # what is before the image


def test_what_looks_like_an_image_in_a_text_stays_text(engine: LocalEngine) -> None:
    data = encoded(picture("odd"))
    image = {"type": "image", "image": data}
    assert engine._encoder is not None
    for text in ("[IMG]", "a [IMG][IMG_BREAK][IMG_END] b", "[IM", "G]"):
        parts = [{"type": "text", "text": text}, image, {"type": "text", "text": text}]
        request = engine.preprocessor.prepare(
            messages=[{"role": "user", "content": [parts[0], {"type": "image"}, parts[2]]}],
            images=[engine._encoder.whole(ImageFile(data)).image],
        )
        assert (request.prompt_token_ids == IMG).sum() == 15  # those of the image alone
        (start, end, *_), *others = request.extra_keys
        assert not others
        assert (request.prompt_token_ids[start:end] == IMG).sum() == 15
        assert said(engine.stream_chat([{"role": "user", "content": parts}], GREEDY))[0]
    plain = engine.preprocessor.prepare(messages=[{"role": "user", "content": "[IMG] and text"}])
    assert IMG not in plain.prompt_token_ids


@pytest.mark.parametrize("role", ["system", "tool"])
def test_an_image_where_the_template_has_no_place_is_told(engine: LocalEngine, role: str, tmp_path: Path) -> None:
    image = {"type": "image", "image": encoded(picture("odd"))}
    parts = [{"type": "text", "text": "x"}, image]
    chat = [{"role": role, "content": parts}, {"role": "user", "content": "y"}]
    if role == "tool":  # the template writes tools' results like users' messages: one that does not
        template = tmp_path / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}")
        with (
            engine_of(image_model(), chat_template=str(template)) as other,
            pytest.raises(
                InvalidRequestError, match="has a place for 0 of the chat's 1 images: give images in messages"
            ),
        ):
            said(other.stream_chat(chat, GREEDY))
        return
    with pytest.raises(InvalidRequestError, match="has a place for 0 of the chat's 1 images: give images in messages"):
        said(engine.stream_chat(chat, GREEDY))


def test_images_are_refused_by_name_where_they_are_not_served() -> None:
    asked = [{"role": "user", "content": [{"type": "image", "image": encoded(picture("odd"))}]}]
    with (
        engine_of(image_model(), image_encoders=0) as engine,
        pytest.raises(InvalidRequestError, match="images are not enabled here: start with image_encoders 1"),
    ):
        engine.stream_chat(asked, GREEDY)
    with (
        engine_of(checkpoint("qwen3"), image_encoders=0) as engine,
        pytest.raises(InvalidRequestError, match="this model takes no images: it has no vision tower that is served"),
    ):
        engine.stream_chat(asked, GREEDY)
    with pytest.raises(ModelError, match="this model takes no images"):
        engine_of(checkpoint("qwen3"))


def test_without_encoders_nothing_of_the_tower_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for method in ("read", "stored"):
        real = getattr(SafetensorsFile, method)

        def noted(self: Any, name: str, *rest: Any, _real: Any = real, **named: Any) -> Any:
            read.append(name)
            return _real(self, name, *rest, **named)

        monkeypatch.setattr(SafetensorsFile, method, noted)
    with engine_of(image_model(), image_encoders=0, packed_cache=False) as engine:
        (result,) = engine.generate([[1, 2, 3]], GREEDY)
    assert result.token_ids
    assert any("language_model" in name for name in read)
    assert not [name for name in read if "vision_tower" in name or "multi_modal" in name]


def test_more_images_than_fit_the_model_are_told(engine: LocalEngine) -> None:
    image = {"type": "image", "image": encoded(picture("large"))}
    with (
        engine_of(image_model(), max_model_len=128) as short,
        pytest.raises(InvalidRequestError, match="prompt tokens"),
    ):
        short.stream_chat([{"role": "user", "content": [image] * 3}], GREEDY)
    with pytest.raises(InvalidRequestError, match="more than 64 images were given"):
        engine.stream_chat([{"role": "user", "content": [image] * 65}], GREEDY)


def test_embeddings_in_bfloat16_say_nearly_the_same() -> None:
    """The tower and the model round: the first tokens, whose gaps are wide, are the same."""
    with engine_of(image_model(), dtype="bfloat16") as engine:
        (prompt,) = (each for each in references()["prompts"] if each["name"] == "one")
        tokens, _ = said(engine.stream_chat(chat_of(prompt), GREEDY))
        assert tokens[0] == prompt["output_ids"][0]
        assert engine._encoder is not None
        assert engine._encoder.whole(ImageFile(encoded(picture("odd")))).embeds.dtype == np.uint16


def test_a_cache_whose_size_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="much"):
        replace(SMALL, image_cache="much")


def test_a_part_of_a_gpu_without_one_is_told() -> None:
    with pytest.raises(ConfigError, match=r"image_encoder_gpus 0\.5 needs device cuda, got cpu"):
        check_images(replace(SMALL, model=str(image_model()), device="cpu", image_encoder_gpus=0.5), image_model())
