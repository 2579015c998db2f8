"""The contracts of the tiers behind the device, and the tiers of an engine that does without them.

    device  <--load--  host  <--fetch--  storage
            --store->        --put---->

`CacheManager` owns the device and talks to its host, which owns its storage: `HostTier` and `StorageTier`, or `NoHost`
and `NoStorage`, which have nothing, take nothing and never have work. Nobody asks whether there is a tier but who tells
the user so, or saves work on every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Fetch
from headwise.cache_controller.eviction import Blocks
from headwise.cache_controller.radix_tree import Nodes

_NO_STORES: Blocks = np.empty((0, 2), dtype=np.int32)
_NO_LOADS: Blocks = np.empty((0, 3), dtype=np.int32)


@dataclass(frozen=True)
class NamedBlocks:
    """Host blocks and what they hold.

    blocks: ``int32 [m, 2]`` (group, host block)
    hashes: block hash of each, one after the other
    """

    blocks: Blocks = field(default_factory=lambda: _NO_STORES)
    hashes: tuple[bytes, ...] = ()


NO_BLOCKS = NamedBlocks()


@dataclass(frozen=True)
class HostTierStats:
    """Counts of host blocks, and of blocks copied since the start."""

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    queued_blocks: int
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int
    failed_blocks: int
    retained_blocks: int


@dataclass(frozen=True)
class StorageTierStats:
    """Counts of blocks: on their way now, and since the start.

    hit_tokens: tokens of prefixes that could be served because of what was fetched
    is_stalled: storage has said nothing for too long, and is not used until it does
    """

    queued_puts: int
    queued_fetches: int
    put_blocks: int
    failed_puts: int
    fetched_blocks: int
    missed_blocks: int
    hit_tokens: int
    is_stalled: bool


class Storage(Protocol):
    """What the host and the engine's steps ask of storage."""

    is_there: bool

    @property
    def has_work(self) -> bool:
        """Whether something is on its way of which word may be expected, or of which it is time to ask."""

    def stats(self) -> StorageTierStats | None:
        """None where there is no storage."""

    def watch(self, now: float) -> None:
        """Note the time: of storage that owes an answer and gives none, no more is asked."""

    def reset(self) -> None:
        """Storage is being emptied: nothing is known to be there, whatever is said of the time before."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Delete what storage has of these token blocks."""

    def take_deletes(self) -> tuple[bytes, ...]:
        """The token blocks to delete, of all groups, after what was put before."""

    def put(self, host_blocks: Blocks) -> None:
        """Write host blocks that the tree knows to storage, as many at once as may be in flight, the rest later."""

    def take_puts(self) -> NamedBlocks:
        """What is to be written, from the next step on."""

    def put_done(self, host_blocks: Sequence[int], failed: Sequence[int]) -> None:
        """Blocks are in storage, or could not be written."""

    @property
    def room(self) -> int:
        """Blocks that may be fetched now."""

    def fetch(self, path: Sequence[bytes], wanted: NDArray[np.bool_], gained: int) -> Fetch:
        """Bring the blocks ``wanted [n, groups]`` of a path to the host; those on their way already come once.

        gained: tokens more that can be served then

        Raises ValueError if there are more than `room`.
        """

    def take_fetches(self) -> NamedBlocks:
        """What is to be fetched, from the next step on."""

    def held_host_blocks(self) -> set[int]:
        """The host blocks that puts in flight hold."""


