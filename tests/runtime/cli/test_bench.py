"""The benchmark's arithmetic, its workloads, and its two loops, on a server that is a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from headwise.errors import ConfigError, OverloadedError
from headwise.runtime.cli.bench import Load, Measured, percentiles, run_load, summarize
from headwise.runtime.cli.bench_workload import BenchRequest, Workload, arrival_times, make_requests
from headwise.runtime.protocol.request import FinishReason, OutputDelta, Usage


def test_percentiles_interpolate_linearly() -> None:
    assert percentiles([float(n) for n in range(101)]) == pytest.approx({"p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert percentiles([1.0, 3.0])["p50"] == 2.0
    assert percentiles([]) is None


def test_a_summary_counts_what_clients_saw() -> None:
    measured = [
        Measured(due=10.0, first=10.5, last=11.5, output_tokens=11, usage=Usage(100, 64, 11)),
        Measured(due=11.0, first=11.1, last=12.0, output_tokens=10, usage=Usage(60, 0, 10)),
        Measured(due=11.0, first=11.3, last=11.3, output_tokens=1, usage=Usage(40, 36, 1)),
        Measured(due=11.5, error="the queue is full"),
    ]
    summary = summarize(measured)
    assert summary["requests"] == 4
    assert summary["failed"] == 1
    assert summary["duration_s"] == pytest.approx(2.0)
    assert summary["requests_per_s"] == pytest.approx(1.5)
    assert summary["output_tokens_per_s"] == pytest.approx(11.0)
    assert summary["cache_hit_rate"] == pytest.approx(0.5)
    assert summary["ttft_s"]["p50"] == pytest.approx(0.3)
    assert summary["tpot_s"]["p50"] == pytest.approx(0.1)  # of two requests: one token has no time per token


def test_a_run_in_which_everything_failed_names_the_first_error() -> None:
    with pytest.raises(ConfigError, match="all 2 requests failed; the first one: the queue is full"):
        summarize([Measured(due=0.0, error="the queue is full"), Measured(due=0.0, error="another")])


def test_poisson_arrivals_have_the_rate_and_are_the_same_for_a_seed() -> None:
    times = arrival_times(4000, rate=8.0, seed=3)
    assert np.all(np.diff(times) > 0)
    assert times[-1] == pytest.approx(500.0, rel=0.05)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert np.array_equal(times, arrival_times(4000, rate=8.0, seed=3))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be a positive number"):
        arrival_times(10, rate, seed=0)


@pytest.mark.parametrize("lengths", ["fixed", "uniform", "sharegpt"])
def test_lengths_have_the_mean_that_was_asked_for(lengths: str) -> None:
    requests = make_requests(
        Workload(num_requests=4000, input_tokens=100, output_tokens=40, lengths=lengths, max_tokens=100_000)
    )
    assert np.mean([len(r.prompt) for r in requests]) == pytest.approx(100, rel=0.1)
    assert np.mean([r.output_tokens for r in requests]) == pytest.approx(40, rel=0.1)


def test_requests_begin_with_one_of_the_shared_prefixes_and_go_on_differently() -> None:
    requests = make_requests(Workload(num_requests=64, prefix_tokens=48, num_prefixes=3))
    assert len({r.prompt[:48].tobytes() for r in requests}) == 3
    assert len({r.prompt[48:].tobytes() for r in requests}) == 64


def test_no_request_is_longer_than_max_tokens() -> None:
    workload = Workload(num_requests=500, lengths="sharegpt", prefix_tokens=64, max_tokens=128)
    for request in make_requests(workload):
        assert len(request.prompt) > 64
        assert request.output_tokens >= 1
        assert len(request.prompt) + request.output_tokens <= 128


def test_equal_seeds_send_equal_requests() -> None:
    def content(seed: int) -> list[tuple[list[int], int]]:
        return [(r.prompt.tolist(), r.output_tokens) for r in make_requests(Workload(num_requests=5, seed=seed))]

    assert content(1) == content(1)
    assert content(1) != content(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"prefix_tokens": -1}, "prefix_tokens must not be negative, got -1"),
        ({"prefix_tokens": 2048}, "max_tokens 2048 leaves no room"),
        ({"vocab_size": 10}, "vocab_size must be more than 256, got 10"),
    ],
)
def test_an_impossible_workload_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"concurrency": 2, "rate": 1.0}])
def test_a_load_is_either_closed_or_open(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"either a concurrency .* or a rate"):
        Load(**arguments)


class FakeServer:
    """Answers after a few turns of the event loop, and remembers how many requests were open at once."""

    def __init__(self, fail: int | None = None) -> None:
        self.open = self.most = self.seen = 0
        self.fail = fail

    async def stream(self, request: BenchRequest) -> AsyncIterator[OutputDelta]:
        self.seen += 1
        if self.seen == self.fail:
            raise OverloadedError("the queue is full")
        self.open += 1
        self.most = max(self.most, self.open)
        for token in range(request.output_tokens):
            await asyncio.sleep(0)
            yield OutputDelta("r", (token,))
        self.open -= 1
        yield OutputDelta("r", finish_reason=FinishReason.LENGTH, usage=Usage(len(request.prompt), 0, 1))


def requests(count: int) -> list[BenchRequest]:
    return make_requests(Workload(num_requests=count, input_tokens=4, output_tokens=3, lengths="fixed"))


def test_the_closed_loop_keeps_exactly_so_many_requests_in_flight() -> None:
    server = FakeServer()
    measured = asyncio.run(run_load(server.stream, requests(20), Load(concurrency=4)))
    assert server.most == 4
    assert [m.output_tokens for m in measured] == [3] * 20
    assert all(m.due <= m.first <= m.last for m in measured)


def test_the_open_loop_sends_everything_whatever_the_server_does() -> None:
    server = FakeServer()
    measured = asyncio.run(run_load(server.stream, requests(20), Load(rate=1e6)))
    assert len(measured) == server.seen == 20
    assert sorted(m.due for m in measured) == [m.due for m in measured]


def test_a_request_that_fails_does_not_end_the_others() -> None:
    measured = asyncio.run(run_load(FakeServer(fail=2).stream, requests(5), Load(concurrency=1)))
    assert [m.error for m in measured] == [None, "the queue is full", None, None, None]
