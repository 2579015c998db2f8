"""docs/http.md's table: what OpenAI's API asks of a server, over real sockets; only the model is scripted."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import MODEL, Served, serving
from support.waiting import eventually

from headwise import __version__
from headwise.cache_controller.block_hash import ExtraKey
from headwise.runtime.config.model_card import Naming
from headwise.runtime.http import answers
from headwise.runtime.http.bodies import MAX_CHOICES
from headwise.runtime.http.parameters import NEUTRAL, SAMPLING, WITHOUT_EFFECT
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.prompt_items import digest
from headwise.runtime.protocol.request import GenerateRequest, Retention, SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(deployment: Deployment, core: ScriptedCore) -> Iterator[Served]:
    with serving(deployment) as served:
        yield served


def complete(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    response = served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    response = served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, without the last, which says that it is the last."""
    with served.http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def at_the_engine(served: Served, core: ScriptedCore, **body: Any) -> list[GenerateRequest]:
    """What the engine gets of a request, by the order of its answers' seeds."""
    core.gate.clear()
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(complete, served, **body)
        try:
            eventually(lambda: len(core.live) == body.get("n", 1) or answer.done())
            requests = [request for request, _ in core.live.values()]
        finally:
            core.gate.set()
        answer.result()
    return sorted(requests, key=lambda request: request.sampling.seed or 0)


