"""Attention over what ranks keep together, in host memory: sequences with few queries, and with many.

Of few queries these go to where the tokens are (`seen_by_all`). Of many, as of prompts, tokens go to where the queries
are: every rank has the blocks of the sequence in one layer whole for as long as it attends to them (`gather_context`),
by the kernels that it has for a cache that is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.kernels.base import Array, AttentionBatch, HeadTable
from headwise.kernels.latest import MOST_TABLES, OfEach
from headwise.kernels.token_ranks import TokenRanks, merged, rows_over_share

MANY_QUERIES = 32
"""Of a sequence, for which its tokens are gathered."""

EXCHANGED_BYTES = 64 << 20
"""Of all ranks' queries that go over what ranks keep at a time, and as many of what comes of them, unless those of one
row are more."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SharedContext:
    """Sequences' blocks in one layer, of which this rank has all tokens, as kernels take them.

    rows:     their queries
    sequence: the first of them
    """

    arena: Array
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    rows: slice
    sequence: int


Where = tuple[NDArray[np.uint8], BlockLayout, AttentionBatch, HeadTable]
"""What a rank has: an arena, the layout of blocks of its own tokens, a batch of whole sequences, a layer's one member.
"""


def attend_shared(
    ranks: TokenRanks,
    where: Where,
    row_bytes: int,
    attend: Callable[[SharedContext], None],
    attend_rows: Callable[[NDArray[np.int64]], None],
    roles: Sequence[Role] = (),
) -> None:
    """All of a batch: sequences with `MANY_QUERIES` by ``attend``, the rows of others by ``attend_rows``, as many at a
    time as their ``row_bytes`` allow. roles: see `gather_context`"""
    batch = where[2]
    counts = np.diff(batch.cu_seqlens_q)
    for sequence in np.flatnonzero(counts >= MANY_QUERIES).tolist():
        attend(gather_context(ranks, *where, sequence, roles))
    rows = np.flatnonzero(np.repeat(counts < MANY_QUERIES, counts))
    each = max(1, EXCHANGED_BYTES // row_bytes)
    for first in range(0, len(rows), each):
        attend_rows(rows[first : first + each])


def gather_all(
    ranks: TokenRanks, where: Where, attend: Callable[[SharedContext], None], roles: Sequence[Role] = ()
) -> None:
    """All of a batch by ``attend``, whatever it costs. roles: see `gather_context`"""
    for sequence in np.flatnonzero(np.diff(where[2].cu_seqlens_q)).tolist():
        attend(gather_context(ranks, *where, sequence, roles))


def gather_context(
    ranks: TokenRanks, arena: NDArray[np.uint8], layout: BlockLayout, batch: AttentionBatch, heads: HeadTable,
    sequence: int, roles: Sequence[Role] = (),
) -> SharedContext:  # fmt: skip
    """A sequence's blocks of a layer's one member, of which each of ``ranks`` gives its tokens: all call it together.

    layout: of blocks of a rank's own tokens
    roles:  of which neighbours there is something in what is gathered; none: of all
    """
    parts, context = ranks.share.parts, int(batch.seq_lens[sequence])
    row = batch.block_tables[sequence * batch.groups + int(heads.group[0])]
    table = row[: -(-context // (parts * layout.block_size))]
    mapped = table >= 0
    begin, end = layout.slot_range(0, layout.slots)
    slots, some = arena.reshape(-1, layout.block_bytes)[:, begin:end], roles_alone(layout, tuple(roles))
    first_byte = layout.role_offsets[some.roles[0].name] - begin
    taken = slots.reshape(len(slots), layout.slots, layout.slot_bytes)[:, :, first_byte : first_byte + some.slot_bytes]
    own, whole = taken[table[mapped], heads.slot[0]], whole_layout(some, parts)
    first, last = int(batch.cu_seqlens_q[sequence]), int(batch.cu_seqlens_q[sequence + 1])
    return SharedContext(
        arena=_in_order(ranks.all_gather(own), some, whole).reshape(-1),
        layout=whole,
        batch=AttentionBatch(
            cu_seqlens_q=np.array([0, last - first], np.int32),
            seq_lens=batch.seq_lens[sequence : sequence + 1],
            block_tables=np.where(mapped, np.cumsum(mapped) - 1, -1).astype(np.int32)[None],
            groups=1,
            max_query_len=last - first,
        ),
        heads=_alone(heads),
        rows=slice(first, last),
        sequence=sequence,
    )


@lru_cache(maxsize=64)  # kernels know layouts, and tables of heads, by what they are
def whole_layout(layout: BlockLayout, parts: int) -> BlockLayout:
    """The layout of blocks of one slot that have all tokens."""
    return replace(layout, block_size=parts * layout.block_size, slots=1, lead_bytes=0, tail_bytes=0)


@lru_cache(maxsize=64)
def roles_alone(layout: BlockLayout, roles: tuple[Role, ...]) -> BlockLayout:
    """The layout of blocks of one slot that has these neighbouring roles alone; none: all."""
    return replace(layout, roles=roles or layout.roles, slots=1, lead_bytes=0, tail_bytes=0)


def _in_the_first_place(heads: HeadTable) -> HeadTable:
    none = np.zeros(1, np.int32)
    return replace(heads, group=none, slot=none)


_alone = OfEach(_in_the_first_place, MOST_TABLES)


def _in_order(every: NDArray[np.uint8], layout: BlockLayout, whole: BlockLayout) -> NDArray[np.uint8]:
    """Slots of all tokens, ``[blocks, bytes]``, of ``every [parts, blocks, bytes]`` of each rank's own."""
    parts, blocks, _ = every.shape
    slots = np.empty((blocks, whole.slot_bytes), np.uint8)
    for role in layout.roles:
        size, at, to = role.token_bytes, layout.role_offsets[role.name], whole.role_offsets[role.name]
        own = every[:, :, at : at + layout.block_size * size].reshape(parts, blocks, layout.block_size, size)
        target = slots[:, to : to + whole.block_size * size].reshape(blocks, layout.block_size, parts, size)
        target[...] = own.transpose(1, 2, 0, 3)
    return slots


def seen_by_all(
    query: Floats,
    size: int,
    batch: AttentionBatch,
    rows: NDArray[np.int64],
    ranks: TokenRanks,
    attend: Callable[[Floats, AttentionBatch], tuple[Floats, Floats]],
    sink_logits: Floats | None = None,
) -> Floats:
    """What ``query [n, heads, any]`` of these ``rows`` of a batch sees of what ``ranks`` keep, ``[n, heads, size]``.

    attend: gives, of queries of all ranks' heads ``[m, heads, any]``, each a sequence of a batch over this rank's own
            tokens, the means ``[m, heads, size]`` and the logarithms, to base 2, of the softmaxes' sums ``[m, heads]``
    sink_logits: of this rank's heads, as for `AttentionKernels.attend`
    """
    (count, heads, _), parts = query.shape, ranks.share.parts
    every = ranks.all_gather(query).swapaxes(0, 1).reshape(count, parts * heads, -1)
    seeing, own = rows_over_share(batch, ranks.share, rows)
    found = np.zeros((parts, count, heads, size + 1), np.float32)  # means, and the logarithm: one exchange, not two
    means, sums = found[..., :size], found[..., size]
    sums[:] = -np.inf
    if len(seeing):
        mean, lse = attend(every[seeing], own)
        means[:, seeing] = mean.reshape(len(seeing), parts, heads, size).swapaxes(0, 1)
        sums[:, seeing] = lse.reshape(len(seeing), parts, heads).swapaxes(0, 1)
    told = ranks.exchange(found)
    return merged(told[..., :size], told[..., size], sink_logits)
