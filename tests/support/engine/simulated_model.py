"""A model whose KV cache holds token ids: what it says next is a function of every token that block tables lead to.

Its states hold how many tokens they stand for, and a checksum of these.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.engine.simulated_copies import DEVICE_POISON, HOST_POISON, Faults, WatchedCopy
from support.late_fetch import LateFetch

from headwise.cache_controller.block_tables import HostBlockTables, TableShape
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import FOLLOWS, GUESSED, AttentionBatch, HeadTable
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.base import AttentionLayer, Embeds, Model
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.comm import Collectives, Communicator, host_collectives
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.protocol.prompt_items import as_float32
from headwise.runtime.worker.last_sampled import HostLastSampled
from headwise.transfer.base import Stream

VOCAB = 97

OF_WEIGHTS = 1 << 20
"""What is kept of a token is the token, and so many times the number of the weights that it was computed by."""

Context = list[int] | None
"""The tokens that a sequence's next one depends on; None: it was computed from a block that never came."""


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes()) % VOCAB


def sure_of_one(tokens: list[int], following: Callable[[Sequence[int]], int] = next_token) -> NDArray[np.float32]:
    """Logits ``[VOCAB]`` that leave no choice, at whatever temperature."""
    logits = np.full(VOCAB, -1e9, dtype=np.float32)
    logits[following(tokens)] = 0
    return logits


def often_again(tokens: Sequence[int], period: int = 7) -> int:
    """A next token that is mostly what stood ``period`` tokens before."""
    found = next_token(tokens)
    return tokens[-period] if len(tokens) >= period and found % 5 else found


