"""A worker's copies between its device arena and its part of the host cache."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import HeadGroupPlan
from headwise.errors import ConfigError, LayerSwapTimeoutError
from headwise.kernels.block_copy import make_block_copy
from headwise.runtime.batch import BatchRequest
from headwise.runtime.config import EngineConfig
from headwise.runtime.model_card import ModelCard
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.host_memory import HostArena, check_host_memory
from headwise.transfer.transfer_manager import TransferManager

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""Seconds that a step without sequences waits for copies, so that asking for them is no busy loop."""

COPY_THREADS = 1
"""Threads of each direction: copies run beside the forward pass, which wants the cores."""


class HostCopies:
    """Owns the rank's host arena and starts, waits for and reports the copies that batches ask for."""

    def __init__(self, config: EngineConfig, card: ModelCard, rank: int, device_arena: NDArray[np.uint8]) -> None:
        num_bytes = card.spec.num_host_blocks * card.layout.block_bytes
        self._arena = HostArena(num_bytes)
        self._manager = TransferManager(
            card.layout,
            layer_ranges(card.plan, card.layout, rank),
            device_arena,
            self._arena.array,
            copy=make_block_copy(config.kernels, COPY_THREADS),
            input_stream=CpuStream("headwise-load"),
            output_stream=CpuStream("headwise-store"),
            load_timeout_s=config.load_timeout_s,
        )
        self._load_s = 0.0

    @staticmethod
    def check_memory(config: EngineConfig, card: ModelCard) -> None:
        """Raises `ConfigError` if the machine has not the memory for the arenas of all ranks."""
        try:
            check_host_memory(config.tp_size * card.spec.num_host_blocks * card.layout.block_bytes)
        except ValueError as error:
            raise ConfigError(f"host_cache {config.host_cache} for each of {config.tp_size} workers: {error}") from None

    def start(self, batch: BatchRequest) -> None:
        """Start a batch's copies. Its stores read what earlier steps have written."""
        self._manager.load(batch.cache_swap_metadata)
        self._manager.store(batch.cache_evict_metadata)

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer's part of the loads is there, or given up: the step goes on, as other ranks do."""
        try:
            self._manager.wait_layer(layer)
        except LayerSwapTimeoutError as error:
            log.warning("%s", error)

    def finish(self, batch: BatchRequest) -> dict[str, Any]:
        """What came of copies, as the fields of a `StepResult`."""
        if not len(batch.rows):
            self._manager.drain(IDLE_WAIT_S)
        failed_in = self._manager.finish_loads()
        stores = self._manager.finished_stores()
        before, self._load_s = self._load_s, self._manager.load_stats().busy_s
        return {
            "failed_in": failed_in,
            "swapped_out": stores.complete[:, 1].copy(),
            "failed_out": stores.failed[:, 1].copy(),
            "load_s": self._load_s - before,
        }

    def close(self) -> None:
        """Finish what was started. The last call."""
        self._manager.close()
        self._arena.close()


def layer_ranges(plan: HeadGroupPlan, layout: BlockLayout, rank: int) -> NDArray[np.int64]:
    """``int64 [layers, groups, 2]``: the bytes of each layer within a block of each group; empty without members."""
    ranges = np.zeros((plan.num_layers, len(plan.groups), 2), dtype=np.int64)
    for index, group in enumerate(plan.groups):
        layers = [member.layer for member in group.members[rank]]
        for layer in set(layers):
            first = layers.index(layer)
            ranges[layer, index] = layout.slot_range(first, first + layers.count(layer))
    return ranges
