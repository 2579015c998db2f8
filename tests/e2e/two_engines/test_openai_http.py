"""The official OpenAI client against a whole deployment with real weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import ray
from support.collector import Collector, attributes
from support.later import anthropic, openai
from support.two_engines import ADAPTER, ENGINES, KEY, MODEL
from support.waiting import eventually

from headwise import Client, ClientKeys, LocalEngine, SamplingParams
from headwise.actors.deployment import Deployment
from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, NotAllowedError
from headwise.runtime.protocol.request import GenerationResult

pytestmark = [pytest.mark.ray, pytest.mark.model]

FAMILIES = "All happy families are alike; every unhappy family is unhappy in its own way. " * 4
HARBOURS: list[Any] = [{"role": "user", "content": "Name three harbours."}]


@pytest.fixture(scope="module")
def base_url(deployment: Deployment) -> str:
    return f"{deployment.http_address}/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=KEY, timeout=120.0) as client:
        yield client


@pytest.fixture(scope="module")
def ours(deployment: Deployment, keys: ClientKeys) -> Iterator[Client]:
    with Client(deployment.client_address, keys=keys) as client:
        yield client


def test_a_completion_is_what_our_client_gets(client: openai.OpenAI, ours: Client) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
    expected = ours.generate(prompt, temperature=0.0, max_tokens=8)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_chat_is_what_our_client_gets_whole_and_streamed(client: openai.OpenAI, ours: Client) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    expected = ours.chat(HARBOURS, sampling).text
    answer = client.chat.completions.create(model=MODEL, messages=HARBOURS, temperature=0, max_completion_tokens=24)
    assert answer.choices[0].message.content == expected
    with client.chat.completions.create(
        model=MODEL,
        messages=HARBOURS,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_prompt_is_kept_where_it_was_computed(client: openai.OpenAI, ours: Client) -> None:
    def retained() -> int:
        engines = ours.stats()["engines"].values()
        pools = [engine[tier] for engine in engines for tier in ("cache", "host") if engine[tier]]
        return sum(pool["retained_blocks"] for pool in pools)

    assert retained() == 0
    retention = {"prompt_cache_retention": "24h"}
    answer = client.completions.create(model=MODEL, prompt=f"Kept. {FAMILIES}" * 3, max_tokens=1, extra_body=retention)
    assert answer.usage is not None
    size = ours.stats()["engines"][ENGINES[0]]["cache"]["smallest_reusable_prefix"]
    blocks = answer.usage.prompt_tokens // int(size)
    eventually(lambda: retained() == blocks > 0)


def test_the_asynchronous_client_has_many_streams_at_once(base_url: str, ours: Client) -> None:
    prompts = ["One, two, three,", "The sky is", "Water boils at", "Once upon a time"]
    expected = [ours.generate(prompt, temperature=0.0, max_tokens=12).text for prompt in prompts]

    async def text(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, timeout=120.0) as client:
            return list(await asyncio.gather(*(text(client, prompt) for prompt in prompts)))

    assert asyncio.run(texts()) == expected


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=16)
    text = whole.choices[0].text
    stop = text[len(text) // 2 :][:3]
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three,", temperature=0, max_tokens=16, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_equal_seeds_give_equal_answers_and_answers_of_one_request_differ(client: openai.OpenAI) -> None:
    def answers() -> list[str | None]:
        answer = client.chat.completions.create(model=MODEL, messages=HARBOURS, seed=7, n=3, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first = answers()
    assert answers() == first
    assert len(set(first)) > 1


def test_an_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    harbour = {"type": "object", "properties": {"name": {"enum": ["Hamburg", "Genoa"]}, "depth": {"type": "integer"}}}
    schema = {**harbour, "required": ["name", "depth"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HARBOURS,
        max_tokens=60,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "harbour", "schema": schema}},
    )
    told = json.loads(answer.choices[0].message.content or "")
    assert told.keys() == {"name", "depth"}
    assert told["name"] in ("Hamburg", "Genoa")
    with pytest.raises(openai.BadRequestError, match="cannot be used"):
        client.chat.completions.create(
            model=MODEL,
            messages=HARBOURS,
            response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": {"type": "no type"}}},
        )


DEPTH = {
    "type": "object",
    "properties": {
        "harbour": {"enum": ["Hamburg", "Genoa"]},
        "metres": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["harbour", "metres"],
    "additionalProperties": False,
}
CLOSE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "tell_depth", "description": "Of a harbour.", "parameters": DEPTH}},
    {"type": "function", "function": {"name": "close_harbour", "parameters": CLOSE}},
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell_depth"}}])
def test_a_forced_call_fits_its_schema_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HARBOURS, "max_tokens": 120, "seed": 5, "tools": TOOLS}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    schemas = {"tell_depth": DEPTH, "close_harbour": CLOSE}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    as_response = {"input": HARBOURS, "max_output_tokens": 120, "extra_body": {"seed": 5}, "parallel_tool_calls": False}
    tools: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
    of_response = choice if choice == "required" else {"type": "function", **choice["function"]}
    (item,) = client.responses.create(model=MODEL, tools=tools, tool_choice=of_response, **as_response).output
    assert (item.type, item.name, item.arguments) == ("function_call", call.function.name, call.function.arguments)


def test_a_model_without_a_form_of_calls_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template has no form of calls"):
        client.chat.completions.create(model=MODEL, messages=HARBOURS, tools=TOOLS)


def test_a_call_cannot_be_forced_into_a_schema_that_is_none(client: openai.OpenAI) -> None:
    none = {"type": "function", "function": {"name": "none", "parameters": {"properties": {"a": {"type": "no type"}}}}}
    with pytest.raises(openai.BadRequestError, match="cannot be used"):
        client.chat.completions.create(model=MODEL, messages=HARBOURS, tools=[none], tool_choice="required")


def test_logprobs_are_what_our_client_gets(client: openai.OpenAI, ours: Client) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    expected = ours.chat(HARBOURS, sampling).logprobs
    answer = client.chat.completions.create(
        model=MODEL, messages=HARBOURS, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.logprob for entry in content] == pytest.approx([each.chosen for each in expected], abs=1e-3)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 12
    prompt = "The capital of France is"
    of_ours = ours.generate(prompt, temperature=0.0, max_tokens=1, prompt_logprobs=1)
    echoed = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=1, echo=True, logprobs=1)
    told = echoed.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or []) == echoed.choices[0].text == prompt + " Paris"
    expected_of_prompt = [each and pytest.approx(each.chosen, abs=1e-3) for each in of_ours.prompt_logprobs]
    assert (told.token_logprobs or [])[:-1] == expected_of_prompt


def test_a_response_is_the_chat_of_our_client_whole_streamed_and_asynchronous(
    client: openai.OpenAI, base_url: str, ours: Client
) -> None:
    expected = ours.chat(HARBOURS, temperature=0.0, max_tokens=12).text
    asked: dict[str, Any] = {"model": MODEL, "input": HARBOURS, "temperature": 0, "max_output_tokens": 12}
    answer = client.responses.create(**asked)
    assert (answer.output_text, answer.status) == (expected, "incomplete")
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens > 0) == (12, True)
    with client.responses.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == expected

    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, timeout=120.0) as client:
            events = await client.responses.create(**asked, stream=True)
            return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

    assert asyncio.run(text()) == expected
    with pytest.raises(openai.BadRequestError, match="keeps no state"):
        client.responses.create(model=MODEL, input="and then?", previous_response_id=answer.id)


def test_a_message_of_anthropics_client_is_the_chat_of_our_client_whole_and_streamed(
    base_url: str, ours: Client
) -> None:
    expected = ours.chat(HARBOURS, temperature=0.0, max_tokens=12).text
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": HARBOURS, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), auth_token=KEY, timeout=120.0) as client:
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for each in (message, streamed):
        assert [block.text for block in each.content] == [expected]
        assert (each.stop_reason, each.usage.output_tokens) == ("max_tokens", 12)
        assert each.usage.cache_read_input_tokens > 0


def test_a_message_may_ask_for_more_tokens_than_fit(base_url: str) -> None:
    harbours = {"role": "user", "content": "harbour " * 456 + "Describe three harbours at length."}
    asked: dict[str, Any] = {"model": MODEL, "messages": [harbours]}
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), auth_token=KEY, timeout=120.0) as client:
        told = client.messages.count_tokens(**asked).input_tokens
        message = client.messages.create(**asked, max_tokens=32_000, extra_body={"temperature": 0})
        assert 480 < told < 512
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.output_tokens == 512 - told
        with pytest.raises(anthropic.BadRequestError, match="and 1 to generate are more than the 512 tokens"):
            client.messages.create(**{**asked, "messages": [harbours] * 2}, max_tokens=1)


def test_an_answer_that_is_begun_is_gone_on_with(client: openai.OpenAI, base_url: str, ours: Client) -> None:
    begun: Any = [
        {"role": "user", "content": "Which city is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    asked: dict[str, Any] = {"model": MODEL, "messages": begun, "max_tokens": 4}
    expected = ours.chat(begun, temperature=0.0, max_tokens=4, continue_final_message=True).text
    assert expected.startswith(" Paris")
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(**asked, temperature=0, extra_body=goes_on)
    assert answer.choices[0].message.content == expected
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), auth_token=KEY, timeout=120.0) as other:
        (block,) = other.messages.create(**asked, extra_body={"temperature": 0}).content
    assert (block.type, block.text) == ("text", expected)


def test_an_adapter_is_a_model_of_its_own(client: openai.OpenAI, deployment: Deployment, ours: Client) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    with LocalEngine(replace(deployment.config, replicas=1, min_replicas=1)) as engine:
        expected = [
            "".join(delta.text for delta in engine.stream_chat(HARBOURS, sampling, adapter=adapter))
            for adapter in ("", ADAPTER)
        ]
    assert expected[0] != expected[1]
    for _ in range(2):  # the second time out of the cache, which each has its own of
        for model, text in zip((MODEL, ADAPTER), expected, strict=True):
            answer = client.chat.completions.create(model=model, messages=HARBOURS, temperature=0, max_tokens=12)
            assert (answer.model, answer.choices[0].message.content) == (model, text)
    assert ours.chat(HARBOURS, sampling, adapter=ADAPTER).text == expected[1]
    with pytest.raises(openai.NotFoundError, match="the model 'pirate' is not served here: served are"):
        client.models.retrieve("pirate")
    with pytest.raises(InvalidRequestError, match="there is no adapter 'pirate'; served are sailor"):
        ours.generate("x", adapter="pirate")


def test_a_second_request_says_what_the_cache_served(client: openai.OpenAI) -> None:
    for _ in range(2):
        answer = client.completions.create(model=MODEL, prompt=FAMILIES, temperature=0, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 48


def test_token_ids_and_our_own_parameters_are_taken(client: openai.OpenAI, base_url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=base_url.removesuffix("/v1"), headers=headers, timeout=120.0) as http:
        tokens = http.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "The capital of France is"
    ours = {"top_k": 5, "ignore_eos": True, "priority": -1, "cache_salt": "tenant"}
    answer = client.completions.create(
        model=MODEL, prompt=tokens, temperature=0, max_tokens=4, echo=True, extra_body=ours
    )
    assert answer.choices[0].text.startswith("The capital of France is Paris")


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, ADAPTER]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_those_of_the_official_client(client: openai.OpenAI, base_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="600 to generate"):
        client.chat.completions.create(model=MODEL, messages=HARBOURS, max_tokens=600)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")
    with (
        openai.OpenAI(base_url=base_url, api_key="sk-wrong", timeout=120.0) as stranger,
        pytest.raises(openai.AuthenticationError) as unknown,
    ):
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"


def test_a_stream_that_is_closed_frees_its_blocks(client: openai.OpenAI, ours: Client) -> None:
    def total(of: str, what: str) -> int:
        return sum(engine[of][what] for engine in ours.stats()["engines"].values())

    before = total("requests", "aborted")
    stream = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: total("requests", "aborted") == before + 1 and total("cache", "held_blocks") == 0)


def test_metrics_tell_of_servers_and_engines(deployment: Deployment) -> None:
    def metrics() -> str:
        answer = httpx.get(f"{deployment.http_address}/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert answer.headers["connection"] == "close"
        return answer.text

    for name in (
        'headwise_time_to_first_token_seconds_bucket{le="0.5",server="http-0"}',
        'headwise_time_to_first_token_seconds_bucket{le="0.5",server="http-1"}',
        'headwise_prefix_cache_hit_tokens_total{engine="engine-0",tier="device"}',
        'headwise_kv_cache_blocks{engine="engine-0",state="free",tier="device"}',
    ):
        eventually(lambda name=name: name in metrics())


def test_the_page_is_told_of_the_model_and_its_head_groups(deployment: Deployment) -> None:
    assert "<!doctype html>" in httpx.get(deployment.http_address).text
    told = httpx.get(f"{deployment.http_address}/deployment", headers={"authorization": f"Bearer {KEY}"}).json()
    assert told["model"] == MODEL
    ((name, text),) = told["groups"]
    assert name == "group 0"
    assert text.startswith("full attention, 90 ")
    assert told["engines"][0]["pools"].keys() == {"device", "host"}


def test_a_request_is_a_span_of_its_caller_s_trace(client: openai.OpenAI, collector: Collector) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    client.chat.completions.create(
        model=MODEL, messages=HARBOURS, max_tokens=8, extra_headers=headers, extra_body={"ignore_eos": True}
    )

    def found() -> list[Any]:
        return [span for span in collector.spans if span.trace_id.hex() == trace]

    eventually(lambda: bool(found()))
    (span,) = found()
    told = attributes(span)
    latencies = [told[f"gen_ai.latency.time_in_{what}"] for what in ("queue", "model_prefill", "model_decode")]
    assert 0 < sum(latencies) <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert told["gen_ai.usage.output_tokens"] == 8


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_killed_is_started_again_and_the_other_answers(
    deployment: Deployment, client: openai.OpenAI, how: signal.Signals
) -> None:
    before = deployment.actor_pids()["http-0"]
    os.kill(before, how)
    assert client.models.list().data  # the client tries again where a connection ends

    def is_back() -> bool:
        try:
            return deployment.actor_pids().get("http-0", before) != before
        except Exception:  # the actor is just ending
            return False

    eventually(is_back)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].text


def test_readiness_needs_no_key(deployment: Deployment) -> None:
    assert httpx.get(f"{deployment.http_address}/ready").json()["engines"] == len(ENGINES)


def test_a_tenant_s_key_comes_and_goes_while_all_serve(deployment: Deployment, base_url: str, ours: Client) -> None:
    file, key = Path(deployment.config.api_key_file), "sk-of-a-tenant"
    before, http = file.read_text(), httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=120.0)
    models = f"{base_url}/models"
    assert http.get(models).status_code == 401
    file.write_text(f"{before}{key} tenant=team\n")
    eventually(lambda: all(http.get(models).status_code == 200 for _ in range(8)))  # of both servers
    assert http.post(f"{base_url}/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200

    assert deployment.client_keys is not None
    keys, tenants = ClientKeys(deployment.client_keys.server, key), list[Client]()

    def is_let_in() -> bool:
        with suppress(DeploymentError):  # the scheduler has not looked yet
            tenants.append(Client(deployment.client_address, keys=keys))
        return bool(tenants)

    eventually(is_let_in)
    with tenants[0] as tenant:
        prompts = ["The capital of France is"] * 4
        expected = [result.text for result in ours.generate(prompts, temperature=0.0, max_tokens=8)]
        eventually(lambda: [each.text for each in answered(tenant, prompts)] == expected)  # engines have heard of it
        with pytest.raises(NotAllowedError, match="this API key is tenant team's"):
            tenant.scale(1)
        file.write_text(before)
        eventually(lambda: http.get(models).status_code == 401)
        with pytest.raises(HeadwiseError):
            eventually(lambda: not tenant.generate("a", max_tokens=1))
    http.close()


def answered(client: Client, prompts: list[str]) -> list[GenerationResult]:
    try:
        results = client.generate(prompts, temperature=0.0, max_tokens=8)
    except HeadwiseError:
        return []
    assert isinstance(results, list)
    return results


def test_keys_are_in_no_log(deployment: Deployment, client: openai.OpenAI) -> None:
    assert client.models.list().data
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {path.name: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert texts, "Ray writes logs"
    assert [name for name, text in texts.items() if KEY.encode() in text] == []


def test_ray_has_the_same_numbers_as_metrics_of_its_own(deployment: Deployment) -> None:
    """Last of all: Ray takes them from processes every ten seconds."""
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def is_there(name: str, **labels: str) -> bool:
        wanted = [f'{key}="{value}"' for key, value in {"deployment": "headwise", **labels}.items()]
        lines = [line for line in httpx.get(url).text.splitlines() if line.startswith(f"ray_headwise_{name}{{")]
        return any(all(label in line for label in wanted) for line in lines)

    eventually(lambda: is_there("kv_cache_blocks", engine="engine-0", tier="device", state="free"))
    eventually(lambda: is_there("routing_decisions_total", reason="no_hit"))
    eventually(lambda: is_there("time_to_first_token_seconds_bucket", server="http-1", le="0.5"))
