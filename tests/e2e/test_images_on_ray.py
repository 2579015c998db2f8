"""Images and videos over HTTP, by the official clients, to a deployment with an encoder of its own: actors and all."""

from __future__ import annotations

import os
import re
import signal
import struct
import time
import zlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.free_ports import free_ports
from support.later import anthropic, openai
from support.tiny_images import encoded, image_model, picture, references
from support.tiny_videos import film, video_references
from support.waiting import eventually

from headwise import Client, ClientKeys, EngineConfig
from headwise.actors.deployment import Deployment
from headwise.runtime.client.embeds_sender import EmbedsSender
from headwise.runtime.protocol.messages import EmbedsPart

pytestmark = pytest.mark.ray

KEY = "sk-of-these-tests"
MODEL = "qwen2.5-vl"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    keys = tmp_path_factory.mktemp("images") / "keys"
    keys.write_text(f"{KEY}\n")
    config = EngineConfig(
        model=str(image_model(MODEL)),
        port=0,
        http=free_ports(1)[0],
        api_key_file=str(keys),
        image_encoders=1,
        dtype="float32",
        kv_cache="8MiB",
        block_size=16,
        cpu_threads=1,
        tokenizer_processes=1,
        index_timeout_s=5.0,
        standby=False,
    )
    with Deployment.start(config) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[Any]:
    url = f"{deployment.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120.0) as client:
        yield client


@pytest.fixture(scope="module")
def ours(deployment: Deployment) -> Iterator[Client]:
    assert deployment.client_keys is not None
    with Client(deployment.client_address, keys=ClientKeys(deployment.client_keys.server, KEY)) as client:
        yield client


def url_of(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def asked(client: Any, *parts: Any, text: str = "Look at one, the image.", **options: Any) -> Any:
    content = [*parts, {"type": "text", "text": text}]
    model, messages = str(image_model(MODEL)), [{"role": "user", "content": content}]
    options = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return client.chat.completions.create(model=model, messages=messages, **options)


def reference_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in references(MODEL)["prompts"] if each["name"] == name)
    return found


def test_our_client_says_what_transformers_says(ours: Client) -> None:
    for prompt in references(MODEL)["prompts"]:
        parts = [{"type": "image", "image": picture(name)} for name in prompt["images"]]
        text = {"type": "text", "text": f"Look at {prompt['name']}, the image."}
        chat = [{"role": "user", "content": [*parts, text] if parts else "Look at none."}]
        result = ours.chat(chat, temperature=0, max_tokens=32, ignore_eos=True)
        assert result.token_ids == prompt["output_ids"][:32]


def test_the_official_client_says_the_same_whole_and_streamed(client: Any, ours: Client) -> None:
    text = {"type": "text", "text": "Look at one, the image."}
    expected = ours.chat(user(part(encoded(picture("odd"))), text), temperature=0, max_tokens=12, ignore_eos=True)
    assert expected.token_ids == reference_of("one")["output_ids"][:12]
    whole = asked(client, part(encoded(picture("odd"))))
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.prompt_tokens == len(reference_of("one")["prompt_ids"])
    stream = asked(client, part(encoded(picture("odd"))), stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream if event.choices) == expected.text


def test_the_same_image_hits_the_cache_and_is_not_encoded_again_and_another_one_does_not(
    client: Any, ours: Client
) -> None:
    def queries() -> dict[str, int]:
        (stats,) = ours.stats()["encoders"].values()
        return dict(stats["cache"])

    def settled() -> dict[str, int]:
        """What the encoder counts, once some reports in a row say the same: they come twice a second."""
        told = [queries()]
        while len(told) < 8 or told[-8:] != told[-1:] * 8:
            time.sleep(0.25)
            told.append(queries())
        return told[-1]

    def cached(seed: int) -> int:
        answer = asked(client, part(encoded(picture("large", seed))), text=f"Which? {'x' * 20}")
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    cold, warm, other = cached(11), cached(11), cached(12)
    assert cold <= 16
    assert warm >= 64
    assert other <= 16
    before = settled()
    assert cached(12) >= 64
    eventually(lambda: queries()["hits"] == before["hits"] + 1)
    assert queries()["misses"] == before["misses"] >= 2


def test_several_answers_and_several_images(client: Any) -> None:
    answer = asked(
        client, part(encoded(picture("odd"))), part(encoded(picture("tall"))), n=3, temperature=1, max_tokens=4, seed=5
    )
    assert len(answer.choices) == 3
    assert answer.usage.prompt_tokens > 36


