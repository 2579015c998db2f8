"""The step channel with real sockets and scripted workers in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from support.skipping_clock import SkippingClock
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError, LayerSwapTimeoutError
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.copies import CopyReport
from headwise.runtime.protocol.request import TokenLogprobs
from headwise.runtime.protocol.running_step import DoneStep
from headwise.runtime.protocol.step_channel import ZmqExecutor, serve_steps
from headwise.sockets.context import num_open
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key

Execute = Callable[[BatchRequest], StepResult]


def batch(step_id: int, rows: int = 2) -> BatchRequest:
    ints = np.arange(rows, dtype=np.int32)
    return BatchRequest(step_id, ints, ints, ints, ints, np.ones(rows, np.bool_), np.empty((0, 4), np.int32))


class Echo:
    """Samples ``step_id`` for each row on rank 0; remembers the steps it saw."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_blocks = 100 + rank
        self.exports = (b"first of %d" % rank, b"second")
        self.seen: list[int] = []

    def execute(self, batch: BatchRequest) -> StepResult:
        self.seen.append(batch.step_id)
        rows = len(batch.rows) if self.rank == 0 else 0
        return StepResult(batch.step_id, self.rank, np.full(rows, batch.step_id, np.int32), compute_s=float(self.rank))

    def begin(self, batch: BatchRequest) -> DoneStep:
        return DoneStep(self.execute(batch))


class Looks:
    """A clock that goes on by ``tick_s`` at every look, and at first not at all: no machine is too slow for it."""

    def __init__(self) -> None:
        self.now, self.tick_s = 1e6, 0.0

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


class Scripted:
    num_blocks = 100
    exports = ()

    def __init__(self, execute: Execute) -> None:
        self.begin = lambda batch: DoneStep(execute(batch))


class Group:
    """An executor and its workers; everything is joined at the end."""

    def __init__(self, endpoint: str, *, accepts: ServerKeys | None = None, keys: ClientKeys | None = None) -> None:
        self._endpoint, self._accepts, self._keys = endpoint, accepts, keys
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []

    def start(
        self,
        workers: list[Echo | Scripted],
        step_timeout_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> ZmqExecutor:
        options = {"start_timeout_s": PATIENCE_S, "keys": self._accepts, **options}
        self.executor = ZmqExecutor(self._endpoint, len(workers), step_timeout_s, clock, **options)
        for rank, worker in enumerate(workers):
            self._threads.append(threading.Thread(target=self._serve, args=(worker, rank)))
            self._threads[-1].start()
        self.executor.wait_ready(PATIENCE_S)
        assert self.executor.num_blocks == 100, "of the worker with the fewest"
        return self.executor

    def _serve(self, worker: Echo | Scripted, rank: int) -> None:
        try:
            serve_steps(worker, self.executor.endpoint, rank, self._stop.is_set, self._keys)
        except EngineDiedError as error:
            self.failures.append(error)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self.executor.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(f"ipc://{tmp_path}/steps")
    yield group
    group.close()


def test_queued_steps_run_and_return_in_order_on_every_rank(group: Group) -> None:
    workers = [Echo(rank) for rank in range(3)]
    executor = group.start(list(workers))
    for step_id in range(5):
        executor.submit(batch(step_id))
    results = [executor.poll(PATIENCE_S) for _ in range(5)]
    assert [r.step_id for r in results if r] == [0, 1, 2, 3, 4]
    assert [r.token_ids.tolist() for r in results if r] == [[i, i] for i in range(5)]
    assert all(r and r.compute_s == 2.0 for r in results)
    assert all(worker.seen == [0, 1, 2, 3, 4] for worker in workers)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_steps_go_to_other_nodes_over_tcp_and_only_to_who_has_the_key(is_encrypted: bool) -> None:
    secret, opened = new_secret(), num_open()
    accepts = ServerKeys(secret, frozenset((client_key("ours"),))) if is_encrypted else None
    group = Group(
        "tcp://127.0.0.1:*", accepts=accepts, keys=ClientKeys(public_key(secret), "ours") if accepts else None
    )
    workers, executor = [Echo(rank) for rank in range(2)], None
    context = zmq.Context()
    try:
        executor = group.start(list(workers))
        stranger = context.socket(zmq.DEALER)
        stranger.connect(executor.endpoint)
        if is_encrypted:  # in the clear, whoever reaches it has a say
            stranger.send(b"what no rank says")
        for step_id in range(3):
            executor.submit(batch(step_id))
        assert [(executor.poll(PATIENCE_S) or workers).step_id for _ in range(3)] == [0, 1, 2]
        assert all(worker.seen == [0, 1, 2] for worker in workers)
    finally:
        context.destroy(linger=0)
        group.close()
    assert num_open() == opened


def test_where_host_caches_are_read_is_known_once_all_ranks_are_ready(group: Group) -> None:
    executor = group.start([Echo(0), Echo(1)])
    assert executor.exports == ((b"first of 0", b"second"), (b"first of 1", b"second"))


def test_where_one_rank_cannot_be_read_no_block_can(group: Group) -> None:
    executor = group.start([Echo(0), Scripted(lambda batch: StepResult(0, 1, np.empty(0, np.int32)))])
    assert executor.exports == ()


def test_poll_gives_nothing_while_a_rank_is_still_computing(group: Group) -> None:
    release = threading.Event()

    def slow(batch: BatchRequest) -> StepResult:
        release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 1, np.empty(0, np.int32))

    executor = group.start([Echo(0), Scripted(slow)])
    executor.submit(batch(0))
    assert executor.poll(0.05) is None
    assert executor.poll(0) is None
    release.set()
    result = executor.poll(PATIENCE_S)
    assert result is not None
    assert result.step_id == 0


