"""Makes steps of rows and their numbers of tokens, and knows which are on their way to the workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.joint_reads import JointReads
from headwise.runtime.engine.introduction import introduction
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.speculation.asked import asked_of_model
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.engine.step_embeds import step_embeds
from headwise.runtime.engine.step_places import step_places
from headwise.runtime.engine.step_tokens import step_tokens
from headwise.runtime.engine.tier_copies import TierCopies
from headwise.runtime.engine.whole_items import step_sees
from headwise.runtime.protocol.batch import NO_DRAFTS, NOTHING_SHARED, BatchRequest, NewSequence
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.transfer.shared_buffers import SharedBuffers


@dataclass(frozen=True)
class ScheduledStep:
    """A step on its way: what was sent, and whose rows they are."""

    batch: BatchRequest
    sequences: tuple[Sequence, ...]


@dataclass
class Plan:
    """Rows of the step being planned, and how many tokens of each."""

    rows: Index
    counts: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Plan:
        return cls(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))

    def add(self, row: int, count: int) -> None:
        self.rows = np.append(self.rows, np.int32(row))
        self.counts = np.append(self.counts, count)


class StepsInFlight:
    """joint_reads: puts decodes beside each other that read the same
    buffers: in which embeddings of requests are, and which workers read; None: they read none
    """

    def __init__(
        self, cache: CacheManager, table: SequenceTable, copies: TierCopies, buffers: SharedBuffers | None
    ) -> None:
        self.joint_reads = JointReads(cache)
        self._cache, self._table, self._copies, self._buffers = cache, table, copies, buffers
        self._new: list[NewSequence] = []
        self.sent = 0
        """Number of the latest step."""
        self.done = 0
        """And of the latest that came back."""

    @property
    def are_there(self) -> bool:
        """Whether steps are in flight."""
        return self.done < self.sent

    def may_touch(self, row: int) -> bool:
        """Whether steps in flight may touch a row's blocks."""
        return bool(self._table.last_step[row] > self.done)

    def introduce(self, sequence: Sequence) -> None:
        """Have the next step tell the workers of a sequence that starts."""
        self.joint_reads.forget(sequence.row)
        self._new.append(introduction(sequence))

    def forget(self, row: int) -> None:
        """A row's sequence is gone: workers that were not told of it need not be."""
        self._new = [new for new in self._new if new.row != row]

    def make(
        self,
        plan: Plan,
        is_one: NDArray[np.bool_],
        speculator: Speculator | None,
        command: str = "",
        weights: WeightsToLoad | None = None,
    ) -> ScheduledStep:
        """The next step, of these rows, in the order in which they are computed.

        is_one: see `SequenceTable.is_one`
        """
        (rows, counts, shared), columns = self._arranged(plan, is_one), self._table
        starts = columns.scheduled[rows]
        drafts = np.clip(starts + counts - columns.length[rows], 0, columns.offered[rows])
        token_ids = step_tokens(columns, rows, starts, counts, drafts, speculator)
        columns.scheduled[rows] = starts + counts
        columns.drafted[rows] = drafts
        length = columns.length[rows]
        samples = starts + counts - drafts == length
        columns.pending[rows] += samples
        columns.length[rows] = length + samples
        self.sent += 1
        columns.last_step[rows] = self.sent
        sequences, room = columns.of(rows), self._cache.num_blocks[rows] * self._cache.block_size
        of_model = asked_of_model(speculator, sequences, starts + counts, samples, room)
        new, self._new = tuple(self._new), []
        swap_in, swap_out = self._copies.take_orders(self.sent)
        batch = BatchRequest(
            step_id=self.sent,
            rows=rows,
            starts=starts.astype(np.int32),
            query_lens=counts.astype(np.int32),
            token_ids=token_ids,
            sample=samples,
            table_updates=self._cache.drain_table_updates(),
            new_sequences=new,
            cache_swap_metadata=swap_in,
            cache_evict_metadata=swap_out,
            command=command,
            embeds=step_embeds(columns, rows, starts, counts, self._buffers),
            drafts=drafts.astype(np.int32) if drafts.any() else NO_DRAFTS,
            places=step_places(columns, rows, starts, counts),
            sees=step_sees(columns, rows, starts, counts),
            shared=shared,
            weights=weights,
            **of_model,
        )
        return ScheduledStep(batch, tuple(sequences))

    def _arranged(self, plan: Plan, is_one: NDArray[np.bool_]) -> tuple[Index, NDArray[np.int64], NDArray[np.int32]]:
        """The rows of a step in the order in which they are computed, how many tokens of each, and what of these they
        share (`BatchRequest.shared`)."""
        rows, counts = plan.rows, plan.counts
        order, shared = self.joint_reads.arranged(rows, np.where(is_one, self._table.num_prompt[rows] - 1, 0))
        self.joint_reads.count(self._table.scheduled[rows][is_one], shared)
        return rows[order], counts[order], shared if shared.any() else NOTHING_SHARED