def test_anthropic_s_client_and_responses_take_images_too(deployment: Deployment, client: Any, ours: Client) -> None:
    data, text = encoded(picture("odd")), "Look at one, the image."
    expected = ours.chat(user(part(data), {"type": "text", "text": text}), temperature=0, max_tokens=12)
    with anthropic.Anthropic(base_url=deployment.http_address, api_key=KEY, max_retries=0, timeout=120.0) as other:
        source = {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": text}]
        message = other.messages.create(
            model=str(image_model(MODEL)),
            max_tokens=12,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": blocks}],
        )
    assert message.content[0].text == expected.text
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(reference_of("one")["prompt_ids"])
    items = [{"type": "input_image", "image_url": url_of(data)}, {"type": "input_text", "text": text}]
    response = client.responses.create(
        model=str(image_model(MODEL)), max_output_tokens=12, temperature=0, input=[{"role": "user", "content": items}]
    )
    assert response.output_text == expected.text
    assert response.usage.input_tokens == len(reference_of("one")["prompt_ids"])


def test_videos_say_what_transformers_says_by_our_client_and_by_the_official_one(client: Any, ours: Client) -> None:
    for prompt in video_references(MODEL)["prompts"]:
        text = f"Look at {prompt['name']}, the video."
        parts = [{"type": "video", "video": film(name)} for name in prompt["films"]]
        chat = user(*parts, {"type": "text", "text": text})
        said = ours.chat(chat, temperature=0, max_tokens=20, ignore_eos=True)
        assert said.token_ids == prompt["output_ids"][:20]
        urls = [
            {"type": "video_url", "video_url": {"url": url_of(film(name), "video/mp4")}} for name in prompt["films"]
        ]
        answer = asked(client, *urls, text=text, max_tokens=20)
        assert answer.choices[0].message.content == said.text
        assert answer.usage.prompt_tokens == len(prompt["prompt_ids"])
        assert answer.usage.prompt_tokens_details.cached_tokens >= len(prompt["prompt_ids"]) - 32
        assert ours.find_chat_prefix(chat)["tokens"] == len(prompt["prompt_ids"])


def test_embeddings_of_what_is_cached_are_not_sent(ours: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[EmbedsPart] = []
    due = EmbedsSender.due
    monkeypatch.setattr(EmbedsSender, "due", lambda sender: (sent.append(part) or part for part in due(sender)))
    text = {"type": "text", "text": f"What is it? {'x' * 40}"}
    chat = user({"type": "video", "video": film("exact"), "fps": 4}, text)
    first, again = (ours.chat(chat, temperature=0, max_tokens=8, ignore_eos=True) for _ in range(2))
    assert sum(len(part.values) for part in sent) == 6 * 12
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens >= 6 * 12


def test_a_video_takes_as_many_frames_as_it_is_asked_for(client: Any) -> None:
    url = {"type": "video_url", "video_url": {"url": url_of(film("exact"), "video/mp4")}}
    few, many = (asked(client, {**url, "fps": fps}).usage.prompt_tokens for fps in (2, 4))
    assert many - few == 3 * 12


def huge() -> bytes:
    data = encoded(picture("odd"))
    header = b"IHDR" + struct.pack(">II", 100_000, 100_000) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def moving() -> bytes:
    frames = [picture("odd", seed) for seed in range(2)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def linked(url: Any) -> list[dict[str, Any]]:
    return user({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (linked("data:image/png;base64,@@@@"), "Base64 is broken"),
        (linked(url_of(b"no image at all")), "are no image that is served: PNG, JPEG, WEBP, GIF"),
        (linked(url_of(huge())), "too many pixels"),
        (user(*[part(encoded(picture("tiny")))] * 65), "more than 64 images were given; at most 64 are allowed"),
        (linked(url_of(b"<svg/>", "image/svg+xml")), "type 'image/svg+xml'; image/png, image/jpeg"),
        (linked("https://example.org/cat.png"), "other URLs are not fetched"),
        (linked("file:///etc/passwd"), "other URLs are not fetched"),
        (user({"type": "image", "image": "/etc/passwd"}), "other URLs are not fetched"),
        (
            [{**user({"type": "text", "text": "x"}, part(encoded(picture("odd"))))[0], "role": "system"}],
            "a place for 0",
        ),
        (linked("data:image/png;base64,"), "is empty"),
        (linked(url_of(encoded(picture("odd")), "text/plain")), "type 'text/plain'"),
        (linked(url_of(moving(), "image/gif")), "the GIF moves"),
        (linked(url_of(encoded(picture("large"))[:150])), "is broken"),
        (user({"type": "image"}), "must have an image"),
        (linked(5), "must have an image"),
    ],
)
def test_what_is_no_image_is_told_and_the_next_request_is_served(
    deployment: Deployment, client: Any, messages: list[dict[str, Any]], says: str
) -> None:
    body = {"messages": messages, "max_tokens": 2}
    answer = httpx.post(
        f"{deployment.http_address}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=120.0,
    )
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert asked(client, part(encoded(picture("odd")))).usage.prompt_tokens == len(reference_of("one")["prompt_ids"])


@pytest.mark.parametrize("name", ["one", "two", "each"])
def test_tokens_of_chats_with_images_are_counted(deployment: Deployment, name: str) -> None:
    known = reference_of(name)
    text = {"type": "text", "text": f"Look at {name}, the image."}
    files = [encoded(picture(each)) for each in known["images"]]

    def told(path: str, messages: list[dict[str, Any]], **more: Any) -> Any:
        headers = {"authorization": f"Bearer {KEY}"}
        url, body = f"{deployment.http_address}{path}", {"messages": messages, **more}
        return httpx.post(url, json=body, headers=headers, timeout=120.0).raise_for_status().json()

    found = told("/tokenize", user(*map(part, files), text))
    assert (found["count"], found["tokens"]) == (len(known["prompt_ids"]), known["prompt_ids"])
    sources = [{"type": "base64", "media_type": "image/png", "data": b64encode(file).decode()} for file in files]
    blocks = [{"type": "image", "source": source} for source in sources]
    counted = told("/v1/messages/count_tokens", user(*blocks, text), model=str(image_model(MODEL)))
    assert counted == {"input_tokens": len(known["prompt_ids"])}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([{"role": "user", "content": [part(b"no image")]}], "no image that is served"),
        ([{"role": "user", "content": [part(b"")]}], "is empty"),
        ([{"role": "user", "content": [{"type": "image"}]}], "must have an image|source"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.org/b"}}]}], "not fetched"),
    ],
)
def test_what_is_no_image_is_not_counted(deployment: Deployment, path: str, chat: Any, says: str) -> None:
    body = {"messages": chat, **({"model": str(image_model(MODEL))} if "count" in path else {})}
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{deployment.http_address}{path}", json=body, headers=headers, timeout=120.0)
    assert answer.status_code == 400, answer.text
    assert path != "/tokenize" or re.search(says, answer.json()["error"]["message"])


def test_prefixes_of_chats_with_images_are_found(ours: Client) -> None:
    image = {"type": "image", "image": picture("large", 7)}
    text = {"type": "text", "text": "Where is it, of all the places?"}
    chat = user(image, text)
    told = ours.chat(chat, max_tokens=2, temperature=0)
    eventually(lambda: any(each["device"] for each in ours.find_chat_prefix(chat)["engines"].values()))
    found = ours.find_chat_prefix(chat)
    assert found["tokens"] == told.usage.prompt_tokens
    (held,) = found["engines"].values()
    assert held["device"] == (found["tokens"] - 1) // 16 * 16
    other = ours.find_chat_prefix(user({"type": "image", "image": picture("large", 8)}, text))
    assert other["tokens"] == found["tokens"]
    assert not any(each["device"] for each in other["engines"].values())  # before the image is no whole block


def test_an_encoder_that_is_killed_is_started_again(deployment: Deployment, client: Any, ours: Client) -> None:
    def pid() -> int | None:
        return deployment.actor_pids().get("encoder-0")

    def serves() -> bool:
        return bool(ours.stats()["encoders"])

    before = pid()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not serves())
    text_only = client.chat.completions.create(
        model=str(image_model(MODEL)), messages=[{"role": "user", "content": "x"}], max_tokens=2
    )
    assert text_only.usage.completion_tokens == 2

    def is_served() -> bool:
        """It waits for a while for the next encoder, whose start may take longer on a busy machine."""
        try:
            answer = asked(client, part(encoded(picture("odd"))))
            return answer.usage.prompt_tokens == len(reference_of("one")["prompt_ids"])
        except openai.InternalServerError as told:
            if told.status_code == 503 and "started again" in str(told):
                return False
            raise

    eventually(is_served)
    assert serves()
    assert pid() != before
