"""The contract of attention kernels: one call serves prefill chunks and decode, over group block tables.

Arrays are those of the device the kernels run on (NumPy arrays on a CPU). Kernels never allocate device
memory that outlives the call, never write outside ``out`` and the slots named by the block tables, and
never read a block that no query of the batch may see: such blocks may hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headwise.cache_controller.layout import BlockLayout

Array = Any


@dataclass(frozen=True)
class HeadTable:
    """Where one rank's KV heads of one layer live. All arrays are ``int32 [kv_heads]``.

    group:  head group, selects the row of the block table
    slot:   slot of the head inside a block of that group
    window: 0 for full attention, else the number of most recent tokens seen (the query's own included)
    sink:   number of first tokens always seen
    chunked: whether windows are chunks: a query sees its own chunk of ``window`` tokens up to itself, and none before.
             Only kernels with `ChunkingKernels.sees_chunks` take such heads
    both_ways: whether queries see what `AttentionBatch.sees` says, else none behind themselves
    """

    group: Array
    slot: Array
    window: Array
    sink: Array
    chunked: bool = field(default=False, kw_only=True)
    both_ways: bool = field(default=False, kw_only=True)

    def elsewhere(self, bring: Callable[[Array], Array]) -> HeadTable:
        """The same with its arrays in other memory, to which ``bring`` takes them."""
        arrays = (bring(array) for array in (self.group, self.slot, self.window, self.sink))
        return HeadTable(*arrays, chunked=self.chunked, both_ways=self.both_ways)


@dataclass(frozen=True)
class HostLengths:
    """The lengths of an `AttentionBatch` in the host's memory."""

    cu_seqlens_q: Array
    seq_lens: Array


FOLLOWS, GUESSED = 1, 2
"""Values of `AttentionBatch.follows`, where a sequence follows another; else it is 0."""


@dataclass(frozen=True)
class AttentionBatch:
    """One step's sequences. All arrays are int32.

    cu_seqlens_q: ``[batch + 1]``; sequence ``i`` owns the query rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]``
    seq_lens:     ``[batch]``; tokens of the sequence *after* this step, so query row ``j`` of sequence ``i``
                  is at position ``seq_lens[i] - (cu_seqlens_q[i + 1] - cu_seqlens_q[i]) + j``
    block_tables: ``[batch * groups, max_blocks]``; row ``i * groups + g`` maps token block to block id.
                  ``-1`` marks a recycled block or one never allocated. Columns that ``seq_lens`` does not reach are
                  not read.
    groups:       number of head groups
    max_query_len: no sequence has more query rows than this, if the host knows it; 1 promises decode only. Kernels
                  on a device choose their grid by it without looking at the arrays.
    on_host:      the lengths of a step that is no graph, where the arrays are on a device
    follows:      ``[batch]``, on the host: not 0 of a sequence of one query that is the one before it, a token longer,
                  and shares its blocks; kernels may compute such queries together, to the same bits. `GUESSED` where
                  its token, and all behind it, are guesses, of which no state is left. None: there are none
    shared:       ``[batch]``, on the host: not 0 of a sequence of one query whose first so many tokens lie in the same
                  blocks as those of the sequence before it, of one query, too: of all groups that heads without a
                  window are in. Of sequences in a row for which it is not 0 it is the same number. Kernels may read
                  these tokens once for all of them. None: nobody says
    joint:        ``[3, batch]``, where the other arrays are, what comes of ``shared``, see `headwise.kernels.joint`: at
                  the first sequence of a group that reads its first tokens together how many these are, and how many
                  sequences; and of each of these how many tokens. Else 0. None: none does
    follows_on_device: ``follows`` where the other arrays are, for kernels that keep states; 0 of padding. None: there
                  are none
    sees:         ``[tokens]``, for heads that see `HeadTable.both_ways`: how many of its sequence's tokens, the first
                  ones, each query row may see. More than its position, no more than ``seq_lens``, and no less than
                  those of the rows before it in its sequence. None: up to itself
    """

    cu_seqlens_q: Array
    seq_lens: Array
    block_tables: Array
    groups: int
    max_query_len: int | None = None
    on_host: HostLengths | None = None
    follows: Array | None = None
    shared: Array | None = None
    joint: Array | None = None
    follows_on_device: Array | None = None
    sees: Array | None = None

    def sees_of(self, heads: HeadTable) -> Array | None:
        """``sees``, for heads that go by it."""
        return self.sees if heads.both_ways else None


class AttentionKernels(Protocol):
    """KV write and attention for grouped-query attention (roles ``key`` and ``value``)."""

    name: str

    def write_kv(
        self, key: Array, value: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """Store this step's keys and values ``[tokens, kv_heads, size]``, each of its own, at their positions.

        A token whose block is ``-1`` is skipped: its head will never look at it again.
        """

    def attend(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None = None,
    ) -> None:
        """Causal attention of ``query [tokens, q_heads, head_dim]`` over the cached tokens into ``out``, of as many
        heads of a value's size.

        ``q_heads`` is a multiple of ``kv_heads``; query heads ``[h * n, (h + 1) * n)`` share KV head ``h``.
        Query position ``p`` sees keys ``k <= p`` with ``window == 0 or p - k < window or k < sink``; of heads that are
        chunked, with ``k // window == p // window`` in place of ``p - k < window``; of heads that see both ways, with
        ``k < batch.sees[row]`` in place of ``k <= p``. Scores are
        ``scale * q.k``, then ``softcap * tanh(s / softcap)`` if ``softcap > 0``. The KV of this step's
        own tokens was written by `write_kv` before. ``sink_logits``, float32 ``[q_heads]``, if given, are scores of one
        more key for each query head, which every query sees and whose value is 0: they take from the others' share
        (attention sinks that a model has learned). A query that sees no key gets 0.
        ``arena`` is ``uint8 [num_blocks * layout.block_bytes]``.
        """


@runtime_checkable
class ChunkingKernels(AttentionKernels, Protocol):
    """Kernels that know chunks. sees_chunks: see `HeadTable.chunked`"""

    sees_chunks: bool


@runtime_checkable
class JointKernels(AttentionKernels, Protocol):
    """Kernels of a device that want `AttentionBatch.joint`."""

    @property
    def joint_share(self) -> int:
        """Query heads over a KV head at most, for which that is to be; 0: they have no use for it."""


@runtime_checkable
class RotatingKernels(AttentionKernels, Protocol):
    """Kernels that can rotate what they write on the way."""

    def write_kv_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """Rotate ``query [tokens, q_heads, head_dim]`` in place, and store rotated keys, and values as they are.

        ``cosines``, ``sines``: float32 ``[tokens, head_dim / 2]`` or ``[tokens, 1, head_dim / 2]``, C-contiguous, of
        each token's position: element ``i`` turns with ``i + head_dim / 2``, in float32. ``key`` is left as it is. The
        rest is as for `write_kv`.
        """


@runtime_checkable
class BiasingKernels(RotatingKernels, Protocol):
    """Kernels that can add a projection's bias on the way, too. adds_biases: so they are told apart"""

    adds_biases: bool

    def write_kv_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        bias: Array | None = None,
    ) -> None:
        """See `RotatingKernels.write_kv_rope`. ``bias [(q_heads + 2 * kv_heads) * head_dim]``, of the queries' dtype,
        is of a token's queries, then keys, then values: it is added to them first, and sums are rounded to their dtype.
        """
