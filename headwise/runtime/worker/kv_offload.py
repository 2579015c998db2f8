"""A worker's copies between its device arena, its part of the host cache, storage, and other engines' host caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError, LayerSwapTimeoutError
from headwise.runtime.config.block_storage import open_rank_storage
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.copies import CopyReport
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.peer_parts import PeerParts
from headwise.storage.backends.base import BlockStorage
from headwise.transfer.base import Stream
from headwise.transfer.connectors.names import SHARED_MEMORY
from headwise.transfer.connectors.select import Memories, PeerAccess, choose_transports
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.host_memory import check_host_memory
from headwise.transfer.stats import TransferStats
from headwise.transfer.storage_manager import StorageManager
from headwise.transfer.transfer_manager import TransferManager

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.01
"""Seconds that a step without sequences waits for copies, so that asking for them is no busy loop."""

CLOSE_S = 10.0
"""Longest wait for storage to take what it was given, when the worker ends."""


class KVOffload:
    """Owns the rank's host arena and starts, waits for and reports the copies that batches ask for.

    storage:    the configured one, unless another is given
    background: makes the streams on which storage is called, and other workers are read
    peers:      how other engines' workers reach this one's part of the host cache; None: not at all

    Raises `ConfigError` if storage cannot be opened.
    """

    def __init__(
        self,
        config: EngineConfig,
        card: ModelCard,
        rank: int,
        device: Device,
        device_arena: Any,
        *,
        storage: BlockStorage | None = None,
        background: Callable[[str], Stream] = CpuStream,
        peers: PeerAccess | None = None,
    ) -> None:
        sharing = None if peers is None or config.without_peer_loads else device.sharing()
        transports = [] if peers is None or config.without_peer_loads else transports_of(config, sharing is not None)
        num_bytes = card.spec.num_host_blocks * card.layout.block_bytes
        shares = {"is_shared": True} if SHARED_MEMORY in transports else {}
        self._arena = device.host_arena(num_bytes, **shares)
        copy = device.block_copy()
        self._manager = TransferManager(
            card.layout,
            layer_ranges(card.plan, card.layouts, rank),
            device_arena,
            self._arena.array,
            copy=copy,
            input_stream=device.copy_stream("headwise-load"),
            output_stream=device.copy_stream("headwise-store"),
            load_timeout_s=config.load_timeout_s,
            piece_bytes=copy.piece_bytes,
        )
        if storage is None and config.storage:
            storage = open_rank_storage(config, card, rank)
        self._storage = storage
        self._storage_manager = (
            StorageManager(
                self._storage,
                self._arena.array,
                read_stream=background("headwise-fetch"),
                write_stream=background("headwise-put"),
            )
            if self._storage is not None
            else None
        )
        memories = Memories(self._arena, device_arena, sharing)
        self._peers = PeerParts(config, card, rank, transports, peers or PeerAccess(), memories, background)
        self._num_groups = len(card.plan.groups)
        self._reported: dict[str, TransferStats] = {}

    def start(self, batch: BatchRequest) -> None:
        """Start a batch's copies. Its stores read what earlier steps have written."""
        swap_in, swap_out = batch.cache_swap_metadata, batch.cache_evict_metadata
        self._manager.load(swap_in.loads)
        self._manager.store(swap_out.stores)
        if swap_out.mark:
            self._manager.mark(batch.step_id)
        if self._storage_manager is not None:
            self._storage_manager.put(swap_out.puts.blocks, swap_out.puts.hashes)
            self._storage_manager.delete(swap_out.deletes, self._num_groups)
            self._storage_manager.fetch(swap_in.fetches.blocks, swap_in.fetches.hashes)
        for fetch in swap_in.from_peers:
            self._peers.reads.fetch(fetch.exports, fetch.blocks)

    @property
    def exports(self) -> tuple[bytes, ...]:
        """Where other engines' workers read this rank's blocks: encoded `ExportAddress`es, the best first."""
        return tuple(export.address.encode() for export in self._peers.exports)

    @property
    def transports(self) -> str:
        """Those by which others read from here, each once, in words."""
        return ",".join(dict.fromkeys(export.address.transport for export in self._peers.exports)) or "none"

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way to the device, layer by layer."""
        return self._manager.is_loading

    def attach_device(self, device_arena: Any | None) -> None:
        """Copy between the host and another device arena from now on; None: there is none for a while."""
        self._manager.attach_device(device_arena)
        self._peers.attach_device(device_arena)

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer's part of the loads is there, or given up: the step goes on, as other ranks do."""
        try:
            self._manager.wait_layer(layer)
        except LayerSwapTimeoutError as error:
            log.warning("%s", error)

    def finish(self, batch: BatchRequest) -> CopyReport:
        """What came of copies. Nothing writes to the blocks of the batch's loads any more.

        Raises:
            LayerSwapTimeoutError: a load that was given up still runs: its blocks must never be anybody else's.
        """
        if not len(batch.rows):
            self._wait_a_little()
        not_loaded = self._manager.finish_loads()
        stores = self._manager.finished_stores()
        report = CopyReport(not_loaded, stores.complete[:, 1].copy(), stores.failed[:, 1].copy())
        if self._storage_manager is not None:
            finished = self._storage_manager.finished()
            report = replace(
                report,
                fetched=finished.fetched,
                missed=finished.missed,
                put=finished.put,
                not_put=finished.not_put,
            )
        from_peers = self._peers.reads.finished()
        return replace(
            report,
            fetched=np.concatenate([report.fetched, from_peers.fetched]),
            missed=np.concatenate([report.missed, from_peers.missed]),
            settled=self._manager.settled(),
            transfers=self._news(),
        )

    def _wait_a_little(self) -> None:
        if self._manager.drain(IDLE_WAIT_S) and self._peers.reads.drain(IDLE_WAIT_S) and self._storage_manager:
            self._storage_manager.drain(IDLE_WAIT_S)

    def _news(self) -> dict[str, TransferStats]:
        """Statistics of all directions if one has changed since the last call."""
        stats = {"load": self._manager.load_stats(), "store": self._manager.store_stats()}
        if self._storage_manager is not None:
            stats |= {"fetch": self._storage_manager.fetch_stats(), "put": self._storage_manager.put_stats()}
        if self._peers.transports:
            stats["peer"] = self._peers.reads.stats()
        if stats == self._reported:
            return {}
        self._reported = stats
        return stats

    def reset_storage(self) -> int:
        """Have storage forget all of this rank's blocks, soon; how many those are, as far as is known."""
        if self._storage is None or self._storage_manager is None:
            return 0
        self._storage_manager.reset()
        return self._storage.stats().blocks

    def close(self) -> None:
        """Finish what was started. The last call."""
        self._manager.close()
        self._peers.close(CLOSE_S)
        if self._storage_manager is not None:
            self._storage_manager.close(CLOSE_S)
        self._arena.close()


