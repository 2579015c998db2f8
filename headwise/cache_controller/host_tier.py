"""The host memory's part of an engine's cache: what is copied there, and what comes back from it.

    device block   --store-->  host block        both are held until the workers report the copy
    host block     --load--->  device block      both are held until the step that carried the load is done

A copy is known to the prefix tree, and may be loaded, only once it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrivals
from headwise.cache_controller.block_pool import BlockPool
from headwise.cache_controller.eviction import Blocks, EvictionPolicy, RecycledFirst
from headwise.cache_controller.kv_events import KVEvents
from headwise.cache_controller.leases import Leases
from headwise.cache_controller.protection import PROTECTED_SHARE
from headwise.cache_controller.radix_tree import NOWHERE, Nodes, RadixTree
from headwise.cache_controller.settling import Settling
from headwise.cache_controller.storage_tier import StorageTier
from headwise.cache_controller.tiers import HostTierStats, NoStorage, Storage

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

NEVER = 1 << 30

MAX_STORING = 0.125
"""Share of the device's blocks that stores in flight may hold. Held blocks cannot be evicted."""


@dataclass(frozen=True)
class HostConfig:
    """The host's part of the cache, and what is copied there.

    policy:    ``write_through``: every block that a later request may need, when it is computed;
               ``write_through_selective``: when it was computed or served ``threshold`` times;
               ``write_back``: when it is about to be evicted from the device
    storage_timeout_s: seconds after which a storage behind the host, that does not answer, is not used; None: there
               is no storage
    """

    num_blocks: int
    policy: WritePolicy = "write_through_selective"
    threshold: int = 2
    storage_timeout_s: float | None = None