def test_a_command_may_take_as_long_as_a_start_and_a_step_may_not(group: Group) -> None:
    def slow(batch: BatchRequest) -> StepResult:
        time.sleep(0.3)
        return StepResult(batch.step_id, 0, np.empty(0, np.int32), forgotten=5)

    executor = group.start([Scripted(slow)], step_timeout_s=0.1)
    executor.submit(replace(batch(0, rows=0), command="wake"))
    result = executor.poll(PATIENCE_S)
    assert result is not None
    assert (result.step_id, result.forgotten) == (0, 5)
    executor.submit(batch(1))
    with pytest.raises(EngineDiedError, match=r"step 1 did not end within step_timeout_s = 0\.1 s"):
        executor.poll(PATIENCE_S)


def test_logprobs_cross_the_channel(group: Group) -> None:
    logprobs = {1: TokenLogprobs(-0.25, ((3, -0.25), (4, -1.5)))}
    executor = group.start([Scripted(lambda b: StepResult(b.step_id, 0, np.array([1, 2], np.int32), logprobs))])
    executor.submit(batch(0))
    result = executor.poll(PATIENCE_S)
    assert result is not None
    assert result.logprobs == logprobs


@pytest.mark.parametrize("sampling", [0, 1, 3])
def test_a_result_is_what_the_rank_says_that_samples_and_others_only_acknowledge(group: Group, sampling: int) -> None:
    """The first rank of a pipeline's last stage does. Of copies and times all ranks have their say."""

    def says(rank: int) -> Scripted:
        def result(batch: BatchRequest) -> StepResult:
            copied = CopyReport(stored=np.array([7], np.int32))
            if rank != sampling:
                return StepResult(batch.step_id, rank, np.empty(0, np.int32), copies=copied, compute_s=1.0 + rank)
            return StepResult(
                batch.step_id,
                rank,
                np.array([rank, 5], np.int32),
                {1: TokenLogprobs(-0.25, ((5, -0.25),))},
                {0: "not finite"},
                copies=copied,
                compute_s=0.5,
                prompt_logprobs={0: (TokenLogprobs(-1.0, ()),)},
                accepted=np.array([2, 0], np.int32),
                proposed=np.array([[3, 4], [-1, -1]], np.int32),
            )

        return Scripted(result)

    executor = group.start([says(rank) for rank in range(4)], sampling=sampling)
    executor.submit(batch(0))
    result = executor.poll(PATIENCE_S)
    assert result is not None
    assert (result.rank, result.token_ids.tolist(), result.broken) == (0, [sampling, 5], {0: "not finite"})
    assert (result.logprobs[1].chosen, result.prompt_logprobs[0][0].chosen) == (-0.25, -1.0)
    assert (result.accepted.tolist(), result.proposed.tolist()) == ([2, 0], [[3, 4], [-1, -1]])
    assert result.copies.stored.tolist() == [7]
    assert result.compute_s == max(1.0 + rank for rank in range(4) if rank != sampling)


def test_a_step_is_over_once_all_stages_are_through_and_later_ones_are_begun_meanwhile(group: Group) -> None:
    """The first rank works ahead of the last one."""
    release, begun = threading.Event(), threading.Event()

    def first(batch: BatchRequest) -> StepResult:
        if batch.step_id == 2:
            begun.set()
        return StepResult(batch.step_id, 0, np.empty(0, np.int32))

    def last(batch: BatchRequest) -> StepResult:
        release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 1, np.array([batch.step_id], np.int32))

    executor = group.start([Scripted(first), Scripted(last)], sampling=1)
    for step_id in range(3):
        executor.submit(batch(step_id))
    assert begun.wait(PATIENCE_S)
    assert executor.poll(0.05) is None
    release.set()
    results = [executor.poll(PATIENCE_S) for _ in range(3)]
    assert [result.token_ids.tolist() for result in results if result] == [[0], [1], [2]]


