"""`/v1/messages`: Anthropic's form of a chat, by its official client; only the model is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine.repeating import RepeatingCore
from support.engine.scripted_deployment import Deployment
from support.later import anthropic
from support.scripted_http import MODEL, Served, serving, serving_repeated

from headwise.runtime.http.guard import ApiKeys
from headwise.runtime.protocol.request import FinishReason, Retention
from headwise.runtime.protocol.users import Users

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"name": "add", "description": "It adds.", "input_schema": NUMBERS},
    {"name": "look_up", "input_schema": {"type": "object"}},
]
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LOOK = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def core() -> RepeatingCore:
    core = RepeatingCore()
    core.ends = FinishReason.STOP
    core.pace = [3, 1, 7]
    return core


@pytest.fixture(scope="module")
def served(core: RepeatingCore) -> Iterator[Served]:
    with serving_repeated(core) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.base_url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def asked(said: Any, **body: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 999, "messages": [{"role": "user", "content": said}], **body}


def refused(served: Served, status: int = 400, **body: Any) -> dict[str, Any]:
    response = served.http.post("/v1/messages", json=asked("hello", **body))
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    assert answer["type"] == "error"
    error: dict[str, Any] = answer["error"]
    return error


def test_a_message_has_anthropics_form(client: Any) -> None:
    message = client.messages.create(**asked("Hello."))
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (6, 6, 0)


def test_blocks_of_texts_and_a_system_are_the_prompt(client: Any, core: RepeatingCore) -> None:
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    system = [{"type": "text", "text": "Be kind. ", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(
        **asked(blocks, system=system, extra_body={"temperature": 0.5, "top_k": 4, "top_p": 0.9})
    )
    assert message.content[0].text == "Be kind. one two"
    assert core.seen is not None
    sampling = core.seen.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 4, 0.9, 999)


MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("content", "others", "seconds"),
    [
        ("x", {}, None),
        ("x", {"system": [{"type": "text", "text": "Be kind.", **MARK}]}, 300.0),
        ([{"type": "text", "text": "x", **HOUR}], {}, 3600.0),
        ([{"type": "text", "text": "x", **MARK}], {"tools": [{**TOOLS[0], **HOUR}]}, 3600.0),
        (
            [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", **MARK}]}],
            {},
            300.0,
        ),
        ("x", {"extra_body": HOUR}, 3600.0),
        ([{"type": "text", "text": "x", **HOUR}], {"extra_body": {"retain_s": 7}}, 7.0),
        ([{"type": "text", "text": "x", "cache_control": None}], {}, None),
    ],
)
def test_what_is_marked_is_kept_as_long_as_the_longest_mark_says(
    client: Any, core: RepeatingCore, content: Any, others: dict[str, Any], seconds: float | None
) -> None:
    client.messages.create(**asked(content, **others))
    assert core.seen is not None
    assert core.seen.retention == (None if seconds is None else Retention(seconds))


def test_a_stop_sequence_is_told(client: Any) -> None:
    message = client.messages.create(**asked("Well, well. And so.", stop_sequences=["so", ". A"]))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "Well, well",
        "stop_sequence",
        ". A",
    )
    with client.messages.stream(**asked("Well, well.", stop_sequences=["well"])) as stream:
        assert (stream.get_final_message().stop_reason, stream.get_final_message().stop_sequence) == (
            "stop_sequence",
            "well",
        )


def test_an_answer_that_is_cut_off_says_so(client: Any, core: RepeatingCore) -> None:
    core.ends = FinishReason.LENGTH
    try:
        assert client.messages.create(**asked("Hello.", max_tokens=6)).stop_reason == "max_tokens"
        assert client.messages.create(**asked("Hello.")).stop_reason == "model_context_window_exceeded"
    finally:
        core.ends = FinishReason.STOP


MIXED = f"<think>\nHm.</think>\n\nI add.\n{ADD}\n{LOOK}"


def parts(message: Any) -> list[Any]:
    told = {"thinking": "thinking", "text": "text"}
    return [
        (block.type, getattr(block, told[block.type])) if block.type in told else (block.name, block.input)
        for block in message.content
    ]


def test_thoughts_texts_and_calls_are_blocks_whole_and_streamed(client: Any) -> None:
    expected = [("thinking", "Hm."), ("text", "I add."), ("add", {"a": 1}), ("look_up", {})]
    message = client.messages.create(**asked(MIXED, tools=TOOLS))
    assert parts(message) == expected
    assert message.stop_reason == "tool_use"
    assert len({block.id for block in message.content if block.type == "tool_use"}) == 2
    with client.messages.stream(**asked(MIXED, tools=TOOLS)) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert parts(streamed) == expected
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", message.usage.output_tokens)
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


def test_events_are_anthropics(served: Served) -> None:
    with served.http.stream("POST", "/v1/messages", json=asked("Hi", stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {each['type']}" for each in data]
    assert [each["type"] for each in data] == [
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert data[0]["message"]["content"] == []
    assert data[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert data[2]["delta"] == {"type": "text_delta", "text": "Hi"}
    assert data[4]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[4]["usage"]["output_tokens"] == 2


def test_a_conversation_with_calls_and_their_results_is_taken(served: Served, core: RepeatingCore) -> None:
    messages = [
        {"role": "user", "content": "Add. "},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "So.", "signature": "x"},
                {"type": "text", "text": "I add. "},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2 "}]},
                {"type": "tool_result", "tool_use_id": "toolu_1"},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    response = served.http.post("/v1/messages", json={**asked(""), "messages": messages, "tools": TOOLS})
    assert response.json()["content"] == [{"type": "text", "text": "Add. I add. 2 Go on."}]


def test_choices_of_tools_are_read(client: Any, served: Served) -> None:
    one = client.messages.create(
        **asked(ADD + LOOK, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    )
    assert parts(one) == [("add", {"a": 1})]
    none = client.messages.create(**asked(ADD, tools=TOOLS, tool_choice={"type": "none"}))
    assert parts(none) == [("text", ADD)]
    forced = client.messages.create(**asked('{"a": 5}', tools=TOOLS, tool_choice={"type": "tool", "name": "add"}))
    assert parts(forced) == [("add", {"a": 5})]
    some = client.messages.create(
        **asked('[{"name": "look_up", "arguments": {}}]', tools=TOOLS, tool_choice={"type": "any"})
    )
    assert parts(some) == [("look_up", {})]
    assert "not among the tools" in refused(served, tools=TOOLS, tool_choice={"type": "tool", "name": "x"})["message"]


def test_arguments_that_are_no_object_are_kept(client: Any) -> None:
    message = client.messages.create(**asked('<tool_call>{"name": "add", "arguments": {"a": }', tools=TOOLS))
    assert parts(message) == [("add", {"arguments": '{"a": }'})]


def test_tokens_are_counted(client: Any) -> None:
    given = asked("Hello.", system="Be kind.")
    del given["max_tokens"]
    assert client.messages.count_tokens(**given).input_tokens == len("Be kind.Hello.")
    assert client.messages.count_tokens(**given, extra_body={"max_tokens": 5}).input_tokens == 14
    with pytest.raises(anthropic.BadRequestError, match="'max_token' is no parameter"):
        client.messages.count_tokens(**given, extra_body={"max_token": 5})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0] must have a role, user or assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a text or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0] is of type 'document'; text, image and tool_result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source must have the image itself",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}
                ]
            },
            "URLs and files are not fetched",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0] must be a block with a type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text must be a string",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
            "which must be the assistant's, with text",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": 1}]}
                ]
            },
            "messages[0].content[0].input must be an object, got 1",
        ),
        ({"system": {"text": "x"}}, "system must be a text or a list of text blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "those of a server are not served"),
        ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice must have a type: auto, any, none, or tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice chooses among tools"),
        ({"thinking": {"type": ["enabled"]}}, "thinking must have a type"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice must have a type"),
        ({"tools": [{"name": "x", "type": ["custom"]}]}, "tools[0] must be a tool with name and input_schema"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0] must have a role"),
        ({"thinking": {"type": "much"}}, "thinking must have a type: enabled, disabled, adaptive"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be a json_schema"),
        ({"presence_penalty": 1}, "'presence_penalty' is no parameter of this endpoint"),
        ({"mcp_servers": []}, "'mcp_servers' is no parameter of this endpoint"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control must be of type ephemeral, with a ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, "cache_control must be of type ephemeral"),
        ({"cache_control": "ephemeral"}, "cache_control must be of type ephemeral"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "persistent"}}]},
            "cache_control must be of type ephemeral",
        ),
    ],
)
def test_what_cannot_be_served_is_told(served: Served, body: dict[str, Any], says: str) -> None:
    error = refused(served, **body)
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_what_clients_send_of_their_own_accord_is_taken(client: Any, core: RepeatingCore) -> None:
    message = client.beta.messages.create(
        **asked("Hello."),
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}, "service_tier": "auto"},
    )
    assert message.content[0].text == "Hello."


def test_an_answer_may_have_a_form(served: Served, core: RepeatingCore) -> None:
    given = {"format": {"type": "json_schema", "schema": NUMBERS}}
    response = served.http.post("/v1/messages", json=asked('{"a": 1}', output_config=given))
    assert response.json()["content"] == [{"type": "text", "text": '{"a": 1}'}]
    assert core.seen is not None
    assert core.seen.sampling.guided is not None


def test_errors_are_those_of_the_official_client(served: Served, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' is not served here"):
        client.messages.create(**asked("x", model="other"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asked("x", extra_body={"temperature": 7.0}))
    assert served.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert served.http.get("/v1/messages/other").json()["error"]["type"] == "not_found_error"


def test_a_failure_within_a_stream_is_an_event() -> None:
    core, deployment = RepeatingCore(), Deployment()
    deployment.add_engine(core)
    core.shuts_after = 1
    with (
        serving(deployment) as served,
        served.http.stream("POST", "/v1/messages", json=asked("Hello.", stream=True)) as response,
    ):
        told = response.iter_text()
        first = next(told)
        core.fails = "the engine is lost"
        core.gate.set()
        rest = first + "".join(told)
    deployment.close()
    last = json.loads(rest.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert "the engine is lost" in last["error"]["message"]


def test_keys_may_be_given_as_anthropics_clients_do() -> None:
    deployment = Deployment()
    deployment.add_engine(RepeatingCore())
    with serving(deployment, keys=ApiKeys(Users({"secret-key": None}))) as served:
        for given in ({"api_key": "secret-key"}, {"auth_token": "secret-key"}):
            with anthropic.Anthropic(base_url=served.base_url, max_retries=0, **given) as client:
                assert client.messages.create(**asked("Hello.")).content[0].text == "Hello."
        with (
            anthropic.Anthropic(base_url=served.base_url, api_key="wrong-key", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="this server wants an API key"),
        ):
            client.messages.create(**asked("Hello."))
    deployment.close()