def error(answer: dict[str, Any]) -> dict[str, Any]:
    """Of an answer that is an error in OpenAI's form, and nothing else."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    told: dict[str, Any] = answer["error"]
    return told


# ---- whole answers ----


def test_a_completion_has_openais_form(served: Served) -> None:
    answer = complete(served)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["choices"] == [{"index": 0, "text": "0 1 ", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_has_openais_form(served: Served) -> None:
    answer = chat(served)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "0 1 ", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 5


def test_a_chat_takes_text_parts_and_the_new_name_of_max_tokens(served: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]
    answer = chat(served, messages=parts, max_tokens=None, max_completion_tokens=3)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 3


def test_completions_produce_16_tokens_if_nothing_is_said(served: Served) -> None:
    assert complete(served, max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abc", 3), (["abc", "d"], 4), ([97, 98], 2), ([[97], [98, 99]], 3), (["abc", [97]], 4)],
    ids=["text", "texts", "ids", "lists of ids", "both"],
)
def test_a_prompt_has_four_forms(served: Served, prompt: Any, tokens: int) -> None:
    answer = complete(served, prompt=prompt)
    assert answer["usage"]["prompt_tokens"] == tokens
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))


@pytest.mark.parametrize("prompt", [[], {}, 7, [1, "a"], [None], [[1, "a"]], [1.5], True, [True], None], ids=repr)
def test_what_is_no_prompt_is_told(served: Served, prompt: Any) -> None:
    assert error(complete(served, 400, prompt=prompt))["param"] == "prompt"


def test_an_empty_prompt_is_told(served: Served) -> None:
    assert "empty" in error(complete(served, 400, prompt=""))["message"]


def test_echo_tells_the_prompt_before_the_answer(served: Served) -> None:
    texts = [choice["text"] for choice in complete(served, prompt=["ab", "c"], echo=True, n=2)["choices"]]
    assert texts == ["ab0 1 ", "ab0 1 ", "c0 1 ", "c0 1 "]
    assert complete(served, prompt=[97, 98], echo=True)["choices"][0]["text"] == "ab0 1 "
    assert error(complete(served, 400, prompt=[-1], echo=True))["param"] == "prompt"


def test_n_gives_so_many_answers_of_each_prompt_which_counts_once(served: Served) -> None:
    answer = chat(served, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 6


def test_answers_of_one_prompt_have_seeds_of_their_own(served: Served, core: ScriptedCore) -> None:
    seeds = [request.sampling.seed for request in at_the_engine(served, core, n=3, seed=7)]
    assert seeds == sorted(sample.seed for sample in SamplingParams(n=3, seed=7).samples())


def test_what_a_request_says_reaches_the_engine(served: Served, core: ScriptedCore) -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    said |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 1}
    others = {"stop": "x", "stop_token_ids": [9], "priority": -2, "cache_salt": "tenant", "logit_bias": {"7": -2}}
    (request,) = at_the_engine(served, core, **said, **others)
    assert {name: getattr(request.sampling, name) for name in said} == said
    assert (request.sampling.stop, request.sampling.stop_token_ids) == (("x",), (9,))
    assert (request.priority, request.cache_salt) == (-2, "tenant")
    assert request.sampling.logit_bias == {7: -2.0}


@pytest.mark.parametrize(
    ("said", "retention"),
    [
        ({}, None),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_retention": "24h"}, Retention(86400.0)),
        ({"retain_s": 90}, Retention(90.0)),
        ({"retain_s": 0.5, "retain_tokens": 64}, Retention(0.5, 64)),
        ({"retain_s": 90, "prompt_cache_retention": "24h"}, Retention(90.0)),
        ({"retain_s": 0, "prompt_cache_retention": "24h"}, None),
        ({"retain_tokens": 64, "prompt_cache_retention": "24h"}, Retention(86400.0, 64)),
    ],
    ids=repr,
)
def test_how_long_a_prompt_is_to_be_kept_reaches_the_engine(
    served: Served, core: ScriptedCore, said: dict[str, Any], retention: Retention | None
) -> None:
    (request,) = at_the_engine(served, core, **said)
    assert request.retention == retention


def test_items_of_a_prompt_reach_the_engine_with_their_embeddings(served: Served, core: ScriptedCore) -> None:
    rows = np.arange(6, dtype="<f4").reshape(2, 3)
    items = [{"offset": 0, "length": 1, "hash": "cat"}]
    items.append({"offset": 1, "length": 2, "embeds": b64encode(rows.tobytes()).decode()})
    (request,) = at_the_engine(served, core, prompt=[97, 98, 99], prompt_items=items)
    assert request.extra_keys == (ExtraKey(0, 1, "cat"), ExtraKey(1, 3, digest(rows)))
    np.testing.assert_array_equal(request.embeds[0].values, rows)


@pytest.mark.parametrize(
    ("prompt", "item", "says"),
    [
        ("abc", {"offset": 0, "length": 1, "hash": "a"}, "give their prompt as token ids"),
        ([[1, 2], [3]], {"offset": 0, "length": 1, "hash": "a"}, "prompt_items are those of one prompt"),
        ([1, 2], {"offset": 1, "length": 2, "hash": "a"}, "does not lie in the prompt's 2 tokens"),
        ([1, 2], {"offset": 0, "length": 1}, "an item without embeddings needs a hash"),
        ([1, 2], {"offset": 0, "length": 1, "embeds": "AAAA"}, "embeds have 3 bytes: no rows of float32 for 1 tokens"),
        ([1, 2], {"offset": 0, "length": 1, "embeds": ""}, "embeds have 0 bytes"),
        ([1, 2], {"offset": 0, "length": 1, "embeds": "é"}, "embeds must be Base64"),
        ([1, 2], {"offset": 0, "length": 1, "image": "x"}, "Extra inputs are not permitted"),
    ],
)
def test_items_that_are_none_are_told_by_name(served: Served, prompt: Any, item: dict[str, Any], says: str) -> None:
    told = error(complete(served, 400, prompt=prompt, prompt_items=[item]))
    assert told["param"] == "prompt_items"
    assert says in told["message"]


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("said", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guided(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_regex": "[ab]+"}, Guided(regex="[ab]+")),
        ({"guided_choice": ["yes", "no"]}, Guided(choice=("yes", "no"))),
        ({"guided_grammar": 'start: "a"'}, Guided(grammar='start: "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, SCHEMA),
        ({"structured_outputs": {"choice": ["yes"]}}, Guided(choice=("yes",))),
    ],
    ids=repr,
)
def test_forms_of_answers_reach_the_engine(
    served: Served, core: ScriptedCore, said: dict[str, Any], form: Guided | dict[str, Any] | None
) -> None:
    (request,) = at_the_engine(served, core, **said)
    assert request.sampling.guided == (Guided(json_schema=form) if isinstance(form, dict) else form)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", "json"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "schema": SCHEMA}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": SCHEMA, "regex": "a"}),
        ("structured_outputs", {"yaml": "a"}),
        ("guided_choice", []),
        ("guided_regex", 7),
        ("guided_json", [1]),
    ],
)
def test_what_is_no_form_is_told(served: Served, name: str, value: Any) -> None:
    assert error(complete(served, 400, **{name: value}))["param"] == name


def test_an_answer_has_one_form(served: Served) -> None:
    told = error(complete(served, 400, guided_regex="a", response_format={"type": "json_object"}))
    assert "one form" in told["message"]


def test_null_is_as_good_as_nothing(served: Served) -> None:
    nothing = dict.fromkeys(("n", "stream", "stream_options", "echo", "stop", "seed", "logit_bias", "user", "top_k"))
    assert complete(served, **nothing)["choices"][0]["text"] == "0 1 "


def test_minus_one_is_vllms_word_for_all_of_top_k(served: Served) -> None:
    complete(served, top_k=-1)


# ---- streams ----


def test_a_chat_streams_openais_events(served: Served) -> None:
    told = events(served, "/v1/chat/completions", messages=HELLO, max_tokens=2)
    assert {event["object"] for event in told} == {"chat.completion.chunk"}
    assert len({event["id"] for event in told}) == 1
    choices = [choice for event in told for choice in event["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"].get("content") for choice in choices[1:]] == ["0 ", "1 "]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert all("usage" not in event for event in told)


def test_a_completion_streams_openais_events(served: Served) -> None:
    told = events(served, "/v1/completions", prompt="ab", max_tokens=2, echo=True)
    assert [event["choices"][0]["text"] for event in told] == ["ab", "0 ", "1 "]
    assert told[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": HELLO})]
)
def test_include_usage_ends_a_stream_with_the_usage(served: Served, path: str, body: dict[str, Any]) -> None:
    told = events(served, path, max_tokens=2, n=2, stream_options={"include_usage": True}, **body)
    assert all(event["usage"] is None for event in told[:-1])
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": HELLO})]
)
def test_each_event_has_the_usage_so_far_where_that_is_asked_for(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *told, last = events(served, path, max_tokens=3, n=2, stream_options=options, **body)
    for index in range(2):
        usages = [event["usage"] for event in told if event["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages][-3:] == [1, 2, 3]
        assert all(usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] > 0 for usage in usages)
    assert last["usage"]["completion_tokens"] == 6


def test_streams_of_several_prompts_are_told_apart_by_index(served: Served) -> None:
    told = events(served, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=3)
    texts = dict.fromkeys(range(4), "")
    for event in told:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == dict.fromkeys(range(4), "0 1 2 ")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": HELLO})]
)
def test_by_which_weights_tokens_are_is_told_once_these_are_others(
    served: Served, core: ScriptedCore, path: str, body: dict[str, Any]
) -> None:
    ask = chat if "messages" in body else complete
    before = ask(served, max_tokens=4, **body)
    assert "weights" not in before["choices"][0]
    core.weights = {0: "one", 2: "two"}
    try:
        whole = ask(served, max_tokens=4, n=2, **body)
        told = events(served, path, max_tokens=4, n=2, **body)
    finally:
        core.weights = {}
    for index in range(2):
        assert whole["choices"][index]["weights"] == [[0, "one"], [2, "two"]]
        choices = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
        texts = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
        news = {choice["weights"]: text for choice, text in zip(choices, texts, strict=True) if "weights" in choice}
        assert news == {"one": texts[0], "two": "2 "}


def test_tokens_of_completions_are_told_by_their_ids(served: Served) -> None:
    """In vLLM's form: those of a prompt once, with its choice, and in streams those of each event."""
    body: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "return_token_ids": True}
    prompts = [[ord("a"), ord("b")]] * 2 + [[ord("c")]] * 2
    whole = complete(served, **body)
    assert "prompt_token_ids" not in whole
    for echo in (False, True):
        told = events(served, "/v1/completions", echo=echo, **body)
        for index, prompt in enumerate(prompts):
            assert whole["choices"][index]["prompt_token_ids"] == prompt
            assert whole["choices"][index]["token_ids"] == [0, 1, 2]
            choices = [event["choices"][0] for event in told if event["choices"][0]["index"] == index]
            assert [choice.get("prompt_token_ids") for choice in choices] == [prompt, *[None] * (len(choices) - 1)]
            assert [token for choice in choices for token in choice["token_ids"]] == [0, 1, 2]
    best = complete(served, **{**body, "n": 1, "best_of": 2})
    assert [choice["prompt_token_ids"] for choice in best["choices"]] == [prompts[0], prompts[2]]
    assert "token_ids" not in complete(served, prompt="ab")["choices"][0]
    assert "token_ids" not in events(served, "/v1/completions", prompt="ab", return_token_ids=False)[0]["choices"][0]


