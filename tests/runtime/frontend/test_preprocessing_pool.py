"""Which text is tokenised next, and how many wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from headwise.errors import HeadwiseError
from headwise.runtime.frontend import preprocessing_pool as preparing
from headwise.runtime.frontend.preprocessing_pool import (
    BYTES_PER_S,
    SHORT_BYTES,
    Job,
    JobQueue,
    PreparedRequest,
    PreprocessingPool,
)

LONG = 10 * SHORT_BYTES


def job(tag: str, num_bytes: int = 1, is_wanted: bool = True) -> Job:
    def work() -> PreparedRequest:
        raise HeadwiseError(tag)

    return Job(tag, work, num_bytes, lambda: is_wanted)


def drained(jobs: JobQueue, count: int, only_short: bool = False) -> list[str]:
    tags = []
    for _ in range(count):
        job = jobs.get(only_short=only_short)
        assert job is not None
        tags.append(job.tag)
    return tags


def test_short_texts_overtake_long_ones_and_no_one_waits_for_ever() -> None:
    now = [1e9]
    jobs = JobQueue(lambda: now[0])
    for tag, num_bytes in (("long", 4 * LONG), ("shorter", LONG), ("short", 1)):
        jobs.put(job(tag, num_bytes))
    assert drained(jobs, 3) == ["short", "shorter", "long"]
    jobs.put(job("long", LONG))
    now[0] += LONG / BYTES_PER_S + 1.0
    jobs.put(job("came much later", 1))
    assert drained(jobs, 2) == ["long", "came much later"]


def test_equals_go_in_turn() -> None:
    jobs = JobQueue(lambda: 1e9)
    for tag in "abc":
        jobs.put(job(tag))
    assert drained(jobs, 3) == ["a", "b", "c"]


def test_one_taker_is_there_for_short_texts_only() -> None:
    jobs = JobQueue()
    jobs.put(job("long", LONG))
    jobs.put(job("short", SHORT_BYTES))
    assert drained(jobs, 1, only_short=True) == ["short"]
    assert drained(jobs, 1) == ["long"]


def test_what_nobody_waits_for_any_more_is_left_out() -> None:
    jobs = JobQueue()
    for tag, is_wanted in (("a", False), ("b", True), ("c", False), ("d", True)):
        jobs.put(job(tag, is_wanted=is_wanted))
    assert drained(jobs, 2) == ["b", "d"]


def test_the_bytes_that_wait_are_bounded_without_what_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_WAITING_BYTES", 3 * LONG)
    jobs = JobQueue()
    assert jobs.put(job("larger than all", 9 * LONG))  # alone: it could never be taken otherwise
    assert not jobs.put(job("one more", 1))
    assert drained(jobs, 1) == ["larger than all"]
    assert jobs.put(job("withdrawn", 2 * LONG, is_wanted=False))
    assert jobs.put(job("wanted", 2 * LONG))
    assert not jobs.put(job("too much", 2 * LONG))
    assert jobs.put(job("fits", LONG))
    assert drained(jobs, 2) == ["fits", "wanted"]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_and_short_are_prepared_by_however_many_threads(
    context: zmq.Context[zmq.Socket[bytes]], threads: int
) -> None:
    pool = PreprocessingPool(context, threads)
    for tag, num_bytes in (("long", LONG), ("short", 1)):
        pool.submit(job(tag, num_bytes))
    done: dict[str, str] = {}
    while len(done) < 2:
        assert pool.socket.poll(120_000)
        done |= {tag: str(outcome) for tag, outcome in pool.finished()}
    pool.close()
    assert done == {"long": "long", "short": "short"}