class TokenOps(NumpyOps):
    """Memory on the device holds nothing at first."""

    def empty_bytes(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.full(num_bytes // 4, DEVICE_POISON, dtype=np.int32).view(np.uint8)


class TokenKernels:
    """Attention kernels that write keys, which are token ids, and read them again.

    state_groups: those that keep states
    contexts:     what each sequence of the latest step has seen
    shared:       what sequences of the latest step share with the ones before them
    is_drafting:  whether a layer that drafts is next: what it keeps of a block's last token is of whoever computed that
    weights:      number of those that it computes by
    mixed:        of each sequence of the latest step, whether tokens that were computed by earlier weights may be its
    """

    name = "simulated"

    def __init__(self, copies: WatchedCopy, state_groups: Collection[int] = ()) -> None:
        self._copies, self._state_groups = copies, state_groups
        self._tokens: list[NDArray[np.int32]] = []  # of each sequence in the latest step
        self.contexts: list[Context] = []
        self.shared: list[int] = []
        self.is_drafting = False
        self.weights = 0
        self.mixed: list[bool] = []

    def write_kv(self, *arguments: Any) -> None:
        raise AssertionError("the worker prefers to have keys rotated on the way")

    def write_kv_rope(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        cosines: Any,
        sines: Any,
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        blocks, size = _slots(arena, layout), layout.block_size
        self._block_size = size
        ends = batch.cu_seqlens_q.tolist()
        places = [place for place in _places(heads) if place[0] not in self._state_groups]
        of_weights = self.weights * OF_WEIGHTS
        self._tokens = [key[first:last, 0, 0].astype(np.int32) + of_weights for first, last in pairwise(ends)]
        for index, length in enumerate(batch.seq_lens.tolist()):
            tokens = self._tokens[index]
            positions = np.arange(length - len(tokens), length)
            for group, slot in places:
                ids = batch.block_tables[index * batch.groups + group][positions // size]
                kept = ids >= 0
                blocks[ids[kept], slot, positions[kept] % size] = tokens[kept]
                if self._copies.nonsense:  # they were given to somebody else
                    self._copies.nonsense.difference_update(ids[kept & (positions % size == 0)].tolist())

    def attend(
        self,
        query: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: NDArray[np.float32],
        sink_logits: NDArray[np.float32] | None = None,
    ) -> None:
        out[:] = -1
        self._check_shared(batch, heads)
        blocks = _slots(arena, layout)
        behind = _where_states_are_left(batch)
        for index, first in behind.items():
            tokens = np.concatenate(self._tokens[first : index + 1])
            for group, slot in _places(heads):
                if group in self._state_groups:
                    table = batch.block_tables[index * batch.groups + group]
                    self._go_on(blocks[:, slot], table, tokens, int(batch.seq_lens[index]))
        self.contexts = [
            self._read(index, blocks, batch.block_tables[index * batch.groups :], length, heads, index in behind)
            for index, length in enumerate(batch.seq_lens.tolist())
        ]
        out[batch.cu_seqlens_q[1:] - 1] = np.arange(len(self.contexts), dtype=np.float32)[:, None, None]

    def _check_shared(self, batch: AttentionBatch, heads: HeadTable) -> None:
        """That sequences share what the step says they do."""
        self.shared = [0] * len(batch.seq_lens) if batch.shared is None else batch.shared.tolist()
        assert self.shared[0] == 0
        whole = sorted({group for group, slot in _places(heads) if group not in self._state_groups})
        whole = [group for group in whole if not heads.window[heads.group == group].any()]
        for index, shared in enumerate(self.shared):
            if not shared:
                continue
            assert self.shared[index - 1] in (0, shared)
            assert len(self._tokens[index - 1]) == len(self._tokens[index]) == 1
            assert shared % self._block_size == 0
            assert shared < batch.seq_lens[index - 1 : index + 1].min()
            for group in whole:
                own, before = (batch.block_tables[at * batch.groups + group] for at in (index, index - 1))
                columns = shared // self._block_size
                assert (own[:columns] >= 0).all()
                assert (own[:columns] == before[:columns]).all()

    def _read(
        self,
        index: int,
        blocks: NDArray[np.int32],
        tables: NDArray[np.int32],
        length: int,
        heads: HeadTable,
        has_state: bool,
    ) -> Context:
        """The tokens of a sequence as one head holds them; all must hold the same where they may look. has_state: one
        was left."""
        positions, size = np.arange(length), blocks.shape[2]
        found = np.full(length, -1, dtype=np.int32)
        columns = zip(*(column.tolist() for column in (heads.group, heads.slot, heads.window, heads.sink)), strict=True)
        for group, slot, window, sink in sorted(columns, key=lambda head: head[0] in self._state_groups):
            if group in self._state_groups:
                block = int(tables[group][(length - 1) // size])
                if not has_state:
                    continue
                if block in self._copies.nonsense:
                    return None
                if _state(blocks[block, slot]) != (length, zlib.crc32(found.tobytes())):
                    self._copies.violations.append(f"group {group} has the state of other tokens than its {length}")
                continue
            seen = positions if not window else positions[(positions < sink) | (length - 1 - positions < window)]
            ids = tables[group][seen // size]
            if (ids < 0).any():
                self._copies.violations.append(f"group {group} lost a block of {length} tokens")
                return None
            if self._copies.nonsense and self._copies.nonsense.intersection(ids.tolist()):
                return None
            tokens = blocks[ids, slot, seen % size]
            known = found[seen]
            differ = (known >= 0) & (known != tokens)
            if self.is_drafting:  # groups may have blocks of different requests
                differ &= ((seen + 1) % size > 0) & (not self._copies.has_lost)
            if differ.any():
                self._copies.violations.append("groups hold different tokens for one sequence")
            found[seen] = tokens
        known = found[found >= 0] // OF_WEIGHTS
        may_be_mixed = bool(self.mixed) and self.mixed[index]
        if (
            (np.diff(known) < 0).any()
            or (known > self.weights).any()
            or (not may_be_mixed and (known < self.weights).any())
        ):
            self._copies.violations.append(f"by weights {self.weights} a sequence goes on behind those of {known}")
        return np.where(found < 0, found, found % OF_WEIGHTS).tolist()

    def check_following(self, expected: list[int], kept: list[int], place: int) -> None:
        """What a layer that drafts has kept up to a token's place must be the tokens behind, but of blocks' ends."""
        if self._copies.has_lost:  # who computes from that is void
            return
        size = self._block_size
        wrong = [at for at, pair in enumerate(zip(expected, kept, strict=True)) if pair[0] != pair[1]]
        if len(kept) != place + 1 or any((at + 1) % size for at in wrong):
            self._copies.violations.append(f"behind the token at {place} {kept} are kept, not {expected}")

    def _go_on(
        self, states: NDArray[np.int32], table: NDArray[np.int32], tokens: NDArray[np.int32], length: int
    ) -> None:
        """Take a sequence's state, among ``states [blocks, size]``, on by a step's tokens."""
        size, start = states.shape[1], length - len(tokens)
        checksum, is_known = 0, True
        if start:
            left = int(table[(start - 1) // size])
            source = left if left >= 0 else int(table[(length - 1) // size])
            count, checksum = _state(states[source])
            is_known = source not in self._copies.nonsense
            if source < 0 or (is_known and count != start):
                self._copies.violations.append(f"a state stands for {count} tokens, the sequence has {start}")
        for column in range(start // size, (length - 1) // size + 1):
            first, last = max(start, column * size), min(length, (column + 1) * size)
            checksum = zlib.crc32(tokens[first - start : last - start].tobytes(), checksum)
            if (block := int(table[column])) >= 0:
                states[block] = 0  # whatever is kept is not negative: see `holds`
                states[block, :3] = last, checksum >> 16, checksum & 0xFFFF
                (self._copies.nonsense.discard if is_known else self._copies.nonsense.add)(block)


def _where_states_are_left(batch: AttentionBatch) -> dict[int, int]:
    """By each sequence behind which states are left: the first of those that it follows, itself if it follows none."""
    follows = [0] * len(batch.seq_lens) if batch.follows is None else batch.follows.tolist()
    found, first = {}, 0
    for index, how in enumerate(follows):
        first = first if how else index
        if how == FOLLOWS:
            del found[index - 1]
        if how != GUESSED:
            found[index] = first
    return found


def _state(stored: NDArray[np.int32]) -> tuple[int, int]:
    """How many tokens a state stands for, and their checksum."""
    return int(stored[0]), int(stored[1]) << 16 | int(stored[2])


def _places(heads: HeadTable) -> list[tuple[int, int]]:
    return list(zip(heads.group.tolist(), heads.slot.tolist(), strict=True))


def _slots(arena: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.int32]:
    return arena.view(np.int32).reshape(-1, layout.slots, layout.block_size)


DRAFTED = 1 << 10
"""Hidden rows from here on are of what was drafted: more than a step has sequences."""

WRONG_DRAFTS = 4
"""Of drafts one in so many."""


class TokenModel(Model):
    """fails: what its next forward pass raises; breaks: contexts whose logits are no numbers"""

    def __init__(self, config: ModelConfig, kernels: TokenKernels) -> None:
        self.config = config
        self._kernels = kernels
        self.fails: Exception | None = None
        self.breaks: Callable[[list[int]], bool] = lambda tokens: False
        self.logits_of: Callable[[list[int]], NDArray[np.float32]] = sure_of_one
        self._drafted: list[Context] = []

    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Hidden rows ``[T, 1]``: which of the kernels' contexts each is of; -1 for none."""
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        tokens = np.repeat(_shown(token_ids, embeds)[:, None, None], self.config.num_kv_heads, axis=1)
        hidden: NDArray[np.float32] = attention(0, tokens, tokens, tokens, (None, None))[:, 0]
        return hidden if wanted is None else hidden[wanted]

    def draft(
        self,
        following: NDArray[np.int32],
        positions: NDArray[np.int32],
        hidden: NDArray[np.float32],
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> NDArray[np.float32]:
        """Hidden rows of contexts that are a token longer than those of ``hidden``. The layer keeps the tokens that
        follow: they must be those of the contexts, but where another request's may be in a cached prefix."""
        before = [self._context(int(index)) if index >= 0 else None for index in hidden[:, 0]]
        shown = _shown(following, embeds)
        tokens = np.repeat(shown[:, None, None], self.config.num_kv_heads, axis=1)
        self._kernels.is_drafting = True
        seen = attention(1, tokens, tokens, tokens, (None, None))[:, 0]
        self._kernels.is_drafting = False
        self._drafted = [
            None if context is None else [*context, int(token)]
            for context, token in zip(before, shown.tolist(), strict=True)
        ]
        for row in range(len(hidden)) if wanted is None else wanted.tolist():  # others may be behind a wrong guess
            context, kept = self._drafted[row], self._kernels.contexts[int(seen[row, 0])]
            if context is not None and kept is not None:
                self._kernels.check_following(context[1:], kept, int(positions[row]))
        made = np.where(hidden >= 0, DRAFTED + np.arange(len(hidden), dtype=np.float32)[:, None], np.float32(-1))
        return made if wanted is None else made[wanted]

    def drafted(self, made: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        scores = self.scores(made)
        return scores.argmax(axis=1).astype(np.int32), scores.max(axis=1)

    def scores(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.stack([self._scores(int(index)) for index in hidden[:, 0]])

    def _scores(self, index: int) -> NDArray[np.float32]:
        context = self._context(index)
        if context is None or self.breaks(context):
            return np.full(VOCAB, np.nan, dtype=np.float32)
        logits = self.logits_of(context)
        is_wrong = index >= DRAFTED and next_token(context) % WRONG_DRAFTS == 0
        return np.roll(logits, 1) if is_wrong else logits

    def _context(self, index: int) -> Context:
        return self._drafted[index - DRAFTED] if index >= DRAFTED else self._kernels.contexts[index]

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.scores(hidden)


class LateSamples(HostLastSampled):
    """The host has tokens later than the next step."""

    def keep(self, *arguments: Any) -> LateFetch:
        return LateFetch(super().keep(*arguments).get())


class SimulatedDevice:
    """`Device` with streams that count steps, and memory in which nothing is found that was not put there."""

    name = "simulated"
    sampler, products_per_s = None, 0.0

    def __init__(self, faults: Faults, state_groups: Collection[int] = (), is_late: bool = False) -> None:
        """is_late: see `SimulatedExecutor`"""
        self._is_late = is_late
        self.ops = TokenOps()
        self.copies = WatchedCopy(faults)
        self.kernels = TokenKernels(self.copies, state_groups)

    def check(self, card: ModelCard, model_dir: Path) -> None:
        pass

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collectives(self, comm: Communicator) -> Collectives:
        return host_collectives(self.ops, comm)

    def spare_bytes(self) -> int:
        raise NotImplementedError

    def block_tables(self, shape: TableShape) -> HostBlockTables:
        return HostBlockTables(shape)

    def last_sampled(self, max_rows: int) -> HostLastSampled:
        return (LateSamples if self._is_late else HostLastSampled)(max_rows)

    def block_copy(self) -> WatchedCopy:
        return self.copies

    def copy_stream(self, name: str) -> Stream:
        return {"headwise-load": self.copies.loads, "headwise-store": self.copies.stores}[name]

    def host_arena(self, num_bytes: int) -> Any:
        array = np.full(num_bytes // 4, HOST_POISON, dtype=np.int32).view(np.uint8)
        return SimpleNamespace(array=array, close=lambda: None)

    def sharing(self) -> None:
        return None


def _shown(token_ids: NDArray[np.int32], embeds: Embeds | None) -> NDArray[np.float32]:
    """The tokens that a step computes with: an embedding is that of the token that it begins with."""
    seen = token_ids.astype(np.float32)
    if embeds is not None:
        rows, values = embeds
        seen[rows] = as_float32(values[:, 0])
    return seen
