"""One worker's copies between its device and host arenas: what runs when, what waits, what came of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import GpuFailedError, first_line
from headwise.kernels.block_copy import BlockCopy, check_ranges
from headwise.transfer.base import Event, Stream, ends_by
from headwise.transfer.layer_done import LayerDoneCounter, Load
from headwise.transfer.load_pieces import load_pieces
from headwise.transfer.stats import TransferStats as TransferStats
from headwise.transfer.stats import TransferTotals

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedStores:
    """Stores that are over: ``int32 [m, 2]`` (device block, host block), in order of completion."""

    complete: NDArray[np.int32]
    failed: NDArray[np.int32]


class TransferManager:
    """Loads blocks layer by layer and stores them whole, both at once, beside the forward pass.

    Used by the worker's thread alone. Once the device has failed, whatever asks how copies stand raises
    `GpuFailedError`: no block is told to be complete, or free. A step of the worker is::

        load(...), store(...)                  start copies
        wait_layer(l) before layer l's attention
        finish_loads(), finished_stores()      say what came of them

    layer_ranges: ``int64 [layers, groups, 2]``, the bytes ``[first, last)`` of each layer within a block of each
                  group; empty where a group has no member in the layer
    piece_bytes:  layers are loaded together where they have less in a block, see `load_pieces`
    device_arena, host_arena: flat uint8, whole numbers of ``layout.block_bytes``
    copy:         from arena to arena; on a GPU it enqueues on the current stream
    clock:        in seconds, for the timeout of `drain`

    Raises:
        ValueError: ``layer_ranges`` or an arena does not fit the layout.
    """

    def __init__(
        self,
        layout: BlockLayout,
        layer_ranges: NDArray[np.int64],
        device_arena: Any,
        host_arena: Any,
        *,
        copy: BlockCopy,
        input_stream: Stream,
        output_stream: Stream,
        clock: Callable[[], float] = time.monotonic,
        load_timeout_s: float = 10.0,
        piece_bytes: int = 0,
    ) -> None:
        _check_arenas(layout, layer_ranges, device_arena, host_arena)
        self._block_bytes = layout.block_bytes
        pieces = load_pieces(np.ascontiguousarray(layer_ranges, dtype=np.int64), piece_bytes)
        self._ranges = dict(zip(pieces.first_layers.tolist(), pieces.ranges, strict=True))
        self._first_layers = pieces.first_layers
        self._range_bytes = pieces.ranges[..., 1] - pieces.ranges[..., 0]
        self._whole_block = np.array([[0, layout.block_bytes]], dtype=np.int64)
        self._device, self._host = device_arena, host_arena
        self._copy = copy
        self._input, self._output = input_stream, output_stream
        self._clock = clock
        self._layers = LayerDoneCounter(input_stream, len(self._first_layers), load_timeout_s)
        self._stores: deque[tuple[NDArray[np.int32], Event]] = deque()
        self._marks: deque[tuple[int, Event]] = deque()
        self._settled = 0
        self._loaded, self._stored = TransferTotals(), TransferTotals()

    # ---- host to device ----

    def load(self, pairs: NDArray[np.int32]) -> None:
        """Start to copy ``pairs [m, 3]`` (group, host block, device block), layers in order. Returns at once.

        Raises:
            ValueError: a group that ``layer_ranges`` do not tell of.
        """
        if not len(pairs):
            return
        groups = self._range_bytes.shape[1]
        counts = np.bincount(pairs[:, 0], minlength=groups)
        if len(counts) > groups:
            raise ValueError(f"group {len(counts) - 1} cannot be loaded: layer_ranges tell of {groups} groups")
        piece_bytes = self._range_bytes @ counts
        in_order = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))].astype(np.int32)  # neighbours become one copy
        first_layers = self._first_layers[piece_bytes > 0].tolist()
        self._layers.start(pairs, first_layers, int(piece_bytes.sum()), partial(self._copy_piece, in_order))

    def _copy_piece(self, pairs: NDArray[np.int32], first_layer: int) -> None:
        self._copy(self._host, self._device, pairs, self._ranges[first_layer], self._block_bytes)

    def wait_layer(self, layer: int) -> None:
        """Right before layer ``layer``'s attention: wait until layers ``[0, layer]`` of all loads so far are complete.

        Costs nothing when no load is under way. A load that failed is over, too: see `finish_loads`.

        Raises:
            LayerSwapTimeoutError: some were not in time. They are given up: the forward pass may go on, and no later
                layer waits for them again.
        """
        self._layers.wait(layer)

    @property
    def is_loading(self) -> bool:
        """Whether there are loads that `finish_loads` has not told of."""
        return bool(self._layers.loads)

    def finish_loads(self) -> NDArray[np.int32]:
        """At the end of a step: the device blocks whose load failed or came too late, ascending; none if all is well.

        Nothing writes to any loaded block afterwards: all of them may be freed. What the forward pass computed from
        the blocks returned is void.

        Raises:
            LayerSwapTimeoutError: a copy that was given up does not end.
        """
        if not self._layers.loads:
            return np.empty(0, dtype=np.int32)
        failed = [np.empty(0, dtype=np.int32)]
        for load in self._layers.collect():
            if not load.lost:
                self._loaded.add(len(load.pairs), load.bytes, _busy_s(load))
            else:
                self._loaded.add(0, 0, _busy_s(load), failed_blocks=len(load.pairs))
                failed.append(load.pairs[:, 2])
                reason = first_line(load.error) if load.error else "it did not come in time"
                log.warning("the load of %d blocks to the device failed: %s", len(load.pairs), reason)
        return np.unique(np.concatenate(failed))

    # ---- device to host ----

    def store(self, pairs: NDArray[np.int32]) -> None:
        """Start to copy ``pairs [m, 2]`` (device block, host block), all layers at once. Returns at once."""
        if not len(pairs):
            return
        in_order = np.zeros((len(pairs), 3), dtype=np.int32)
        in_order[:, 1:] = pairs[np.argsort(pairs[:, 0])]  # neighbours become one copy
        self._stores.append((pairs, self._output.submit(partial(self._copy_blocks, in_order))))

    def _copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        self._copy(self._device, self._host, pairs, self._whole_block, self._block_bytes)

    def finished_stores(self) -> FinishedStores:
        """The stores that came to an end since the last call. Never waits."""
        complete, failed = [np.empty((0, 2), dtype=np.int32)], [np.empty((0, 2), dtype=np.int32)]
        while self._stores and self._stores[0][1].done:
            pairs, event = self._stores.popleft()
            error = _error_of(event)
            if error is None:
                self._stored.add(len(pairs), len(pairs) * self._block_bytes, event.busy_s)
                complete.append(pairs)
            else:
                self._stored.add(0, 0, event.busy_s, failed_blocks=len(pairs))
                failed.append(pairs)
                log.warning("the store of %d blocks to the host failed: %s", len(pairs), first_line(error))
        return FinishedStores(np.concatenate(complete), np.concatenate(failed))

    # ---- what the device is through with ----

    def mark(self, number: int) -> None:
        """Have `settled` say, by this number, when the device is through with all that it was given before."""
        self._marks.append((number, self._output.submit(_nothing)))

    def settled(self) -> int:
        """The latest mark that the device has come to; 0: none yet. Never waits."""
        while self._marks and self._marks[0][1].done:
            self._settled, _ = self._marks.popleft()
        return self._settled

    # ---- both ----

    def attach_device(self, device_arena: Any | None) -> None:
        """Copy from and to another device arena of the same layout from now on; None: to none, until the next call.

        Raises:
            ValueError: copies are under way, or the arena does not fit the layout.
        """
        if self._stores or self._layers.loads:
            raise ValueError("the device arena cannot be exchanged while copies are under way: drain them first")
        if device_arena is not None:
            _check_arena("device", device_arena, self._block_bytes)
        self._device = device_arena

    def drain(self, timeout_s: float) -> bool:
        """Wait until every load and store is over, and return whether they are; `finish_loads` and `finished_stores`
        then tell what came of them."""
        deadline = self._clock() + timeout_s
        self._layers.submit_all()
        for load in self._layers.loads:
            if not load.settle(max(0.0, deadline - self._clock())):
                return False
        last = [events[-1][1] for events in (self._stores, self._marks) if events]
        return all(ends_by(event, max(0.0, deadline - self._clock())) for event in last)

    def load_stats(self) -> TransferStats:
        """Statistics of loads, as of the last `finish_loads`."""
        queued = sum(len(load.pairs) for load in self._layers.loads)
        return self._loaded.stats(self._input.waited_s, queued)

    def store_stats(self) -> TransferStats:
        """Statistics of stores, as of the last `finished_stores`."""
        return self._stored.stats(self._output.waited_s, sum(len(pairs) for pairs, _ in self._stores))

    def close(self) -> None:
        """Finish all copies and end both streams. The last call."""
        self._layers.submit_all()
        self._input.close()
        self._output.close()


def _nothing() -> None:
    """A piece of work."""


def _check_arenas(layout: BlockLayout, layer_ranges: NDArray[np.int64], device_arena: Any, host_arena: Any) -> None:
    if layer_ranges.ndim != 3 or layer_ranges.shape[2] != 2:
        raise ValueError(f"layer_ranges has shape {layer_ranges.shape}: give [layers, groups, 2]")
    check_ranges(layer_ranges, layout.block_bytes)
    for name, arena in (("device", device_arena), ("host", host_arena)):
        _check_arena(name, arena, layout.block_bytes)


def _check_arena(name: str, arena: Any, block_bytes: int) -> None:
    if arena.size % block_bytes:
        raise ValueError(f"the {name} arena has {arena.size} bytes: give a multiple of a block's {block_bytes} bytes")


def _error_of(event: Event) -> Exception | None:
    """What the work of an event that is done raised."""
    try:
        event.wait(0)
    except GpuFailedError:
        raise
    except Exception as error:
        return error
    return None


def _busy_s(load: Load) -> float:
    return sum(event.busy_s for event in load.events[: len(load.layers)])