def test_tokens_of_prompts_are_told_so_many_times_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request must not take the memory of a server with a long prompt and many answers."""
    monkeypatch.setattr(answers, "MAX_PROMPT_IDS", 8)
    body: dict[str, Any] = {"prompt": "abcd", "max_tokens": 2, "return_token_ids": True}
    assert len(complete(served, n=2, **body)["choices"]) == 2
    told = error(complete(served, 400, n=3, **body))
    assert told["param"] == "return_token_ids"
    assert "more than 8" in told["message"]
    assert events(served, "/v1/completions", n=3, **body)[-1]["error"] == told, "its other answers have begun"
    assert len(chat(served, messages=HELLO, n=3, return_token_ids=True)["choices"]) == 3, "they are told once"


def test_tokens_of_chats_are_told_by_their_ids(served: Served) -> None:
    body: dict[str, Any] = {"messages": HELLO, "n": 2, "max_tokens": 3, "return_token_ids": True}
    whole, told = chat(served, **body), events(served, "/v1/chat/completions", **body)
    prompt = whole["prompt_token_ids"]
    assert prompt == [ord(character) for character in HELLO[0]["content"]]
    for index in range(2):
        assert whole["choices"][index]["token_ids"] == [0, 1, 2]
        own = [event for event in told if event["choices"][0]["index"] == index]
        assert [event.get("prompt_token_ids") for event in own] == [prompt, *[None] * (len(own) - 1)]
        assert [token for event in own for token in event["choices"][0]["token_ids"]] == [0, 1, 2]
    assert "prompt_token_ids" not in chat(served, messages=HELLO)
    assert error(chat(served, 400, messages=HELLO, return_token_ids="yes"))["param"] == "return_token_ids"


def test_an_error_before_the_first_event_has_a_status_of_its_own(served: Served) -> None:
    assert "empty" in error(complete(served, 400, prompt="", stream=True))["message"]


def test_an_error_within_a_stream_is_an_event(served: Served, core: ScriptedCore) -> None:
    core.pace_s = 0.05
    with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 999, "stream": True}) as got:
        lines = (line for line in got.iter_lines() if line)
        next(lines)
        core.pace_s, core.fails = 0.0, "the model is broken"
        *_, last, done = lines
    assert "the model is broken" in error(json.loads(last.removeprefix("data: ")))["message"]
    assert done == "data: [DONE]"


# ---- errors ----


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_served_yet_is_refused_by_name(served: Served, name: str) -> None:
    assert error(complete(served, 400, **{name: "something"}))["param"] == name


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in sorted(NEUTRAL) for value in NEUTRAL[name]])
def test_what_is_not_served_yet_may_say_what_happens_anyway(served: Served, name: str, value: Any) -> None:
    complete(served, **{name: value})


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_changes_no_answer_is_taken(served: Served, name: str) -> None:
    complete(served, **{name: "anything"})


def test_an_unknown_parameter_is_refused_by_name(served: Served) -> None:
    assert error(complete(served, 400, tempature=0.5))["param"] == "tempature"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("n", "2"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop", [1]),
        ("seed", -1),
        ("ignore_eos", 1),
        ("priority", 2**31),
        ("cache_salt", 5),
        ("prompt_cache_retention", "1h"),
        ("prompt_cache_retention", 5),
        ("retain_s", -1),
        ("retain_s", "1h"),
        ("retain_s", 1e9),
        ("retain_tokens", 64),
        ("retain_tokens", 1.5),
        ("min_p", 2),
        ("stop_token_ids", [-1]),
    ],
)
def test_values_out_of_range_are_told_by_name(served: Served, name: str, value: Any) -> None:
    told = error(complete(served, 400, **{name: value}))
    assert (told["param"], told["type"]) == (name, "invalid_request_error")


def test_too_many_answers_at_once_are_refused(served: Served) -> None:
    assert error(complete(served, 400, prompt=["a"] * MAX_CHOICES, n=2))["param"] == "n"


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], [{"role": "nobody", "content": "x"}], [5]])
def test_what_is_no_chat_is_told(served: Served, messages: Any) -> None:
    assert error(chat(served, 400, messages=messages))["param"] == "messages"


def test_another_model_is_not_found(served: Served) -> None:
    told = error(complete(served, 404, model="gpt-5"))
    assert (told["code"], told["param"]) == ("model_not_found", "model")
    assert complete(served, model=MODEL)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": }', b"\xff", b"7", b"[" * 100_000], ids=repr)
def test_malformed_json_is_told(served: Served, body: bytes) -> None:
    response = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error(response.json())


def test_a_body_that_does_not_say_it_is_json_is_refused(served: Served) -> None:
    """So that a page of another origin, open in a browser, cannot ask a server on its user's machine."""
    response = served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    error(response.json())