def test_an_error_of_any_rank_is_the_step_s_error_and_the_next_step_runs(group: Group) -> None:
    def fails_once(batch: BatchRequest) -> StepResult:
        error = "ValueError: row 9 has no table" if batch.step_id == 0 else None
        return StepResult(batch.step_id, 1, np.empty(0, np.int32), error=error)

    executor = group.start([Echo(0), Scripted(fails_once)])
    executor.submit(batch(0))
    executor.submit(batch(1))
    first, second = executor.poll(PATIENCE_S), executor.poll(PATIENCE_S)
    assert first is not None
    assert first.error == "TP rank 1: ValueError: row 9 has no table"
    assert second is not None
    assert second.error is None


def submit_and_poll(executor: ZmqExecutor, step_ids: Iterable[int]) -> None:
    for step_id in step_ids:
        executor.submit(batch(step_id))
    executor.poll(PATIENCE_S)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (EngineDiedError("rank 1 did not show up"), "rank 1 did not show up"),
        (
            LayerSwapTimeoutError("a copy has not ended"),
            "the worker failed: LayerSwapTimeoutError: a copy has not ended",
        ),
        (MemoryError(), "the worker failed: MemoryError: MemoryError"),
    ],
)
def test_whatever_a_worker_raises_is_told_at_once_and_no_later_step_is_begun(
    group: Group, raised: Exception, told: str
) -> None:
    begun: list[int] = []

    def fails(batch: BatchRequest) -> StepResult:
        begun.append(batch.step_id)
        raise raised

    executor = group.start([Echo(0), Scripted(fails)])
    executor.submit(batch(0))
    with pytest.raises(EngineDiedError, match=told):
        submit_and_poll(executor, [1])  # it may be gone by then
    group._threads[1].join(PATIENCE_S)
    assert [str(failure) for failure in group.failures] == [told]
    assert begun == [0]


def test_a_rank_that_went_before_a_step_came_has_said_why(group: Group) -> None:
    def fails(batch: BatchRequest) -> StepResult:
        raise MemoryError

    executor = group.start([Echo(0), Scripted(fails)])
    executor.submit(batch(0))
    group._threads[1].join(PATIENCE_S)
    with pytest.raises(EngineDiedError, match="the worker failed: MemoryError"):
        submit_and_poll(executor, range(1, 10_000))  # its end of the channel is known to be closed by then


@pytest.mark.parametrize(("of_rank_1", "of_all"), [([4, 7], [2, 4, 7]), ([], [2, 4]), (None, None)])
def test_loads_that_a_rank_has_no_word_of_are_not_said_to_have_come(
    group: Group, of_rank_1: list[int] | None, of_all: list[int] | None
) -> None:
    def loads(rank: int, failed: list[int] | None) -> Scripted:
        blocks = None if failed is None else np.array(failed, np.int32)
        return Scripted(lambda b: StepResult(b.step_id, rank, np.empty(0, np.int32), copies=CopyReport(blocks)))

    executor = group.start([loads(0, [4, 2]), loads(1, of_rank_1)])
    executor.submit(batch(0))
    result = executor.poll(PATIENCE_S)
    assert result is not None
    not_loaded = result.copies.not_loaded
    assert (None if not_loaded is None else not_loaded.tolist()) == of_all


def test_a_worker_that_hangs_is_noticed_long_before_step_timeout_s(group: Group) -> None:
    release, clock = threading.Event(), Looks()

    def hangs_at_last(batch: BatchRequest) -> StepResult:
        if batch.step_id == 5:
            release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 0, np.empty(0, np.int32), compute_s=0.04)

    executor = group.start([Scripted(hangs_at_last)], step_timeout_s=120.0, clock=clock)
    for step_id in range(5):
        executor.submit(replace(batch(step_id), starts=np.array([1, 2], np.int32)))
        assert executor.poll(None) is not None
    began, clock.tick_s = clock.now, 0.5
    executor.submit(batch(5))

    def poll() -> None:
        while executor.poll(0) is None:
            pass

    try:
        with pytest.raises(EngineDiedError, match=r"step 5 did not end within 15 s, although .* on TP rank \[0\]"):
            poll()
    finally:
        release.set()
    assert clock.now - began < 20.0


