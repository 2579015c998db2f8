"""Partial results of attention, in Triton: as splits of one sequence leave them, and as the last of these adds them up.

No kernel comes after the splits. Each counts itself once its part is in memory, and the one that finds all others of
its group counted merges them by their log-sum-exps (FlashDecoding) into one part, groups of which are merged likewise:

        parts      0 1 2 ... 15 | 16 ... 31 | 32 ... 40
        merged     0              16          32
        result     0

So no program reads more than `GROUP` parts at a time, however many a long sequence has. Groups and sums are by place:
which split ends last changes nothing. Counters are set back to zero by whoever was last, as the next launch, or the
next replay of a graph, must find them.

With ``OF_RANKS`` queries are those of all ranks that keep tokens together, ``[ranks, tokens, own_heads]``, and a result
is a part of another kind: what was seen here of what is seen on all of them, with its log-sum-exp behind it.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import functools

import triton.language as tl
from triton.runtime.jit import JITFunction

LOG2E = tl.constexpr(1.4426950408889634)

GROUP = tl.constexpr(16)
"""Parts merged by one program at a time."""

MERGED = tl.constexpr(8192)
"""Numbers of parts in registers at once, about: 64 of a thread, of four warps."""

BESIDE = tl.constexpr(4)
"""Numbers behind a mean, the first of which is its log-sum-exp: rows stay whole vectors of 16 bytes."""


@JITFunction
def with_sink(total, highest, sink_logit):
    """The softmax's sum with the sink's share: a key of this score, whose value is 0."""
    return total + tl.exp2(sink_logit * LOG2E - highest)


@JITFunction
def store_mean(out, at, mixed, total, real, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``mixed [rows, BLOCK]`` divided by the softmax's sums, to ``out``, where ``at [rows]`` says; 0 without a sum."""
    dims = tl.arange(0, BLOCK)
    mean = (mixed / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + dims[None, :], mean, mask=real[:, None] & (dims < SIZE)[None, :])


@JITFunction
def log_sum_exp(total, highest):
    """To base 2, of a softmax's sum by its highest score; -inf where nothing was seen."""
    return tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))


