"""`/v1/responses`: OpenAI's newer form of a chat, as far as it needs no state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.later import openai
from support.scripted_http import MODEL, Served, serving
from support.waiting import eventually

from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import GenerateRequest, Retention

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.fixture(scope="module")
def served(deployment: Deployment, core: ScriptedCore) -> Iterator[Served]:
    with serving(deployment) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120.0) as client:
        yield client


def respond(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    response = served.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(served: Served, **body: Any) -> tuple[str, str]:
    """The field at fault, and why."""
    error = respond(served, 400, **body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["param"], error["message"]


def at_the_engine(served: Served, core: ScriptedCore, **body: Any) -> GenerateRequest:
    core.gate.clear()
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(respond, served, **body)
        try:
            eventually(lambda: len(core.live) == 1 or answer.done())
            ((request, _),) = core.live.values()
        finally:
            core.gate.set()
        answer.result()
    return request


def test_a_response_has_openais_form(served: Served) -> None:
    answer = respond(served, metadata={"of": "a test"})
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"], answer["status"]) == ("response", MODEL, "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": "0 1 ", "annotations": [], "logprobs": []}]
    assert answer["usage"]["input_tokens"] == 5
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert (answer["usage"]["output_tokens"], answer["usage"]["total_tokens"]) == (2, 7)
    assert (answer["store"], answer["error"], answer["metadata"]) == (False, None, {"of": "a test"})


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("hello", 5),
        ([HELLO], 5),
        ([{"type": "message", **HELLO}, {"role": "assistant", "content": "a"}, HELLO], 11),
        ([{"role": "user", "content": [{"type": "input_text", "text": "he"}, {"type": "text", "text": "y"}]}], 3),
        ([{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
           "content": [{"type": "output_text", "text": "yes", "annotations": []}]}, HELLO], 8),
    ],
    ids=["text", "messages", "several", "parts", "an answer sent back"],
)  # fmt: skip
def test_an_input_has_two_forms(served: Served, given: Any, tokens: int) -> None:
    assert respond(served, input=given)["usage"]["input_tokens"] == tokens


def test_instructions_come_first(served: Served, core: ScriptedCore) -> None:
    request = at_the_engine(served, core, instructions="be brief: ")
    assert "".join(map(chr, request.prompt_token_ids)) == "be brief: hello"
    assert respond(served, instructions="be brief")["instructions"] == "be brief"


@pytest.mark.parametrize(
    "given",
    [
        None, 7, [], [7], [{"role": "tool", "content": "a"}], [{"role": "user"}], [{"role": ["user"], "content": "a"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}],
        [{"role": "user", "content": [{"type": ["input_text"], "text": "a"}]}],
        [{"type": "item_reference", "id": "msg_1"}], [{"type": "function_call_output", "output": "a"}],
        [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}],
        [{"type": "reasoning", "content": "a"}],
        [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}], [{"type": "web_search_call"}], [{"type": []}],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_input_is_told(served: Served, given: Any) -> None:
    assert refused(served, input=given)[0] == "input"


def test_what_a_response_says_of_sampling_reaches_the_engine(served: Served, core: ScriptedCore) -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3}
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "medium"}
    request = at_the_engine(
        served, core, **said, text=text, cache_salt="tenant", priority=2, prompt_cache_retention="24h"
    )
    assert {name: getattr(request.sampling, name) for name in said} == said
    assert request.sampling.max_tokens == 2
    assert request.sampling.guided == Guided(json_schema=SCHEMA)
    assert (request.priority, request.cache_salt, request.retention) == (2, "tenant", Retention(86400.0))
    answer = respond(served, **said, text=text)
    assert (answer["temperature"], answer["top_p"], answer["text"]["format"]) == (0.5, 0.9, text["format"])


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt", "background", "context_management"])
def test_what_needs_state_is_refused_and_says_what_to_do(served: Served, name: str) -> None:
    param, why = refused(served, **{name: {"id": "resp_1"}})
    assert param == name
    assert "keeps no state" in why


def test_store_is_taken_and_nothing_is_stored(served: Served) -> None:
    for store in (True, False, None):
        answer = respond(served, store=store)
        assert answer["store"] is False
    assert served.http.get(f"/v1/responses/{answer['id']}").status_code == 404


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "web_search"}]), ("tool_choice", "required"), ("max_tool_calls", 1),
        ("truncation", "auto"), ("reasoning", {"effort": "much"}), ("reasoning", {"summary": "long"}),
        ("include", ["web_search_call.results"]),
        ("n", 2), ("max_tokens", 2), ("messages", [HELLO]), ("response_format", {"type": "text"}),
        ("text", "json"), ("text", {"verbosity": "high"}), ("text", {"format": {}}),
        ("text", {"format": {"type": "yaml"}}), ("text", {"format": {"type": "json_schema"}}), ("top_logprobs", 2),
        ("max_output_tokens", 0), ("temperature", -1), ("metadata", {"a": 1}), ("metadata", {"a": "b" * 513}),
        ("instructions", [HELLO]), ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_what_is_not_served_or_out_of_range_is_told_by_name(served: Served, name: str, value: Any) -> None:
    assert refused(served, **{name: value})[0] == name


def test_an_answer_has_one_form_here_too(served: Served) -> None:
    assert "one form" in refused(served, text={"format": {"type": "json_object"}}, guided_regex="a")[1]


def test_what_clients_send_of_their_own_accord_is_taken(served: Served) -> None:
    neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled", "include": []}
    respond(served, **neutral, reasoning={}, text={"format": {"type": "text"}}, user="a", background=False)


def test_a_stream_tells_openais_events_in_their_order(served: Served) -> None:
    with served.http.stream(
        "POST", "/v1/responses", json={"input": "a", "max_output_tokens": 2, "stream": True}
    ) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in got.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events[4:6]] == ["0 ", "1 "]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert len({event.get("item_id") or event["item"]["id"] for event in events[2:9]}) == 1
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    assert last["usage"]["output_tokens"] == 2


def test_an_error_within_a_stream_ends_it_with_a_failed_response(served: Served, core: ScriptedCore) -> None:
    core.pace_s = 0.05
    body = {"input": "a", "max_output_tokens": 999, "stream": True}
    with served.http.stream("POST", "/v1/responses", json=body) as got:
        lines = (line for line in got.iter_lines() if line)
        next(lines)
        core.pace_s, core.fails = 0.0, "the model is broken"
        *_, last = lines
    event = json.loads(last.removeprefix("data: "))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"]["code"] == "server_error"
    assert "the model is broken" in event["response"]["error"]["message"]


def test_an_error_before_the_first_event_has_a_status(served: Served) -> None:
    assert respond(served, 404, model="another")["error"]["code"] == "model_not_found"
    assert respond(served, 400, input="", stream=True)["error"]["type"] == "invalid_request_error"


def test_the_official_client_builds_the_same_response_from_a_stream(client: openai.OpenAI, served: Served) -> None:
    whole = client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert whole.output_text == "0 1 2 "
    with client.responses.stream(model=MODEL, input="hello", max_output_tokens=3) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text

    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120.0) as client:
            return (await client.responses.create(model=MODEL, input="hello", max_output_tokens=3)).output_text

    assert asyncio.run(text()) == whole.output_text
