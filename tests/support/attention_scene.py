"""Batches to attend to, on arenas poisoned with NaN, and the answer of an oracle that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headwise.kernels.base import AttentionBatch, AttentionKernels, HeadTable
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.gqa import QUANTISED, bit_views, gqa_layout, kv_views, quantise, scale_views
from headwise.kernels.nibbles import INT4, pack, unpack

GARBAGE_IDS = (2**31 - 1, -(2**31), -7, 10**9)


@dataclass(frozen=True)
class Case:
    """A batch to attend to. ``policies`` are (window, sink) per KV head; ``query_lens <= seq_lens``.

    value_dim: of values; 0: as large as keys
    chunked: windows are chunks, see `HeadTable`
    items: (sequence, start, end): tokens of a sequence that all see each other, those of one item behind another's
    shared: of each sequence, how many first tokens, in whole blocks, are those of the one before it: heads that see all
            have them in the same blocks
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    policies: tuple[tuple[int, int], ...]
    share: int = 1
    head_dim: int = 16
    block_size: int = 4
    softcap: float = 0.0
    has_sink_logits: bool = False
    seed: int = 0
    dtype: str = "float32"
    tail_bytes: int = 0
    chunked: bool = False
    value_dim: int = 0
    items: tuple[tuple[int, int, int], ...] = ()
    shared: tuple[int, ...] = ()


