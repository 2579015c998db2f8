"""The scheduler's view of one engine's cache: block tables, prefix hits, allocation and eviction.

No I/O, no clock, no device memory: it decides. Workers learn of it by `drain_table_updates`, the attention store by
`drain_index_updates`. What a step needs is done for all rows of the batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.copy_costs import CopyCosts
from headwise.cache_controller.eviction import RESUME_SLACK, EvictionPolicy, RecycledFirst, ResumePoints
from headwise.cache_controller.hand_over import HandOver, most_recent_first
from headwise.cache_controller.host_tier import HostConfig, HostTier
from headwise.cache_controller.kv_events import IndexUpdate, KVEvents
from headwise.cache_controller.left_behind import LeftBehind
from headwise.cache_controller.legacy import LeftPaths
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.prefix_match import PrefixFinder, PrefixMatch
from headwise.cache_controller.protection import PROTECTED_SHARE
from headwise.cache_controller.radix_tree import DEVICE_TIER, HOST_TIER, NOWHERE, ROOT, STORAGE_TIER, RadixTree
from headwise.cache_controller.states import CheckpointPlaces, StateColumns, StateStep
from headwise.cache_controller.tiers import Host, NoHost
from headwise.cache_controller.windows import GroupWindows, column_spans

Rows = NDArray[np.int32]
Tokens = NDArray[np.int64]
"""Per row, a number of tokens."""


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks, and of tokens asked for and served by prefix caching since the start.

    host_hit_tokens:          those of ``hit_tokens`` that were served because of what came from the host
    smallest_reusable_prefix: tokens that two requests must have in common for the second to be served any
    lost_window_tokens:       tokens of prefixes that the full groups still had, and no window group could resume
    lost_checkpoint_tokens:   those that full and window groups could serve, and at whose end there was no checkpoint
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    host_hit_tokens: int
    lost_window_tokens: int
    lost_checkpoint_tokens: int
    evicted_blocks: int
    recycled_blocks: int
    retained_blocks: int
    smallest_reusable_prefix: int


SECLUDED = 1 << 40
"""Of a row of which the tree is told nothing more: more columns than any has."""


class CacheManager:
    """Owns the pool, the prefix tree and the block tables ``int32 [max_rows, groups, max_blocks]``.

    A row is one running sequence. Its life: `match` and `adopt` a prefix, `extend` before tokens are computed,
    `register` and `recycle` after they were, `release` once no step in flight may touch its blocks.

    What window groups leave behind is evicted before anything else (`RecycledFirst`), but for the windows at which a
    request is likely to resume (`ResumePoints`): they stay as long as the rest of their prefix does, as do those at the
    end of a request.

    Groups of states have blocks in few columns of a row's tables: see `StateColumns`. Checkpoints where a request is
    likely to resume are kept like such windows; others, as those at the end of a step, as long as there is room.

    step_tokens: most tokens of one sequence in the steps that are in flight together
    num_blocks:  per row, the columns of its tables that are allocated
    registered:  per row, the columns that the tree knows, or `SECLUDED`
    checkpoint_tokens: of a long prompt, between checkpoints of states; 0: only at its end, and where prompts part
    eviction:    makes the policy by which a pool evicts, the device's and the host's
    protected_share: of each pool's blocks, how many may be kept because somebody asked for it: see `protect`
    costs:       what decides whether blocks are copied from other tiers, or computed
    """

    def __init__(
        self,
        policies: Sequence[HeadPolicy],
        *,
        block_size: int,
        num_blocks: int,
        max_rows: int,
        max_blocks: int,
        step_tokens: int,
        prefix_caching: bool = True,
        host: HostConfig | None = None,
        resume_slack: int = RESUME_SLACK,
        checkpoint_tokens: int = 0,
        eviction: Callable[[int], EvictionPolicy] = RecycledFirst,
        protected_share: float = PROTECTED_SHARE,
    ) -> None:
        self.policies = tuple(policies)
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.step_tokens = step_tokens
        self.prefix_caching = prefix_caching
        groups = len(self.policies)
        self.pool = BlockPool(num_blocks, self._on_evict, eviction, protected_share)
        self.windows = GroupWindows(policies, block_size)
        self._resume = ResumePoints(max_rows, self.windows, resume_slack)
        self._places = CheckpointPlaces(max_rows, block_size, checkpoint_tokens)
        self._states = StateColumns(
            self.windows.is_state, self._places, max_rows=max_rows, block_size=block_size, keeps=prefix_caching
        )
        self._token_groups = np.flatnonzero(~self.windows.is_state)
        # Blocks that the steps under way may need: checkpoints are made only while there are more.
        self._reserve = -(-step_tokens // block_size) * len(self._token_groups) + self._states.count
        self.tree = RadixTree(
            groups,
            num_blocks,
            host.num_blocks if host else 0,
            has_storage=host is not None and host.storage_timeout_s is not None,
            num_top=max(1, int(self.windows.sink_blocks.max())),
        )
        self.events = KVEvents(self.tree, self.windows)
        self.costs = CopyCosts(groups, block_size)
        self.host: Host = NoHost()
        if host and prefix_caching:
            self.host = HostTier(self.tree, self.pool, host, self.events, eviction, protected_share)
        self.tables: NDArray[np.int32] = np.full((max_rows, groups, max_blocks), NOWHERE, dtype=np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.registered: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._open: NDArray[np.bool_] = np.zeros(max_rows, dtype=np.bool_)
        self._computed: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens, by steps that are done
        self._held: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # blocks in the row's tables
        self._recycled: NDArray[np.int64] = np.zeros((max_rows, groups), dtype=np.int64)  # columns given back up to
        self._recycle_at: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens
        self._left = LeftBehind(self.tree.device)
        self._window_groups = np.flatnonzero(~self.windows.is_full)
        self._finder = PrefixFinder(self.tree, self.windows, self.host, self.costs, max_blocks)
        self._table_updates: list[NDArray[np.int32]] = []
        self._queried_tokens = self._hit_tokens = self._host_hit_tokens = 0
        self._lost_window_tokens = self._lost_checkpoint_tokens = 0
        self._evicted_blocks = self._recycled_blocks = 0

    # ---- questions ----

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def peak_blocks(self, tokens: int, computed: int = 0) -> int:
        """Most blocks that a sequence holds at any time while it grows from ``computed`` tokens to ``tokens``."""
        in_flight = min(self.step_tokens, tokens - computed)
        return int(self.windows.peak_blocks(tokens, in_flight, state_copies=2 if computed else 1))

    def promised_blocks(self, rows: Rows, tokens: Tokens) -> int:
        """Blocks that ``rows`` may still take until they have ``tokens`` tokens each.

        Once a prompt is computed, its window groups never again hold as much as they did for its chunks.
        """
        in_flight = np.minimum(self.step_tokens, tokens - self._computed[rows])
        peak = self.windows.peak_blocks(tokens, in_flight)
        return int(np.maximum(0, peak - self._held[rows]).sum())

    def blocks_needed(self, rows: Rows, tokens: Tokens) -> NDArray[np.int64]:
        """Blocks that each row lacks for ``tokens`` tokens in all."""
        lacking = np.maximum(0, -(-tokens // self.block_size) - self.num_blocks[rows])
        needed: NDArray[np.int64] = lacking * len(self._token_groups)
        if self._states.count:
            must_be_new = (self.num_blocks[rows] == 0) | np.array(self._have_shared_states(rows))
            needed += np.where((lacking > 0) & must_be_new, self._states.count, 0)
        return needed

    def _have_shared_states(self, rows: Rows) -> list[bool]:
        """Whether others hold the states that each row has last."""
        last = np.maximum(self.num_blocks[rows] - 1, 0)
        blocks = self.tables[rows[:, None], self._states.groups, last[:, None]]
        return [bool(self.pool.are_shared(of_row[of_row != NOWHERE]).any()) for of_row in blocks]

    def stats(self) -> CacheStats:
        return CacheStats(
            total_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            held_blocks=self.pool.num_held,
            nodes=len(self.tree.nodes),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            host_hit_tokens=self._host_hit_tokens,
            lost_window_tokens=self._lost_window_tokens,
            lost_checkpoint_tokens=self._lost_checkpoint_tokens,
            evicted_blocks=self._evicted_blocks,
            recycled_blocks=self._recycled_blocks,
            retained_blocks=self.pool.num_protected,
            smallest_reusable_prefix=self.block_size if self.prefix_caching else 0,
        )

    # ---- prefix hits ----

    def match(self, hashes: Sequence[bytes], max_tokens: int) -> PrefixMatch:
        """The longest prefix of at most ``max_tokens`` tokens that every group can serve. Changes nothing."""
        return self._finder.match(hashes[: max_tokens // self.block_size] if self.prefix_caching else ())

    def fetch(self, hashes: Sequence[bytes], stored: NDArray[np.bool_]) -> Fetch | None:
        """See `PrefixFinder.fetch`."""
        return self._finder.fetch(hashes, stored)

    def lacking(
        self, hashes: Sequence[bytes], elsewhere: NDArray[np.bool_], room: int
    ) -> tuple[NDArray[np.bool_], int]:
        """See `PrefixFinder.lacking`."""
        return self._finder.lacking(hashes, elsewhere, room)

    def gain(self, hashes: Sequence[bytes], more: NDArray[np.bool_]) -> int:
        """See `PrefixFinder.gain`."""
        return self._finder.gain(hashes, more)

    def num_reclaimed(self, match: PrefixMatch) -> int:
        """Blocks of a match that nobody holds now: adopting it takes them out of `num_available`."""
        kept = match.kept
        return len(kept) - self.pool.count_held(kept)

    # ---- the life of a row ----

    def adopt(self, row: int, match: PrefixMatch, prompt_tokens: int, kept_tokens: int = 0) -> None:
        """Open ``row`` for a sequence whose prefix is ``match`` (maybe empty), and of whose prompt the first
        ``kept_tokens`` will be protected (`protect`)."""
        if self._open[row]:
            raise ValueError(f"row {row} is in use")
        count = match.num_blocks
        self._open[row] = True
        self.num_blocks[row] = self.registered[row] = count
        self._computed[row] = count * self.block_size
        self._recycled[row] = self._finder.first_live[count]
        self._recycle_at[row] = 0
        kept_blocks = kept_tokens // self.block_size
        self._resume.open(row, match.reached, prompt_tokens // self.block_size, kept_blocks)
        self._places.open(row, match.reached, prompt_tokens, kept_blocks)
        self._states.open(row, count * self.block_size)
        group, column = (match.blocks != NOWHERE).nonzero()
        blocks = match.blocks[group, column]
        self._held[row] = len(blocks)
        self.pool.retain(blocks)
        if len(self._window_groups):
            self.pool.value(blocks)
        self._enter(np.int32(row), group, column, blocks)
        self._bring_from_host(row, match)
        self.host.note_use(match.nodes, match.blocks)  # last: it may evict what the match has on the host
        self._queried_tokens += prompt_tokens
        self._hit_tokens += count * self.block_size
        self._lost_window_tokens += (match.reached - match.without_states) * self.block_size
        self._lost_checkpoint_tokens += (match.without_states - count) * self.block_size

    def will_part(self, row: int, depth: int) -> int:
        """A request waits to go on behind the first ``depth`` blocks of a row, which that computes next; behind how
        many of them it will be able to: where there are states, checkpoints may have been decided already."""
        if self._states.count:
            depth = self._places.will_part(row, depth, int(self.num_blocks[row]))
        self._resume.will_part(row, depth)
        return depth

    def _bring_from_host(self, row: int, match: PrefixMatch) -> None:
        """Allocate what a match has on the host only, and have it copied before the row's first step."""
        if match.host is None:
            return
        group, column = (match.host != NOWHERE).nonzero()
        blocks = self.host.load(group, match.host[group, column])
        self.tree.device.attach_one_by_one(match.nodes[column], group, blocks)
        self.pool.register(blocks)
        self.pool.value(blocks)
        self._held[row] += len(blocks)
        self._enter(np.int32(row), group, column, blocks)
        self._host_hit_tokens += match.gained * self.block_size
        self.events.gained(match.nodes[column], group)

    def _enter(
        self, rows: Rows | np.int32, groups: NDArray[Any], columns: NDArray[Any], blocks: NDArray[np.int32]
    ) -> None:
        """Write ``blocks`` into the tables, and note it for the workers. The rest is broadcast to their shape."""
        self.tables[rows, groups, columns] = blocks
        updates = np.empty((*blocks.shape, 4), dtype=np.int32)
        updates[..., 0], updates[..., 1], updates[..., 2], updates[..., 3] = rows, groups, columns, blocks
        self._table_updates.append(updates.reshape(-1, 4))

    def extend(self, rows: Rows, tokens: Tokens) -> bool:
        """Make room for ``tokens`` tokens in all in each row; False, and nothing changed, if the pool lacks blocks."""
        columns = -(-tokens // self.block_size)
        if columns.max(initial=0) > self.max_blocks:
            raise ValueError(
                f"{tokens.max()} tokens need {columns.max()} blocks; a block table has {self.max_blocks} columns"
            )
        short = (columns > self.num_blocks[rows]).nonzero()[0]
        if not self._make_room(rows[short], columns[short]):
            return False
        self._states.extended(rows, tokens)
        return True

    def _make_room(self, rows: Rows, last: Tokens) -> bool:
        """Let rows have more columns, ``last`` in all; False, and nothing changed, if the pool lacks blocks."""
        if not len(rows):
            return True
        first, groups = self.num_blocks[rows], self._token_groups
        total, steps = int((last - first).sum()), self._plan_states(rows, last)
        of_states = sum(step.needs_blocks for step in steps) * self._states.count
        if total * len(groups) + of_states > self.pool.num_available:
            return False
        index, column = column_spans(first, last)
        blocks = self.pool.allocate(total * len(groups)).reshape(total, len(groups))
        self._enter(rows[index][:, None], groups, column[:, None], blocks)
        self._held[rows] += (last - first) * len(groups)
        for step in sorted(steps, key=lambda step: not step.needs_blocks):  # the others can do without
            self._go_on(step)
        for step in steps:
            self._leave_room(step)
        self.num_blocks[rows] = last
        return True

    def _plan_states(self, rows: Rows, last: Tokens) -> list[StateStep]:
        if not self._states.count:
            return []
        return self._states.steps(rows, self.num_blocks[rows], last, self._have_shared_states(rows))

    def _go_on(self, step: StateStep) -> None:
        """Put the live states of a row into their next column; what they leave is a checkpoint if there are blocks."""
        is_new = step.needs_blocks or (step.may_stay and self._has_room)
        if is_new:
            self._enter_states(step.row, step.to, self._take_states(step.row))
        else:
            self._move_states(step.row, step.source, step.to)

    def _leave_room(self, step: StateStep) -> None:
        """Have checkpoints made between, if there are blocks."""
        for column in step.checkpoints:
            if self._has_room:
                self._enter_states(step.row, column, self._take_states(step.row))

    @property
    def _has_room(self) -> bool:
        """Whether there are blocks for a checkpoint."""
        return self.pool.num_available >= self._states.count + self._reserve

    def _take_states(self, row: int) -> NDArray[np.int32]:
        self._held[row] += self._states.count
        return self.pool.allocate(self._states.count)

    def _enter_states(self, row: int, column: int, blocks: NDArray[np.int32]) -> None:
        self._enter(np.int32(row), self._states.groups, np.full(len(blocks), column), blocks)

    def _move_states(self, row: int, source: int, to: int) -> None:
        """Let the live states go on in the blocks that they are in: nothing may be known of those any more."""
        blocks = self.tables[row, self._states.groups, source].copy()
        self._forget_held(blocks[self.tree.device.are_attached(blocks)])
        self._enter_states(row, source, np.full_like(blocks, NOWHERE))
        self._enter_states(row, to, blocks)

    def register(self, rows: Sequence[int], hashes: Sequence[Sequence[bytes]]) -> None:
        """Let the tree know the first full blocks of ``rows``, which ``hashes`` name. Their tokens must be computed."""
        if not self.prefix_caching:
            return
        entries: dict[int, tuple[int, int]] = {}  # row and column by node: of two rows' copies, the first one's
        for row, row_hashes in zip(rows, hashes, strict=True):
            if len(row_hashes) == self.registered[row]:
                continue  # nothing new: what has been evicted of it would come back as nodes that hold nothing
            first = self._first_unknown(row, row_hashes)
            parent = self.tree.nodes[row_hashes[first - 1]] if first else ROOT
            for column, node in enumerate(self.tree.insert(row_hashes[first:], parent, first), first):
                entries.setdefault(node, (row, column))
        if not entries:
            return
        nodes = np.array(list(entries), dtype=np.int64)
        at_row, columns = zip(*entries.values(), strict=True)
        blocks = self.tables[at_row, :, columns]
        self._replace_unheld(nodes, blocks)
        taken = self.tree.device.attach(nodes, blocks)
        self.pool.register(blocks[taken])
        if self.host.writes_through:
            self.host.store(blocks[taken & self.windows.is_full])
        brought = np.flatnonzero(taken.any(axis=1))
        self.events.brought([at_row[index] for index in brought.tolist()], nodes[brought])
        self.registered[rows] = [len(row_hashes) for row_hashes in hashes]

    def seclude(self, row: int) -> None:
        """Let the tree know nothing more of a row: what it computes serves nobody else."""
        self.registered[row] = SECLUDED

    def _replace_unheld(self, nodes: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """Let a row's ``blocks [n, groups]`` take the place of cached ones, which are freed.

        Where a window group had lost its blocks, a row computes again what other groups still have cached.
        """
        cached = self.tree.device.blocks[nodes]
        index, group = ((cached != NOWHERE) & (blocks != NOWHERE) & (cached != blocks)).nonzero()
        if not len(index):
            return
        unheld = self.pool.are_unheld(cached[index, group])
        index, group = index[unheld], group[unheld]
        self.tree.device.move(cached[index, group], blocks[index, group])
        self.pool.replace(cached[index, group], blocks[index, group])

    def _first_unknown(self, row: int, hashes: Sequence[bytes]) -> int:
        """The first column that the tree must be told of."""
        first, nodes = int(self.registered[row]), self.tree.nodes
        while first > 0 and hashes[first - 1] not in nodes:
            first -= 1  # another row's copy was in the tree and has been evicted since: ours takes its place
        return first

    def recycle(self, rows: Rows, tokens: Tokens) -> None:
        """Give back the window blocks that no query from position ``tokens`` of each row on sees.

        Steps in flight must not look at positions before it.
        """
        self._computed[rows] = tokens
        due = (tokens >= self._recycle_at[rows]).nonzero()[0]
        if not len(due) or not len(self._window_groups):
            return
        rows, tokens = rows[due], tokens[due]
        live = self.windows.first_live(tokens)
        self._recycle_at[rows] = self.windows.next_recycling(live)
        live = np.minimum(live, self.num_blocks[rows][:, None])
        first = np.maximum(self._recycled[rows], self.windows.sink_blocks)
        at, column = column_spans(first.ravel(), np.maximum(first, live).ravel())
        row, group = rows[at // len(self.policies)], at % len(self.policies)
        blocks = self.tables[row, group, column]
        self._recycled[rows] = np.maximum(self._recycled[rows], live)
        held = blocks != NOWHERE
        row, group, column, blocks = row[held], group[held], column[held], blocks[held]
        np.subtract.at(self._held, row, 1)
        self._enter(row, group, column, np.full(len(blocks), NOWHERE, dtype=np.int32))
        self._recycled_blocks += len(blocks)
        self._keep_resumable(row, group, column, blocks)
        self.pool.recycle(blocks)

    def _keep_resumable(
        self, rows: Rows, groups: NDArray[Any], columns: NDArray[Any], blocks: NDArray[np.int32]
    ) -> None:
        """Give value to those of the recycled blocks that another request is likely to resume with."""
        is_inside, is_state = self._resume.are_inside(rows, groups, columns), self.windows.is_state[groups]
        if is_state.any():
            is_inside |= is_state & self._places.are_wanted(rows, columns)
            others = is_state & ~is_inside
            self._left.note_latest(rows[others], groups[others], columns[others], blocks[others])
        if not is_inside.any():
            return
        kept = blocks[is_inside]
        self.pool.value(kept)
        if self.host.writes_through:
            self.host.store(kept)
        self._left.note(rows[is_inside], groups[is_inside], columns[is_inside], kept)

    def _take_back(self, row: int) -> None:
        """Hold what is left again at which another request may resume, to release it together with the row."""
        group, column, blocks = self._left.take(row)
        self.pool.retain(blocks)
        self.tables[row, group, column] = blocks

    def release(self, row: int, will_return: bool = False) -> None:
        """Close a row. Its registered blocks stay as cache, the deepest to be evicted first.

        will_return: it was preempted. Where they come back faster than they are computed, its blocks go to the host
        """
        self._take_back(row)
        if will_return:
            held = self.tables[row][self.tables[row] != NOWHERE]
            if self.costs.is_worth_loading(len(held), int(self._computed[row])):
                self.host.store(held)
        if self.host.writes_through and len(self._window_groups):
            windows = self.tables[row, self._window_groups, : self.num_blocks[row]]
            self.host.store(windows[windows != NOWHERE])
        held = self.tables[row, :, : self.num_blocks[row]]
        deepest_first = held[:, ::-1].T.ravel()
        if len(self._window_groups):
            deepest_first = deepest_first[deepest_first != NOWHERE]
        self.host.touch(deepest_first)
        self.pool.release(deepest_first)
        held[:] = NOWHERE
        self._open[row] = False
        self.num_blocks[row] = self.registered[row] = self._held[row] = 0
        self.events.closed(row)

    def protect(self, hashes: Sequence[bytes], until: float) -> None:
        """Keep until then, rather than what nobody has asked to keep, what a request needs that goes on behind these
        token blocks, or some tokens before their end: on the host, where that has it or can, else on the device.
        """
        nodes = self.tree.find(hashes)
        if not len(nodes):
            return
        index, group = self._finder.are_seen_around(len(nodes), self._resume.slack).nonzero()
        on_host, on_device = self.tree.host.blocks[nodes[index], group], self.tree.device.blocks[nodes[index], group]
        self.host.protect(on_host[on_host != NOWHERE], until)
        blocks = on_device[(on_device != NOWHERE) & (on_host == NOWHERE)]
        self.pool.protect(blocks, until)
        self.host.store(blocks)

    def advance(self, now: float) -> None:
        """It is ``now``, in seconds: what was to be kept until then is not any more."""
        self.pool.advance(now)
        self.host.advance(now)

    def hand_over(self, hashes: Sequence[bytes] | None, most: int | None = None) -> HandOver:
        """Begin to put these token blocks into storage, as the cache is about to end; None: all that there are."""
        return HandOver(self.tree, self.pool, self.host, hashes, most)

    def left_paths(self, hashes: Iterable[bytes] | None) -> LeftPaths:
        """The paths of these token blocks, for other engines, as the cache is about to end; None: of all."""
        named = most_recent_first(self.tree, self.pool) if hashes is None else hashes
        return LeftPaths(named, self.tree.parent_of, self._finder.served, self._finder.shorter)

    def reset(self, tiers: Sequence[str] = (DEVICE_TIER, HOST_TIER)) -> int:
        """Forget every block that no row and no copy holds, on these tiers; how many those were.

        Of storage, only what is known of it is forgotten, and not counted: it is for others to empty it.
        """
        if STORAGE_TIER in tiers:
            self.host.storage.reset()
        device = self.pool.evict_all() if DEVICE_TIER in tiers else 0
        return device + (self.host.reset() if HOST_TIER in tiers else 0)

    def loads_done(self, step_id: int, failed: NDArray[np.int32]) -> Rows:
        """The loads that a step carried are done; the rows that hold one of the ``failed`` device blocks."""
        if len(failed):
            self._forget_held(failed[self.tree.device.are_attached(failed)])
        self.host.step_done(step_id, failed)
        if not len(failed):
            return np.empty(0, dtype=np.int32)
        return np.flatnonzero(np.isin(self.tables, failed).any(axis=(1, 2))).astype(np.int32)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing that any tier has of these token blocks serves a request any more; who holds them keeps them.

        Storage deletes them. Other engines may have read them before.
        """
        known = map(self.tree.nodes.get, hashes)
        nodes = np.array([node for node in known if node is not None], dtype=np.int64)
        cached = self.tree.device.blocks[nodes]
        blocks = cached[cached != NOWHERE]
        unheld = self.pool.are_unheld(blocks)
        self.host.forget(hashes)
        self.pool.evict(blocks[unheld])
        self._forget_held(blocks[~unheld])
        self.host.storage.forget(hashes)

    def _forget_held(self, blocks: NDArray[np.int32]) -> None:
        self.events.lost(*self.tree.device.owners(blocks))
        self.pool.forget(blocks)
        self.tree.prune(self.tree.device.detach(blocks))

    def _on_evict(self, blocks: NDArray[np.int32]) -> None:
        self._evicted_blocks += len(blocks)
        self.events.lost(*self.tree.device.owners(blocks))
        self.tree.prune(self.tree.device.detach(blocks))

    # ---- what others must hear ----

    def drain_table_updates(self) -> NDArray[np.int32]:
        """``int32 [k, 4]``: (row, group, block index, block id) since the last call, in order."""
        updates, self._table_updates = self._table_updates, []
        return np.concatenate(updates) if updates else np.empty((0, 4), dtype=np.int32)

    def drain_index_updates(self) -> list[IndexUpdate]:
        """What changed for the attention store since the last call, in order."""
        return self.events.drain()

    def resident_paths(self) -> list[IndexUpdate]:
        """Everything that is resident, as statements: a snapshot for the attention store."""
        return self.events.everything()

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, pool and tree agree (DESIGN invariant 1)."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        for row in np.flatnonzero(self._open).tolist():
            held = self.tables[row]
            assert (held[:, self.num_blocks[row] :] == NOWHERE).all(), f"row {row} holds blocks behind its end"
            assert (held != NOWHERE).sum() == self._held[row], f"row {row} miscounts its blocks"
        assert (self.tables[~self._open] == NOWHERE).all(), "a closed row holds blocks"
        holds = np.bincount(self.tables[self.tables != NOWHERE], minlength=self.pool.num_blocks)
        self.host.check_integrity()
        np.add.at(holds, self.host.held_device_blocks(), 1)
        for block in np.flatnonzero(holds != self.pool.references).tolist():
            raise AssertionError(f"block {block} is held {self.pool.references[block]} times, by {holds[block]} owners")
