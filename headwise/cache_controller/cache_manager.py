"""The scheduler's view of one engine's cache: block tables, prefix hits, allocation and eviction.

No I/O, no clock, no device memory: it decides, and says in `drain_table_updates` and `drain_index_updates` what
workers and the attention store must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.radix_tree import NOWHERE, Node, RadixTree
from headwise.cache_controller.windows import first_live_block, next_recycling, num_blocks_for, peak_blocks, sink_blocks

DEVICE_TIER = "device"


@dataclass(frozen=True)
class PrefixMatch:
    """A prefix of ``num_blocks`` blocks that can be served from the cache.

    kept: runs (group, first column, device blocks) of what a sequence that starts with the prefix may still see
    """

    num_blocks: int = 0
    kept: tuple[tuple[int, int, list[int]], ...] = ()

    @property
    def num_kept(self) -> int:
        """Blocks that adopting the match puts into a row's table."""
        return sum(len(blocks) for _, _, blocks in self.kept)


@dataclass(frozen=True)
class IndexUpdate:
    """An absolute statement for the attention store.

    "On this path, from block ``start_block`` on, these blocks are (not) resident on this node's ``tier``."
    """

    tier: str
    start_block: int
    block_hashes: tuple[bytes, ...]
    resident: bool


@dataclass(frozen=True)
class CacheStats:
    """Counts of blocks, and of tokens asked for and served by prefix caching since the start."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    nodes: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    recycled_blocks: int


@dataclass
class _Row:
    """One sequence: columns of its table that are allocated and registered.

    held:     blocks in its table, over all groups
    recycled: per group, the column up to which blocks behind the sink were given back
    recycle_at: tokens at which the next block of a window group dies
    fresh:    runs (first column, hashes) that this row brought into the tree, to be announced when it closes: until
              then it holds them, so they cannot be evicted
    """

    num_blocks: int = 0
    held: int = 0
    recycled: list[int] = field(default_factory=list)
    recycle_at: int = 0
    registered: int = 0
    fresh: list[tuple[int, list[bytes]]] = field(default_factory=list)


class CacheManager:
    """Owns the pool, the prefix tree and the block tables ``int32 [max_rows, groups, max_blocks]``.

    A row is one running sequence. Its life: `match` and `adopt` a prefix, `extend` before tokens are computed,
    `commit` after they were, `release` once no step in flight may touch its blocks.

    step_tokens: most tokens of one sequence in the steps that are in flight together
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
    ) -> None:
        self.policies = tuple(policies)
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.step_tokens = step_tokens
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, self._on_evict)
        self.tree = RadixTree(len(self.policies))
        self.tables: NDArray[np.int32] = np.full((max_rows, len(self.policies), max_blocks), NOWHERE, dtype=np.int32)
        self._rows: dict[int, _Row] = {}
        self._full_groups = [g for g, policy in enumerate(self.policies) if policy.is_full]
        self._window_groups = [g for g, policy in enumerate(self.policies) if not policy.is_full]
        self._index_groups = self._full_groups or self._window_groups
        self._table_updates: list[tuple[int, int, int, NDArray[np.int32]]] = []
        self._index_updates: list[IndexUpdate] = []
        self._queried_tokens = self._hit_tokens = self._evicted_blocks = self._recycled_blocks = 0

    # ---- questions ----

    def peak_blocks(self, tokens: int) -> int:
        """Most blocks that a sequence of up to ``tokens`` tokens holds at any time, over all groups."""
        return sum(peak_blocks(policy, tokens, self.block_size, self.step_tokens) for policy in self.policies)

    @property
    def num_available(self) -> int:
        return self.pool.num_available

    def promised_blocks(self, row: int, tokens: int) -> int:
        """Blocks that a row may still take until it has ``tokens`` tokens."""
        return max(0, self.peak_blocks(tokens) - self._rows[row].held)

    def stats(self) -> CacheStats:
        return CacheStats(
            total_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            held_blocks=self.pool.num_held,
            nodes=len(self.tree.nodes),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._evicted_blocks,
            recycled_blocks=self._recycled_blocks,
        )

    # ---- prefix hits ----

    def match(self, hashes: Sequence[bytes], max_tokens: int) -> PrefixMatch:
        """The longest prefix of at most ``max_tokens`` tokens that every group can serve. Changes nothing.

        A prefix of ``n`` blocks can be served iff every full group has blocks ``[0, n)`` and every window group
        has its sink blocks and the blocks that a query after the prefix may see.
        """
        if not self.prefix_caching:
            return PrefixMatch()
        nodes = self.tree.find(hashes[: max_tokens // self.block_size])
        for group in self._full_groups:
            held = [node.device[group] for node in nodes]
            if NOWHERE in held:
                del nodes[held.index(NOWHERE) :]
        count = self._window_depth(nodes) if self._window_groups else len(nodes)
        return PrefixMatch(count, self._kept(nodes[:count]))

    def _window_depth(self, nodes: Sequence[Node]) -> int:
        """The deepest prefix of ``nodes`` that every window group can serve."""
        best = 0
        runs = dict.fromkeys(self._window_groups, 0)  # resident blocks in a row, ending at this one
        sinks = dict.fromkeys(self._window_groups, 0)  # resident blocks in a row, from the first one
        for depth, node in enumerate(nodes):
            for group in self._window_groups:
                resident = node.device[group] != NOWHERE
                runs[group] = runs[group] + 1 if resident else 0
                if resident and sinks[group] == depth:
                    sinks[group] += 1
            if all(self._window_servable(g, depth + 1, runs[g], sinks[g]) for g in self._window_groups):
                best = depth + 1
        return best

    def _window_servable(self, group: int, blocks: int, run: int, from_start: int) -> bool:
        policy = self.policies[group]
        live = blocks - first_live_block(policy, blocks * self.block_size, self.block_size)
        return run >= live and from_start >= min(sink_blocks(policy, self.block_size), blocks)

    def _kept(self, nodes: Sequence[Node]) -> tuple[tuple[int, int, list[int]], ...]:
        """Per group, the sink's run and the window's; a full group's is one."""
        runs = []
        for group, policy in enumerate(self.policies):
            live = first_live_block(policy, len(nodes) * self.block_size, self.block_size)
            sinks = min(sink_blocks(policy, self.block_size), live)
            for first, last in ((0, sinks), (live, len(nodes))):
                if first < last:
                    runs.append((group, first, [node.device[group] for node in nodes[first:last]]))
        return tuple(runs)

    def num_reclaimed(self, match: PrefixMatch) -> int:
        """Blocks of a match that nobody holds now: adopting it takes them out of `num_available`."""
        return sum(len(blocks) - self.pool.count_held(blocks) for _, _, blocks in match.kept)

    # ---- the life of a row ----

    def adopt(self, row: int, match: PrefixMatch, prompt_tokens: int) -> None:
        """Open ``row`` for a sequence whose prefix is ``match`` (maybe empty)."""
        if row in self._rows:
            raise ValueError(f"row {row} is in use")
        tokens = match.num_blocks * self.block_size
        recycled = [first_live_block(policy, tokens, self.block_size) for policy in self.policies]
        self._rows[row] = _Row(match.num_blocks, match.num_kept, recycled, registered=match.num_blocks)
        for group, first, blocks in match.kept:
            self.pool.retain(blocks)
            self._enter(row, group, first, np.array(blocks, dtype=np.int32))
        self._queried_tokens += prompt_tokens
        self._hit_tokens += tokens

    def _enter(self, row: int, group: int, first: int, blocks: NDArray[np.int32]) -> None:
        """Write ``blocks`` into the table, at the columns from ``first`` on, and note it for the workers."""
        self.tables[row, group, first : first + len(blocks)] = blocks
        self._table_updates.append((row, group, first, blocks))

    def extend(self, row: int, tokens: int) -> bool:
        """Make room for ``tokens`` tokens in all; False, and nothing changed, if the pool has not enough."""
        state = self._rows[row]
        first, last = state.num_blocks, num_blocks_for(tokens, self.block_size)
        if last > self.max_blocks:
            raise ValueError(f"{tokens} tokens need {last} blocks; a block table has {self.max_blocks} columns")
        if last <= first:
            return True
        groups = len(self.policies)
        if (last - first) * groups > self.pool.num_available:
            return False
        blocks = self.pool.allocate((last - first) * groups).reshape(groups, last - first)
        for group in range(groups):
            self._enter(row, group, first, blocks[group])
        state.num_blocks = last
        state.held += (last - first) * groups
        return True

    def commit(self, row: int, tokens: int, hashes: Sequence[bytes]) -> None:
        """Say that the row's first ``tokens`` tokens are computed; ``hashes`` name their full blocks.

        Steps in flight must not look at positions before ``tokens``' windows: what these leave is recycled.
        """
        state = self._rows[row]
        if self.prefix_caching and len(hashes) > state.registered:
            self._register_up_to(row, hashes)
        if self._window_groups and tokens >= state.recycle_at:
            self._recycle(row, tokens)

    def _recycle(self, row: int, tokens: int) -> None:
        """Give back the window blocks that no later query sees; registered ones are the first to be evicted."""
        state = self._rows[row]
        for group in self._window_groups:
            policy = self.policies[group]
            first = max(state.recycled[group], sink_blocks(policy, self.block_size))
            live = min(first_live_block(policy, tokens, self.block_size), state.num_blocks)
            if live <= first:
                continue
            dead = self.tables[row, group, first:live]
            blocks = dead[dead != NOWHERE]
            self._enter(row, group, first, np.full(live - first, NOWHERE, dtype=np.int32))
            state.recycled[group] = live
            state.held -= len(blocks)
            self._recycled_blocks += len(blocks)
            self.pool.release(blocks, evict_first=True)
        state.recycle_at = min(
            next_recycling(self.policies[group], tokens, self.block_size) for group in self._window_groups
        )

    def _register_up_to(self, row: int, hashes: Sequence[bytes]) -> None:
        state, nodes = self._rows[row], self.tree.nodes
        first = state.registered
        while first > 0 and hashes[first - 1] not in nodes:
            first -= 1  # another row's copy was in the tree and has been evicted since: ours takes its place
        parent = nodes[hashes[first - 1]] if first else None
        columns = self.tables[row, :, first : len(hashes)].T.tolist()
        for depth, blocks in enumerate(columns, first):
            parent = self.tree.insert(hashes[depth], parent, depth)
            if self._register(parent, blocks):
                self._note_fresh(state, depth, parent.hash)
        state.registered = len(hashes)

    def _register(self, node: Node, blocks: list[int]) -> bool:
        """Let the tree have the row's blocks of a node where it has none; whether that made the node resident."""
        added = False
        for group, block in enumerate(blocks):
            if block != NOWHERE and node.device[group] == NOWHERE:
                self.tree.attach(node, group, block)
                self.pool.register(block)
                added = True
        return added and self._is_resident(node)

    def _note_fresh(self, state: _Row, depth: int, block_hash: bytes) -> None:
        if state.fresh and state.fresh[-1][0] + len(state.fresh[-1][1]) == depth:
            state.fresh[-1][1].append(block_hash)
        else:
            state.fresh.append((depth, [block_hash]))

    def release(self, row: int) -> None:
        """Close a row. Its registered blocks stay as cache, the deepest to be evicted first."""
        state = self._rows.pop(row)
        held = self.tables[row, :, : state.num_blocks]
        deepest_first = held.T[::-1].ravel()
        self.pool.release(deepest_first[deepest_first != NOWHERE])
        held[:] = NOWHERE
        self._index_updates += [
            IndexUpdate(DEVICE_TIER, first, tuple(hashes), resident=True) for first, hashes in state.fresh
        ]

    def _is_resident(self, node: Node | None) -> bool:
        """Whether the device holds what every prefix through this node needs: its full groups."""
        return node is not None and all(node.device[group] != NOWHERE for group in self._index_groups)

    def reset(self) -> None:
        """Forget every block that no row holds."""
        self.pool.evict_all()

    def _on_evict(self, blocks: list[int]) -> None:
        self._evicted_blocks += len(blocks)
        run: list[Node] = []  # neighbours of one path, the deepest first: so they were released, so they go
        for block in blocks:
            node, group = self.tree.detach(block)
            if group not in self._index_groups or (run and run[-1] is node):
                continue
            if run and run[-1].parent is not node:
                self._announce_gone(run)
                run = []
            run.append(node)
        if run:
            self._announce_gone(run)

    def _announce_gone(self, run: list[Node]) -> None:
        hashes = tuple(node.hash for node in reversed(run))
        self._index_updates.append(IndexUpdate(DEVICE_TIER, run[-1].depth, hashes, resident=False))

    # ---- what others must hear ----

    def drain_table_updates(self) -> NDArray[np.int32]:
        """``int32 [k, 4]``: (row, group, block index, block id) since the last call, in order."""
        runs, self._table_updates = self._table_updates, []
        updates = np.empty((sum(len(blocks) for *_, blocks in runs), 4), dtype=np.int32)
        at = 0
        for row, group, first, blocks in runs:
            part = updates[at : at + len(blocks)]
            part[:, 0], part[:, 1], part[:, 3] = row, group, blocks
            part[:, 2] = range(first, first + len(blocks))
            at += len(blocks)
        return updates

    def drain_index_updates(self) -> list[IndexUpdate]:
        """What changed for the attention store since the last call, in order."""
        updates, self._index_updates = self._index_updates, []
        return updates

    def resident_paths(self) -> list[IndexUpdate]:
        """Everything that is resident, as statements: a snapshot for the attention store."""
        return [
            IndexUpdate(DEVICE_TIER, node.depth, (node.hash,), resident=True)
            for node in self.tree.nodes.values()
            if self._is_resident(node)
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, pool and tree agree (DESIGN invariant 1)."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        references = [0] * self.pool.num_blocks
        for row, state in self._rows.items():
            held = self.tables[row]
            assert (held[:, state.num_blocks :] == NOWHERE).all(), f"row {row} holds blocks behind its end"
            assert (held != NOWHERE).sum() == state.held, f"row {row} miscounts its blocks"
            for block in held[held != NOWHERE].tolist():
                references[block] += 1
        for block, count in enumerate(references):
            assert (count > 0) == self.pool.is_held(block), f"block {block} is in {count} tables but held disagrees"
        closed = np.ones(len(self.tables), dtype=bool)
        closed[list(self._rows)] = False
        assert (self.tables[closed] == NOWHERE).all(), "a closed row holds blocks"
