# mypy: ignore-errors
"""The compiled half of `headwise.kernels.cpu.pool`: threads that sleep, and are given jobs, without the interpreter.

A job is POSTED by its caller and TAKEN by the thread that it is for, unless the caller is through with the work before
that thread has a core: then it takes the job back. So a caller waits for threads that work, never for one to begin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import call_at, longs_at, record_at
from headwise.kernels.cpu.records import JOB
from headwise.kernels.cpu.threads import exchange_if, publish, semaphore_post, semaphore_wait, wait_for

POSTED, TAKEN, IDLE = range(3)

_JOB_BYTES, SEMAPHORE_AT = JOB.itemsize, JOB.fields["semaphore"][1]
_job_at = record_at(JOB)


def _serve(address):
    job, state = _job_at(address), longs_at(address, 1)
    while True:
        semaphore_wait(address + SEMAPHORE_AT)  # may return for nothing, as after a job that was taken back
        if exchange_if(state, 0, POSTED, TAKEN):
            if job.function == 0:
                return
            call_at(job.function, (job.argument, job.thread))
            publish(state, 0, IDLE)


@numba.njit(nogil=True, error_model="numpy")
def _post(address, function, argument, thread):
    job = _job_at(address)
    job.function, job.argument, job.thread = function, argument, thread
    publish(longs_at(address, 1), 0, POSTED)
    semaphore_post(address + SEMAPHORE_AT)


def _run(jobs, function, argument, threads):
    for thread in range(1, threads):
        _post(jobs + (thread - 1) * _JOB_BYTES, function, argument, thread)
    call_at(function, (argument, 0))
    for thread in range(1, threads):
        state = longs_at(jobs + (thread - 1) * _JOB_BYTES, 1)
        if not exchange_if(state, 0, POSTED, IDLE):
            wait_for(state, 0, IDLE)


@cache
def serve() -> Any:
    """The compiled function of a `JOB`'s address: does what is posted there until it is told to end."""
    return machine_code.unit(_serve, 1, error_model="numpy")


@cache
def run() -> Any:
    """The compiled function of the addresses of `JOB` records and a C function, an argument, and a number of threads.

    It calls the function of the argument and a thread's number on this thread, 0, and on as many of the others as are
    there in time; it returns when all of these have returned.
    """
    return machine_code.unit(_run, 4, error_model="numpy")


@cache
def post() -> Any:
    """The compiled function that gives the thread of a `JOB`'s address a function, its argument and number."""
    return machine_code.unit(_post.py_func, 4, error_model="numpy")
