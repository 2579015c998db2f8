"""Decides what runs in the next step: continuous batching with chunked prefill over a bounded cache."""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.joint_reads import JointReads
from headwise.cache_controller.prefix_match import PrefixMatch
from headwise.prompt_turns import NONE_BESIDE, Beside, PromptTurns
from headwise.runtime.engine.followers import Followers, Shared
from headwise.runtime.engine.introduction import introduction
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.engine.pipeline_shares import NO_PIPELINE, PipelineShares
from headwise.runtime.engine.prefetcher import Prefetcher
from headwise.runtime.engine.retained_prompts import RetainedPrompts
from headwise.runtime.engine.sequence import Phase, Sequence
from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.speculation.asked import asked_of_model
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.engine.step_budget import left_for, shares
from headwise.runtime.engine.step_embeds import step_embeds
from headwise.runtime.engine.step_places import step_places
from headwise.runtime.engine.step_tokens import step_tokens
from headwise.runtime.engine.throughput import StepTimes
from headwise.runtime.engine.tier_copies import TierCopies
from headwise.runtime.engine.waiting_queue import WaitingQueue
from headwise.runtime.engine.whole_items import ending_outside, step_sees
from headwise.runtime.protocol.batch import (
    NO_DRAFTS,
    NOTHING_PROPOSED,
    NOTHING_SHARED,
    BatchRequest,
    NewSequence,
    StepResult,
)
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.transfer.shared_buffers import SharedBuffers

ASKED_CHUNK = 256
"""Most tokens of a prompt in a step whose log-probabilities are asked for: others in the step wait for these."""
MAX_LOOKED_AT = 64
"""Waiting sequences, the next ones, whose cached tokens are left out where the engine says how much it has to do."""


@dataclass(frozen=True)
class ScheduledStep:
    """A step on its way: what was sent, and whose rows they are."""

    batch: BatchRequest
    sequences: tuple[Sequence, ...]


@dataclass
class _Plan:
    """Rows of the step being planned, and how many tokens of each."""

    rows: Index
    counts: NDArray[np.int64]

    def add(self, row: int, count: int) -> None:
        self.rows = np.append(self.rows, np.int32(row))
        self.counts = np.append(self.counts, count)