def test_transfers_count_once_every_rank_has_finished_them(group: Group) -> None:
    def finished(rank: int, by_step: list[list[int]]) -> Scripted:
        return Scripted(
            lambda b: StepResult(
                b.step_id,
                rank,
                np.empty(0, np.int32),
                copies=CopyReport(stored=np.array(by_step[b.step_id], np.int32)),
            )
        )

    executor = group.start([finished(0, [[1, 2], []]), finished(1, [[2], [1]])])
    for step_id in range(2):
        executor.submit(batch(step_id))
    results = [executor.poll(PATIENCE_S) for _ in range(2)]
    assert [r.copies.stored.tolist() for r in results if r] == [[2], [1]]


def test_a_lost_worker_ends_a_waiting_poll_and_every_later_call(group: Group) -> None:
    release = threading.Event()

    def stuck(batch: BatchRequest) -> StepResult:
        release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 0, np.empty(0, np.int32))

    executor = group.start([Scripted(stuck)])
    executor.submit(batch(0))
    threading.Timer(0.1, executor.lost, ("TP rank 0 was killed",)).start()
    with pytest.raises(EngineDiedError, match="TP rank 0 was killed"):
        executor.poll(None)
    executor.lost("a later reason")
    with pytest.raises(EngineDiedError, match="TP rank 0 was killed"):
        executor.submit(batch(1))
    release.set()


def test_a_step_over_its_time_is_a_lost_worker_named_by_rank(group: Group) -> None:
    release = threading.Event()

    def stuck(batch: BatchRequest) -> StepResult:
        release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 1, np.empty(0, np.int32))

    executor = group.start([Echo(0), Scripted(stuck)], step_timeout_s=0.3)
    executor.submit(batch(4))
    with pytest.raises(EngineDiedError, match=r"step 4 did not end within step_timeout_s = 0.3 s on TP rank \[1\]"):
        executor.poll(None)
    release.set()


def test_workers_have_their_time_also_if_all_were_suspended_in_a_step(group: Group) -> None:
    release, clock = threading.Event(), SkippingClock()

    def suspended(batch: BatchRequest) -> StepResult:
        release.wait(PATIENCE_S)
        return StepResult(batch.step_id, 0, np.empty(0, np.int32))

    executor = group.start([Scripted(suspended)], clock=clock)
    executor.submit(batch(4))
    clock.skipped_s += 3600.0
    assert executor.poll(0.3) is None
    release.set()
    result = executor.poll(PATIENCE_S)
    assert result is not None
    assert result.step_id == 4


def test_workers_that_never_connect_are_named(tmp_path: Path) -> None:
    executor = ZmqExecutor(f"ipc://{tmp_path}/none", 2, 1.0)
    with pytest.raises(EngineDiedError, match=r"TP rank \[0, 1\] did not connect"):
        executor.wait_ready(0.05)
    executor.close()


def test_a_step_for_a_worker_that_left_is_refused(tmp_path: Path) -> None:
    group = Group(f"ipc://{tmp_path}/steps")
    executor = group.start([Echo(0)])
    group._stop.set()
    group._threads[0].join(PATIENCE_S)

    def submit_until_it_is_noticed() -> None:
        for step_id in range(int(PATIENCE_S / 0.02)):
            executor.submit(batch(step_id))
            time.sleep(0.02)

    with pytest.raises(EngineDiedError, match="TP rank 0 cannot be reached"):
        submit_until_it_is_noticed()
    group.close()


def test_what_no_worker_sends_loses_the_workers_with_a_reason() -> None:
    executor = ZmqExecutor("tcp://127.0.0.1:*", 1, step_timeout_s=PATIENCE_S)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(executor.endpoint)
        socket.send_multipart([b"a", b"b"])
        with pytest.raises(EngineDiedError, match="a message of 2 frames"):
            executor.wait_ready(PATIENCE_S)
    executor.close()


def test_tcp_endpoints_take_a_free_port(tmp_path: Path) -> None:
    executor = ZmqExecutor("tcp://127.0.0.1:*", 1, PATIENCE_S)
    stop = threading.Event()
    thread = threading.Thread(target=serve_steps, args=(Echo(0), executor.endpoint, 0, stop.is_set))
    thread.start()
    executor.wait_ready(PATIENCE_S)
    executor.submit(batch(0))
    result = executor.poll(PATIENCE_S)
    stop.set()
    thread.join(PATIENCE_S)
    executor.close()
    assert result is not None
    assert result.token_ids.tolist() == [0, 0]
