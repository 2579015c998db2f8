"""Takes in what steps computed: sampled tokens, drafts that were right, blocks that are full, and how long it took."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.runtime.engine.retained_prompts import RetainedPrompts
from headwise.runtime.engine.sequence_table import Index, SequenceTable
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.engine.steps_in_flight import ScheduledStep
from headwise.runtime.engine.throughput import StepTimes


class StepResults:
    """times: what was learnt of how long steps take"""

    def __init__(self, cache: CacheManager, table: SequenceTable, retained: RetainedPrompts) -> None:
        self._cache, self._table, self._retained = cache, table, retained
        self._keeps_states = any(policy.is_state for policy in cache.policies)
        self.times = StepTimes()

    def take(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int32],
        accepted: NDArray[np.int32],
        proposed: NDArray[np.int32],
        speculator: Speculator | None,
    ) -> list[int]:
        """The indices in its batch of the sequences whose output has new tokens: see `ResourceManager.commit`."""
        batch, columns = step.batch, self._table
        wanted = columns.wanted[batch.rows]
        ends = batch.starts.astype(np.int64) + batch.query_lens
        if len(batch.drafts):
            self._take_drafts(step, wanted, accepted, ends, speculator)
        rows, computed = batch.rows[wanted], ends[wanted]
        self._register(rows, computed)
        self._retained.computed()
        self._cache.recycle(rows, computed)
        sampled = (wanted & batch.sample).nonzero()[0]
        columns.pending[batch.rows[sampled]] -= 1
        columns.last_token[batch.rows[sampled]] = token_ids[sampled]
        indices: list[int] = sampled.tolist()
        for index, token in zip(indices, token_ids[sampled].tolist(), strict=True):
            step.sequences[index].output.append(token)
        if speculator is not None and len(proposed):
            for index in indices:
                tokens = proposed[index]
                speculator.proposed(step.sequences[index], tokens[tokens >= 0])
        return indices

    def _take_drafts(
        self,
        step: ScheduledStep,
        wanted: NDArray[np.bool_],
        accepted: NDArray[np.int32],
        ends: NDArray[np.int64],
        speculator: Speculator | None,
    ) -> None:
        """Take the drafts that are what was sampled, and let the others be forgotten: ``ends``, of what each sequence
        has computed, are before them then. Where states are kept, none was left of those that were right either: they
        are computed once more."""
        batch, columns = step.batch, self._table
        first = np.cumsum(batch.query_lens, dtype=np.int64) - batch.drafts
        having = np.flatnonzero(wanted & (batch.drafts > 0))  # the others may be in a later step already
        for index in having.tolist():
            step.sequences[index].output += batch.token_ids[first[index] : first[index] + accepted[index]].tolist()
        ends -= batch.drafts if self._keeps_states else batch.drafts - accepted
        rows = batch.rows[having]
        columns.scheduled[rows] = ends[having]
        columns.length[rows] += accepted[having]
        columns.drafted[rows] = 0
        if speculator is not None:
            speculator.checked(int(batch.drafts[having].sum()), int(accepted[having].sum()))

    def _register(self, rows: Index, computed: NDArray[np.int64]) -> None:
        """Tell the cache of the blocks that the rows' ``computed`` tokens have filled."""
        block_size = self._cache.block_size
        if not self._cache.prefix_caching:
            return
        full = (computed // block_size > self._cache.registered[rows]).nonzero()[0]
        if not len(full):
            return
        counts = computed[full].tolist()
        hashes = [s.block_hashes(n, block_size) for s, n in zip(self._table.of(rows[full]), counts, strict=True)]
        self._cache.register(rows[full].tolist(), hashes)

    def observe(self, step: ScheduledStep, compute_s: float, speculator: Speculator | None) -> None:
        """Learn from how long a step has taken."""
        batch = step.batch
        if not batch.drafts.any():
            self.times.observe(batch.num_tokens, len(batch.rows), compute_s)
        if speculator is not None and compute_s and self._decodes_alone(step):
            passes = int(batch.proposals.max(initial=0))
            speculator.took(batch.num_tokens - len(batch.rows), compute_s, passes)

    def _decodes_alone(self, step: ScheduledStep) -> bool:
        """Whether all of its sequences decode: each has one token in it, drafts, and what is computed once more."""
        batch, lag = step.batch, self._table.lag
        known = batch.query_lens - batch.drafts if len(batch.drafts) else batch.query_lens
        if not len(known) or int(known.max()) > 1 + lag:
            return False
        several = (known > 1).nonzero()[0]
        return all(batch.starts[index] >= step.sequences[index].num_prompt for index in several.tolist())
