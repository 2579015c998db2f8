# mypy: ignore-errors
"""Threads in compiled code: counters from which they take their work, and waiting for what others took."""

from __future__ import annotations

from typing import Any

import numba
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


@intrinsic
def exchange_if(typing, counters, index, expected, value):
    """Set ``counters[index]`` to ``value`` if it is ``expected``, as one atomic step; returns whether it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index, expected, value = Emitter(context, builder, signature, args).args
        place = builder.gep(counters, [index])
        return builder.extract_value(builder.cmpxchg(place, expected, value, "acq_rel", "acquire"), 1)

    return types.boolean(counters, types.intp, types.int64, types.int64), emit


@intrinsic
def publish(typing, counters, index, value):
    """Set ``counters[index]``; who sees that, sees all that this thread has written before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index, value = Emitter(context, builder, signature, args).args
        builder.store_atomic(value, builder.gep(counters, [index]), "release", 8)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), emit


def _semaphore_call(name: str) -> Any:
    """Make the call of a C function of a semaphore's address, which returns its result."""

    @intrinsic
    def call(typing, address):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word, long = ir.IntType(32), ir.IntType(64)
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [long]), name)
            return builder.call(function, args)

        return types.int32(types.int64), emit

    return call


semaphore_wait, semaphore_post = map(_semaphore_call, ("sem_wait", "sem_post"))


@numba.njit(nogil=True, error_model="numpy")
def take_item(counters, index, share, shares, count):
    """Take one of ``count`` items that no thread has taken; returns it and its share, or ``count`` if there is none.

    Items are dealt out in so many ``shares`` of neighbours, of each of which ``counters[index + share]`` are taken. A
    thread that begins with a share of its own walks through memory in order, where the processor's prefetching follows
    it; when that is through, it helps with the others'.
    """
    for _ in range(shares):
        first, last = count * share // shares, count * (share + 1) // shares
        if first + counters[index + share] < last:  # it need not be counted when nothing is left
            item = first + fetch_add(counters, index + share)
            if item < last:
                return item, share
        share = share + 1 if share + 1 < shares else 0
    return count, share


@numba.njit(inline="always", nogil=True, error_model="numpy")
def _rows_of_piece(rows):
    """A counter's round trip is worth several rows, where there are many."""
    return 1 if rows < 32 else 8


@numba.njit(inline="always", nogil=True, error_model="numpy")
def pieces_of(rows):
    """In how many pieces `take_rows` gives so many rows."""
    return -(-rows // _rows_of_piece(rows))


@numba.njit(inline="always", nogil=True, error_model="numpy")
def take_rows(counters, phase, rows, share, threads):
    """The next rows of a phase, whose counters begin at ``phase``, and their share; an empty range at the end.

    A thread begins with the same share of the rows in each phase: they are in its caches from the one before.
    """
    piece, share = take_item(counters, phase + 1, share, threads, pieces_of(rows))
    first = piece * _rows_of_piece(rows)
    return min(first, rows), min(first + _rows_of_piece(rows), rows), share


@intrinsic
def is_reached(typing, counters, index, least):
    """Whether ``counters[index]`` is ``least`` or more; then all that was written before it became so can be seen."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index, least = Emitter(context, builder, signature, args).args
        return builder.icmp_signed(">=", builder.load_atomic(builder.gep(counters, [index]), "acquire", 8), least)

    return types.boolean(counters, types.intp, types.int64), emit


@intrinsic
def prefetch_line(typing, address):
    """Start to bring the cache line at ``address`` into the L2 cache; harmless wherever that is."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emitter(context, builder, signature, args).prefetch(builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), emit


LINE = 64
"""Bytes of a cache line."""

LINES_A_LOOK = 4
"""Lines that are prefetched between two looks at a counter."""


@numba.njit(inline="always", nogil=True, error_model="numpy")
def wait_and_prefetch(counters, index, least, begin, end):
    """As `wait_for`; meanwhile prefetch from the address ``begin`` to ``end``. Returns how far that came."""
    while begin < end and not is_reached(counters, index, least):
        for line in range(LINES_A_LOOK):
            prefetch_line(begin + line * LINE)
        begin += LINES_A_LOOK * LINE
    wait_for(counters, index, least)
    return begin


SPINS = 4_000
"""Looks at a counter before the core is offered to others: a few microseconds."""

OFFERS = 16
"""Offers before the core is left to others for a time. One that is only offered comes back at once: threads that wait
so take half of the time that those with work to do could have."""

NAP_US = 50


@intrinsic
def wait_for(typing, counters, index, least):
    """Wait until ``counters[index]`` is ``least`` or more: until work that other threads have taken is done.

    A thread that has a core finishes within microseconds; one that has none gets this one's.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters, index, least = Emitter(context, builder, signature, args).args
        word = ir.IntType(32)
        place = builder.gep(counters, [index])
        spins, offers = (cgutils.alloca_once_value(builder, word(0)) for _ in range(2))
        names = ("look", "wait", "leave", "offer", "nap", "done")
        look, wait, leave, offer, nap, done = (builder.append_basic_block(name) for name in names)

        def is_more(variable: Any, most: int) -> Any:
            count = builder.add(builder.load(variable), word(1))
            builder.store(count, variable)
            return builder.icmp_unsigned(">", count, word(most))

        def call(name: str, *arguments: Any) -> None:
            kind = ir.FunctionType(word, [argument.type for argument in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        builder.branch(look)
        builder.position_at_end(look)
        reached = builder.icmp_signed(">=", builder.load_atomic(place, "acquire", 8), least)
        builder.cbranch(reached, done, wait)
        builder.position_at_end(wait)
        builder.cbranch(is_more(spins, SPINS), leave, look)
        builder.position_at_end(leave)
        builder.store(word(0), spins)
        builder.cbranch(is_more(offers, OFFERS), nap, offer)
        builder.position_at_end(offer)
        call("sched_yield")
        builder.branch(look)
        builder.position_at_end(nap)
        call("usleep", word(NAP_US))
        builder.branch(look)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(counters, types.intp, types.int64), emit