class Host(Protocol):
    """What the cache and the engine's steps ask of the host.

    storage:        where blocks that reached the host go from there
    writes_through: whether to `store` every block that a later request may need once it is computed
    """

    is_there: bool
    storage: Storage

    @property
    def writes_through(self) -> bool: ...

    @property
    def is_busy(self) -> bool:
        """Whether copies are on their way, or waiting to be sent."""

    @property
    def has_work(self) -> bool:
        """Whether a step should be sent for the sake of the copies alone."""

    @property
    def num_returning(self) -> int:
        """Device blocks that nobody holds but the stores in flight: they are available once those are complete."""

    def stats(self) -> HostTierStats | None:
        """None where there is no host."""

    def store(self, blocks: Blocks) -> None:
        """Copy those device blocks to the host that the tree knows, and not to be there.

        As many at once as room allows, the rest later; what is evicted before its turn comes is not copied.
        """

    def note_use(self, nodes: Nodes, blocks: Blocks) -> None:
        """``nodes [n]`` serve another request, which holds ``blocks [groups, n]`` of them on the device."""

    def back_up(self, reserve: int) -> None:
        """With ``write_back``: copy what is evicted next, once fewer than ``reserve`` blocks are free."""

    def back_up_all(self) -> None:
        """Copy what the device has cached, before it is lost: as much as fits, the most recently used of it."""

    def touch(self, blocks: Blocks) -> None:
        """Evict the copies of those device blocks last of all; of these, the first given first."""

    def protect(self, blocks: Blocks, until: float) -> None:
        """Keep these host blocks, that the tree knows, until then rather than others."""

    def advance(self, now: float) -> None:
        """It is ``now``, in seconds: what was to be kept until then is not any more."""

    def load(self, groups: NDArray[np.int64], host_blocks: Blocks) -> Blocks:
        """Bring ``host_blocks`` of the tree to the device with the next step; the blocks there, held for the caller."""

    def take_loads(self, step_id: int) -> Blocks:
        """``int32 [m, 3]`` (group, host block, device block) that step ``step_id`` carries."""

    def take_stores(self) -> Blocks:
        """``int32 [m, 2]`` (device block, host block) to start with the next step."""

    def take_mark(self, step_id: int) -> bool:
        """Whether workers are to tell when the device is through with all steps before ``step_id``."""

    def settled(self, step_id: int) -> None:
        """The device is through with all steps before that one, by its mark; 0: with none that had one."""

    def stored(self, host_blocks: Sequence[int], failed: Sequence[int] = ()) -> None:
        """Copies are complete, or ``failed``: nothing may be known of those."""

    def step_done(self, step_id: int, failed: Blocks) -> None:
        """The loads that a step carried are done; those to the ``failed`` device blocks brought nothing."""

    def arrived(self, host_blocks: Sequence[int], missed: Sequence[int]) -> None:
        """What was on its way to the host from storage or other engines is there, or did not come."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing that the host has of these token blocks, or that is on its way there, is loaded any more, here or by
        other engines. What a copy holds stays until that is done.
        """

    def reset(self) -> int:
        """Forget every block that no copy holds; how many those were."""

    def held_device_blocks(self) -> list[int]:
        """The device blocks that copies in flight hold, each as often as they do."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, tree and copies in flight agree."""


class NoStorage:
    """The `Storage` of an engine that has none."""

    is_there = False
    has_work = False
    room = 0

    def stats(self) -> StorageTierStats | None:
        return None

    def watch(self, now: float) -> None:
        pass

    def reset(self) -> None:
        pass

    def forget(self, hashes: Sequence[bytes]) -> None:
        pass

    def take_deletes(self) -> tuple[bytes, ...]:
        return ()

    def put(self, host_blocks: Blocks) -> None:
        pass

    def take_puts(self) -> NamedBlocks:
        return NO_BLOCKS

    def put_done(self, host_blocks: Sequence[int], failed: Sequence[int]) -> None:
        pass

    def fetch(self, path: Sequence[bytes], wanted: NDArray[np.bool_], gained: int) -> Fetch:
        raise ValueError("there is no storage to fetch from")

    def take_fetches(self) -> NamedBlocks:
        return NO_BLOCKS

    def held_host_blocks(self) -> set[int]:
        return set()


class NoHost:
    """The `Host` of an engine that has none."""

    is_there = False
    writes_through = False
    is_busy = False
    has_work = False
    num_returning = 0

    def __init__(self) -> None:
        self.storage: Storage = NoStorage()

    def stats(self) -> HostTierStats | None:
        return None

    def store(self, blocks: Blocks) -> None:
        pass

    def note_use(self, nodes: Nodes, blocks: Blocks) -> None:
        pass

    def back_up(self, reserve: int) -> None:
        pass

    def back_up_all(self) -> None:
        pass

    def touch(self, blocks: Blocks) -> None:
        pass

    def protect(self, blocks: Blocks, until: float) -> None:
        pass

    def advance(self, now: float) -> None:
        pass

    def load(self, groups: NDArray[np.int64], host_blocks: Blocks) -> Blocks:
        raise ValueError("there is no host to load from")

    def take_loads(self, step_id: int) -> Blocks:
        return _NO_LOADS

    def take_stores(self) -> Blocks:
        return _NO_STORES

    def take_mark(self, step_id: int) -> bool:
        return False

    def settled(self, step_id: int) -> None:
        pass

    def stored(self, host_blocks: Sequence[int], failed: Sequence[int] = ()) -> None:
        pass

    def step_done(self, step_id: int, failed: Blocks) -> None:
        pass

    def arrived(self, host_blocks: Sequence[int], missed: Sequence[int]) -> None:
        pass

    def forget(self, hashes: Sequence[bytes]) -> None:
        pass

    def reset(self) -> int:
        return 0

    def held_device_blocks(self) -> list[int]:
        return []

    def check_integrity(self) -> None:
        pass
