from __future__ import annotations

import threading

import numpy as np
import pytest
from support.engine.simulation import VOCAB, SimulatedExecutor, continuation, simulated_card
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.policy import FULL
from headwise.errors import EngineDiedError, InvalidRequestError
from headwise.runtime.client.local_calls import LocalCalls
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta, SamplingParams

BLOCK = 4


class Letters:
    """Token t is one letter; nothing ends a text by itself."""

    eos_token_ids = (VOCAB + 1,)

    def detokenizer(self, shown_tokens: tuple[str, ...] = ()) -> Letters:
        return self

    def push(self, ids) -> str:
        return "".join(chr(ord("!") + i) for i in ids)

    def flush(self) -> str:
        return ""


@pytest.fixture
def core() -> EngineCore:
    card = simulated_card((FULL,), block_size=BLOCK, num_blocks=64, max_rows=4)
    config = EngineConfig(block_size=BLOCK, max_batched_tokens=16)
    return EngineCore(config, card, Letters(), SimulatedExecutor(card))


@pytest.fixture
def calls(core: EngineCore) -> LocalCalls:
    return LocalCalls(core)


def request(name: str, prompt: list[int], max_tokens: int = 12) -> GenerateRequest:
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), SamplingParams(max_tokens=max_tokens, seed=1))


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_a_call_is_served_while_a_stream_is_open(core: EngineCore, calls: LocalCalls) -> None:
    stream = calls.run([request("open", [1, 2, 3])])
    begun = [next(stream), next(stream)]
    other = list(calls.run([request("other", [4, 5, 6])]))
    assert tokens(other) == continuation([4, 5, 6], 12)
    assert tokens([*begun, *stream]) == continuation([1, 2, 3], 12)
    assert core.cache.pool.num_held == 0


def test_streams_read_in_turn_say_what_each_would_alone(calls: LocalCalls) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    streams = [calls.run([request(str(prompt), prompt)]) for prompt in prompts]
    got = [list(deltas) for deltas in zip(*zip(*streams, strict=True), strict=True)]
    assert [tokens(deltas) for deltas in got] == [continuation(prompt, 12) for prompt in prompts]


def test_a_stream_that_is_closed_ends_its_request_alone(core: EngineCore, calls: LocalCalls) -> None:
    stays, goes = calls.run([request("stays", [1, 2])]), calls.run([request("goes", [3, 4])])
    begun = [next(stays)]
    next(goes)
    goes.close()
    assert core.stats()["requests"]["aborted"] == 1
    assert tokens([*begun, *stays]) == continuation([1, 2], 12)
    assert core.cache.pool.num_held == 0
    assert not core.has_work()


def test_a_stream_collected_in_the_middle_of_a_step_ends_with_the_next(core: EngineCore, calls: LocalCalls) -> None:
    streams = [calls.run([request("garbage", [1, 2])])]
    next(streams[0])
    step = core.step

    def collects(timeout_s: float | None) -> list[OutputDelta]:
        while streams:
            streams.pop().close()
        return step(timeout_s)

    core.step = collects
    assert tokens(list(calls.run([request("other", [3, 4])]))) == continuation([3, 4], 12)
    assert core.stats()["requests"]["aborted"] == 1
    assert core.cache.pool.num_held == 0


def test_an_operation_is_carried_out_while_streams_are_open(core: EngineCore, calls: LocalCalls) -> None:
    stream = calls.run([request("open", [1, 2, 3])])
    begun = [next(stream)]
    calls.operate("sleep")
    assert core.stats()["state"] == "asleep"
    calls.operate("wake")
    assert tokens([*begun, *stream]) == continuation([1, 2, 3], 12)
    assert calls.operate("reset_cache") > 0


def test_threads_share_the_engine_and_sleep_holds_all_of_them(core: EngineCore, calls: LocalCalls) -> None:
    calls.operate("sleep")
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    got: dict[int, list[OutputDelta]] = {}

    def read(n: int) -> None:
        got[n] = list(calls.run([request(f"{n}", prompts[n])]))

    threads = [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    eventually(lambda: core.stats()["requests"]["waiting"] == 6)
    assert not got
    calls.operate("wake")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {n: tokens(deltas) for n, deltas in got.items()} == {n: continuation(prompts[n], 12) for n in range(6)}


def test_a_request_that_fails_fails_its_own_call(core: EngineCore, calls: LocalCalls) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        list(calls.run([request("fine", [1]), request("empty", [])]))
    stream = calls.run([request("open", [1, 2, 3])])
    next(stream)
    with pytest.raises(InvalidRequestError, match="ids must differ"):
        list(calls.run([request("open", [1, 2, 3])]))
    core._executor.model.fails = ValueError("out of memory")
    with pytest.raises(EngineDiedError, match="out of memory"):
        list(stream)
    assert tokens(list(calls.run([request("next", [7])]))) == continuation([7], 12)


def test_a_stream_of_an_engine_that_was_closed_says_so(calls: LocalCalls) -> None:
    stream = calls.run([request("open", [1, 2, 3])])
    assert next(stream).finish_reason is not FinishReason.ERROR
    calls.close()
    with pytest.raises(EngineDiedError, match="the engine was closed"):
        list(stream)
