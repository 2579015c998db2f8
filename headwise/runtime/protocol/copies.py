"""The copies between tiers that a step orders, and what workers report of them.

    SwapIn    host --load--> device       storage --fetch--> host       another engine's host --fetch--> host
    SwapOut   device --store--> host      host --put--> storage      storage --delete--> nowhere

Loads are over with the step that carries them; the other copies take what time they need, and any later step's report
tells of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.tiers import NO_BLOCKS, NamedBlocks
from headwise.transfer.stats import TransferStats

Blocks = NDArray[np.int32]

_NO_LOADS: Blocks = np.empty((0, 3), dtype=np.int32)
_NO_STORES: Blocks = np.empty((0, 2), dtype=np.int32)
_NO_BLOCKS: Blocks = np.empty(0, dtype=np.int32)
for _array in (_NO_LOADS, _NO_STORES, _NO_BLOCKS):
    _array.flags.writeable = False


@dataclass(frozen=True)
class PeerFetch:
    """Host blocks to fill from those that another engine has leased to this one.

    exports: where each rank of that engine can be read: encoded `ExportAddress`es, by rank
    blocks:  ``[m, 5]`` (its group, its block, our group, our host block, in which of its memories its block is)
    """

    exports: tuple[tuple[bytes, ...], ...]
    blocks: Blocks


@dataclass(frozen=True)
class SwapIn:
    """Copies towards the device.

    loads:      ``[m, 3]`` (group, host block, device block), complete before the step looks at the device blocks
    fetches:    host blocks to read from storage, in the background
    from_peers: host blocks to read from other engines' hosts, likewise; reported as ``fetched`` or ``missed``, too
    """

    loads: Blocks = field(default_factory=lambda: _NO_LOADS)
    fetches: NamedBlocks = NO_BLOCKS
    from_peers: tuple[PeerFetch, ...] = ()


@dataclass(frozen=True)
class SwapOut:
    """Copies away from the device.

    stores:  ``[m, 2]`` (device block, host block), beside the step
    puts:    host blocks to write to storage, in the background
    deletes: hashes of token blocks to delete from storage, of all groups, after the puts; nothing is reported of them
    mark:    say when the device is through with all steps before this one: see `CopyReport.settled`
    """

    stores: Blocks = field(default_factory=lambda: _NO_STORES)
    puts: NamedBlocks = NO_BLOCKS
    deletes: tuple[bytes, ...] = ()
    mark: bool = False


@dataclass(frozen=True)
class CopyReport:
    """What has come of copies since the last report, whichever step ordered them.

    not_loaded: device blocks whose load brought nothing: what the step computed from them is void. None: nothing is
                known of loads, which is not to be taken for none having failed
    stored:     host blocks to which a store is complete
    not_stored: host blocks to which a store failed
    fetched:    host blocks that came from storage
    missed:     host blocks that storage had nothing for
    put:        host blocks that are in storage now
    not_put:    host blocks that could not be written to storage
    settled:    the latest step with a mark for which the device is through with all before it; 0: none yet
    transfers:  what the worker has copied since it started, by direction: load, store, fetch, put, peer; empty if
                nothing since the last report
    """

    not_loaded: Blocks | None = None
    stored: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    not_stored: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    fetched: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    missed: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    put: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    not_put: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    settled: int = 0
    transfers: dict[str, TransferStats] = field(default_factory=dict)


NOTHING_IN, NOTHING_OUT, NO_REPORT = SwapIn(), SwapOut(), CopyReport()


class MergedReports:
    """Makes one report of those of all ranks: a copy is complete once every rank has told of it."""

    def __init__(self, size: int) -> None:
        self._stores, self._fetches, self._puts = (_OfEveryRank(size) for _ in range(3))

    def merge(self, reports: Sequence[CopyReport]) -> CopyReport:
        """One report of the engine's, of the ``reports`` of each rank on the same step."""
        stored, not_stored = self._stores.finished([(report.stored, report.not_stored) for report in reports])
        fetched, missed = self._fetches.finished([(report.fetched, report.missed) for report in reports])
        put, not_put = self._puts.finished([(report.put, report.not_put) for report in reports])
        return CopyReport(
            not_loaded=_of_any_rank([report.not_loaded for report in reports]),
            stored=stored,
            not_stored=not_stored,
            fetched=fetched,
            missed=missed,
            put=put,
            not_put=not_put,
            settled=min(report.settled for report in reports),
            transfers=reports[0].transfers,
        )


def _of_any_rank(not_loaded: Sequence[Blocks | None]) -> Blocks | None:
    """Blocks that one of the ranks lacks; None if nothing is known of one rank's."""
    known = [blocks for blocks in not_loaded if blocks is not None]
    return np.unique(np.concatenate(known)) if len(known) == len(not_loaded) else None


class _OfEveryRank:
    """Copies of host blocks in one direction: which of them every rank is through with."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._done: Counter[int] = Counter()  # ranks, by host block
        self._failed: set[int] = set()

    def finished(self, reports: Sequence[tuple[Blocks, Blocks]]) -> tuple[Blocks, Blocks]:
        """Blocks that all ranks have copied, and those that one could not, given each rank's (copied, failed)."""
        for copied, failed in reports:
            self._done.update(copied.tolist())
            self._done.update(failed.tolist())
            self._failed.update(failed.tolist())
        over = [block for block, count in self._done.items() if count == self._size]
        for block in over:
            del self._done[block]
        lost = self._failed.intersection(over)
        self._failed -= lost
        copied_by_all = [block for block in over if block not in lost]
        return np.array(copied_by_all, dtype=np.int32), np.array(sorted(lost), dtype=np.int32)