def test_a_body_that_is_encoded_is_refused_as_such(served: Served) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = served.http.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert response.status_code == 415
    assert "'gzip', which is not served" in error(response.json())["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/completions", 405)])
def test_what_there_is_not_is_told_in_openais_form(served: Served, method: str, path: str, status: int) -> None:
    response = served.http.request(method, path)
    assert response.status_code == status
    error(response.json())


def test_a_full_queue_says_when_to_come_again(served: Served, core: ScriptedCore) -> None:
    core.max_requests = 0
    try:
        response = served.http.post("/v1/completions", json={"prompt": "a"})
    finally:
        core.max_requests = 100
    assert response.status_code == 429
    assert error(response.json())["code"] == "overloaded"
    assert int(response.headers["retry-after"]) > 0


# ---- around the answers ----


def test_models_names_the_model(served: Served) -> None:
    answer = served.http.get("/v1/models").json()
    assert [model["id"] for model in answer["data"]] == [MODEL]
    assert served.http.get(f"/v1/models/{MODEL}").json() == answer["data"][0]
    assert served.http.get("/v1/models/other").status_code == 404


def test_adapters_are_models_of_their_own(deployment: Deployment, core: ScriptedCore) -> None:
    """Those that a server was told of at its start, and those that come later."""
    with serving(deployment, adapters=("sql",)) as served:
        assert complete(served, prompt="a", model="sql")["model"] == "sql"
        assert error(complete(served, 404, prompt="a", model="chat"))["code"] == "model_not_found"
        deployment.preprocessor.naming = Naming("scripted", (("sql", ""), ("chat", "")))
        eventually(lambda: served.http.get("/v1/models/chat").status_code == 200)
        assert complete(served, prompt="a", model="chat")["model"] == "chat"
        data = served.http.get("/v1/models").json()["data"]
        assert [(model["id"], model.get("parent")) for model in data] == [
            (MODEL, None),
            ("sql", MODEL),
            ("chat", MODEL),
        ]
        assert served.http.get("/v1/models/sql").json() == data[1]
        (request,) = at_the_engine(served, core, prompt="a", model="sql")
        assert request.lora_id == "sql"
        assert complete(served, prompt="a", model="sql")["model"] == "sql"
        (request,) = at_the_engine(served, core, prompt="a", model=MODEL)
        assert request.lora_id == ""
        told = error(complete(served, 404, prompt="a", model="other"))
        assert told["message"] == f"the model 'other' is not served here: served are {MODEL}, sql, chat"
        deployment.preprocessor.naming = Naming("scripted")
        eventually(lambda: len(served.http.get("/v1/models").json()["data"]) == 1)


