"""Client, global scheduler and engine server over real sockets; only the model is scripted."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import SECRET, Deployment, ScriptedPreprocessor
from support.passing_on import PortForward
from support.skipping_clock import SkippingClock
from support.waiting import PATIENCE_S, eventually
from typer.testing import CliRunner

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import (
    ConfigError,
    DeploymentError,
    EngineDiedError,
    HeadwiseError,
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
)
from headwise.runtime.cli.app import app
from headwise.runtime.client import client as client_module
from headwise.runtime.client import connections, many_prompts
from headwise.runtime.client.client import Client
from headwise.runtime.client.io_thread import ClientIO
from headwise.runtime.client.ways import RelayMode
from headwise.runtime.engine.reports import Reporting
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.frontend import pending_calls
from headwise.runtime.frontend.scaling import FleetState, Split, Wish
from headwise.runtime.frontend.scheduler_server import SchedulerServer
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import (
    MAX_PING_REQUESTS,
    Abort,
    EngineStatus,
    Failed,
    GetStats,
    Outputs,
    Ping,
    Pong,
    Route,
    Stats,
    Submit,
)
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, SamplingParams, Usage
from headwise.runtime.protocol.request_checks import check_request


@pytest.fixture
def client(deployment: Deployment, core: ScriptedCore) -> Iterator[Client]:
    with Client(deployment.address) as client:
        yield client


# ---- what a client can do ----


def test_generate_returns_the_whole_text(client: Client) -> None:
    result = client.generate("abc", max_tokens=4)
    assert result.text == "0 1 2 3 "
    assert result.token_ids == [0, 1, 2, 3]
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage == Usage(3, 0, 4)
    assert result.request_id.startswith("r-")


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3])])
def test_token_ids_are_one_prompt(client: Client, prompt: Any) -> None:
    assert client.generate(prompt, max_tokens=1).usage.prompt_tokens == 3


@pytest.mark.parametrize("prompts", [["a", "bcd"], [[1], [1, 2, 3]], ["a", [1, 2, 3]]])
def test_several_prompts_give_several_results_in_order(client: Client, prompts: Any) -> None:
    results = client.generate(prompts, SamplingParams(max_tokens=2))
    assert [result.usage.prompt_tokens for result in results] == [1, 3]
    assert [result.text for result in results] == ["0 1 ", "0 1 "]


@pytest.mark.parametrize("is_async", [False, True])
def test_of_a_long_list_some_prompts_are_under_way_and_those_that_begin_alike_together(
    is_async: bool, client: Client, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_prompts, "MOST_OPEN", 4)
    core.gate.clear()
    prompts = [f"{300 * 'abc'[number % 3]} {number}" for number in range(12)]

    def call() -> Any:
        if is_async:
            return asyncio.run(client.agenerate(prompts, max_tokens=1))
        return client.generate(prompts, max_tokens=1)

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(call)
        eventually(lambda: len(core.live) == 4)
        time.sleep(0.1)
        begun = ["".join(map(chr, request.prompt_token_ids)) for request, _ in core.live.values()]
        core.gate.set()
        results = calling.result(PATIENCE_S)
    assert sorted(begun) == sorted(prompts[::3])
    assert [result.usage.prompt_tokens for result in results] == [len(prompt) for prompt in prompts]


def test_the_first_error_of_a_long_list_ends_what_is_under_way(
    client: Client, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_prompts, "MOST_OPEN", 2)
    for call in (client.generate, lambda *given, **options: asyncio.run(client.agenerate(*given, **options))):
        with pytest.raises(InvalidRequestError, match="empty"):
            call(["", "abc", "abd", "abe"], max_tokens=10**6)
        eventually(lambda: not core.live)


def test_several_samples_are_requests_with_seeds_of_their_own(client: Client, core: ScriptedCore) -> None:
    core.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(client.generate, ["a", "bcd"], n=3, seed=5, max_tokens=1, priority=1)
        eventually(lambda: len(core.live) == 6)
        requests = [request for request, _ in core.live.values()]
        core.gate.set()
        results = calling.result(PATIENCE_S)
    assert [result.usage.prompt_tokens for result in results] == [1, 1, 1, 3, 3, 3]
    seeds = [sample.seed for sample in SamplingParams(n=3, seed=5).samples()]
    assert sorted(request.sampling.seed for request in requests) == sorted(seeds * 2)
    assert {(request.sampling.n, request.priority) for request in requests} == {(1, 1)}
    assert len(client.generate("abc", SamplingParams(n=2, max_tokens=1))) == 2
    assert len(asyncio.run(client.agenerate("abc", n=2, max_tokens=1))) == 2


def test_a_stream_or_chat_is_one_sample(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2, but a chat or stream is one sample"):
        client.stream("abc", n=2)
    with pytest.raises(InvalidRequestError, match="n is 2, but a chat or stream is one sample"):
        client.chat([{"role": "user", "content": "hi"}], n=2)


def test_a_stream_gives_each_delta_and_the_result(client: Client) -> None:
    stream = client.stream("abc", {"max_tokens": 3}, temperature=0.0)
    assert [delta.text for delta in stream] == ["0 ", "1 ", "2 "]
    assert stream.result.text == "0 1 2 "
    assert next(stream, None) is None


def test_chats_send_their_messages(client: Client) -> None:
    messages = [{"role": "user", "content": "four"}]
    assert client.chat(messages, max_tokens=1).usage.prompt_tokens == 4
    assert [delta.text for delta in client.stream_chat(messages, max_tokens=1)] == ["0 "]


def test_chats_send_their_tools(client: Client) -> None:
    messages = [{"role": "user", "content": "four"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert client.chat(messages, max_tokens=1, tools=tools, chat_template_kwargs={"day": 1}).usage.prompt_tokens == 4
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] must be a function"):
        client.chat(messages, tools=["add"])
    with pytest.raises(InvalidRequestError, match="unknown sampling parameter tools"):
        client.stream("four", tools=tools)


def test_priority_and_salt_reach_the_engine(client: Client, core: ScriptedCore) -> None:
    core.gate.clear()
    with client.stream("abc", priority=-3, cache_salt="tenant"):
        eventually(lambda: len(core.live) == 1)
        ((request, _),) = core.live.values()
        assert (request.priority, request.cache_salt) == (-3, "tenant")


def test_the_asynchronous_calls_do_the_same(client: Client) -> None:
    async def calls() -> None:
        one, two = await client.agenerate(["a", "bc"], max_tokens=2)
        assert (one.text, two.usage.prompt_tokens) == ("0 1 ", 2)
        assert [delta.text async for delta in client.astream("x", max_tokens=2)] == ["0 ", "1 "]
        assert (await client.achat([{"role": "user", "content": "hi"}], max_tokens=1)).text == "0 "
        assert (await client.astats())["model"] == "scripted"
        with pytest.raises(InvalidRequestError):
            await client.agenerate("")

    asyncio.run(calls())


def test_many_threads_share_one_client(client: Client) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(client.generate("a", max_tokens=3).text)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert texts == ["0 1 2 "] * 16


def test_a_step_s_tokens_reach_a_client_as_one_message(deployment: Deployment, core: ScriptedCore) -> None:
    core.gate.clear()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(deployment.servers[0].endpoint)
        for index in range(20):
            request = GenerateRequest(f"r{index}", np.ones(1, np.int32), SamplingParams(max_tokens=3))
            socket.send(wire.encode(Submit(index, request)))
        eventually(lambda: len(core.live) == 20)
        core.gate.set()
        messages = [wire.decode(socket.recv(), Outputs) for _ in range(3)]
    assert [len(message.deltas) for message in messages] == [20, 20, 20]


# ---- operations ----


def test_an_operation_is_over_when_every_engine_is_done() -> None:
    deployment, cores = Deployment(replicas=2), [ScriptedCore(), ScriptedCore()]
    for core in cores:
        deployment.add_engine(core)
    with Client(deployment.address) as client, ThreadPoolExecutor() as pool:
        slept = pool.submit(client.sleep)
        cores[1].finish()
        eventually(lambda: [o.action for o in cores[0].operations] == ["sleep"])
        assert not slept.done()
        cores[0].finish()
        slept.result(PATIENCE_S)
        reset = pool.submit(client.reset_cache, "device")
        for blocks, core in enumerate(cores, start=5):
            core.finish(blocks)
        assert reset.result(PATIENCE_S) == {"engine-0": 5, "engine-1": 6}
    deployment.close()


def test_nothing_is_asked_for_while_an_engine_is_missing() -> None:
    deployment, core = Deployment(replicas=2), ScriptedCore()
    deployment.add_engine(core)
    with Client(deployment.address) as client, pytest.raises(OverloadedError, match="1 of 2 engines are ready"):
        client.sleep()
    assert not core.operations
    deployment.close()


def test_an_operation_that_takes_longer_than_any_silence_is_waited_for(
    client: Client, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PEER_TIMEOUT_S", 2.5)  # a busy machine may be as silent for a moment
    monkeypatch.setattr(connections, "PING_INTERVAL_S", 0.1)
    with ThreadPoolExecutor() as pool:
        woken = pool.submit(client.wake)
        time.sleep(3.0)
        core.finish()
        woken.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("command", "said"),
    [(["sleep"], ""), (["wake"], ""), (["reset-cache", "--tier", "device"], "engine-0: 7 blocks\n")],
)
def test_the_command_line_asks_for_the_same(
    deployment: Deployment, core: ScriptedCore, command: list[str], said: str
) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(CliRunner().invoke, app, [*command, "--address", deployment.address])
        eventually(lambda: bool(core.operations))
        assert core.operations[0].action == command[0].replace("-", "_")
        core.finish(7)
        assert (asked.result(PATIENCE_S).exit_code, asked.result().stdout) == (0, said)


def test_an_engine_s_refusal_is_the_caller_s_error(client: Client) -> None:
    with pytest.raises(ConfigError, match="no storage"):
        client.reset_cache("storage")


def test_an_operation_ends_with_the_engine_that_dies(client: Client, core: ScriptedCore) -> None:
    with ThreadPoolExecutor() as pool:
        woken = pool.submit(client.wake)
        eventually(lambda: bool(core.operations))
        core.dies = EngineDiedError("the checkpoint is gone")
        with pytest.raises(EngineDiedError, match="the checkpoint is gone"):
            woken.result(PATIENCE_S)
        with pytest.raises(OverloadedError, match="the engine is starting"):
            client.sleep()


# ---- cancelling ----


def cancel(stream: Any) -> None:
    stream.cancel()


def leave_block(stream: Any) -> None:
    with stream:
        next(stream)


@pytest.mark.parametrize(
    ("asked_for", "wished"),
    [
        ("--replicas 3", (3, None)),
        ("--replicas auto", (None, None)),
        ("--prefill 0 --decode 0 --replicas 2", (2, Split())),
    ],
)
def test_the_command_line_sets_the_number_of_engines(
    deployment: Deployment, asked_for: str, wished: tuple[int | None, Split | None]
) -> None:
    def wish() -> Wish | None:
        return deployment.exchange.swap(FleetState(1, "")).wish

    with ThreadPoolExecutor() as pool:
        command = ["scale", *asked_for.split(), "--address", deployment.address]
        asked = pool.submit(CliRunner().invoke, app, command)
        eventually(lambda: wish() is not None)
        assert (wish().replicas, wish().split) == wished
        deployment.exchange.swap(FleetState(3, "1 -> 3: decided", wish=wish().id))
        result = asked.result(PATIENCE_S)
    assert (result.exit_code, result.stdout) == (0, "1 -> 3: decided\n")


@pytest.mark.parametrize("replicas", ["-1", "many", "1.5"])
def test_a_number_that_is_none_is_told_before_anything_is_asked(replicas: str) -> None:
    result = CliRunner().invoke(app, ["scale", "--replicas", replicas, "--address", "127.0.0.1:9"])
    assert result.exit_code == 2
    assert "give a number of engines, or auto" in result.stderr


@pytest.mark.parametrize("end", [cancel, leave_block])
def test_a_stream_that_is_left_aborts_its_request(client: Client, core: ScriptedCore, end: Any) -> None:
    stream = client.stream("abc", max_tokens=10**6)
    assert next(stream).text == "0 "
    end(stream)
    eventually(lambda: len(core.aborted) == 1)
    assert list(stream) == []
    assert stream.result.finish_reason is FinishReason.ABORT
    assert client.generate("abc", max_tokens=1).text == "0 "


def test_breaking_out_of_a_loop_aborts_the_request(client: Client, core: ScriptedCore) -> None:
    for _ in client.stream("abc", max_tokens=10**6):
        break
    gc.collect()
    eventually(lambda: len(core.aborted) == 1)


def test_cancelling_from_another_thread_ends_a_waiting_stream(client: Client, core: ScriptedCore) -> None:
    core.gate.clear()
    stream = client.stream("abc")
    threading.Timer(0.2, stream.cancel).start()
    assert list(stream) == []


def test_a_cancelled_task_aborts_its_request(client: Client, core: ScriptedCore) -> None:
    async def calls() -> None:
        task = asyncio.create_task(client.agenerate("abc", max_tokens=10**6))
        while not core.live:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(calls())
    eventually(lambda: len(core.aborted) == 1)


def test_the_first_error_of_several_prompts_cancels_the_others(client: Client, core: ScriptedCore) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        client.generate(["", "abc"], max_tokens=10**6)
    eventually(lambda: not core.live)


def test_closing_the_client_ends_its_requests(deployment: Deployment, core: ScriptedCore) -> None:
    core.gate.clear()
    client = Client(deployment.address)
    stream = client.stream("abc")
    eventually(lambda: len(core.live) == 1)
    client.close()
    with pytest.raises(RequestAbortedError, match="closed"):
        next(stream)
    eventually(lambda: len(core.aborted) == 1)
    with pytest.raises(DeploymentError, match="closed"):
        client.generate("abc")


def test_a_client_that_breaks_says_so_to_every_caller(
    client: Client, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.gate.clear()
    stream = client.stream("abc", max_tokens=4)
    eventually(lambda: bool(core.live))

    def broken(self: connections.Connections) -> None:
        raise KeyError("unheard of")

    monkeypatch.setattr(connections.Connections, "check_silence", broken)
    with pytest.raises(DeploymentError, match=r"failed .*unheard of.*make a new one"):
        stream.read()
    with pytest.raises(DeploymentError, match="is closed; make a new one"):
        client.generate("abc", max_tokens=4)
    core.gate.set()


def read_over_a_suspension(client: Client, core: ScriptedCore, clock: SkippingClock) -> None:
    """A stream is read to its end although those who use the clock are suspended in the middle of it."""
    core.gate.clear()
    stream = client.stream("abc", max_tokens=4)
    eventually(lambda: bool(core.live))
    clock.skip(3600.0)
    core.gate.set()
    assert stream.read().token_ids == [0, 1, 2, 3]
    assert core.aborted == []


def test_an_engine_that_was_suspended_keeps_its_clients(deployment: Deployment) -> None:
    core, clock = ScriptedCore(), SkippingClock()
    deployment.add_engine(core, clock=clock)
    with Client(deployment.address) as client:
        read_over_a_suspension(client, core, clock)


def test_a_client_that_was_suspended_gives_up_neither_engine_nor_deployment(
    deployment: Deployment, core: ScriptedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SkippingClock()
    monkeypatch.setattr(client_module, "ClientIO", partial(ClientIO, clock=clock))
    with Client(deployment.address) as client:
        read_over_a_suspension(client, core, clock)
        assert client.stats()["scheduler"]["rerouted"] == 0


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_q": 1}, "unknown sampling parameter top_q"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": "x" * 10_000_000}, "10000000 characters"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"cache_salt": b"x"}, "cache_salt must be a string"),
        ({"cache_salt": "\udcff"}, "cache_salt is no valid Unicode: character 0 is half of a surrogate pair"),
        ({"stop": "a\ud800"}, "a stop string is no valid Unicode: character 1"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"sampling": "greedy"}, "sampling must be SamplingParams or a mapping"),
    ],
)
def test_bad_options_are_named(client: Client, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        client.generate("abc", **options)
    assert client.generate("abc", max_tokens=1).text == "0 "


@pytest.mark.parametrize("prompt", ["", "\ud800", [], [-1], [1.5], 7, None])
def test_bad_prompts_are_refused(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        client.generate(prompt)


def test_a_request_that_no_message_can_hold_is_refused_here(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        client.chat([{"role": "user", "content": "\ud800"}])


@pytest.mark.parametrize(
    "messages", [None, [], "hi", [{"role": "robot", "content": "x"}], [{"role": "user", "content": object()}]]
)
def test_chats_that_no_model_takes_are_refused_here(client: Client, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        client.chat(messages)
    with pytest.raises(InvalidRequestError, match="messages"):
        client.find_chat_prefix(messages)


def test_numpy_s_numbers_are_taken_as_numbers(client: Client) -> None:
    result = client.generate("abc", max_tokens=np.int64(2), ignore_eos=np.bool_(True), priority=np.int32(1))
    assert result.text == "0 1 "


def test_an_operation_on_what_is_no_tier_disturbs_no_other_call(client: Client) -> None:
    stream = client.stream("abc", max_tokens=3)
    with pytest.raises(InvalidRequestError, match="tier must be a string, got 5"):
        client.reset_cache(5)
    assert stream.read().text == "0 1 2 "


def test_an_overloaded_engine_says_so(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore(max_requests=0))
    with Client(deployment.address) as client, pytest.raises(OverloadedError, match="0 requests are waiting"):
        client.generate("abc")


def test_no_engine_is_an_overload_and_no_hang(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "ENGINES_REPORT_S", 0.1)
    with Client(deployment.address) as client, pytest.raises(OverloadedError, match="no engine is ready"):
        client.generate("abc")


def test_who_waits_for_the_first_engine_is_told_so_in_one_line(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.exchange.swap(FleetState(1, "0 -> 1: a request waits"))
    with Client(deployment.address) as client:
        streams = [client.stream("abc", max_tokens=2) for _ in range(2)]
        told = "waiting for an engine to start (0 serve; asked for 1)"
        eventually(lambda: [stream.waits for stream in streams] == [told, told])
        deployment.add_engine(ScriptedCore())
        assert [stream.read().text for stream in streams] == ["0 1 ", "0 1 "]
        assert [stream.waits for stream in streams] == ["", ""]
    assert [record.message for record in caplog.records].count(told) == 1


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\xa4Ping\x90", wire.encode(Outputs(()))])
@pytest.mark.parametrize("to", ["scheduler", "engine"])
def test_malformed_messages_are_answered_and_disturb_nobody(
    deployment: Deployment, client: Client, to: str, data: bytes
) -> None:
    endpoint = f"tcp://{deployment.address}" if to == "scheduler" else deployment.servers[0].endpoint
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send(data)
        socket.send_multipart([b"a", b"b"])
        answers = [wire.decode(socket.recv()) for _ in range(2)]
    assert [type(answer) for answer in answers] == [Failed, Failed]
    assert answers[0].error == "WireError"
    assert "one frame" in answers[1].message
    assert client.generate("abc", max_tokens=1).text == "0 "


def test_the_scheduler_itself_checks_what_hand_made_clients_send(deployment: Deployment, core: ScriptedCore) -> None:
    route = Route(5, "abc", None, None, {"stop": 7}, 0, "")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://{deployment.address}")
        socket.send(wire.encode(route))
        answer = wire.decode(socket.recv(), Failed)
    assert answer.key == 5
    assert "stop must be a list" in answer.message


def test_the_engine_itself_checks_what_hand_made_clients_send(deployment: Deployment, core: ScriptedCore) -> None:
    item = ExtraKey(0, 3, "h")
    bad = [
        GenerateRequest("", np.ones(1, np.int32), SamplingParams()),
        GenerateRequest("r", np.ones((2, 2), np.int32), SamplingParams()),
        GenerateRequest("r", np.array([-5], np.int32), SamplingParams()),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), output_token_ids=(-1,)),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), output_token_ids=(2**40,)),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), cache_salt="s" * 2000),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), lora_id="a" * 2000),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(n=2)),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), extra_keys=(ExtraKey(0, 1, "h"),) * 2000),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), extra_keys=(ExtraKey(0, 2, "h"),)),
        GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), extra_keys=(ExtraKey(0, 1, "h" * 200),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(item, item)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(item._replace(columns=2),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(item._replace(columns=-1),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(ExtraKey(-1, 2, "h"),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(ExtraKey(2, 1, "h"),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(ExtraKey(0, 2**40, "h"),)),
        GenerateRequest("r", np.ones(3, np.int32), SamplingParams(), extra_keys=(ExtraKey(0, 1, ""),)),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(deployment.servers[0].endpoint)
        for request in bad:
            socket.send(wire.encode(Submit(1, request)))
        answers = [wire.decode(socket.recv(), Failed) for _ in bad]
    assert all(answer.error == "InvalidRequestError" for answer in answers)
    assert not core.live


def test_a_name_of_an_adapter_that_is_too_long_is_refused() -> None:
    request = GenerateRequest("r", np.ones(1, np.int32), SamplingParams(), lora_id="a" * 2000)
    with pytest.raises(InvalidRequestError, match="a lora_id has 2000 characters; at most 1024 are allowed"):
        check_request(request)


def test_a_request_id_of_another_client_can_be_neither_taken_nor_aborted(
    deployment: Deployment, core: ScriptedCore
) -> None:
    core.gate.clear()
    request = GenerateRequest("mine", np.ones(1, np.int32), SamplingParams())
    with zmq.Context() as context, context.socket(zmq.DEALER) as mine, context.socket(zmq.DEALER) as other:
        for socket in (mine, other):
            socket.connect(deployment.servers[0].endpoint)
        mine.send(wire.encode(Submit(1, request)))
        eventually(lambda: "mine" in core.live)
        other.send(wire.encode(Submit(1, request)))
        assert "taken" in wire.decode(other.recv(), Failed).message
        other.send(wire.encode(Abort("mine")))
        other.send(wire.encode(GetStats(2)))
        assert wire.decode(other.recv(), Stats).stats["live"] == 1


def test_who_goes_past_the_scheduler_fills_no_engine(deployment: Deployment) -> None:
    core = ScriptedCore()
    core.gate.clear()
    server = deployment.add_engine(core, most_of_one=2)

    def submit(name: str, tenant: str = "") -> Submit:
        return Submit(1, GenerateRequest(name, np.ones(1, np.int32), SamplingParams(max_tokens=1), tenant=tenant))

    with zmq.Context() as context, context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as other:
        for socket in (one, other):
            socket.connect(server.endpoint)
        for name in ("a", "b", "c"):
            one.send(wire.encode(submit(name)))
        refused = wire.decode(one.recv(), Failed)
        assert (refused.request_id, refused.error) == ("c", "OverloadedError")
        assert "2 requests of this client are at this engine already" in refused.message
        for socket, name in ((one, "d"), (other, "e"), (other, "f")):
            socket.send(wire.encode(submit(name, tenant="team")))
        assert wire.decode(other.recv(), Failed).request_id == "f", "a tenant's are counted over its connections"
        other.send(wire.encode(submit("g")))
        eventually(lambda: sorted(core.live) == ["a", "b", "d", "e", "g"])
        core.gate.set()
        eventually(lambda: not core.live)
        one.send(wire.encode(submit("h")))
        eventually(lambda: core.steps and not core.live)


# ---- who dies, and who does not listen ----


def test_the_only_engine_that_dies_serves_its_requests_again_once_it_has_a_new_core(
    deployment: Deployment, core: ScriptedCore, client: Client
) -> None:
    core.pace_s = 0.01
    stream = client.stream("abc", max_tokens=100)
    said = next(stream).text
    core.dies = EngineDiedError("TP rank 1 was killed")
    eventually(lambda: [str(error) for error in deployment.died] == ["TP rank 1 was killed"])
    waiting = client.stream("abc", max_tokens=2)  # in the scheduler
    eventually(lambda: client.stats()["scheduler"]["pending"] == 2)
    assert any("TP rank 1 was killed" in fault for _, fault in client.stats()["faults"])
    deployment.servers[0].attach(ScriptedCore())
    assert waiting.read().text == "0 1 "
    assert said + "".join(delta.text for delta in stream) == "".join(f"{n} " for n in range(100))


def test_a_request_leaves_an_engine_that_dies_for_one_that_lives(deployment: Deployment) -> None:
    cores = [ScriptedCore(), ScriptedCore()]
    for core in cores:
        core.pace_s = 0.01
        deployment.add_engine(core)
    with Client(deployment.address) as client:
        streams = [client.stream("abc", max_tokens=100) for _ in range(6)]
        eventually(lambda: all(core.live for core in cores))
        cores[0].dies = EngineDiedError("TP rank 1 was killed")
        assert [stream.read().text for stream in streams] == ["".join(f"{n} " for n in range(100))] * 6
        assert client.stats()["scheduler"]["rerouted"] > 0


def test_an_idle_engine_whose_workers_are_lost_lets_go_of_its_core(deployment: Deployment, core: ScriptedCore) -> None:
    deployment.servers[0].fail(EngineDiedError("TP rank 0 was killed"))
    eventually(lambda: [str(error) for error in deployment.died] == ["TP rank 0 was killed"])


def test_a_bug_in_the_engine_is_its_death_too(deployment: Deployment, core: ScriptedCore) -> None:
    core.dies = KeyError("row 3")
    eventually(lambda: [str(error) for error in deployment.died] == ["the engine failed: KeyError: 'row 3'"])


def test_an_engine_reports_who_it_is_what_it_has_to_do_and_what_it_received(core: ScriptedCore) -> None:
    statuses: list[EngineStatus] = []

    def latest() -> EngineStatus:
        while socket.poll(0):
            statuses.append(wire.decode(socket.recv_multipart()[1], EngineStatus))
        return statuses[-1]

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, context.socket(zmq.DEALER) as client:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        reporting = Reporting(f"tcp://127.0.0.1:{port}", SECRET, "engine-3")
        server = EngineServer("tcp://127.0.0.1:*", reporting=reporting, epoch=7)
        server.start()
        eventually(lambda: socket.poll(0) > 0)
        assert (latest().secret, latest().engine, latest().endpoint) == (SECRET, "engine-3", server.endpoint)
        assert (latest().epoch, latest().work.accepts) == (7, False)
        core.gate.clear()
        server.attach(core)
        client.connect(server.endpoint)
        client.send(wire.encode(Submit(1, GenerateRequest("r", np.ones(1, np.int32), SamplingParams()))))
        eventually(lambda: latest().received == ("r",) or bool(latest().work.running))
        eventually(lambda: latest().work.running == 1)
        core.dies = EngineDiedError("TP rank 1 was killed")
        core.gate.set()
        eventually(lambda: not latest().work.accepts)
        assert latest().epoch > 7
        eventually(lambda: latest().load == 0)
        assert [request_id for each in statuses for request_id in each.received] == ["r"]
        assert [fault for each in statuses for fault in each.faults] == ["TP rank 1 was killed"]
        assert server.loop_count > 0
        server.stop()


def test_an_engine_reports_to_a_scheduler_that_has_moved(core: ScriptedCore) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as before, context.socket(zmq.ROUTER) as after:
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (before, after)]
        server = EngineServer(
            "tcp://127.0.0.1:*", reporting=Reporting(f"tcp://127.0.0.1:{ports[0]}", SECRET, "engine-3")
        )
        server.start()
        eventually(lambda: before.poll(0) > 0)
        server.follow(f"tcp://127.0.0.1:{ports[1]}", "")
        eventually(lambda: after.poll(0) > 0)
        assert wire.decode(after.recv_multipart()[1], EngineStatus).engine == "engine-3"
        server.stop()


def test_a_request_the_engine_does_not_know_is_failed_by_the_next_ping(
    deployment: Deployment, core: ScriptedCore
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(deployment.servers[0].endpoint)
        socket.send(wire.encode(Ping(("lost",))))
        answers = [wire.decode(socket.recv()) for _ in range(2)]
    assert isinstance(answers[0], Pong)
    assert (answers[1].request_id, answers[1].error) == ("lost", "RequestAbortedError")


def test_a_client_that_vanishes_has_its_requests_aborted(deployment: Deployment) -> None:
    core = ScriptedCore()
    core.gate.clear()
    server = deployment.add_engine(core, client_timeout_s=0.3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        socket.send(wire.encode(Submit(1, GenerateRequest("gone", np.ones(1, np.int32), SamplingParams()))))
        eventually(lambda: core.aborted == ["gone"])


def test_a_client_that_does_not_read_is_dropped_and_the_others_go_on(deployment: Deployment) -> None:
    core = ScriptedCore()
    server = deployment.add_engine(core, send_queue=2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(server.endpoint)
        core.gate.clear()  # who is dropped loses what it has sent and nobody has read
        for index in range(50):
            request = GenerateRequest(f"slow-{index}", np.ones(1, np.int32), SamplingParams(max_tokens=10**9))
            socket.send(wire.encode(Submit(index, request)))
        eventually(lambda: len(core.live) == 50)
        core.gate.set()
        with Client(deployment.address) as client:
            eventually(lambda: len(core.aborted) == 50)
            assert client.generate("abc", max_tokens=1).text == "0 "


@pytest.mark.parametrize(
    "message", [Abort("nobody's"), Ping(("nobody's",) * MAX_PING_REQUESTS)], ids=["many", "costly"]
)
def test_a_client_that_floods_an_engine_does_not_keep_the_others_from_their_tokens(
    deployment: Deployment, message: Any
) -> None:
    count, steps = (20_000, 200) if isinstance(message, Abort) else (400, 20)
    core = ScriptedCore()
    server = deployment.add_engine(core, send_queue=0)
    client = Client(deployment.address)
    stream = client.stream("abc", max_tokens=10**9)
    next(stream)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.endpoint)
        socket.send(wire.encode(GetStats(1)))
        assert isinstance(wire.decode(socket.recv()), Stats)
        release = threading.Event()
        server.call(lambda: release.wait(PATIENCE_S) and None)
        for _ in range(count):
            socket.send(wire.encode(message))
        socket.send(wire.encode(GetStats(2)))
        before = core.steps
        release.set()
        while not isinstance(wire.decode(socket.recv()), Stats):
            pass
    assert core.steps - before > steps
    client.close()


def test_a_ping_that_names_more_requests_than_are_answered_at_once_is_refused(
    deployment: Deployment, core: ScriptedCore
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(deployment.servers[0].endpoint)
        socket.send(wire.encode(Ping(("r",) * (MAX_PING_REQUESTS + 1))))
        assert "at most 100 " in wire.decode(socket.recv(), Failed).message


def test_requests_are_aborted_as_soon_as_their_client_s_connection_has_ended(deployment: Deployment) -> None:
    core = ScriptedCore()
    core.gate.clear()
    server = deployment.add_engine(core, client_timeout_s=1000.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.endpoint)
        socket.send(wire.encode(Submit(1, GenerateRequest("gone", np.ones(1, np.int32), SamplingParams()))))
        eventually(lambda: "gone" in core.live)
    eventually(lambda: core.aborted == ["gone"])


def test_stopping_an_engine_fails_what_it_serves(deployment: Deployment, core: ScriptedCore, client: Client) -> None:
    core.gate.clear()
    stream = client.stream("abc")
    eventually(lambda: len(core.live) == 1)
    deployment.servers[0].stop()
    with pytest.raises(HeadwiseError, match="stopping"):
        next(stream)


def test_stopping_a_deployment_ends_the_calls_that_wait_for_an_engine(deployment: Deployment) -> None:
    deployment.add_engine(None)
    with Client(deployment.address) as client:
        waiting = client.stream("abc")
        eventually(lambda: client.stats()["scheduler"]["queued"] == 1)
        deployment.scheduler.stop()
        with pytest.raises(DeploymentError, match="stopping"):
            next(waiting)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is noticed is not noticed by silence."""
    monkeypatch.setattr(connections, "FIRST_ANSWER_S", 10**6)
    monkeypatch.setattr(connections, "RECONNECT_S", 10**6)


