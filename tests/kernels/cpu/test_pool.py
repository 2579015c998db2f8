"""The threads of compiled code: each number runs once, failures reach the caller, and callers take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from headwise.errors import ConfigError
from headwise.kernels.cpu.pool import ThreadPool, check_threads, pool_of_this_process

PATIENCE_S = 60


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_thread_number_runs_once_with_the_arguments(threads: int) -> None:
    pool, seen = ThreadPool(5), []
    for _ in range(50):
        seen.clear()
        pool.run(lambda *args: seen.append(args), threads, "a", 7)
        assert sorted(seen) == [("a", 7, thread) for thread in range(threads)]


def test_numbers_run_on_threads_of_their_own_the_first_on_the_callers() -> None:
    pool, barrier = ThreadPool(3), threading.Barrier(3)
    found: dict[int, int] = {}

    def meet(thread: int) -> None:
        barrier.wait(PATIENCE_S)  # which they only pass together
        found[thread] = threading.get_ident()

    pool.run(meet, 3)
    assert found[0] == threading.get_ident()
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_of_any_thread_reaches_the_caller_once_all_are_through(failing: int) -> None:
    pool, ended = ThreadPool(3), []

    def work(thread: int) -> None:
        if thread == failing:
            raise ArithmeticError(f"of thread {thread}")
        ended.append(thread)

    for _ in range(3):
        ended.clear()
        with pytest.raises(ArithmeticError, match=f"of thread {failing}"):
            pool.run(work, 3)
        assert sorted(ended) == [thread for thread in range(3) if thread != failing]
        ended.clear()
        pool.run(ended.append, 3)  # the pool goes on, and what failed is not told again
        assert sorted(ended) == [0, 1, 2]


def test_when_all_threads_fail_one_failure_is_told_and_none_is_left_over() -> None:
    pool = ThreadPool(3)

    def fail(thread: int) -> None:
        raise ArithmeticError(str(thread))

    with pytest.raises(ArithmeticError, match="0"):
        pool.run(fail, 3)
    pool.run(lambda thread: None, 3)


def test_two_callers_at_once_do_not_mix() -> None:
    pool, inside, mixed = ThreadPool(2), [], []
    lock = threading.Lock()

    def work(caller: str, thread: int) -> None:
        with lock:
            inside.append(caller)
            mixed.extend({*inside} - {caller})
        for _ in range(100):
            threading.Event().wait(0)
        with lock:
            inside.remove(caller)

    def call(caller: str) -> None:
        for turn in range(50):
            if turn % 10 == 9:
                with pytest.raises(ArithmeticError, match=caller):
                    pool.run(fail, 2, caller)
            pool.run(work, 2, caller)

    def fail(caller: str, thread: int) -> None:
        raise ArithmeticError(caller)

    failures: list[BaseException] = []

    def guarded(caller: str) -> None:
        try:
            call(caller)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=guarded, args=(name,), daemon=True) for name in ("first", "second")]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert not any(caller.is_alive() for caller in callers)
    assert failures == []
    assert mixed == []


def test_a_call_on_one_thread_does_not_wait_for_another_caller() -> None:
    pool, leave = ThreadPool(2), threading.Event()
    busy = threading.Thread(target=pool.run, args=(lambda thread: leave.wait(PATIENCE_S), 2))
    busy.start()
    try:
        seen: list[int] = []
        pool.run(seen.append, 1)
        assert seen == [0]
        assert busy.is_alive()
    finally:
        leave.set()
        busy.join(PATIENCE_S)


def test_the_process_has_one_pool_with_a_thread_for_each_core() -> None:
    pool, cores, seen = pool_of_this_process(), len(os.sched_getaffinity(0)), []
    assert pool_of_this_process() is pool
    pool.run(seen.append, cores)
    assert sorted(seen) == list(range(cores))


def test_threads_that_the_pool_has_not_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    check_threads(1)
    check_threads(cores)
    for threads in (0, -1, cores + 1):
        with pytest.raises(ConfigError, match=rf"threads={threads} cannot be had: choose from 1 to {cores}"):
            check_threads(threads)


def test_a_forked_process_has_threads_of_its_own() -> None:
    program = """
import os
from headwise.kernels.cpu.pool import pool_of_this_process
cores, seen = len(os.sched_getaffinity(0)), []
pool_of_this_process().run(seen.append, cores)
if os.fork() == 0:
    pool_of_this_process().run(seen.append, cores)
    os._exit(len(seen) - 2 * cores)
print(os.wait()[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr
