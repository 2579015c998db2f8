"""The threads of compiled code: each number runs once, nobody waits for one to begin, and callers take turns."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.kernels.cpu import pool_jit, records
from headwise.kernels.cpu.pool import ThreadPool, check_threads, pool_of_this_process

PATIENCE_S = 60


Compiled = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
"""What the pool runs is compiled; these tests call Python from there, which waits for the interpreter's lock."""


class Function:
    """A C function at ``address`` that calls a Python function of an argument and a thread's number."""

    def __init__(self, function: Callable[[int, int], object]) -> None:
        self._compiled = Compiled(lambda *args: function(*args) and None)
        address = ctypes.cast(self._compiled, ctypes.c_void_p).value
        assert address is not None
        self.address = address


class Meeting(Function):
    """A function that only so many threads can pass, together. seen: argument, number and thread of each call"""

    def __init__(self, threads: int) -> None:
        self._barrier = threading.Barrier(threads)
        self.seen: list[tuple[int, int, int]] = []
        super().__init__(self._meet)

    def _meet(self, argument: int, thread: int) -> None:
        self._barrier.wait(PATIENCE_S)
        self.seen.append((argument, thread, threading.get_ident()))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_thread_number_runs_once_with_the_argument(threads: int) -> None:
    pool, function = ThreadPool(5), Meeting(threads)
    for argument in range(50):
        function.seen.clear()
        pool.run(function.address, threads, argument)
        assert sorted(seen[:2] for seen in function.seen) == [(argument, thread) for thread in range(threads)]


def test_numbers_run_on_threads_of_their_own_the_first_on_the_callers() -> None:
    pool, function = ThreadPool(3), Meeting(3)
    pool.run(function.address, 3, 0)
    threads = {number: thread for _, number, thread in function.seen}
    assert threads[0] == threading.get_ident()
    assert len(set(threads.values())) == 3


def test_a_job_whose_thread_has_no_core_in_time_is_taken_back() -> None:
    jobs, seen = np.zeros(1, records.JOB), list[int]()
    jobs["state"] = pool_jit.IDLE
    function = Function(lambda _, thread: seen.append(thread))
    pool_jit.run().ctypes(jobs.ctypes.data, function.address, 0, 2)  # whose second thread there is not at all
    assert seen == [0]
    assert jobs["state"] == [pool_jit.IDLE]


def test_the_caller_waits_for_a_thread_that_has_begun() -> None:
    pool, both, late = ThreadPool(2), threading.Barrier(2), threading.Event()
    ended: list[int] = []

    def work(argument: int, thread: int) -> None:
        both.wait(PATIENCE_S)
        if thread == 1:
            late.wait(0.05)  # the first one is through by then, mostly
        ended.append(thread)

    function = Function(work)
    for _ in range(5):
        ended.clear()
        pool.run(function.address, 2, 0)
        assert sorted(ended) == [0, 1]


def test_two_callers_at_once_do_not_mix() -> None:
    pool, inside, mixed = ThreadPool(2), list[int](), list[int]()
    lock = threading.Lock()

    def work(caller: int, thread: int) -> None:
        with lock:
            inside.append(caller)
            mixed.extend({*inside} - {caller})
        for _ in range(100):
            threading.Event().wait(0)
        with lock:
            inside.remove(caller)

    function = Function(work)

    def call(caller: int) -> None:
        for _ in range(50):
            pool.run(function.address, 2, caller)

    callers = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in (1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert not any(caller.is_alive() for caller in callers)
    assert mixed == []


def test_a_call_on_one_thread_does_not_wait_for_another_caller() -> None:
    pool, leave = ThreadPool(2), threading.Event()
    waiting, seen = Function(lambda _, thread: leave.wait(PATIENCE_S)), list[int]()
    busy = threading.Thread(target=pool.run, args=(waiting.address, 2, 0))
    busy.start()
    try:
        pool.run(Function(lambda _, thread: seen.append(thread)).address, 1, 0)
        assert seen == [0]
        assert busy.is_alive()
    finally:
        leave.set()
        busy.join(PATIENCE_S)


def test_threads_sleep_while_there_is_nothing_to_do_and_end_with_their_pool() -> None:
    def own() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("kernels-")} - before

    def state(thread: threading.Thread) -> str:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        return stat.rpartition(") ")[2][0]

    before = set(threading.enumerate())
    pool = ThreadPool(3)
    pool.run(Meeting(3).address, 3, 0)
    threads = own()
    assert len(threads) == 2
    eventually(lambda: all(state(thread) == "S" for thread in threads))
    del pool
    gc.collect()
    eventually(lambda: not own())


def test_the_process_has_one_pool_with_a_thread_for_each_core() -> None:
    pool, cores = pool_of_this_process(), len(os.sched_getaffinity(0))
    assert pool_of_this_process() is pool
    function = Meeting(cores)
    pool.run(function.address, cores, 0)
    assert sorted(thread for _, thread, _ in function.seen) == list(range(cores))


def test_threads_that_the_pool_has_not_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    check_threads(1)
    check_threads(cores)
    for threads in (0, -1, cores + 1):
        with pytest.raises(ConfigError, match=rf"threads={threads} cannot be had: choose from 1 to {cores}"):
            check_threads(threads)


def test_a_forked_process_has_threads_of_its_own() -> None:
    program = """
import ctypes, os, threading
from headwise.kernels.cpu.pool import pool_of_this_process
cores = len(os.sched_getaffinity(0))
barrier = threading.Barrier(cores)
meet = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(lambda *_: barrier.wait(50) and None)
address = ctypes.cast(meet, ctypes.c_void_p).value
pool_of_this_process().run(address, cores, 0)
if os.fork() == 0:
    barrier = threading.Barrier(cores)
    pool_of_this_process().run(address, cores, 0)
    os._exit(barrier.broken)
print(os.wait()[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr
