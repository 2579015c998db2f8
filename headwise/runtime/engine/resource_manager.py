"""Decides what runs in the next step: continuous batching with chunked prefill over a bounded cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.prompt_turns import PromptTurns, ShareOf
from headwise.runtime.engine.admission import Admission
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.engine.pipeline_shares import NO_PIPELINE, PipelineShares
from headwise.runtime.engine.prefetcher import Prefetcher
from headwise.runtime.engine.retained_prompts import RetainedPrompts
from headwise.runtime.engine.running import Running
from headwise.runtime.engine.sequence import Phase, Sequence
from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.engine.step_budget import shares
from headwise.runtime.engine.step_results import StepResults
from headwise.runtime.engine.steps_in_flight import Plan, ScheduledStep, StepsInFlight
from headwise.runtime.engine.throughput import StepTimes
from headwise.runtime.engine.tier_copies import TierCopies
from headwise.runtime.engine.waiting_queue import WaitingQueue
from headwise.runtime.engine.whole_items import ending_outside
from headwise.runtime.protocol.batch import NO_DRAFTS, NOTHING_PROPOSED, StepResult
from headwise.runtime.protocol.messages import WaitingPrompts
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.transfer.shared_buffers import SharedBuffers


class ResourceManager:
    """Serves sequences by `Sequence.order`; the oldest one is never preempted, so nothing can deadlock.

    Out of blocks, the one of the lowest priority that came last is preempted: its blocks go back (they stay as cache
    while nobody needs them) and it is computed again from what the cache still has. Blocks and rows of a sequence that
    leaves the batch come back once no step in flight may touch them.

    max_batched_tokens: token budget of a step
    prefill_chunk:      most tokens of one sequence in a step
    pipeline:           of the workers
    speculator:         whether sequences have drafts; None: they have not
    prefetcher, peer_loads: see `WaitingQueue`
    whole_items:        whether steps compute items whole: see `whole_items`. None has more tokens than a chunk
    turns:              see `Admission`
    buffers:            see `StepsInFlight`
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_rows: int,
        max_batched_tokens: int,
        prefill_chunk: int,
        pipeline: PipelineShares = NO_PIPELINE,
        speculator: Speculator | None = None,
        prefetcher: Prefetcher | None = None,
        peer_loads: PeerLoads | None = None,
        whole_items: bool = False,
        turns: PromptTurns | None = None,
        buffers: SharedBuffers | None = None,
    ) -> None:
        self.cache, self.speculator = cache, speculator
        self.max_batched_tokens, self._pipeline = max_batched_tokens, pipeline
        self.copies = TierCopies(cache, peer_loads)
        self.num_preemptions = 0
        self._keeps_states = any(policy.is_state for policy in cache.policies)
        lag = speculator.most if speculator is not None and self._keeps_states else 0
        self.table = SequenceTable(max_rows, lag, takes_known=pipeline.takes_known, whole_items=whole_items)
        self._batch = Running(self.table)
        self._retained = RetainedPrompts(cache)
        self.steps = StepsInFlight(cache, self.table, self.copies, buffers)
        self._results = StepResults(cache, self.table, self._retained)
        self._admission = Admission(
            cache,
            self._batch,
            self._retained,
            prefill_chunk=prefill_chunk,
            pipeline=pipeline,
            turns=turns,
            prefetcher=prefetcher,
            peer_loads=peer_loads,
            begins=self.steps.introduce,
        )

    @property
    def running(self) -> list[Sequence]:
        """By their order."""
        return self._batch.sequences

    @property
    def waiting(self) -> WaitingQueue:
        return self._admission.waiting

    @property
    def step_times(self) -> StepTimes:
        return self._results.times

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight."""
        return self.steps.are_there

    @property
    def _blocks_of_a_step(self) -> int:
        columns = self.max_batched_tokens // self.cache.block_size + 1
        return columns * len(self.cache.policies)

    # ---- those that wait ----

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, once what other engines and storage have of it is there."""
        self._admission.add(sequence, now)

    def queued_tokens(self) -> int:
        """See `Admission`."""
        return self._admission.queued_tokens()

    def share_by(self, share_of: ShareOf) -> None:
        """See `Admission`."""
        self._admission.share_by(share_of)

    def waiting_prompts(self) -> WaitingPrompts | None:
        """See `Admission`."""
        return self._admission.waiting_prompts()

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of a new sequence's tokens would not be computed."""
        return self._admission.cached_tokens(sequence)

    def take_lacking(self) -> list[str]:
        """See `Admission`."""
        return self._admission.take_lacking()

    # ---- planning a step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if there is nothing to do until a step in flight comes back, or drafts are to wait for
        what that samples."""
        self._advance_copies(now)
        if self.speculator is not None and self._offer_drafts(self.speculator) and self.has_steps:
            return None
        self._make_way()
        self._admission.admit_before_prompts(now, self.max_batched_tokens)
        preemptions = self.num_preemptions
        plan = self._plan_running()
        if self.num_preemptions == preemptions:  # where blocks were short, no newcomer may take what came free
            self._plan_newcomers(plan, now)
        return self._send(plan) if len(plan.rows) or self._copies_need_a_step() else None

    def schedule_copies(self, now: float) -> ScheduledStep | None:
        """Like `schedule`, while no sequence may run."""
        self._advance_copies(now)
        return self._send(Plan.empty()) if self._copies_need_a_step() else None

    def command(self, command: str, weights: WeightsToLoad | None = None) -> ScheduledStep:
        """A step that has the workers obey a command; see `BatchRequest`."""
        return self._send(Plan.empty(), command, weights)

    def _send(self, plan: Plan, command: str = "", weights: WeightsToLoad | None = None) -> ScheduledStep:
        is_one = self.table.is_one(plan.rows, plan.counts)
        self._admission.computed(int(plan.counts[~is_one].sum()))
        return self.steps.make(plan, is_one, self.speculator, command, weights)

    def _advance_copies(self, now: float) -> None:
        self._retained.advance(now)
        self.copies.advance(now, self._blocks_of_a_step)
        self.waiting.advance(now)

    def _copies_need_a_step(self) -> bool:
        """Whether a step without sequences must start copies, or bring word of them: no other one is under way."""
        return not self.has_steps and self.copies.needs_step

    def _offer_drafts(self, speculator: Speculator) -> bool:
        """Let decoding rows have drafts; whether that is worth waiting for tokens that steps in flight sample."""
        rows, columns = self._batch.rows, self.table
        length = columns.length[rows]
        rows = rows[(length > columns.num_prompt[rows]) & (columns.scheduled[rows] >= length - 1 - columns.lag)]
        if self._pipeline.takes_known:
            rows = rows[columns.pending[rows] == 0]
        counts, is_worth_waiting = speculator.chosen(columns.of(rows), (columns.pending[rows] == 0).tolist())
        if self._keeps_states:  # what a block of states is of, stays the last known token's
            counts = np.minimum(counts, -columns.length[rows] % self.cache.block_size)
        columns.offered[:] = 0
        columns.offered[rows] = np.where(columns.pending[rows] == 0, counts, 0)
        return is_worth_waiting and not self._pipeline.takes_known

    def _plan_running(self) -> Plan:
        """The next tokens of what runs, with room for them in the cache.

        Short of blocks, the latest sequences are preempted; while blocks are on their way back, those wait that
        need more.
        """
        while True:
            plan = self._ask_for_tokens()
            targets = self.table.scheduled[plan.rows] + plan.counts
            if self._extend(plan.rows, targets):
                return plan
            if self.table.offered.any():
                self.table.offered[:] = 0
                continue
            needed = self.cache.blocks_needed(plan.rows, targets)
            available = self.cache.num_available
            if self._batch.leaving or int(needed.sum()) <= available + self.cache.host.num_returning:
                fits = (needed == 0) | (np.cumsum(needed) <= available)
                self.cache.extend(plan.rows[fits], targets[fits])
                return Plan(plan.rows[fits], plan.counts[fits])
            self._preempt_latest()

    def _plan_newcomers(self, plan: Plan, now: float) -> None:
        """Start sequences with what running ones leave of the step."""
        budget = self.max_batched_tokens - int(plan.counts.sum())
        while budget > 0 and (admitted := self._admission.admit(now)):
            self._admission.first_to_start()  # who waits for it says so before its blocks are laid out
            row = np.array([admitted.row], dtype=np.int32)
            wanted = np.minimum(admitted.num_tokens - self.table.scheduled[row], self.table.chunk[row])
            count = int(ending_outside(self.table, row, np.minimum(wanted, budget))[0])
            if count and self._extend(row, self.table.scheduled[row] + count):
                plan.add(admitted.row, count)
                budget -= count

    def _extend(self, rows: Index, targets: NDArray[np.int64]) -> bool:
        """Make room for so many tokens of each row, and, where that is had, for those that the model drafts behind
        them. A block of states has no room beyond its last known token."""
        if self.speculator is not None and self.speculator.by_model and not self._keeps_states:
            further = np.minimum(targets + self.speculator.most - 1, self.table.max_length[rows])
            if self.cache.extend(rows, np.maximum(further, targets)):
                return True
        return self.cache.extend(rows, targets)

    def _ask_for_tokens(self) -> Plan:
        """The tokens that running sequences get, within the budget; decoding ones first."""
        rows, (wanted, decoding) = self._batch.rows, self._batch.wanted()
        wanted = self._pipeline.of_step(wanted, decoding, self.table, rows, self.steps.sent + 1, self.steps.done)
        order, counts = shares(wanted, decoding, self.max_batched_tokens)
        whole = ending_outside(self.table, rows[order], counts)
        if whole is counts:  # as in nearly all steps: no item is near
            return Plan(rows[order], counts)
        stuck = order[(whole == 0) & ~decoding[order]]
        if len(stuck) and not whole[~decoding[order]].any():
            # No prompt gets on, for an item has no room beside all that decode: some of these wait for one step.
            is_first = np.arange(len(rows)) == stuck[0]
            wanted = np.where(decoding | is_first, wanted, 0)
            order, counts = shares(wanted, is_first, self.max_batched_tokens)
            whole = ending_outside(self.table, rows[order], counts)
        return Plan(rows[order][whole > 0], whole[whole > 0])

    # ---- what comes back ----

    def commit(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int32],
        accepted: NDArray[np.int32] = NO_DRAFTS,
        proposed: NDArray[np.int32] = NOTHING_PROPOSED,
    ) -> list[int]:
        """Take what a step computed; the indices in its batch of the sequences whose output has new tokens: one each,
        and accepted drafts before it.

        token_ids: ``[n]``, the sampled token of each sequence of the batch
        accepted, proposed: see `StepResult`
        """
        indices = self._results.take(step, token_ids, accepted, proposed, self.speculator)
        self.step_done(step)
        return indices

    def observe(self, step: ScheduledStep, compute_s: float) -> None:
        """Learn from how long a step has taken."""
        self._results.observe(step, compute_s, self.speculator)

    def copies_done(self, step: ScheduledStep, result: StepResult) -> None:
        """Take in what a step says of copies; to be called before its tokens are committed.

        A sequence that the step computed from a block that never came is void from here on, and computed anew.

        Raises:
            EngineDiedError: the step has loaded blocks, and says nothing of whether they came.
        """
        void = self.copies.take_report(step.batch, result.copies, self.step_times.prefill_token_s)
        if not len(void):
            return
        failed = set(void.tolist())
        for sequence in [each for each in (*self.running, *self._batch.leaving) if each.row in failed]:
            if sequence.phase is Phase.RUNNING:
                self._preempt(sequence)
            if sequence.row >= 0:  # else no step has carried it yet
                self.table.wanted[sequence.row] = False

    def is_wanted(self, step: ScheduledStep, index: int) -> bool:
        """Whether anybody waits for what a step says of a sequence of its batch: it neither ended nor is it void."""
        return bool(self.table.wanted[step.batch.rows[index]])

    def step_done(self, step: ScheduledStep) -> None:
        """A step came back, as they do in order: what left the batch meanwhile may give back its blocks."""
        self.steps.done = step.batch.step_id
        self._settle_all()

    def drop_steps(self) -> None:
        """No step in flight will come back, or touch a block any more."""
        self.steps.done = self.steps.sent
        self._settle_all()

    # ---- leaving the batch ----

    def _make_way(self) -> None:
        """Preempt a running sequence for one of higher priority that could not start otherwise."""
        urgent = self.waiting.first
        if urgent is None or not self.running or self._batch.leaving:  # what is on its way back may do
            return
        if self._admission.is_kept_out(urgent):
            self._preempt_latest()

    def _preempt_latest(self) -> None:
        self._preempt(self._batch.latest)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.leave(sequence)

    def preempt_all(self) -> None:
        """Let nothing run: all sequences wait again, with the tokens they have, and are computed again later."""
        for sequence in list(self.running):
            self.leave(sequence)

    def reseed(self, sequence: Sequence, seed: bytes, now: float) -> None:
        """Have a sequence's blocks hashed from another seed: no step is in flight. Nothing that is cached is its any
        more; what a running one computes from now on is nobody else's, since what is before it is not of that seed."""
        sequence.reseed(seed)
        if sequence.phase is Phase.RUNNING:
            self.cache.seclude(sequence.row)
        else:
            self.waiting.discard(sequence)
            self.waiting.add(sequence, now)

    def forget_computed(self, sequence: Sequence) -> None:
        """Let no request be served what a sequence has computed; what it was itself served by others stays."""
        self.cache.forget(sequence.hashes[sequence.computed_from // self.cache.block_size :])

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch; a running one gives back its blocks when no step may touch them.

        A sequence that is not finished goes back to the waiting ones then.
        """
        if sequence.row >= 0:
            self.table.wanted[sequence.row] = not sequence.finished
        if sequence.phase is Phase.WAITING:
            self.waiting.discard(sequence)
        elif sequence.phase is Phase.RUNNING:
            self._batch.leave(sequence)
            self._settle(sequence)

    def _settle_all(self) -> None:
        for sequence in list(self._batch.leaving):
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Give back a row and its blocks, unless a step in flight may touch them."""
        row = sequence.row
        if self.steps.may_touch(row):
            return
        self._batch.leaving.pop(sequence, None)
        self._retained.leaves(sequence)
        self.cache.release(row, will_return=not sequence.finished)
        self.table.close(sequence)
        self.steps.forget(row)
        sequence.phase = Phase.WAITING
        if not sequence.finished:
            self.waiting.put_back(sequence)