class Scene:
    """A case with its random KV, the arena that holds only what some query of the batch may see, and the answer.

    The KV is rounded to what the arena's dtype can hold: answers differ by how they are computed, not by that.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, np.random.default_rng(case.seed)
        heads = len(case.policies)
        drawn = [self.rng.standard_normal((2, n, heads, case.head_dim)).astype(np.float32) for n in case.seq_lens]
        self.kv = [(kv[0], np.ascontiguousarray(kv[1, ..., : case.value_dim or case.head_dim])) for kv in drawn]
        for sequence, count in enumerate(case.shared):
            for own, before in zip(self.kv[sequence], self.kv[sequence - 1], strict=True):
                own[:count] = before[:count]
        self.stored = [[self._rounded(rows) for rows in kv] for kv in self.kv]
        tokens = sum(case.query_lens)
        self.query = self.rng.standard_normal((tokens, heads * case.share, case.head_dim)).astype(np.float32)
        self.scale = case.head_dim**-0.5
        self.sink_logits = None
        if case.has_sink_logits:
            self.sink_logits = self.rng.standard_normal(heads * case.share).astype(np.float32) * 2
        self._place_heads()
        self._fill_arena()

    def _rounded(self, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys or values as stored, and their scales; ``kv`` itself becomes what is read of these."""
        stored, scales = kv.copy(), np.ones(kv.shape[:-1], np.float32)
        if self.case.dtype == "bfloat16":
            stored = to_bits(kv)
            kv[:] = to_float32(stored)
        elif self.case.dtype in QUANTISED:
            stored, scales = quantise(kv, self.case.dtype)
            kv[:] = stored.astype(np.float32) * scales[..., None]
        elif self.case.dtype == INT4:
            stored, scales = pack(kv)
            kv[:] = unpack(stored, scales)
        return stored, scales

    def _place_heads(self) -> None:
        # Heads of one policy share a group, as the planner has it; each sits in a slot of its own.
        policies = sorted(set(self.case.policies))
        group = [policies.index(policy) for policy in self.case.policies]
        slot = [group[:head].count(group[head]) for head in range(len(group))]
        window, sink = zip(*self.case.policies, strict=True)
        columns = (np.array(column, np.int32) for column in (group, slot, window, sink))
        self.heads = HeadTable(*columns, chunked=self.case.chunked, both_ways=bool(self.case.items))
        self.groups, self.slots = len(policies), max(slot) + 1

    def _fill_arena(self) -> None:
        case, size = self.case, self.case.block_size
        columns = -(-max(case.seq_lens) // size)
        needed = len(case.seq_lens) * self.groups * columns
        layout = gqa_layout(size, self.slots, case.head_dim, case.dtype, case.value_dim or None)
        self.layout = replace(layout, tail_bytes=case.tail_bytes)
        self.arena = np.full((needed + 1) * self.layout.block_bytes, 0xFF, np.uint8)  # NaN, of float32 and of bfloat16
        views = (bit_views if case.dtype == "bfloat16" else kv_views)(self.arena, self.layout)
        scales = scale_views(self.arena, self.layout) if case.dtype in (*QUANTISED, INT4) else ()
        free = iter(self.rng.permutation(needed + 1))
        tables = self.rng.choice(np.array(GARBAGE_IDS, np.int64), (len(case.seq_lens) * self.groups, columns + 1))
        for sequence, length in enumerate(case.seq_lens):
            for group in range(self.groups):
                members = np.flatnonzero(self.heads.group == group)
                seen = self.visible(sequence, int(members[0])).any(axis=0)
                row = tables[sequence * self.groups + group]
                row[: -(-length // size)] = -1
                for block in np.unique(np.flatnonzero(seen) // size):
                    row[block] = next(free)
                if case.shared and case.policies[members[0]][0] == 0:
                    columns = case.shared[sequence] // size
                    row[:columns] = tables[(sequence - 1) * self.groups + group][:columns]
                for position in np.flatnonzero(seen):
                    for head in members:
                        at = (row[position // size], self.heads.slot[head], position % size)
                        for role, view in enumerate(views):
                            view[at] = self.stored[sequence][role][0][position, head]
                        for role, view in enumerate(scales):
                            view[at] = self.stored[sequence][role][1][position, head]
        cu = np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32)
        lengths = np.array(case.seq_lens, np.int32)
        sees = np.concatenate([self.reach(sequence) for sequence in range(len(lengths))]).astype(np.int32)
        self.batch = AttentionBatch(
            cu, lengths, tables.astype(np.int32), self.groups, sees=sees if case.items else None,
            shared=np.array(case.shared, np.int32) if case.shared else None,
        )  # fmt: skip

    def reach(self, sequence: int) -> np.ndarray:
        """``[queries]``: how many tokens of the sequence each query may see, windows aside."""
        length, queries = self.case.seq_lens[sequence], self.case.query_lens[sequence]
        positions = np.arange(length - queries, length)
        ends = positions + 1
        for own, start, end in self.case.items:
            if own == sequence:
                ends[(positions >= start) & (positions < end)] = end
        return ends

    def visible(self, sequence: int, head: int) -> np.ndarray:
        """``bool [queries, keys]`` by the rule of the contract, spelled out token by token."""
        window, sink = self.case.policies[head]
        length, queries = self.case.seq_lens[sequence], self.case.query_lens[sequence]

        def is_near(p: int, k: int) -> bool:
            return k >= p - p % window if self.case.chunked else p - k < window

        rule = [
            [k < end and (window == 0 or is_near(p, k) or k < sink) for k in range(length)]
            for p, end in zip(range(length - queries, length), self.reach(sequence), strict=True)
        ]
        return np.array(rule, dtype=bool).reshape(queries, length)

    def expected(self) -> np.ndarray:
        """Dense attention in float64."""
        out = np.empty(self.room)
        for sequence, queries in enumerate(self.case.query_lens):
            first = int(self.batch.cu_seqlens_q[sequence])
            for q_head in range(self.query.shape[1]):
                head = q_head // self.case.share
                key, value = (rows[:, head].astype(np.float64) for rows in self.kv[sequence])
                scores = self.scale * self.query[first : first + queries, q_head].astype(np.float64) @ key.T
                if self.case.softcap:
                    scores = self.case.softcap * np.tanh(scores / self.case.softcap)
                weights = np.exp(scores) * self.visible(sequence, head)
                total = weights.sum(axis=1, keepdims=True)
                if self.sink_logits is not None:
                    total += np.exp(np.float64(self.sink_logits[q_head]))
                out[first : first + queries, q_head] = weights / total @ value
        return out

    @property
    def room(self) -> tuple[int, ...]:
        """The shape of what queries see."""
        return (*self.query.shape[:2], self.case.value_dim or self.case.head_dim)

    def attend(self, kernels: AttentionKernels) -> np.ndarray:
        out = np.full(self.room, np.nan, np.float32)
        kernels.attend(
            self.query, self.arena, self.layout, self.batch, self.heads,
            scale=self.scale, softcap=self.case.softcap, out=out, sink_logits=self.sink_logits,
        )  # fmt: skip
        return out
