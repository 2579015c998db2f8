"""Calls and reasoning at `/v1/responses`, by OpenAI's official client; only the model is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine.repeating import RepeatingCore
from support.later import openai
from support.scripted_http import MODEL, Served, serving_repeated

from headwise.runtime.http.bodies import ChatBody, checked_chat, parse
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.message_bodies import CountBody, counted_chat
from headwise.runtime.http.response_bodies import ResponseBody, wanted_response
from headwise.runtime.http.response_items import messages_of
from headwise.runtime.http.tools.choice import ToolChoice
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.protocol.request import FinishReason

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "name": "add", "description": "It adds.", "parameters": NUMBERS, "strict": False},
    {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": None},
]
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LOOK = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
MIXED = f"<think>\nHm.</think>\n\nI add.\n{ADD}\n{LOOK}"
EXPECTED = [("reasoning", "Hm."), ("message", "I add."), ("add", {"a": 1}), ("look_up", {})]


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
    url = f"{served.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def parts(response: Any) -> list[Any]:
    """What the items of a response say."""
    return [
        (item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content))
        for item in response.output
    ]


def refused(served: Served, **body: Any) -> tuple[str, str]:
    response = served.http.post("/v1/responses", json={"input": "hello", **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_thoughts_texts_and_calls_are_items_whole_and_streamed(client: Any) -> None:
    whole = client.responses.create(model=MODEL, input=MIXED, tools=TOOLS)
    assert parts(whole) == EXPECTED
    assert whole.output_text == "I add."
    assert {item.status for item in whole.output} == {whole.status} == {"completed"}
    assert len({item.id for item in whole.output}) == 4
    assert len({item.call_id for item in whole.output if item.type == "function_call"}) == 2
    assert [tool.name for tool in whole.tools] == ["add", "look_up"]
    with client.responses.stream(model=MODEL, input=MIXED, tools=TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert parts(streamed) == EXPECTED
    for kind, name in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        texts = [getattr(event, name) for event in events if event.type == f"response.{kind}.done"]
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        assert deltas == "".join(texts)


def test_events_of_a_call_are_openais(served: Served) -> None:
    body = {"input": ADD, "tools": TOOLS, "stream": True}
    with served.http.stream("POST", "/v1/responses", json=body) as got:
        events = [json.loads(line.removeprefix("data: ")) for line in got.iter_lines() if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begun, done = (
        next(e["item"] for e in events if e["type"] == f"response.output_item.{w}") for w in ("added", "done")
    )
    assert (begun["status"], begun["name"], begun["arguments"]) == ("in_progress", "add", "")
    assert done == {**begun, "status": "completed", "arguments": '{"a": 1}'}
    assert events[-1]["response"]["output"] == [done]


def test_choices_of_tools_are_read(client: Any, served: Served) -> None:
    def said(text: str, **asked: Any) -> list[Any]:
        return parts(client.responses.create(model=MODEL, input=text, tools=TOOLS, **asked))

    assert said(ADD + LOOK, parallel_tool_calls=False) == [("add", {"a": 1})]
    assert said(ADD, tool_choice="none") == [("message", ADD)]
    assert said('{"a": 5}', tool_choice={"type": "function", "name": "add"}) == [("add", {"a": 5})]
    some = '[{"name": "look_up", "arguments": {}}]'
    assert said(some, tool_choice="required") == [("look_up", {})]
    for choice in ({"type": "function", "name": "x"}, {"type": "allowed_tools", "tools": []}, 5):
        assert refused(served, tools=TOOLS, tool_choice=choice)[0] == "tool_choice"
    assert refused(served, tool_choice="required")[0] == "tool_choice"
    for tool in ({"type": "web_search"}, 5, {"type": "function"}, {**TOOLS[0], "parameters": 3}):
        assert refused(served, tools=[tool])[0] == "tools"


def test_a_call_that_is_cut_off_is_incomplete(client: Any, core: RepeatingCore) -> None:
    core.ends = FinishReason.LENGTH
    try:
        response = client.responses.create(
            model=MODEL, input='<tool_call>{"name": "add", "arguments": {"a', tools=TOOLS
        )
    finally:
        core.ends = FinishReason.STOP
    (item,) = response.output
    assert (response.status, item.status, item.arguments) == ("incomplete", "incomplete", '{"a')
    assert response.incomplete_details.reason == "max_output_tokens"


def test_an_answer_without_anything_is_an_empty_message(client: Any) -> None:
    assert parts(client.responses.create(model=MODEL, input="<think>\n</think>\n\n")) == [("message", "")]


def test_what_was_thought_said_and_called_in_a_row_is_one_message(client: Any, served: Served) -> None:
    whole = client.responses.create(model=MODEL, input=MIXED, tools=TOOLS)
    calls = [item for item in whole.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(calls, ("2", [{"type": "input_text", "text": "no"}]), strict=True)
    ]
    before = [item.model_dump(exclude_none=True) for item in whole.output]
    user, assistant, *others = messages_of([{"role": "user", "content": "Add."}, *before, *results])
    assert user == {"role": "user", "content": "Add."}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I add.", "Hm.")
    assert [(call["id"], call["function"]) for call in assistant["tool_calls"]] == [
        (calls[0].call_id, {"name": "add", "arguments": '{"a": 1}'}),
        (calls[1].call_id, {"name": "look_up", "arguments": "{}"}),
    ]
    assert [(message["role"], message["content"]) for message in others] == [("tool", "2"), ("tool", "no")]
    answer = client.responses.create(model=MODEL, input=[*before, *results, {"role": "user", "content": " Go on."}])
    assert answer.output_text == "I add.2no Go on."
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    assert messages_of([sealed, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_an_answer_that_is_begun_is_gone_on_with() -> None:
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]

    def of_chat(**body: Any) -> Any:
        return checked_chat(parse(ChatBody, json.dumps({"messages": begun, **body}).encode()), [])

    expected = {"messages": begun, "continue_final_message": True}
    for said in ({}, {"add_generation_prompt": False}):
        assert of_chat(continue_final_message=True, **said) == expected
    assert of_chat(continue_final_message=False, add_generation_prompt=True) == begun == of_chat()
    body = parse(CountBody, json.dumps({"messages": begun}).encode())
    assert counted_chat(body, ToolChoice()) == expected
    for said in ({"continue_final_message": True, "add_generation_prompt": True}, {"add_generation_prompt": False}):
        with pytest.raises(ApiError, match="add_generation_prompt is the opposite of"):
            of_chat(**said)


def test_how_much_is_thought_is_a_variable_of_the_template() -> None:
    hello = [{"role": "user", "content": "hello"}]

    def of_chat(**body: Any) -> Any:
        return checked_chat(parse(ChatBody, json.dumps({"messages": hello, **body}).encode()), [])

    def of_response(effort: str) -> Any:
        body = parse(ResponseBody, json.dumps({"input": "hello", "reasoning": {"effort": effort}}).encode())
        return wanted_response(body, ToolChoice(), Parsers()).messages

    def of_message(effort: Any) -> Any:
        body = parse(CountBody, json.dumps({"messages": hello, "output_config": {"effort": effort}}).encode())
        return counted_chat(body, ToolChoice())

    for chat in (of_chat(reasoning_effort="high"), of_response("high"), of_message("high")):
        assert chat["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert of_response("none")["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
    said = {"enable_thinking": True}
    assert of_chat(reasoning_effort="none", chat_template_kwargs=said)["chat_template_kwargs"] == {
        "reasoning_effort": "none",
        **said,
    }
    for ask in (lambda: of_chat(reasoning_effort="much"), lambda: of_response("much"), lambda: of_message(5)):
        with pytest.raises(ApiError, match="effort"):
            ask()