def test_texts_become_tokens_and_tokens_texts(served: Served) -> None:
    tokens = served.http.post("/tokenize", json={"prompt": "abc"}).json()
    assert tokens == {"count": 3, "max_model_len": 1000, "tokens": [97, 98, 99]}
    assert served.http.post("/tokenize", json={"messages": HELLO}).json()["count"] == 5
    assert served.http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", {"prompt": "a" * 5000}),
        ("/detokenize", {"tokens": [-5]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_texts_and_tokens_that_cannot_be_are_told(served: Served, path: str, body: dict[str, Any]) -> None:
    response = served.http.post(path, json=body)
    assert response.status_code == 400
    error(response.json())


def test_health_and_version_answer(served: Served) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/version").json() == {"version": __version__}


# ---- docs/http.md ----


def test_each_row_of_the_table_names_its_tests() -> None:
    root = Path(__file__).parents[3]
    files = [*(root / "tests/runtime/http").rglob("test_*.py"), root / "tests/e2e/two_engines/test_openai_http.py"]
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))
    table = (root / "docs/http.md").read_text().partition("## Conformance")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    named = [set(re.findall(r"`(test_\w+)`", row)) for row in rows]
    assert len(rows) > 25
    assert all(named)
    assert set().union(*named) - tests == set()


def test_parameters_that_the_docs_name_are_those_that_are_taken(served: Served) -> None:
    """A parameter that is served stands in the table; one that is not served does not."""
    text = (Path(__file__).parents[3] / "docs/http.md").read_text().partition("## Parameters")[2].partition("\n## ")[0]
    table, _, refused = text.partition("What is not served yet")
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert set(SAMPLING) | WITHOUT_EFFECT <= named
    assert not named & set(NEUTRAL)
    assert set(re.findall(r"`([a-z_]+)`", refused)) <= set(NEUTRAL)
