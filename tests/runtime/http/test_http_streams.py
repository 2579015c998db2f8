"""Text arrives as it was produced, wherever tokens, stop strings and packets cut it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.repeating import RepeatingCore
from support.engine.scripted_deployment import Deployment
from support.later import openai
from support.scripted_http import MODEL, Served, serving

ALPHABET = 'ab é\u0301ẞ漢字🚢👩‍👩‍👧\u2028\x85\n\r\t"\\\x00{}:'
TEXTS = st.text(st.sampled_from(ALPHABET) | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def core() -> RepeatingCore:
    return RepeatingCore()


@pytest.fixture(scope="module")
def served(core: RepeatingCore) -> Iterator[Served]:
    deployment = Deployment()
    deployment.add_engine(core)
    with serving(deployment) as served:
        yield served
    deployment.close()


def read_by_pieces(served: Served, body: dict[str, Any], piece: int) -> list[dict[str, Any]]:
    """The events of a stream, by a reader that takes so many bytes at a time."""
    data = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=120.0) as sock:
        sock.sendall(head.encode() + data)
        got = b""
        while part := sock.recv(piece):
            got += part
    lines = [line for line in got.partition(b"\r\n\r\n")[2].split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def expected_of(text: str, stops: list[str]) -> tuple[str, str]:
    """What an answer should be: as much as stands before the stop string that is complete first."""
    for end in range(len(text.encode()) + 1):
        seen = text.encode()[:end].decode(errors="ignore")
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            return seen[: min(found)], "stop"
    return text, "length"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    cuts=st.lists(st.tuples(st.integers(0, 39), st.integers(1, 6)), max_size=2),
    pace=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    piece=st.integers(1, 64),
)
def test_streams_tell_what_whole_answers_tell_at_every_cut(
    served: Served, core: RepeatingCore, text: str, cuts: list[tuple[int, int]], pace: list[int], piece: int
) -> None:
    stops = [stop for at, length in cuts if (stop := text[at : at + length])]
    expected, reason = expected_of(text, stops)
    core.pace = pace
    body = {"prompt": text, "max_tokens": 1000, "stop": stops}
    whole = served.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (expected, reason)
    events = read_by_pieces(served, body, piece)
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == reason


def test_the_official_client_reads_line_separators_as_text(served: Served, core: RepeatingCore) -> None:
    core.pace = [1]
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120.0) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ALPHABET}], max_tokens=1000, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ALPHABET
