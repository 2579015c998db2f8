# mypy: ignore-errors
"""Compiled calls of KV write and attention for one layer, as the pool's threads make them: see `records.CALL`."""

from __future__ import annotations

from functools import cache
from typing import Any

from headwise.kernels.cpu import machine_code
from headwise.kernels.cpu.addresses import call_at, longs_at, record_at
from headwise.kernels.cpu.records import CALL
from headwise.kernels.cpu.threads import fetch_add

_call_at = record_at(CALL)


def _write(address, thread):
    call = _call_at(address)
    counters = longs_at(call.counters, 1)
    first = fetch_add(counters, 0) * call.piece
    while first < call.rows:
        call_at(call.function, (call.own, call.layer, first, min(first + call.piece, call.rows), thread))
        first = fetch_add(counters, 0) * call.piece


def _attend(address, thread):
    call = _call_at(address)
    call_at(call.function, (call.own, call.layer, call.counters, thread))


@cache
def write() -> Any:
    """The compiled function of a `CALL`'s address and a thread: rows until none is left."""
    return machine_code.unit(_write, 2, error_model="numpy")


@cache
def attend() -> Any:
    """The compiled function of a `CALL`'s address and a thread: its share of a layer's attention."""
    return machine_code.unit(_attend, 2, error_model="numpy")