def test_a_deployment_that_has_stopped_is_told_at_once_also_to_a_client_that_waited_for_nothing(
    deployment: Deployment, client: Client, patient: None
) -> None:
    deployment.scheduler.stop()
    for _ in range(2):
        with pytest.raises(DeploymentError, match=r"no deployment answers .*headwise serve|stopping"):
            client.generate("abc")


# ---- addresses ----


def test_an_address_where_nothing_listens_is_told_at_once(patient: None) -> None:
    with pytest.raises(DeploymentError, match=r"tcp://127\.0\.0\.1:9 \(no connection .*headwise serve"):
        Client("127.0.0.1:9")


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "http://a:1", "a:99999", "a:0", "a b:80", "[::1]", "[1:2]:80", "[a]:80", None, 8700],
)
def test_what_is_no_address_is_said_to_be_none(address: Any) -> None:
    with pytest.raises(DeploymentError, match=r"write HOST:PORT"):
        Client(address)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("relay", ["auto", "always"])
def test_a_deployment_is_reached_at_an_address_of_version_six(
    deployment: Deployment, core: ScriptedCore, relay: RelayMode
) -> None:
    with (
        closing(PortForward("127.0.0.1", deployment.scheduler.port, at="[::1]")) as forward,
        Client(forward.address.removeprefix("tcp://"), relay) as client,
    ):
        assert client.generate("abc", max_tokens=4).text == "0 1 2 3 "