@JITFunction
def store_part(partial, partial_lse, place, mixed, highest, total, real, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The mean over some keys as one part of several: a row's is number ``place``, int64 ``[rows]``."""
    store_mean(partial, place * SIZE, mixed, total, real, SIZE, BLOCK)
    tl.store(partial_lse + place, log_sum_exp(total, highest), mask=real)


@JITFunction
def place_of(token, head, tokens, own_heads):
    """Which of rows ``[ranks, tokens, own_heads]`` is a head's, counted over all ranks; int64."""
    rank = (head // own_heads).to(tl.int64)
    return (rank * tokens + token) * own_heads + head % own_heads


@JITFunction
def store_seen(out, place, mixed, highest, total, real, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The mean over a rank's keys and its log-sum-exp, as row ``place`` of ``out [places, SIZE + BESIDE]``."""
    at = place * (SIZE + BESIDE)
    store_mean(out, at, mixed, total, real, SIZE, BLOCK)
    tl.store(out + at + SIZE, log_sum_exp(total, highest), mask=real)


@JITFunction
def with_seen(seen, place, mixed, total, highest, real, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """(weighted sums, sums of weights, highest scores) with what row ``place`` of ``seen`` holds of other keys, see
    `store_seen`, where ``real``."""
    at, dims = place * (SIZE + BESIDE), tl.arange(0, BLOCK)
    lse = tl.load(seen + at + SIZE, mask=real, other=float("-inf"))
    mean = tl.load(seen + at[:, None] + dims[None, :], mask=real[:, None] & (dims < SIZE)[None, :], other=0.0)
    new_highest = tl.maximum(highest, lse)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    own, others = tl.exp2(highest - reference), tl.exp2(lse - reference)
    return mixed * own[:, None] + mean * others[:, None], total * own + others, new_highest


@JITFunction
def store_result(
    out, sink_logits, mixed, total, highest, row, real, token, first_head, tokens, own_heads,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, OF_RANKS: tl.constexpr,
):  # fmt: skip
    """What all parts of each row add up to, and its sink."""
    if OF_RANKS:
        place = place_of(token, first_head + row, tokens, own_heads)
        store_seen(out, place, mixed, highest, total, real, SIZE, BLOCK)
    else:
        if SINKS:
            total = with_sink(total, highest, tl.load(sink_logits + row, mask=real, other=0.0))
        store_mean(out, row * SIZE, mixed, total, real, SIZE, BLOCK)


@JITFunction
def is_last(counter, parts):
    """Whether all ``parts`` are in memory, this program's among them: true for one of those that wrote them."""
    tl.debug_barrier()  # every thread's stores, before one of them says so to the whole GPU
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@JITFunction
def sum_of_parts(
    partial, partial_lse, first, stride, parts, real, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(weighted sums ``[ROWS, BLOCK]``, sums of weights, highest log-sum-exps ``[ROWS]``) of up to `GROUP` parts.

    Those of a row are ``stride`` places apart, from ``first`` on, int64 ``[ROWS]``.
    """
    # Other programs wrote them: they are read from L2, past the multiprocessor's own cache.
    every = tl.arange(0, GROUP)
    lse = tl.load(
        partial_lse + (first[:, None] + every[None, :] * stride),
        mask=real[:, None] & (every < parts)[None, :], other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    highest = tl.max(lse, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(lse - highest[:, None]), 1)
    fitting: tl.constexpr = MERGED // (ROWS * BLOCK)
    together: tl.constexpr = 1 if fitting < 1 else (fitting if fitting < GROUP else GROUP)
    dims = tl.arange(0, BLOCK)
    mixed = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, parts, together):
        some = begin + tl.arange(0, together)
        there = real[:, None] & (some < parts)[None, :]
        place = first[:, None] + some[None, :] * stride
        weights = tl.load(partial_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.exp2(weights - highest[:, None])
        at = (place * SIZE)[:, :, None] + dims[None, None, :]
        read = there[:, :, None] & (dims < SIZE)[None, None, :]
        means = tl.load(partial + at, mask=read, other=0.0, cache_modifier=".cg")
        mixed += tl.sum(weights[:, :, None] * means, 1)
    return mixed, total, highest


@functools.partial(JITFunction, noinline=True)
def merge_parts(
    counters, partial, partial_lse, apart, split, used, out, sink_logits, rows,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, OF_RANKS: tl.constexpr = False,
    token=None, first_head=None, tokens=None, own_heads=None,
):  # fmt: skip
    """What a program does once its own part is stored: number ``split`` of ``used``, of each of ``rows`` rows.

    counters:             those of these parts, ``used``, zero
    partial, partial_lse: where the first row's first part is, that of the next row ``apart`` places on
    out, sink_logits:     where the first row's result goes, others behind it, and its sink is; with ``OF_RANKS``, where
                          all results go, of which these are of ``token``'s heads from ``first_head`` on
    """
    begin = split // GROUP * GROUP
    count = tl.minimum(used - begin, GROUP)
    if is_last(counters + begin, count):
        row = tl.arange(0, ROWS)
        real = row < rows
        first = row.to(tl.int64) * apart
        mixed, total, highest = sum_of_parts(partial, partial_lse, first + begin, 1, count, real, ROWS, SIZE, BLOCK)
        if used <= GROUP:
            store_result(
                out, sink_logits, mixed, total, highest, row, real, token, first_head, tokens, own_heads,
                SIZE, BLOCK, SINKS, OF_RANKS,
            )  # fmt: skip
        else:
            tl.debug_barrier()  # every thread has read what is overwritten
            store_part(partial, partial_lse, first + begin, mixed, highest, total, real, SIZE, BLOCK)
            groups = (used + GROUP - 1) // GROUP
            if is_last(counters + 1, groups):  # which is no group's: they begin at multiples of `GROUP`
                mixed, total, highest = sum_of_parts(
                    partial, partial_lse, first, GROUP, groups, real, ROWS, SIZE, BLOCK
                )  # fmt: skip
                store_result(
                    out, sink_logits, mixed, total, highest, row, real, token, first_head, tokens, own_heads,
                    SIZE, BLOCK, SINKS, OF_RANKS,
                )  # fmt: skip