def _no_rows() -> _Plan:
    return _Plan(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))


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
    turns:              of prompts; None: they have them in the order in which they came
    buffers:            in which embeddings of requests are, and which workers read; None: they read none
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
        self.cache, self._buffers, self._turns = cache, buffers, turns
        self.waiting = WaitingQueue(Followers(cache, prefill_chunk), self._take_turn, prefetcher, peer_loads)
        self.copies = TierCopies(cache, peer_loads)
        self.joint_reads = JointReads(cache)
        self._retained = RetainedPrompts(cache)
        self.step_times = StepTimes()
        self._keeps_states = any(policy.is_state for policy in cache.policies)
        lag = speculator.most if speculator is not None and self._keeps_states else 0
        self.table = SequenceTable(max_rows, lag, takes_known=pipeline.takes_known, whole_items=whole_items)
        self.max_batched_tokens = max_batched_tokens
        self.prefill_chunk = prefill_chunk
        self._pipeline = pipeline
        self.speculator = speculator
        self.running: list[Sequence] = []  # by their order
        self.num_preemptions = 0
        self._running_rows: Index | None = None  # of `running`, until that changes
        self._new: list[NewSequence] = []
        self._draining: dict[Sequence, None] = {}  # in the order in which they left: whose blocks come back first
        self._lacking: set[str] = set()
        self._step_id = 0  # the latest step sent
        self._last_done = 0  # and the latest that came back

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight."""
        return self._last_done < self._step_id

    @property
    def _blocks_of_a_step(self) -> int:
        columns = self.max_batched_tokens // self.cache.block_size + 1
        return columns * len(self.cache.policies)

    def queued_tokens(self) -> int:
        """Known tokens still to compute: of what runs, and of what waits in so far as the cache lacks them."""
        left, decoding = self.table.to_schedule(self._rows_in_order())
        waiting, followers = self.waiting.sequences(), self.waiting.followers
        queued = sum(sequence.num_tokens for sequence in waiting) + int(left[~decoding].sum()) - followers.shared_tokens
        others = [sequence for sequence in waiting if sequence not in followers]
        looked_at = heapq.nsmallest(MAX_LOOKED_AT, others, key=lambda sequence: sequence.order)
        return queued - sum(self._match(sequence).num_blocks for sequence in looked_at) * self.cache.block_size

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, once what other engines and storage have of it is there."""
        if self._turns is not None:
            sequence.since = self._turns.now
        self.waiting.add(sequence, now)

    def _take_turn(self, sequence: Sequence, computed: int | None = None) -> None:
        """As `WaitingQueue` asks it to; and of one that starts, by how many of its tokens it has then."""
        if self._turns is None:
            return
        if sequence.beside is None:
            sequence.beside = self._beside(sequence)
        sequence.lacking = sequence.num_tokens - (self.cached_tokens(sequence) if computed is None else computed)
        sequence.turn = self._turns.turn(sequence.since, sequence.lacking, sequence.beside)

    def _beside(self, sequence: Sequence) -> Beside:
        """Prompts of its tenant that are computed, or wait for that alone."""
        if not sequence.tenant:
            return NONE_BESIDE
        rows = self._rows_in_order()
        left, decoding = self.table.to_schedule(rows)
        running = zip(self.table.of(rows[~decoding]), left[~decoding].tolist(), strict=True)
        return self.waiting.present.with_more((each.tenant, tokens) for each, tokens in running).beside(sequence.tenant)

    def _parts(self) -> int:
        """Of prompts that are computed, or wait for that alone."""
        rows = self._rows_in_order()
        prompts = self.table.of(rows[~self.table.to_schedule(rows)[1]])
        return self.waiting.present.parts([sequence.tenant for sequence in prompts])

    # ---- planning a step ----

    def schedule(self, now: float) -> ScheduledStep | None:
        """The next step, or None if there is nothing to do until a step in flight comes back, or drafts are to wait for
        what that samples."""
        self._advance_copies(now)
        if self.speculator is not None and self._offer_drafts(self.speculator) and self.has_steps:
            return None
        self._make_way()
        self._admit_before_prompts(now)
        preemptions = self.num_preemptions
        plan = self._plan_running()
        budget = self.max_batched_tokens - int(plan.counts.sum())
        # Where blocks were short in this step, no newcomer may take what came free.
        while budget > 0 and self.num_preemptions == preemptions and (admitted := self._admit(now)):
            self._first_to_start()  # who waits for it says so before its blocks are laid out
            count = min(
                admitted.num_tokens - int(self.table.scheduled[admitted.row]),
                int(self.table.chunk[admitted.row]),
                budget,
            )
            row = np.array([admitted.row], dtype=np.int32)
            count = int(ending_outside(self.table, row, np.array([count]))[0])
            if count and self._extend(row, self.table.scheduled[row] + count):
                plan.add(admitted.row, count)
                budget -= count
        return self._send(plan) if len(plan.rows) or self._copies_need_a_step() else None

    def schedule_copies(self, now: float) -> ScheduledStep | None:
        """Like `schedule`, while no sequence may run."""
        self._advance_copies(now)
        return self._send(_no_rows()) if self._copies_need_a_step() else None

    def command(self, command: str, weights: WeightsToLoad | None = None) -> ScheduledStep:
        """A step that has the workers obey a command; see `BatchRequest`."""
        return self._send(_no_rows(), command, weights)

    def _advance_copies(self, now: float) -> None:
        self._retained.advance(now)
        self.copies.advance(now, self._blocks_of_a_step)
        self.waiting.advance(now)

    def _copies_need_a_step(self) -> bool:
        """Whether a step without sequences must start copies, or bring word of them: no other one is under way."""
        return self._last_done == self._step_id and self.copies.needs_step

    def _offer_drafts(self, speculator: Speculator) -> bool:
        """Let decoding rows have drafts; whether that is worth waiting for tokens that steps in flight sample."""
        rows, columns = self._rows_in_order(), self.table
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

    def _plan_running(self) -> _Plan:
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
            if self._draining or int(needed.sum()) <= self.cache.num_available + self.cache.host.num_returning:
                fits = (needed == 0) | (np.cumsum(needed) <= self.cache.num_available)
                self.cache.extend(plan.rows[fits], targets[fits])
                return _Plan(plan.rows[fits], plan.counts[fits])
            self._preempt_latest()

    def _extend(self, rows: Index, targets: NDArray[np.int64]) -> bool:
        """Make room for so many tokens of each row, and, where that is had, for those that the model drafts behind
        them. A block of states has no room beyond its last known token."""
        if self.speculator is not None and self.speculator.by_model and not self._keeps_states:
            further = np.minimum(targets + self.speculator.most - 1, self.table.max_length[rows])
            if self.cache.extend(rows, np.maximum(further, targets)):
                return True
        return self.cache.extend(rows, targets)

    def _ask_for_tokens(self) -> _Plan:
        """The tokens that running sequences get, within the budget; decoding ones first."""
        wanted, decoding = self._wanted()
        rows = self._rows_in_order()
        wanted = self._pipeline.of_step(wanted, decoding, self.table, rows, self._step_id + 1, self._last_done)
        order, counts = shares(wanted, decoding, self.max_batched_tokens)
        whole = ending_outside(self.table, rows[order], counts)
        if whole is counts:  # as in nearly all steps: no item is near
            return _Plan(rows[order], counts)
        stuck = order[(whole == 0) & ~decoding[order]]
        if len(stuck) and not whole[~decoding[order]].any():
            # No prompt gets on, for an item has no room beside all that decode: some of these wait for one step.
            is_first = np.arange(len(rows)) == stuck[0]
            wanted = np.where(decoding | is_first, wanted, 0)
            order, counts = shares(wanted, is_first, self.max_batched_tokens)
            whole = ending_outside(self.table, rows[order], counts)
        return _Plan(rows[order][whole > 0], whole[whole > 0])

    def _wanted(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of each running sequence, the tokens that a step could compute at most, and whether it decodes."""
        rows = self._rows_in_order()
        left, decoding = self.table.to_schedule(rows)
        return np.minimum(left, self.table.chunk[rows]), decoding

    def _rows_in_order(self) -> Index:
        if self._running_rows is None:
            self._running_rows = np.array([sequence.row for sequence in self.running], dtype=np.int32)
        return self._running_rows

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

    def _preempt_latest(self) -> None:
        victim = max(self.running, key=lambda sequence: sequence.arrival)
        victim.preemptions += 1
        self.num_preemptions += 1
        self.leave(victim)

    # ---- admission ----

    def _make_way(self) -> None:
        """Preempt a running sequence for one of higher priority that could not start otherwise."""
        urgent = self.waiting.first
        if urgent is None or not self.running or self._draining:  # what is on its way back may do
            return
        if self.running[-1].arrival[0] > urgent.arrival[0] and not self._can_start(urgent, self._match(urgent)):
            self._preempt_latest()

    def _admit_before_prompts(self, now: float) -> None:
        """Start sequences that come before prompts which run: they have less to compute, or what they waited for came
        only after those had started.

        Others are admitted to what running sequences leave of a step. These would wait until those prompts are through.
        """
        while (first := self.waiting.first) is not None and self.running and first.order < self.running[-1].order:
            place = bisect.bisect(self.running, first.order, key=lambda other: other.order)
            if left_for(place, *self._wanted(), self.max_batched_tokens) <= 0:
                return
            if self._first_to_start() is first and self._admit(now) is None:
                return

    def _admit(self, now: float) -> Sequence | None:
        """Start the first waiting sequence if all of its known tokens fit beside what runs already."""
        if not self.table.num_free or any(not leaving.finished for leaving in self._draining):
            return None
        sequence = self._first_to_start()
        if sequence is None:
            return None
        match = self._match(sequence)
        if match.num_blocks * self.cache.block_size < sequence.lacks:
            self._lacking.add(sequence.id)
            return None
        if not self._can_start(sequence, match):
            return None
        self.waiting.pop()
        self._start(sequence, match, now)
        return sequence

    def _first_to_start(self) -> Sequence | None:
        """The waiting sequence whose turn it is. Those before it that share more with what runs than is computed so far
        are set aside."""
        while (first := self.waiting.first) is not None and (shared := self._to_share(first)) is not None:
            self.waiting.follow(shared)
            self._bring_forward(shared.leader, first)
        return first

    def _bring_forward(self, leader: Sequence, follower: Sequence) -> None:
        """Have a running sequence come no later than one that waits for it."""
        if leader.arrival[0] == follower.arrival[0] and leader.turn > follower.turn:
            self.running.remove(leader)
            leader.turn = follower.turn
            self._run(leader)

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self.running, sequence, key=lambda other: other.order)
        self._running_rows = None

    def _to_share(self, sequence: Sequence) -> Shared | None:
        """What a waiting sequence had better have a running one compute."""
        rows, size = self._rows_in_order(), self.cache.block_size
        prompts = rows[self.cache.registered[rows] < self.table.num_prompt[rows] // size]
        if not len(prompts) or not self.cache.prefix_caching:
            return None
        return self.waiting.followers.find(sequence, self.table.of(prompts), lambda: self._match(sequence).num_blocks)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of a new sequence's tokens would not be computed."""
        return self._match(sequence).num_blocks * self.cache.block_size

    def take_lacking(self) -> list[str]:
        """Sequences that cannot start: the cache lost what they have no embeddings of. The first one keeps others
        waiting until it is gone."""
        lacking, self._lacking = list(self._lacking), set()
        return lacking

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the cache has of the sequence, and may serve."""
        if not self.cache.prefix_caching:
            return self.cache.match((), 0)
        hashes = sequence.block_hashes(sequence.num_tokens, self.cache.block_size)
        return self.cache.match(hashes, max_tokens=sequence.servable)

    def _can_start(self, sequence: Sequence, match: PrefixMatch) -> bool:
        if not self.table.num_free:
            return False
        if not self.running and not self._draining:
            return self._can_adopt_alone(match)
        computed = match.num_blocks * self.cache.block_size
        needed = self.cache.peak_blocks(sequence.num_tokens + 1, computed) - len(match.kept)
        return needed <= self.cache.num_available - self.cache.num_reclaimed(match) - self._promised_blocks()

    def _can_adopt_alone(self, match: PrefixMatch) -> bool:
        """Whether the pool has what comes from the host, while nothing runs; if not, copies in flight will give it."""
        if match.host is None or not self.cache.host.is_busy:
            return True
        return match.num_copies <= self.cache.num_available - self.cache.num_reclaimed(match)

    def _promised_blocks(self) -> int:
        """Blocks that admitted sequences will still take for tokens they already have."""
        rows = self._rows_in_order()
        return self.cache.promised_blocks(rows, self.table.length[rows])

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> None:
        computed = match.num_blocks * self.cache.block_size
        chunk = self._pipeline.chunk(sequence.num_tokens - computed, self.prefill_chunk)
        if sequence.is_prompt_asked:
            chunk = min(chunk, ASKED_CHUNK)
        row = self.table.open(sequence, computed, chunk)
        self.cache.adopt(row, match, sequence.num_tokens, sequence.kept_tokens)
        self._retained.started(sequence)
        sequence.phase = Phase.RUNNING
        sequence.computed_from = min(sequence.computed_from, computed)
        if sequence.first_scheduled is None:
            self._take_turn(sequence, computed)
            sequence.cached_tokens = computed
            sequence.first_scheduled = now
        self._run(sequence)
        self.joint_reads.forget(row)
        self._new.append(introduction(sequence))

    # ---- steps ----

    def _send(self, plan: _Plan, command: str = "", weights: WeightsToLoad | None = None) -> ScheduledStep:
        rows, counts, shared, columns = *self._arranged(plan), self.table
        starts = columns.scheduled[rows]
        drafts = np.clip(starts + counts - columns.length[rows], 0, columns.offered[rows])
        token_ids = step_tokens(columns, rows, starts, counts, drafts, self.speculator)
        columns.scheduled[rows] = starts + counts
        columns.drafted[rows] = drafts
        length = columns.length[rows]
        samples = starts + counts - drafts == length
        columns.pending[rows] += samples
        columns.length[rows] = length + samples
        self._step_id += 1
        columns.last_step[rows] = self._step_id
        sequences, room = columns.of(rows), self.cache.num_blocks[rows] * self.cache.block_size
        of_model = asked_of_model(self.speculator, sequences, starts + counts, samples, room)
        new, self._new = tuple(self._new), []
        swap_in, swap_out = self.copies.take_orders(self._step_id)
        batch = BatchRequest(
            step_id=self._step_id,
            rows=rows,
            starts=starts.astype(np.int32),
            query_lens=counts.astype(np.int32),
            token_ids=token_ids,
            sample=samples,
            table_updates=self.cache.drain_table_updates(),
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

    def _arranged(self, plan: _Plan) -> tuple[Index, NDArray[np.int64], NDArray[np.int32]]:
        """The rows of a step in the order in which they are computed, how many tokens of each, and what of these they
        share (`BatchRequest.shared`)."""
        rows, counts, columns = plan.rows, plan.counts, self.table
        starts, prompt = columns.scheduled[rows], columns.num_prompt[rows] - 1
        is_one = (counts <= 1 + columns.offered[rows]) & (starts >= prompt) & (starts + 1 >= columns.length[rows])
        if self._turns is not None and not is_one.all():
            self._turns.computed(int(counts[~is_one].sum()), self._parts())
        order, shared = self.joint_reads.arranged(rows, np.where(is_one, prompt, 0))
        self.joint_reads.count(starts[is_one], shared)
        return rows[order], counts[order], shared if shared.any() else NOTHING_SHARED

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
        batch, columns = step.batch, self.table
        wanted = columns.wanted[batch.rows]
        rows = batch.rows[wanted]
        ends = batch.starts.astype(np.int64) + batch.query_lens
        if len(batch.drafts):
            self._take_drafts(step, wanted, accepted, ends)
        computed = ends[wanted]
        self._register(rows, computed)
        self._retained.computed()
        self.cache.recycle(rows, computed)
        sampled = (wanted & batch.sample).nonzero()[0]
        columns.pending[batch.rows[sampled]] -= 1
        columns.last_token[batch.rows[sampled]] = token_ids[sampled]
        indices = sampled.tolist()
        for index, token in zip(indices, token_ids[sampled].tolist(), strict=True):
            step.sequences[index].output.append(token)
        if self.speculator is not None and len(proposed):
            for index in indices:
                tokens = proposed[index]
                self.speculator.proposed(step.sequences[index], tokens[tokens >= 0])
        self.step_done(step)
        return indices

    def _take_drafts(
        self, step: ScheduledStep, wanted: NDArray[np.bool_], accepted: NDArray[np.int32], ends: NDArray[np.int64]
    ) -> None:
        """Take the drafts that are what was sampled, and let the others be forgotten: ``ends``, of what each sequence
        has computed, are before them then. Where states are kept, none was left of those that were right either: they
        are computed once more."""
        batch, columns = step.batch, self.table
        first = np.cumsum(batch.query_lens, dtype=np.int64) - batch.drafts
        having = np.flatnonzero(wanted & (batch.drafts > 0))  # the others may be in a later step already
        for index in having.tolist():
            step.sequences[index].output += batch.token_ids[first[index] : first[index] + accepted[index]].tolist()
        ends -= batch.drafts if self._keeps_states else batch.drafts - accepted
        rows = batch.rows[having]
        columns.scheduled[rows] = ends[having]
        columns.length[rows] += accepted[having]
        columns.drafted[rows] = 0
        if self.speculator is not None:
            self.speculator.checked(int(batch.drafts[having].sum()), int(accepted[having].sum()))

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
        for sequence in [s for s in (*self.running, *self._draining) if s.row in failed]:
            if sequence.phase is Phase.RUNNING:
                sequence.preemptions += 1
                self.num_preemptions += 1
                self.leave(sequence)
            if sequence.row >= 0:  # else no step has carried it yet
                self.table.wanted[sequence.row] = False

    def _register(self, rows: Index, computed: NDArray[np.int64]) -> None:
        """Tell the cache of the blocks that the rows' ``computed`` tokens have filled."""
        block_size = self.cache.block_size
        if not self.cache.prefix_caching:
            return
        full = (computed // block_size > self.cache.registered[rows]).nonzero()[0]
        if not len(full):
            return
        counts = computed[full].tolist()
        hashes = [s.block_hashes(n, block_size) for s, n in zip(self.table.of(rows[full]), counts, strict=True)]
        self.cache.register(rows[full].tolist(), hashes)

    def observe(self, step: ScheduledStep, compute_s: float) -> None:
        """Learn from how long a step has taken."""
        batch = step.batch
        if not batch.drafts.any():
            self.step_times.observe(batch.num_tokens, len(batch.rows), compute_s)
        if self.speculator is not None and compute_s and self._decodes_alone(step):
            passes = int(batch.proposals.max(initial=0))
            self.speculator.took(batch.num_tokens - len(batch.rows), compute_s, passes)

    def _decodes_alone(self, step: ScheduledStep) -> bool:
        """Whether all of its sequences decode: each has one token in it, drafts, and what is computed once more."""
        batch, lag = step.batch, self.table.lag
        known = batch.query_lens - batch.drafts if len(batch.drafts) else batch.query_lens
        if not len(known) or int(known.max()) > 1 + lag:
            return False
        several = (known > 1).nonzero()[0]
        return all(batch.starts[index] >= step.sequences[index].num_prompt for index in several.tolist())

    def forget_computed(self, sequence: Sequence) -> None:
        """Let no request be served what a sequence has computed; what it was itself served by others stays."""
        self.cache.forget(sequence.hashes[sequence.computed_from // self.cache.block_size :])

    def is_wanted(self, step: ScheduledStep, index: int) -> bool:
        """Whether anybody waits for what a step says of a sequence of its batch: it neither ended nor is it void."""
        return bool(self.table.wanted[step.batch.rows[index]])

    def step_done(self, step: ScheduledStep) -> None:
        """A step came back, as they do in order: what left the batch meanwhile may give back its blocks."""
        self._last_done = step.batch.step_id
        for sequence in list(self._draining):
            self._settle(sequence)

    def drop_steps(self) -> None:
        """No step in flight will come back, or touch a block any more."""
        self._last_done = self._step_id
        for sequence in list(self._draining):
            self._settle(sequence)

    # ---- leaving the batch ----

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch; a running one gives back its blocks when no step may touch them.

        A sequence that is not finished goes back to the waiting ones then.
        """
        if sequence.row >= 0:
            self.table.wanted[sequence.row] = not sequence.finished
        if sequence.phase is Phase.WAITING:
            self.waiting.discard(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self._running_rows = None
            sequence.phase = Phase.DRAINING
            self._draining[sequence] = None
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        row = sequence.row
        if self.table.last_step[row] > self._last_done:
            return
        self._draining.pop(sequence, None)
        self._retained.leaves(sequence)
        self.cache.release(row, will_return=not sequence.finished)
        self.table.close(sequence)
        self._new = [new for new in self._new if new.row != row]
        sequence.phase = Phase.WAITING
        if not sequence.finished:
            self.waiting.put_back(sequence)