def test_an_address_where_nothing_answers_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_ANSWER_S", 0.3)
    with pytest.raises(DeploymentError, match=r"tcp://127\.0\.0\.1:9 .*headwise serve"):
        Client("127.0.0.1:9")


def test_a_port_that_is_taken_is_an_error_with_a_remedy(deployment: Deployment) -> None:
    with pytest.raises(DeploymentError, match=rf"cannot listen on 127.0.0.1:{deployment.scheduler.port}.*--port"):
        SchedulerServer(ScriptedPreprocessor(), "127.0.0.1", deployment.scheduler.port, secret=SECRET, model="second")


def test_nothing_is_left_behind(deployment: Deployment, core: ScriptedCore) -> None:
    def client_threads() -> int:
        return sum(thread.name == "headwise-client" for thread in threading.enumerate())

    before = client_threads()
    for _ in range(3):
        with Client(deployment.address) as client:
            client.generate("abc", max_tokens=1)
    client = Client(deployment.address)
    del client
    gc.collect()
    eventually(lambda: client_threads() <= before)


def test_a_status_without_the_deployment_s_secret_is_ignored(deployment: Deployment) -> None:
    forged = EngineStatus("guess", "evil", "tcp://evil", 0, {})
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, Client(deployment.address) as client:
        socket.connect(f"tcp://{deployment.address}")
        socket.send(wire.encode(forged))
        socket.send(wire.encode(Ping()))
        assert isinstance(wire.decode(socket.recv()), Pong)
        assert client.stats()["engines"] == {}
