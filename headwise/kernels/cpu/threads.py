# mypy: ignore-errors
"""Threads in compiled code: counters from which they take their work, and waiting for what others took."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.simd import Emitter


@intrinsic
def fetch_add(typing, counters, index):
    """Add 1 to ``counters[index]`` (int64), as one atomic step ordered with all memory; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index = Emitter(context, builder, signature, args).args
        return builder.atomic_rmw("add", builder.gep(counters, [index]), ir.IntType(64)(1), "acq_rel")

    return types.int64(counters, types.intp), emit


SPINS = 4_000
"""Looks at a counter before the core is offered to others: a few microseconds."""


@intrinsic
def wait_for(typing, counters, index, least):
    """Wait until ``counters[index]`` is ``least`` or more: until work that other threads have taken is done.

    A thread that has a core finishes within microseconds; one that has none gets this one's.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index, least = Emitter(context, builder, signature, args).args
        place, one = builder.gep(counters, [index]), ir.IntType(32)(1)
        spins = cgutils.alloca_once_value(builder, ir.IntType(32)(0))
        look, wait, offer, done = (builder.append_basic_block(name) for name in ("look", "wait", "offer", "done"))
        builder.branch(look)
        builder.position_at_end(look)
        reached = builder.icmp_signed(">=", builder.load_atomic(place, "acquire", 8), least)
        builder.cbranch(reached, done, wait)
        builder.position_at_end(wait)
        count = builder.add(builder.load(spins), one)
        builder.store(count, spins)
        builder.cbranch(builder.icmp_unsigned(">", count, one.type(SPINS)), offer, look)
        builder.position_at_end(offer)
        builder.store(one.type(0), spins)
        kind = ir.FunctionType(one.type, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        builder.branch(look)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), emit