def transports_of(config: EngineConfig, shares_device: bool) -> list[str]:
    """Raises `ConfigError` if one that is named is not installed, or not for this device."""
    must_encrypt = config.is_encrypted and not config.peer_plain
    return choose_transports(config.peer_transports, must_encrypt, shares_device=shares_device)


def check_host_cache(config: EngineConfig, card: ModelCard, ranks: int) -> None:
    """Raises `ConfigError` if this machine has not the memory for the arenas of so many ranks.

    To be called before the first rank starts: ranks that check alone would count the same memory.
    """
    try:
        check_host_memory(ranks * card.spec.num_host_blocks * card.layout.block_bytes)
    except ValueError as error:
        raise ConfigError(f"host_cache {config.host_cache} for each of {ranks} workers: {error}") from None


def layer_ranges(plan: HeadGroupPlan, layouts: Sequence[BlockLayout], rank: int) -> NDArray[np.int64]:
    """``int64 [layers, groups, 2]``: the bytes of each layer within a block of each group; empty without members."""
    ranges = np.zeros((plan.num_layers, len(plan.groups), 2), dtype=np.int64)
    of_layers: dict[tuple[int, int], list[int]] = {}
    for member, (group, slot) in plan.places[rank].items():
        of_layers.setdefault((member.layer, group), []).append(slot)
    for (layer, group), slots in of_layers.items():
        ranges[layer, group] = layouts[layer].slot_range(min(slots), max(slots) + 1)
    return ranges