class HostTier:
    """The `Host` that there is. Owns the host pool and the copies in flight.

    events:     told of nodes that gain or lose blocks on the host
    threshold:  uses of a block after which it is copied
    storage:    where blocks that reached the host go from there
    arrivals:   what is on its way to the host from elsewhere than the device
    leases:     what other engines are reading from it, and from the device
    settling:   which blocks of the device they may
    """

    is_there = True

    def __init__(
        self,
        tree: RadixTree,
        device: BlockPool,
        config: HostConfig,
        events: KVEvents,
        eviction: Callable[[int], EvictionPolicy] = RecycledFirst,
        protected_share: float = PROTECTED_SHARE,
    ) -> None:
        self.tree = tree
        self.policy = config.policy
        self.threshold = {"write_through": 1, "write_through_selective": config.threshold, "write_back": NEVER}[
            config.policy
        ]
        self.pool = BlockPool(config.num_blocks, self._on_evict, eviction, protected_share)
        timeout_s = config.storage_timeout_s
        self.arrivals = Arrivals(tree, self.pool, events)
        self.settling = Settling(tree.device)
        self.leases = Leases(tree, self.pool, device, self.settling, self.store, lambda: bool(self._backlog))
        self.storage: Storage = NoStorage()
        if timeout_s is not None:
            self.storage = StorageTier(tree, self.pool, self.arrivals, events, timeout_s)
        self._device = device
        self._events = events
        self._max_storing = max(1, int(MAX_STORING * device.num_blocks))
        self._is_storing: NDArray[np.bool_] = np.zeros(device.num_blocks, dtype=np.bool_)
        self._storing: dict[int, int] = {}  # device block by host block
        self._stores: list[NDArray[np.int32]] = []  # not sent yet: (device block, host block)
        self._backlog: deque[tuple[int, int]] = deque(
            maxlen=device.num_blocks
        )  # device blocks that had to wait, and their generations
        self._loads: list[NDArray[np.int32]] = []  # not sent yet: (group, host block, device block)
        self._loading: dict[int, NDArray[np.int32]] = {}  # by the step that carries them
        self._stored = self._loaded = self._evicted = self._failed = 0

    @property
    def writes_through(self) -> bool:
        """Whether to `store` every block that a later request may need once it is computed."""
        return self.threshold == 1

    @property
    def is_busy(self) -> bool:
        """Whether copies are on their way, or waiting to be sent."""
        return bool(self._storing or self._loading or self._loads)

    @property
    def has_work(self) -> bool:
        """Whether a step should be sent for the sake of the copies alone."""
        return bool(self._storing or self._loads) or self.settling.has_work

    @property
    def num_returning(self) -> int:
        """Device blocks that nobody holds but the stores in flight."""
        return self._device.count_held_once(np.array(list(self._storing.values()), dtype=np.int32))

    def stats(self) -> HostTierStats:
        pool = self.pool
        return HostTierStats(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            held_blocks=pool.num_held,
            queued_blocks=len(self._storing) + len(self._backlog),
            stored_blocks=self._stored,
            loaded_blocks=self._loaded,
            evicted_blocks=self._evicted,
            failed_blocks=self._failed,
            retained_blocks=pool.num_protected,
        )

    # ---- device to host ----

    def store(self, blocks: Blocks) -> None:
        """Copy those device blocks to the host that the tree knows, and not to be there.

        As many at once as room allows, the rest later; what is evicted before its turn comes is not copied.
        """
        due = blocks[self.tree.device.are_attached(blocks)]
        due = due[self._are_due(due)]
        self._backlog.extend(zip(due.tolist(), self.tree.device.generations(due).tolist(), strict=True))
        self._start_stores()

    def _start_stores(self) -> None:
        while self._backlog and (room := min(self._max_storing - len(self._storing), self.pool.num_available)) > 0:
            waited = dict.fromkeys(self._backlog.popleft() for _ in range(min(room, len(self._backlog))))
            blocks, generations = np.array(list(waited), dtype=np.int64).T
            device = blocks[generations == self.tree.device.generations(blocks)].astype(np.int32)
            device = device[self._are_due(device)]
            host = self.pool.allocate(len(device))
            self._device.retain(device)
            self._is_storing[device] = True
            self._storing.update(zip(host.tolist(), device.tolist(), strict=True))
            self._stores.append(np.stack([device, host], axis=1))

    def _are_due(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of the attached device ``blocks [n]`` hold what neither is on the host nor on its way there."""
        is_on_host = self.tree.host.blocks[self.tree.device.owners(blocks)] != NOWHERE
        return np.asarray(~is_on_host & ~self._is_storing[blocks])

    def note_use(self, nodes: Nodes, blocks: NDArray[np.int32]) -> None:
        """``nodes [n]`` serve another request, which holds ``blocks [groups, n]`` of them on the device."""
        uses = self.tree.uses
        due = []
        for index, node in enumerate(nodes.tolist()):
            uses[node] += 1
            if uses[node] >= self.threshold:
                due.append(index)
        held = blocks[:, due]
        self.store(held[held != NOWHERE])

    def back_up(self, reserve: int) -> None:
        """With ``write_back``: copy what is evicted next, once fewer than ``reserve`` blocks are free."""
        if self.policy == "write_back" and (short := reserve - self._device.num_free) > 0:
            self.store(self._device.next_evicted(short))

    def back_up_all(self) -> None:
        """Copy what the device has cached, before it is lost: as much as fits, the most recently used of it.

        What only the host has gives way to it, being older, but nothing that both have does.
        """
        cached = self._device.next_evicted(self._device.num_cached)
        blocks = cached[max(0, len(cached) - self.pool.num_available) :]
        self.touch(blocks)
        self._backlog.clear()  # of use only while the device stays
        self.store(blocks)

    def touch(self, blocks: Blocks) -> None:
        """Evict the copies of those device blocks last of all; of these, the first given first.

        They came there in the order in which they were computed, and the tail of a path is of no use without its head.
        """
        blocks = blocks[self.tree.device.are_attached(blocks)]
        copies = self.tree.host.blocks[self.tree.device.owners(blocks)]
        self.pool.touch(copies[copies != NOWHERE])

    def protect(self, blocks: Blocks, until: float) -> None:
        """See `Host.protect`."""
        self.pool.protect(blocks, until)

    def advance(self, now: float) -> None:
        """See `Host.advance`."""
        self.pool.advance(now)

    def take_stores(self) -> NDArray[np.int32]:
        """``int32 [m, 2]`` (device block, host block) to start with the next step."""
        stores, self._stores = self._stores, []
        return np.concatenate(stores) if stores else np.empty((0, 2), dtype=np.int32)

    def take_mark(self, step_id: int) -> bool:
        """See `Host.take_mark`."""
        return self.settling.take_mark(step_id)

    def settled(self, step_id: int) -> None:
        """See `Host.settled`."""
        self.settling.settled(step_id)

    def stored(self, host_blocks: Sequence[int], failed: Sequence[int] = ()) -> None:
        """Copies are complete, or ``failed``: nothing may be known of those."""
        if host_blocks:
            self._stored += len(host_blocks)
            host, device = self._end_stores(host_blocks)
            known = self.tree.device.are_attached(device)  # the rest was forgotten meanwhile
            owners = self.tree.device.owners(device[known])
            self._attach(host[known], *owners)
            self._device.hand_protection(device[known], self.pool, self.tree.host.blocks[owners])
            self._let_go(host, device)
        if failed:
            self._failed += len(failed)
            self._let_go(*self._end_stores(failed))
        self._start_stores()

    def _attach(self, host: Blocks, nodes: Nodes, groups: Nodes) -> None:
        """Let the tree know what came to ``host`` blocks, but for what storage has brought meanwhile."""
        lacked = self.tree.host.blocks[nodes, groups] == NOWHERE
        host, nodes, groups = host[lacked], nodes[lacked], groups[lacked]
        self.tree.host.attach_one_by_one(nodes, groups, host)
        self.pool.register(host)
        self._events.gained(nodes, groups)
        self.storage.put(host)

    def _end_stores(self, host_blocks: Sequence[int]) -> tuple[Blocks, Blocks]:
        device = np.array([self._storing.pop(block) for block in host_blocks], dtype=np.int32)
        self._is_storing[device] = False
        return np.array(host_blocks, dtype=np.int32), device

    def _let_go(self, host: Blocks, device: Blocks) -> None:
        self.pool.release(host)
        if self.policy == "write_back":
            self._device.release_copied(device)
        else:
            self._device.release(device)

    # ---- host to device ----

    def load(self, groups: NDArray[np.int64], host_blocks: Blocks) -> Blocks:
        """Bring ``host_blocks`` of the tree to the device with the next step; the blocks there, held for the caller.

        Raises ValueError if the device has not so many available.
        """
        device_blocks = self._device.allocate(len(host_blocks))
        self.pool.retain(host_blocks)
        self._device.retain(device_blocks)
        self._loads.append(np.stack([groups.astype(np.int32), host_blocks, device_blocks], axis=1))
        return device_blocks

    def take_loads(self, step_id: int) -> NDArray[np.int32]:
        """``int32 [m, 3]`` (group, host block, device block) that step ``step_id`` carries."""
        if not self._loads:
            return np.empty((0, 3), dtype=np.int32)
        self._loading[step_id] = np.concatenate(self._loads)
        self._loads = []
        return self._loading[step_id]

    def step_done(self, step_id: int, failed: Blocks) -> None:
        """The loads that a step carried are done; those to the ``failed`` device blocks brought nothing.

        The tree forgets these, on both tiers: the request that needs them is computed again, from other blocks.
        """
        loads = self._loading.pop(step_id, None)
        if loads is None:
            return
        host, device = loads[:, 1].copy(), loads[:, 2].copy()
        lost = np.isin(device, failed)
        self._loaded += len(loads) - int(np.count_nonzero(lost))
        self._failed += int(np.count_nonzero(lost))
        self.pool.release(host)
        self._drop(host[lost])
        self._device.release(device)

    def _drop(self, host_blocks: Blocks) -> None:
        """Forget host blocks that nobody holds."""
        known = host_blocks[self.tree.host.are_attached(host_blocks) & self.pool.are_unheld(host_blocks)]
        if len(known):
            self.pool.evict(known)

    # ---- eviction ----

    def reset(self) -> int:
        """Forget every block that no copy holds; how many those were."""
        return self.pool.evict_all()

    def arrived(self, host_blocks: Sequence[int], missed: Sequence[int]) -> None:
        """What was on its way to the host from storage or other engines is there, or did not come."""
        self.arrivals.reported(host_blocks, missed)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing that the host has of these token blocks, or that is on its way there, is loaded any more, here or by
        other engines. What a copy holds stays until that is done.
        """
        self.arrivals.forget(hashes)
        self.leases.forget(hashes)
        known = map(self.tree.nodes.get, hashes)
        copies = self.tree.host.blocks[np.array([node for node in known if node is not None], dtype=np.int64)]
        blocks = copies[copies != NOWHERE]
        unheld = self.pool.are_unheld(blocks)
        self.pool.evict(blocks[unheld])
        held = blocks[~unheld]
        self._events.lost(*self.tree.host.owners(held))
        self.pool.forget(held)
        self.tree.prune(self.tree.host.detach(held))

    def _on_evict(self, blocks: Blocks) -> None:
        self._evicted += len(blocks)
        self._events.lost(*self.tree.host.owners(blocks))
        self.tree.prune(self.tree.host.detach(blocks))

    def held_device_blocks(self) -> list[int]:
        """The device blocks that copies in flight hold, each as often as they do."""
        loads = [*self._loads, *self._loading.values()]
        return [*(int(block) for load in loads for block in load[:, 2]), *self._storing.values()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, tree and copies in flight agree."""
        self.pool.check_integrity()
        self.leases.check_integrity()
        loads = [*self._loads, *self._loading.values()]
        held = {int(block) for load in loads for block in load[:, 1]} | set(self._storing)
        held |= self.storage.held_host_blocks() | self.arrivals.held_host_blocks() | self.leases.held_host_blocks()
        assert held == set(np.flatnonzero(~self.pool.are_unheld(np.arange(self.pool.num_blocks, dtype=np.int32)))), (
            "a copy lost its hold"
        )
        assert set(np.flatnonzero(self._is_storing)) == set(self._storing.values())
        complete = np.flatnonzero(self.tree.host.are_attached(np.arange(self.pool.num_blocks, dtype=np.int32)))
        assert not set(complete.tolist()) & set(self._storing), "a copy is known before it is complete"
