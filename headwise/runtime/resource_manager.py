"""Decides what runs in the next step: continuous batching with chunked prefill over a bounded cache."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from headwise.cache_controller.cache_manager import CacheManager, PrefixMatch
from headwise.runtime.batch import BatchRequest, NewSequence
from headwise.runtime.sequence import Phase, Sequence

Plan = dict[Sequence, int]
"""Tokens of each sequence in the step being planned."""


@dataclass(frozen=True)
class ScheduledStep:
    """A step on its way: what was sent, and whose rows they are."""

    batch: BatchRequest
    sequences: tuple[Sequence, ...]


class ResourceManager:
    """First come, first served within a priority; the oldest sequence always gets on, so nothing can deadlock.

    Out of blocks, the latest sequence is preempted: its blocks go back (they stay as cache while nobody needs
    them) and it is computed again from what the cache still has. Blocks and rows of a sequence that leaves the
    batch come back once no step in flight may touch them.
    """

    def __init__(self, cache: CacheManager, *, max_rows: int, max_batched_tokens: int) -> None:
        self.cache = cache
        self.max_batched_tokens = max_batched_tokens
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap; the oldest first
        self._free_rows = deque(range(max_rows))
        self._new: list[NewSequence] = []
        self._draining: set[Sequence] = set()
        self._step_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))

    # ---- planning a step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if there is nothing to do until a step in flight comes back."""
        plan: Plan = {}
        budget, preemptions = self.max_batched_tokens, self.num_preemptions
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        for sequence in decoding + prefilling:  # those take one token each: no prompt may stall them
            budget -= self._plan(plan, sequence, budget)
        # Where blocks were short in this step, no newcomer may take what came free.
        while budget > 0 and self.num_preemptions == preemptions and (admitted := self._admit(plan, now)):
            budget -= self._plan(plan, admitted, budget)
        return self._send(plan) if plan else None

    def _plan(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Put the sequence's next tokens into the plan, with room for them in the cache; how many."""
        if sequence.phase is not Phase.RUNNING or sequence.is_complete:
            return 0
        tokens = min(sequence.length - sequence.scheduled, budget)
        if tokens <= 0 or not self._make_room(plan, sequence, sequence.scheduled + tokens):
            return 0
        plan[sequence] = tokens
        return tokens

    def _make_room(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks up to ``tokens``; preempts from the latest on, and never anybody older."""
        while not self.cache.extend(sequence.row, tokens):
            if self._draining:
                return False  # blocks are on their way back
            if self._preempt_latest(plan) is sequence:
                return False
        return True

    def _preempt_latest(self, plan: Plan) -> Sequence:
        victim = self.running[-1]
        plan.pop(victim, None)
        victim.preemptions += 1
        self.num_preemptions += 1
        self.leave(victim)
        return victim

    def _admit(self, plan: Plan, now: float) -> Sequence | None:
        """Start the first waiting sequence if all of its known tokens fit beside what runs already.

        Where they do not, a running sequence of lower priority makes way.
        """
        if not self._waiting or any(not leaving.finished for leaving in self._draining):
            return None
        sequence = self._waiting[0][1]
        match = self._match(sequence)
        others = self.running or self._draining
        if not self._free_rows or (others and not self._fits(sequence, match)):
            urgent = self.running and self.running[-1].order[0] > sequence.order[0]
            if urgent and not self._draining:  # else wait for what is on its way back
                self._preempt_latest(plan)
            return None
        heapq.heappop(self._waiting)
        self._start(sequence, match, now)
        return sequence

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the cache has of the sequence, short of its last token: that one must be computed to sample."""
        hashes = sequence.block_hashes(sequence.num_tokens, self.cache.block_size)
        return self.cache.match(hashes, max_tokens=sequence.num_tokens - 1)

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        needed = self.cache.peak_blocks(sequence.num_tokens + 1) - match.num_kept
        return needed <= self.cache.num_available - self.cache.num_reclaimed(match) - self._promised_blocks()

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> None:
        sequence.row = self._free_rows.popleft()
        self.cache.adopt(sequence.row, match, sequence.num_tokens)
        sequence.phase = Phase.RUNNING
        sequence.scheduled = match.num_blocks * self.cache.block_size
        if sequence.first_scheduled is None:
            sequence.cached_tokens = sequence.scheduled
            sequence.first_scheduled = now
        self._insert_running(sequence)
        request = sequence.request
        self._new.append(NewSequence(sequence.row, request.request_id, request.sampling, request.sampling.seed or 0))

    def _insert_running(self, sequence: Sequence) -> None:
        at = len(self.running)
        while at and self.running[at - 1].order > sequence.order:
            at -= 1
        self.running.insert(at, sequence)

    def _promised_blocks(self) -> int:
        """Blocks that admitted sequences will still take for tokens they already have."""
        return sum(self.cache.promised_blocks(s.row, s.length) for s in self.running)

    def _send(self, plan: Plan) -> ScheduledStep:
        sequences = tuple(plan)
        counts = list(plan.values())
        starts = [s.scheduled for s in sequences]
        token_ids = np.empty(sum(counts), dtype=np.int32)
        samples, at = [], 0
        for sequence, count in plan.items():
            sequence.take_inputs(count, token_ids[at : at + count])
            samples.append(sequence.schedule(count))
            at += count
        self._step_id += 1
        new, self._new = tuple(self._new), []
        batch = BatchRequest(
            step_id=self._step_id,
            rows=np.array([s.row for s in sequences], dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            query_lens=np.array(counts, dtype=np.int32),
            token_ids=token_ids,
            sample=np.array(samples, dtype=np.bool_),
            table_updates=self.cache.drain_table_updates(),
            new_sequences=new,
        )
        return ScheduledStep(batch, sequences)

    # ---- leaving the batch ----

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch; a running one gives back its blocks when no step may touch them.

        A sequence that is not finished goes back to the waiting ones then.
        """
        if sequence.phase is Phase.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            sequence.phase = Phase.DRAINING
            self._draining.add(sequence)
            self._settle(sequence)

    def step_done(self, sequence: Sequence) -> None:
        """A step that held the sequence came back."""
        sequence.in_flight -= 1
        if sequence.phase is Phase.DRAINING:
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            return
        self._draining.discard(sequence)
        self.cache.release(sequence.row)
        self._free_rows.append(sequence.row)
        self._new = [new for new in self._new if new.row != sequence.row]
        sequence.row = -1
        sequence.phase = Phase.WAITING
        sequence.scheduled = 0
        if not sequence.finished:
            self.add(sequence)
