"""Log-probabilities over HTTP: what the engine says of each token, in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.later import openai
from support.scripted_http import MODEL, ScriptedTexts, Served, serving

from headwise.runtime.engine.output import OutputText
from headwise.runtime.http import logprobs as module
from headwise.runtime.http.logprobs import LogprobForms
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta, TokenLogprobs, Usage

NO_TOKEN = 300
"""Which the tokenizer does not have."""
TEXT = "a é🚢b"


class ByteDetokenizer:
    """Tokens are bytes of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in tokens if token < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    eos_token_ids = ()

    def detokenizer(self, shown_tokens: tuple[str, ...]) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteTexts(ScriptedTexts):
    def token_bytes(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None

    def decoder(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class LikelyCore(ScriptedCore):
    """Answers a prompt with its own bytes, and says of each what `logprobs_of` says."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[str, tuple[OutputText, bytes]] = {}
        self._of_prompts: list[OutputDelta] = []

    def add(self, request: GenerateRequest) -> None:
        super().add(request)
        data = "".join(map(chr, request.prompt_token_ids)).encode()
        self._outputs[request.request_id] = OutputText(ByteTokenizer(), request.sampling), data
        wanted = request.sampling.prompt_logprobs
        if wanted is not None:
            first, *rest = request.prompt_token_ids.tolist()
            logprobs = tuple(logprobs_of(token, at, wanted, 0) for at, token in enumerate(rest))
            self._of_prompts += [
                OutputDelta(request.request_id, prompt_token_ids=(first,), prompt_logprobs=(None,)),
                OutputDelta(request.request_id, prompt_token_ids=tuple(rest), prompt_logprobs=logprobs),
            ]

    def step(self, timeout_s: float | None) -> list[OutputDelta]:
        of_prompts, self._of_prompts = self._of_prompts, []
        return of_prompts + super().step(timeout_s)

    def _next(self, request_id: str) -> OutputDelta:
        request, at = self.live[request_id]
        output, data = self._outputs[request_id]
        text, reason = output.push(data[at])
        if reason is None and at + 1 == min(len(data), request.sampling.max_tokens or len(data)):
            text, reason = text + output.flush(), FinishReason.LENGTH
        wanted = request.sampling.logprobs
        logprobs = () if wanted is None else (logprobs_of(data[at], at, wanted, request.sampling.seed or 0),)
        self.live[request_id] = request, at + 1
        if reason is None:
            return OutputDelta(request_id, (data[at],), text, logprobs)
        del self.live[request_id]
        usage = Usage(len(request.prompt_token_ids), 0, at + 1)
        return OutputDelta(request_id, (data[at],), text, logprobs, reason, usage=usage)


def logprobs_of(token: int, at: int, count: int, seed: int) -> TokenLogprobs:
    """The chosen one is the second likeliest one; the fifth is impossible, and none of the tokenizer's. Chance
    says which of several answers is the likeliest."""
    at += seed % 100
    others = [(ord("z"), -0.25), (token, -0.5 - at), (ord("y"), -50.0), (0xE2, -60.0), (NO_TOKEN, -float("inf"))]
    return TokenLogprobs(-0.5 - at, tuple(others[:count]))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    deployment = Deployment()
    deployment.add_engine(LikelyCore())
    with serving(deployment, ByteTexts()) as served:
        yield served
    deployment.close()


def ask(served: Served, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = served.http.post(path, json={"max_tokens": 100, **body})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer if status != 200 else answer["choices"][0]


def complete(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    return ask(served, "/v1/completions", status, prompt=TEXT, **body)


def chat(served: Served, status: int = 200, **body: Any) -> dict[str, Any]:
    return ask(served, "/v1/chat/completions", status, messages=[{"role": "user", "content": TEXT}], **body)


def choices(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    with served.http.stream("POST", path, json={"stream": True, "max_tokens": 100, **body}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def test_a_chat_tells_each_token_and_the_likeliest_ones(served: Served) -> None:
    content = chat(served, logprobs=True, top_logprobs=3)["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5 - at for at in range(len(TEXT.encode()))]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "z", "logprob": -0.25, "bytes": [122]},
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "y", "logprob": -50.0, "bytes": [121]},
        ],
    }


def test_a_token_that_is_part_of_a_character_is_told_by_its_bytes(served: Served) -> None:
    content = chat(served, logprobs=True)["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == TEXT
    assert [entry["token"] for entry in content[2:4]] == ["\\xc3", "\\xa9"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_what_is_impossible_or_no_token_of_the_tokenizers_has_a_number_and_a_name(served: Served) -> None:
    top = chat(served, logprobs=True, top_logprobs=5)["logprobs"]["content"][0]["top_logprobs"]
    assert top[-1] == {"token": "token_id:300", "logprob": -9999.0, "bytes": None}
    assert list(complete(served, logprobs=5)["logprobs"]["top_logprobs"][0].values())[-1] == -9999.0


def test_a_completion_tells_lists_of_equal_lengths(served: Served) -> None:
    told = complete(served, logprobs=1)["logprobs"]
    assert told["tokens"] == [
        "a",
        " ",
        "bytes:\\xc3",
        "bytes:\\xa9",
        *(f"bytes:\\x{b:02x}" for b in "🚢".encode()),
        "b",
    ]
    assert told["token_logprobs"] == [-0.5 - at for at in range(9)]
    assert told["top_logprobs"][:3] == [
        {"z": -0.25, "a": -0.5},
        {"z": -0.25, " ": -1.5},
        {"z": -0.25, "bytes:\\xc3": -2.5},
    ]
    assert told["text_offset"] == [0, 1, 2, 2, 3, 3, 3, 3, 4]
    assert complete(served, logprobs=0)["logprobs"]["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("stop", [[], ["🚢b"], ["é"], [" é🚢b"]], ids=repr)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_tells_the_logprobs_of_the_whole_answer(served: Served, stop: list[str], n: int) -> None:
    """Also of tokens whose text is held back, and of those of a stop string, which are no text of the answer."""
    whole = chat(served, logprobs=True, top_logprobs=2, stop=stop, n=n)
    said = {"messages": [{"role": "user", "content": TEXT}], "logprobs": True, "top_logprobs": 2, "stop": stop, "n": n}
    parts = [each for each in choices(served, "/v1/chat/completions", **said) if each["index"] == n - 1]
    told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert "".join(part["delta"].get("content", "") for part in parts) == whole["message"]["content"]
    assert told == whole["logprobs"]["content"]

    expected = complete(served, logprobs=2, stop=stop, n=n)
    parts = choices(served, "/v1/completions", prompt=TEXT, logprobs=2, stop=stop, n=n)
    parts = [each for each in parts if each["index"] == n - 1]
    assert "".join(part["text"] for part in parts) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values


def test_nothing_is_told_where_nothing_was_asked_for(served: Served) -> None:
    for said in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        assert chat(served, **said)["logprobs"] is None
    assert complete(served)["logprobs"] is None
    assert all(part["logprobs"] is None for part in choices(served, "/v1/completions", prompt=TEXT))


@pytest.mark.parametrize(
    ("path", "said", "param"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": 2}, "logprobs"),
        ("completion", {"logprobs": 21}, "logprobs"),
        ("completion", {"logprobs": True}, "logprobs"),
        ("completion", {"logprobs": 1, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_numbers_of_logprobs_that_cannot_be_are_told(
    served: Served, path: str, said: dict[str, Any], param: str
) -> None:
    refused = (chat if path == "chat" else complete)(served, 400, **said)
    assert refused["error"]["param"] == param


def test_more_logprobs_than_a_server_may_hold_are_streamed_or_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HELD_BY_ONE", 20)
    told = chat(served, 400, logprobs=True, top_logprobs=2)["error"]
    assert told["param"] == "logprobs"
    assert "stream it" in told["message"]
    assert len(choices(served, "/v1/completions", prompt=TEXT, logprobs=2)) == 9
    monkeypatch.setattr(module, "MAX_HELD", 20)
    monkeypatch.setattr(module, "MAX_HELD_BY_ONE", 100)
    assert chat(served, 429, logprobs=True, top_logprobs=2)["error"]["code"] == "overloaded"
    assert len(chat(served, logprobs=True)["logprobs"]["content"]) == 9  # what was refused is held no more


def test_the_official_client_reads_both_forms(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", timeout=120.0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TEXT}], logprobs=True, top_logprobs=1
        )
        assert answer.choices[0].logprobs is not None
        assert (answer.choices[0].logprobs.content or [])[0].top_logprobs[0].token == "z"
        completion = client.completions.create(model=MODEL, prompt=TEXT, logprobs=1, max_tokens=9)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 2, 3, 3, 3, 3, 4]


def test_of_two_tokens_with_one_text_a_completion_tells_the_likelier_one() -> None:
    class Twins(ByteTexts):
        def token_bytes(self, token: int) -> bytes | None:
            return b"a"

    output = OutputDelta("r", (5,), logprobs=(TokenLogprobs(-3.0, ((1, -0.5), (2, -2.0))),))
    (told,) = LogprobForms(Twins()).completion("").told(output)["top_logprobs"]
    assert told == {"a": -0.5}


def test_a_response_tells_them_where_it_includes_them(served: Served) -> None:
    said = {"input": TEXT, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = served.http.post("/v1/responses", json=said).json()
    content = response["output"][0]["content"][0]
    assert content["text"] == TEXT
    assert content["logprobs"] == chat(served, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    with served.http.stream("POST", "/v1/responses", json={**said, "stream": True}) as got:
        events = [json.loads(line.removeprefix("data: ")) for line in got.iter_lines() if line.startswith("data: ")]
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert told == content["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]


def test_the_best_of_several_answers_are_those_whose_tokens_are_likeliest(served: Served) -> None:
    body = {"prompt": [TEXT, "ab"], "max_tokens": 100, "seed": 5, "logprobs": 0}
    every = served.http.post("/v1/completions", json={**body, "n": 4}).json()
    best = served.http.post("/v1/completions", json={**body, "n": 2, "best_of": 4}).json()
    means = [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in every["choices"]]
    assert len(set(means)) == 8
    told = [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in best["choices"]]
    assert told == [*sorted(means[:4], reverse=True)[:2], *sorted(means[4:], reverse=True)[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] == every["usage"], "what was generated was computed, told or not"
    silent = served.http.post("/v1/completions", json={**body, "best_of": 4, "logprobs": None}).json()
    assert [choice["logprobs"] for choice in silent["choices"]] == [None, None]


@pytest.mark.parametrize("said", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 129}], ids=repr)
def test_a_best_of_that_cannot_be_is_told(served: Served, said: dict[str, Any]) -> None:
    assert complete(served, 400, **said)["error"]["param"] == "best_of"
    assert complete(served, best_of=1)["text"] == TEXT


# ---- of prompts ----


def test_echo_with_logprobs_tells_those_of_the_prompt_first(served: Served) -> None:
    choice = ask(served, "/v1/completions", prompt="ab c", echo=True, logprobs=2)
    assert choice["text"] == "ab cab c"
    told = choice["logprobs"]
    assert told["tokens"] == [*"ab c", *"ab c"]
    assert told["token_logprobs"] == [None, -0.5, -1.5, -2.5, -0.5, -1.5, -2.5, -3.5]
    assert told["top_logprobs"][:2] == [None, {"z": -0.25, "b": -0.5}]
    assert told["text_offset"] == list(range(8))


def test_a_stream_that_echoes_tells_the_logprobs_of_the_whole_answer(served: Served) -> None:
    said = {"prompt": ["ab c", "d"], "echo": True, "logprobs": 2, "n": 2}
    whole = served.http.post("/v1/completions", json=said).json()["choices"]
    parts = choices(served, "/v1/completions", **said)
    for index, expected in enumerate(whole):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in mine) == expected["text"]
        told = [part["logprobs"] for part in mine if part["logprobs"]]
        for name, values in expected["logprobs"].items():
            assert [value for each in told for value in each[name]] == values


def test_prompt_logprobs_have_vllms_form(served: Served) -> None:
    choice = ask(served, "/v1/completions", prompt="ab", prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": None, "decoded_token": "b"},
            "122": {"logprob": -0.25, "rank": 1, "decoded_token": "z"},
        },
    ]
    assert (choice["text"], choice["logprobs"]) == ("ab", None)
    said = {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 2}
    answer = served.http.post("/v1/chat/completions", json=said).json()
    assert answer["prompt_logprobs"][1]["98"] == {"logprob": -0.5, "rank": 2, "decoded_token": "b"}


@pytest.mark.parametrize("said", [{"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}], ids=repr)
def test_prompt_logprobs_that_cannot_be_are_told(served: Served, said: dict[str, Any]) -> None:
    assert complete(served, 400, **said)["error"]["param"] == "prompt_logprobs"
    assert chat(served, 400, **said)["error"]["param"] == "prompt_logprobs"


def test_the_logprobs_of_prompts_count_as_held(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HELD_BY_ONE", 20)
    assert complete(served, 400, prompt_logprobs=5, max_tokens=1)["error"]["param"] == "logprobs"
