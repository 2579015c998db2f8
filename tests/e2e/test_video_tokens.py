"""A whole model with videos in its chats says what transformers says, whoever computes, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.reference import CLOSE
from support.tiny_images import FILMING, encoded, image_model, picture
from support.tiny_videos import film, frames, video_references, written

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.request import OutputDelta, Usage
from headwise.runtime.protocol.step_channel import ZmqExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SMALL = EngineConfig(dtype="float32", kv_cache="8MiB", cpu_threads=1, block_size=16, image_encoders=1)


def engine_of(name: str, **changes: Any) -> LocalEngine:
    return LocalEngine(replace(SMALL, model=str(image_model(name)), **changes))


def chat_of(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [{"type": "video", "video": film(name)} for name in prompt["films"]]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": f"Look at {prompt['name']}, the video."}]}]


def said(deltas: Iterator[OutputDelta]) -> tuple[list[int], Usage]:
    found = list(deltas)
    assert found[-1].usage is not None
    return [token for delta in found for token in delta.token_ids], found[-1].usage


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in FILMING),
        ("qwen2.5-vl", {"tensor_ops": "numpy", "max_batched_tokens": 24}),
        pytest.param("qwen3-vl", {"tensor_ops": "numpy", "max_batched_tokens": 24}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_chats_with_videos_say_what_transformers_says_and_hit_the_cache_when_they_come_again(
    name: str, changes: dict[str, Any]
) -> None:
    """Computed at once, and in steps that end within parts of a video."""
    with engine_of(name, **changes) as engine:
        for round_ in range(2):
            for prompt in video_references(name)["prompts"]:
                tokens, usage = said(engine.stream_chat(chat_of(prompt), GREEDY))
                assert usage.prompt_tokens == len(prompt["prompt_ids"])
                stop = next((at for at, gap in enumerate(prompt["gaps"]) if gap < CLOSE), len(prompt["gaps"]))
                assert stop >= 24, "rounding decides too early to judge anything"
                assert tokens[:stop] == prompt["output_ids"][:stop]
                assert not round_ or usage.cached_tokens >= len(prompt["prompt_ids"]) // 16 * 16 - 16
        assert engine._encoder is not None
        assert engine._encoder.stats()["misses"] == 3  # of three files
        engine.core.cache.check_integrity()


@pytest.mark.parametrize("shares", [True, False])
def test_a_worker_in_another_process_reads_embeddings_where_they_are_or_gets_them(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    submit = ZmqExecutor.submit

    def noted(executor: ZmqExecutor, batch: BatchRequest) -> None:
        if batch.embeds is not None:
            sent.append(batch.embeds.values.size)
        submit(executor, batch)

    monkeypatch.setattr(ZmqExecutor, "submit", noted)
    if not shares:
        monkeypatch.setattr(ZmqExecutor, "shares_memory", False)
    config = replace(SMALL, model=str(image_model("qwen3-vl")), max_batched_tokens=40)
    with LocalEngine(config, worker_process=True) as engine:
        for prompt in video_references("qwen3-vl")["prompts"]:
            assert said(engine.stream_chat(chat_of(prompt), GREEDY))[0] == prompt["output_ids"]
    assert sent
    assert all(size == 0 for size in sent) is shares


def test_a_video_that_goes_on_shares_what_was_seen_already() -> None:
    images = frames("exact")
    text = {"type": "text", "text": "What happens?"}
    chats = [
        [{"role": "user", "content": [{"type": "video", "video": written(images[:count], 4.0), "fps": 4}, text]}]
        for count in (8, 12)
    ]
    with engine_of("qwen3-vl") as engine:
        first, second = (said(engine.stream_chat(chat, GREEDY))[1] for chat in chats)
    assert first.cached_tokens == 0
    assert first.prompt_tokens - 40 < second.cached_tokens < first.prompt_tokens


def test_videos_and_images_stand_in_the_order_of_the_chat_and_other_videos_are_not_taken_for_them() -> None:
    video, image = {"type": "video", "video": film("odd")}, {"type": "image", "image": picture("odd")}
    with engine_of("qwen2.5-vl") as engine:
        ordered = [
            said(engine.stream_chat([{"role": "user", "content": parts}], GREEDY))
            for parts in ([video, image], [image, video], [image, {**video, "fps": 1.0}])
        ]
        found = [usage for _, usage in ordered]
        assert found[0].prompt_tokens == found[1].prompt_tokens > found[2].prompt_tokens
        assert found[1].cached_tokens == 0  # it begins with the image
        assert 0 < found[2].cached_tokens <= 48


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("mistral3", {"type": "video", "video": film("exact")}, "this model takes no videos"),
        ("qwen3-vl", {"type": "video", "video": b"nonsense"}, "are no video that is served"),
        ("qwen3-vl", {"type": "image", "image": film("exact")}, "are no image that is served"),
        ("qwen3-vl", {"type": "video", "video": encoded(picture("odd"))}, "are no video that is served"),
        ("qwen2-vl", {"type": "video", "video": film("exact"), "fps": 1000}, "up to 100"),
    ],
)
def test_what_is_no_video_for_a_model_is_told(name: str, part: dict[str, Any], says: str) -> None:
    with engine_of(name) as engine, pytest.raises(InvalidRequestError, match=says):
        list(engine.stream_chat([{"role": "user", "content": [part]}], GREEDY))
