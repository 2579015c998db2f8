"""Tools and reasoning over HTTP: OpenAI's form of them, and what a request may say; only the model is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine.repeating import RepeatingCore
from support.engine.scripted_deployment import Deployment
from support.later import openai
from support.scripted_http import MODEL, Served, serving, serving_repeated

from headwise.runtime.http.answers import Chat, Telling
from headwise.runtime.http.tools.answer import ChatAnswer
from headwise.runtime.http.tools.marked_calls import HermesCalls
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import MAX_VARIABLES
from headwise.runtime.loader.tools import MAX_TOOLS, MAX_TOOLS_BYTES
from headwise.runtime.protocol.request import FinishReason

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tool(name: str, parameters: Any = NUMBERS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "It works.", "parameters": parameters}}


TOOLS = [tool("add"), tool("look_up", None)]
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LOOK = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def core() -> RepeatingCore:
    core = RepeatingCore()
    core.ends = FinishReason.STOP
    return core


@pytest.fixture(scope="module")
def served(core: RepeatingCore) -> Iterator[Served]:
    with serving_repeated(core) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120.0) as client:
        yield client


def post(served: Served, said: str, status: int = 200, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}]
    response = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 999, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chosen(served: Served, said: str, **body: Any) -> dict[str, Any]:
    """The one choice of an answer, without the ids of its calls."""
    (choice,) = post(served, said, **body)["choices"]
    for call in choice["message"].get("tool_calls", ()):
        assert len(call.pop("id")) == 9
        assert call.pop("type") == "function"
    return choice


def refused(served: Served, **body: Any) -> tuple[str, str]:
    """The parameter that is at fault, and why."""
    told = post(served, "hello", 400, **body)["error"]
    return told["param"], told["message"]


def test_calls_stand_in_the_message(served: Served) -> None:
    choice = chosen(served, f"I add.\n{ADD}\n{LOOK}", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "add", "arguments": '{"a": 1}'}, {"name": "look_up", "arguments": "{}"}]


def test_a_tool_s_schema_says_which_arguments_are_strings() -> None:
    core, deployment = RepeatingCore(), Deployment()
    core.ends = FinishReason.STOP
    deployment.add_engine(core)
    both = {"properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
    said = "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in both["properties"])
    with serving(deployment, parsers=Parsers("glm45")) as served:
        choice = chosen(served, f"<tool_call>add{said}</tool_call>", tools=[tool("add", both)])
    deployment.close()
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "text": "1"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_without_text_beside_calls_there_is_no_content(served: Served) -> None:
    assert chosen(served, ADD, tools=TOOLS)["message"]["content"] is None


def test_an_answer_without_calls_is_as_ever(served: Served) -> None:
    choice = chosen(served, "Hello. ", tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": "Hello. ", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}])
def test_calls_are_text_where_none_are_wanted(served: Served, body: dict[str, Any]) -> None:
    choice = chosen(served, ADD, **body)
    assert (choice["message"]["content"], choice["finish_reason"]) == (ADD, "stop")


def test_one_call_is_told_where_parallel_ones_are_not_wanted(served: Served) -> None:
    message = chosen(served, f"{ADD}{LOOK}", tools=TOOLS, parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]


def test_reasoning_is_told_apart(served: Served) -> None:
    message = chosen(served, f"<think>Hm.</think>\n\n{ADD}", tools=TOOLS)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    assert len(message["tool_calls"]) == 1
    assert chosen(served, "<think>Hm.</think>Yes.")["message"]["reasoning_content"] == "Hm."


def test_a_prompt_that_ends_within_reasoning_begins_it(served: Served) -> None:
    message = chosen(served, "Hm.</think>Yes.<think>\n")["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.<think>\n")


def test_an_answer_of_a_given_form_is_nothing_else(served: Served) -> None:
    choice = chosen(served, "<think>Hm.", guided_regex=".*", tools=TOOLS)
    assert choice["message"]["content"] == "<think>Hm."


@pytest.mark.parametrize("pace", [[1], [2, 7], [500]])
def test_the_official_client_puts_streams_together_to_the_whole(
    client: openai.OpenAI, served: Served, core: RepeatingCore, pace: list[int]
) -> None:
    core.pace = pace
    said = f"<think>H\u00e9?</think>So:\n{ADD} and {LOOK}"
    whole = chosen(served, said, tools=TOOLS)["message"]
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": 999}
    with client.chat.completions.stream(**asked, tools=TOOLS) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == whole["content"] == "So:\nand"
    calls = [
        {"name": call.function.name, "arguments": call.function.arguments} for call in choice.message.tool_calls or ()
    ]
    assert calls == [call["function"] for call in whole["tool_calls"]]
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    reasoning = [delta.model_extra.get("reasoning_content", "") for delta in deltas if delta.model_extra]
    assert "".join(reasoning) == whole["reasoning_content"] == "H\u00e9?"
    assert [call.index for delta in deltas for call in delta.tool_calls or () if call.id] == [0, 1]


def test_a_named_tool_is_called_whatever_the_model_says(served: Served, core: RepeatingCore) -> None:
    choice = chosen(served, '{"a":7}', tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    assert choice["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": '{"a":7}'}}]
    assert choice["finish_reason"] == "tool_calls"
    assert core.seen is not None
    assert core.seen.sampling.guided is not None
    assert json.loads(core.seen.sampling.guided.json_schema or "") == NUMBERS


def test_required_calls_have_the_form_of_a_list(served: Served, core: RepeatingCore) -> None:
    said = '[{"name":"add","arguments":{"a":7}},{"name":"look_up","arguments":{}}]'
    choice = chosen(served, said, tools=TOOLS, tool_choice="required")
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert (names, choice["finish_reason"]) == (["add", "look_up"], "tool_calls")
    assert core.seen is not None
    assert core.seen.sampling.guided is not None
    schema = json.loads(core.seen.sampling.guided.json_schema or "")
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema


def test_calls_that_are_cut_off_say_so(served: Served, core: RepeatingCore) -> None:
    core.ends = FinishReason.LENGTH
    try:
        choice = chosen(served, '[{"name":"add","arguments":{"a"', tools=TOOLS, tool_choice="required")
    finally:
        core.ends = FinishReason.STOP
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": '{"a"'}}]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": ["add"]}, "tools", r"tools[0] must be a function such as"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "must be a function"),
        ({"tools": [tool("no name")]}, "tools", "1 to 64 letters"),
        ({"tools": [tool("a" * 65)]}, "tools", "1 to 64 letters"),
        ({"tools": [tool("add"), tool("add")]}, "tools", "two tools are named 'add'"),
        ({"tools": [tool("add", "none")]}, "tools", "parameters must be a mapping"),
        ({"tools": [tool("add", {"type": "array"})]}, "tools", "schema of an object"),
        ({"tools": [tool("add", {"properties": [1]})]}, "tools", "properties must be a mapping"),
        ({"tools": [tool(f"t{index}") for index in range(MAX_TOOLS + 1)]}, "tools", "at most 128"),
        ({"tools": [tool("add", {"x": "y" * MAX_TOOLS_BYTES})]}, "tools", "bytes as JSON"),
        (
            {"tools": [tool("add", {"x": "y" * (65 << 10)})], "tool_choice": "required"},
            "tools",
            "at most 65536 are allowed",
        ),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "not among the tools",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "one form"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "is taken"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "is taken"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "no name"),
        (
            {"chat_template_kwargs": {f"v{index}": 1 for index in range(MAX_VARIABLES + 1)}},
            "chat_template_kwargs",
            "at most 64",
        ),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs", "bytes as JSON"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "object"),
    ],
)
def test_what_cannot_be_asked_of_tools_is_told(served: Served, body: dict[str, Any], param: str, reason: str) -> None:
    told, why = refused(served, **body)
    assert told == param
    assert reason in why


def test_without_a_known_form_calls_must_be_forced(core: RepeatingCore) -> None:
    deployment = Deployment()
    deployment.add_engine(RepeatingCore())
    with serving(deployment) as served:
        param, why = refused(served, tools=TOOLS)
        assert (param, "tool_choice required" in why) == ("tools", True)
        named = {"type": "function", "function": {"name": "add"}}
        assert chosen(served, "{}", tools=TOOLS, tool_choice=named)["message"]["tool_calls"]
    deployment.close()


def conversation(*calls: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    ]


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_calls_and_their_results_are_part_of_the_conversation(served: Served) -> None:
    assert chosen(served, "", messages=conversation(CALL), tools=TOOLS)["message"]["content"] == "1 + 1?2"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (conversation(), "non-empty list of calls"),
        (conversation({**CALL, "type": "custom"}), "['tool_calls'][0] must be a function"),
        (conversation({**CALL, "id": 7}), "['tool_calls'][0].id must be"),
        (conversation({**CALL, "function": {"name": "a b", "arguments": "{}"}}), "letters"),
        (conversation({**CALL, "function": {"name": "add"}}), "arguments must be JSON text"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "for messages of the role assistant"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "['tool_call_id'] must be a string"),
        ([{"role": "assistant", "content": None}], "['content'] must be a string"),
        ([{"role": "tool", "tool_call_id": "x"}], "['content'] must be a string"),
    ],
)
def test_malformed_calls_in_a_conversation_are_told(served: Served, messages: Any, reason: str) -> None:
    param, why = refused(served, messages=messages)
    assert param == "messages"
    assert reason in why


def test_tools_count_in_what_is_tokenised(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"day": "Monday"}}
    assert served.http.post("/tokenize", json=body).json()["count"] == 5
    assert served.http.post("/tokenize", json={**body, "tools": [1]}).status_code == 400


def test_log_probabilities_of_text_that_is_held_back_are_told_at_once() -> None:
    form = Chat(Telling(MODEL), answers=lambda prompt: ChatAnswer(HermesCalls(("add",))))
    form.start(0, ())
    (choice,) = json.loads(form.part(0, "<tool_", None, {"content": [1]}).removeprefix(b"data: "))["choices"]
    assert choice == {"index": 0, "delta": {}, "logprobs": {"content": [1]}, "finish_reason": None}
    assert form.part(0, "call>", None) == b""
