"""Which sequences start: in whose turn it is, and where all of their known tokens fit beside what runs."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.prefix_match import PrefixMatch
from headwise.prompt_turns import NONE_BESIDE, Beside, PromptTurns, ShareOf
from headwise.runtime.engine.followers import Followers, Shared
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.engine.pipeline_shares import PipelineShares
from headwise.runtime.engine.prefetcher import Prefetcher
from headwise.runtime.engine.retained_prompts import RetainedPrompts
from headwise.runtime.engine.running import Running
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.step_budget import left_for
from headwise.runtime.engine.waiting_queue import WaitingQueue
from headwise.runtime.protocol.messages import WaitingPrompts
from headwise.runtime.protocol.request import owner_digest

ASKED_CHUNK = 256
"""Most tokens of a prompt in a step whose log-probabilities are asked for: others in the step wait for these."""
MAX_LOOKED_AT = 64
"""Waiting sequences, the next ones, whose cached tokens are left out where the engine says how much it has to do."""

MAX_TENANTS = 64
"""Those that the engine says how much they have waiting: the ones that have most."""


class Admission:
    """From `waiting` to ``running``.

    prefill_chunk: most tokens of one sequence in a step
    turns:         of prompts; None: they have them in the order in which they came
    begins:        called with each sequence that starts, once it has its row
    """

    def __init__(
        self,
        cache: CacheManager,
        running: Running,
        retained: RetainedPrompts,
        *,
        prefill_chunk: int,
        pipeline: PipelineShares,
        turns: PromptTurns | None,
        prefetcher: Prefetcher | None,
        peer_loads: PeerLoads | None,
        begins: Callable[[Sequence], None],
    ) -> None:
        self.waiting = WaitingQueue(Followers(cache, prefill_chunk), self._take_turn, prefetcher, peer_loads)
        self._cache, self._running, self._retained = cache, running, retained
        self._prefill_chunk, self._pipeline = prefill_chunk, pipeline
        self._turns, self._begins = turns, begins
        self._lacking: set[str] = set()

    # ---- those that wait ----

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, once what other engines and storage have of it is there."""
        if self._turns is not None:
            sequence.since = self._turns.now
        self.waiting.add(sequence, now)

    def queued_tokens(self) -> int:
        """Known tokens still to compute: of what runs, and of what waits in so far as the cache lacks them."""
        waiting, followers = self.waiting.sequences(), self.waiting.followers
        queued = sum(sequence.num_tokens for sequence in waiting) + sum(self._running.prompts()[1])
        others = [sequence for sequence in waiting if sequence not in followers]
        looked_at = heapq.nsmallest(MAX_LOOKED_AT, others, key=lambda sequence: sequence.order)
        return queued - followers.shared_tokens - sum(map(self.cached_tokens, looked_at))

    def waiting_prompts(self) -> WaitingPrompts | None:
        """What an `EngineLoad` says of those that wait."""
        now = 0.0 if self._turns is None else self._turns.now
        orders = sorted((each.arrival[0], self._turn_of(each) - now) for each in self.waiting.sequences())
        if not orders:
            return None
        most = heapq.nlargest(MAX_TENANTS, self.waiting.present.tenants.items(), key=lambda item: item[1].prompts)
        beside = tuple((owner_digest(owner), each.prompts, each.tokens) for owner, each in most if owner)
        return WaitingPrompts(*orders[len(orders) // 2], beside)

    def _turn_of(self, sequence: Sequence) -> float:
        """Of one that waits for others, too, before it gets its turn: that of one alone."""
        if self._turns is None or sequence.beside is not None:
            return sequence.turn
        return self._turns.turn(sequence.since, sequence.num_tokens, tenant=sequence.tenant)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of a new sequence's tokens would not be computed."""
        return self.match(sequence).num_blocks * self._cache.block_size

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What the cache has of the sequence, and may serve."""
        if not self._cache.prefix_caching:
            return self._cache.match((), 0)
        hashes = sequence.block_hashes(sequence.num_tokens, self._cache.block_size)
        return self._cache.match(hashes, max_tokens=sequence.servable)

    def take_lacking(self) -> list[str]:
        """Sequences that cannot start: the cache lost what they have no embeddings of. The first one keeps others
        waiting until it is gone."""
        lacking, self._lacking = list(self._lacking), set()
        return lacking

    # ---- turns ----

    def _take_turn(self, sequence: Sequence, computed: int | None = None) -> None:
        """As `WaitingQueue` asks it to; and of one that starts, by how many of its tokens it has then."""
        if self._turns is None:
            return
        if sequence.beside is None:
            sequence.beside = self._beside(sequence.tenant)
        sequence.lacking = sequence.num_tokens - (self.cached_tokens(sequence) if computed is None else computed)
        sequence.turn = self._turns.turn(sequence.since, sequence.lacking, sequence.beside, sequence.tenant)

    def _beside(self, tenant: str) -> Beside:
        """A tenant's prompts that are computed, or wait for that alone."""
        if not tenant:
            return NONE_BESIDE
        running = zip(*self._running.prompts(), strict=True)
        return self.waiting.present.with_more((each.tenant, left) for each, left in running).beside(tenant)

    def computed(self, tokens: int) -> None:
        """A step computes so many tokens of prompts."""
        if self._turns is not None and tokens:
            prompts, _ = self._running.prompts()
            tenants = [sequence.tenant for sequence in prompts]
            self._turns.computed(tokens, self.waiting.present.parts(tenants, self._turns.share_of))

    def share_by(self, share_of: ShareOf) -> None:
        """Tenants' prompts have these shares from now on."""
        if self._turns is not None:
            self._turns.share_of = share_of

    # ---- those that start ----

    def is_kept_out(self, urgent: Sequence) -> bool:
        """Whether the first one that waits cannot start, although one that runs has a lower priority."""
        return self._running.sequences[-1].arrival[0] > urgent.arrival[0] and not self._fits(urgent, self.match(urgent))

    def admit_before_prompts(self, now: float, budget: int) -> None:
        """Start sequences that come before prompts which run: they have less to compute, or what they waited for came
        only after those had started.

        Others are admitted to what running sequences leave of a step. These would wait until those prompts are through.

        budget: tokens of a step
        """
        running = self._running.sequences
        while (first := self.waiting.first) is not None and running and first.order < running[-1].order:
            place = bisect.bisect(running, first.order, key=lambda other: other.order)
            if left_for(place, *self._running.wanted(), budget) <= 0:
                return
            if self.first_to_start() is first and self.admit(now) is None:
                return

    def admit(self, now: float) -> Sequence | None:
        """Start the first waiting sequence if all of its known tokens fit beside what runs already."""
        if not self._running.table.num_free or self._running.some_come_back:
            return None
        sequence = self.first_to_start()
        if sequence is None:
            return None
        match = self.match(sequence)
        if match.num_blocks * self._cache.block_size < sequence.lacks:
            self._lacking.add(sequence.id)
            return None
        if not self._fits(sequence, match):
            return None
        self.waiting.pop()
        self._start(sequence, match, now)
        return sequence

    def first_to_start(self) -> Sequence | None:
        """The waiting sequence whose turn it is. Those before it that share more with what runs than is computed so far
        are set aside."""
        while (first := self.waiting.first) is not None and (shared := self._to_share(first)) is not None:
            self.waiting.follow(shared)
            self._running.bring_forward(shared.leader, first)
        return first

    def _to_share(self, sequence: Sequence) -> Shared | None:
        """What a waiting sequence had better have a running one compute."""
        rows, table, size = self._running.rows, self._running.table, self._cache.block_size
        prompts = rows[self._cache.registered[rows] < table.num_prompt[rows] // size]
        if not len(prompts) or not self._cache.prefix_caching:
            return None
        return self.waiting.followers.find(sequence, table.of(prompts), lambda: self.match(sequence).num_blocks)

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        if not self._running.table.num_free:
            return False
        if not self._running.sequences and not self._running.leaving:
            return self._can_adopt_alone(match)
        computed = match.num_blocks * self._cache.block_size
        needed = self._cache.peak_blocks(sequence.num_tokens + 1, computed) - len(match.kept)
        return needed <= self._cache.num_available - self._cache.num_reclaimed(match) - self._promised_blocks()

    def _can_adopt_alone(self, match: PrefixMatch) -> bool:
        """Whether the pool has what comes from the host, while nothing runs; if not, copies in flight will give it."""
        if match.host is None or not self._cache.host.is_busy:
            return True
        return match.num_copies <= self._cache.num_available - self._cache.num_reclaimed(match)

    def _promised_blocks(self) -> int:
        """Blocks that admitted sequences will still take for tokens they already have."""
        rows = self._running.rows
        return self._cache.promised_blocks(rows, self._running.table.length[rows])

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> None:
        computed = match.num_blocks * self._cache.block_size
        chunk = self._pipeline.chunk(sequence.num_tokens - computed, self._prefill_chunk)
        if sequence.is_prompt_asked:
            chunk = min(chunk, ASKED_CHUNK)
        row = self._running.table.open(sequence, computed, chunk)
        self._cache.adopt(row, match, sequence.num_tokens, sequence.kept_tokens)
        self._retained.started(sequence)
        sequence.computed_from = min(sequence.computed_from, computed)
        if sequence.first_scheduled is None:
            self._take_turn(sequence, computed)
            sequence.cached_tokens = computed
            sequence.first_scheduled = now
        self._running.add(sequence)
        self._begins(sequence)
