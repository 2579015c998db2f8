"""The engine's copies between tiers: what a step orders, and what its report tells of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_manager import CacheManager
from headwise.errors import EngineDiedError
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.copies import NOTHING_IN, NOTHING_OUT, CopyReport, PeerFetch, SwapIn, SwapOut
from headwise.transfer.stats import TransferStats

_NO_BLOCKS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class TierCopies:
    """Takes the copies that the cache wants into steps, and tells the cache what has come of them.

    Without a host there are none, which every step is spared to find out.

    peer_loads: has blocks copied from other engines; None: nothing has
    transfers:  what workers have copied since they started, by direction
    """

    def __init__(self, cache: CacheManager, peer_loads: PeerLoads | None = None) -> None:
        self._cache, self._host, self._storage = cache, cache.host, cache.host.storage
        self._peer_loads = peer_loads
        self.transfers: dict[str, TransferStats] = {}

    @property
    def is_busy(self) -> bool:
        """Whether copies between tiers are on their way."""
        return self._host.is_busy or self.needs_step

    @property
    def needs_step(self) -> bool:
        """Whether a step without sequences should start copies or bring word of them, if no other step does."""
        return self._host.has_work or self._storage.has_work or self._has_peer_loads

    @property
    def _has_peer_loads(self) -> bool:
        return self._peer_loads is not None and self._peer_loads.has_work

    def advance(self, now: float, reserve: int) -> None:
        """Note the time, and copy what is evicted next once fewer than ``reserve`` device blocks are free."""
        if not self._host.is_there:
            return
        self._host.back_up(reserve)
        self._storage.watch(now)
        self._cache.costs.retry(now)

    def take_orders(self, step_id: int) -> tuple[SwapIn, SwapOut]:
        """The copies that start with a step."""
        host, storage = self._host, self._storage
        if not host.is_there:
            return NOTHING_IN, NOTHING_OUT
        return (
            SwapIn(host.take_loads(step_id), storage.take_fetches(), self._take_peer_fetches()),
            SwapOut(host.take_stores(), storage.take_puts(), storage.take_deletes(), host.take_mark(step_id)),
        )

    def _take_peer_fetches(self) -> tuple[PeerFetch, ...]:
        return () if self._peer_loads is None else self._peer_loads.take_fetches()

    def take_report(self, batch: BatchRequest, report: CopyReport, prefill_token_s: float) -> NDArray[np.int32]:
        """Take in what the result of ``batch`` says of copies; the rows that hold a block that was never loaded.

        prefill_token_s: seconds to compute a token of a prompt, to weigh copies against; 0: not measured yet

        Raises:
            EngineDiedError: the batch has loaded blocks, and nothing is said of whether they came.
        """
        if not self._host.is_there:
            return _NO_BLOCKS
        if report.not_loaded is None and len(batch.cache_swap_metadata.loads):
            raise EngineDiedError(f"nothing is known of the blocks that step {batch.step_id} loaded")
        self._measure(report, prefill_token_s)
        self._host.stored(report.stored.tolist(), report.not_stored.tolist())
        self._host.settled(report.settled)
        self._host.arrived(report.fetched.tolist(), report.missed.tolist())
        self._storage.put_done(report.put.tolist(), report.not_put.tolist())
        return self._cache.loads_done(batch.step_id, _NO_BLOCKS if report.not_loaded is None else report.not_loaded)

    def _measure(self, report: CopyReport, prefill_token_s: float) -> None:
        self._cache.costs.observe(
            load_s=self._seconds_a_block("load", report),
            fetch_s=self._seconds_a_block("fetch", report),
            peer_s=self._seconds_a_block("peer", report),
            token_s=prefill_token_s or None,
        )
        self.transfers |= report.transfers

    def _seconds_a_block(self, direction: str, report: CopyReport) -> float | None:
        """What a report tells of copies in a direction; None if there were none since the last one that did."""
        new, old = report.transfers.get(direction), self.transfers.get(direction, TransferStats())
        if new is None or new.blocks <= old.blocks:
            return None
        return (new.busy_s - old.busy_s) / (new.blocks - old.blocks)
