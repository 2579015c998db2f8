"""Which layers of which loads are on the device, so that a forward pass runs while its cache still arrives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headwise.errors import GpuFailedError, LayerSwapTimeoutError
from headwise.transfer.base import Event, Stream

EVENT_SETS = 3
"""Event sets made at start: one load that a step waits for, one that the next step brings, one being collected."""


@dataclass
class Load:
    """One batch of blocks on their way to the device.

    pairs:  ``int32 [m, 3]`` (group, host block, device block)
    layers: the first layer of each piece of work, ascending: it is needed from that layer on
    bytes:  of all its pieces together
    events: one per piece that a load may have, of which the first ``len(layers)`` are used, in order
    copy_piece: copies the piece that begins with a layer
    submitted: number of pieces that the stream has
    waited: number of pieces that the forward pass has waited for
    lost:   it failed or was given up; its pieces that have not begun yet copy nothing
    error:  why it failed; None if it was given up
    """

    pairs: NDArray[np.int32]
    layers: Sequence[int]
    bytes: int
    events: list[Event]
    copy_piece: Callable[[int], None]
    submitted: int = 0
    waited: int = 0
    lost: bool = False
    error: BaseException | None = field(default=None, repr=False)

    def settle(self, timeout_s: float) -> bool:
        """Wait for at most about ``timeout_s``; whether all pieces are over, so that nothing more is written.

        All of them are submitted. The stream runs pieces in order, so when the last one is over, all are.

        Raises:
            GpuFailedError: the device has failed: what it writes still, nobody knows.
        """
        for event in reversed(self.events[: len(self.layers)]):
            try:
                if not event.wait(timeout_s):
                    return False
            except GpuFailedError:
                raise
            except Exception as error:
                self.lost, self.error = True, self.error or error
            timeout_s = 0.0
        return True


class LayerDoneCounter:
    """Submits loads to a stream piece by piece, in the order of layers, and lets the forward pass wait for the layer it
    has come to.

    Used by one thread. Event sets rotate: a load takes a free one, and gives it back when it is collected.
    """

    def __init__(self, stream: Stream, num_pieces: int, timeout_s: float) -> None:
        self._stream = stream
        self._num_pieces = num_pieces
        self._timeout_s = timeout_s
        self._free = [self._make_events() for _ in range(EVENT_SETS)]
        self._loads: list[Load] = []
        self._gates: list[Load] = []  # those of the loads that the forward pass may still have to wait for

    @property
    def loads(self) -> Sequence[Load]:
        """The loads not collected yet, in order of submission."""
        return self._loads

    def start(
        self,
        pairs: NDArray[np.int32],
        layers: Sequence[int],
        num_bytes: int,
        copy_piece: Callable[[int], None],
    ) -> None:
        """A piece of work per first layer, ``copy_piece(layer)``: submit as many of them as is worth it now."""
        events = self._free.pop() if self._free else self._make_events()
        load = Load(pairs, layers, num_bytes, events, copy_piece)
        self._submit(load, self._stream.lookahead)
        self._loads.append(load)
        if layers:
            self._gates.append(load)

    def submit_all(self) -> None:
        """Submit what is left of every load."""
        for load in self._loads:
            self._submit(load, len(load.layers))

    def _submit(self, load: Load, upto: int) -> None:
        for at in range(load.submitted, min(upto, len(load.layers))):
            self._stream.submit(partial(_run_piece, load, load.layers[at]), load.events[at], follows=at > 0)
            load.submitted = at + 1

    def wait(self, layer: int) -> None:
        """Let the forward pass wait until layers ``[0, layer]`` of all loads are complete; a failed load is over, too.

        Raises:
            LayerSwapTimeoutError: some were not in time. They are given up: the forward pass may go on, and no later
                layer waits for them again.
        """
        if self._gates:
            self._wait(layer)

    def _wait(self, layer: int) -> None:
        late = 0
        for load in self._gates:
            pieces = bisect_right(load.layers, layer)
            if pieces <= load.waited or load.lost:
                continue
            load.waited = pieces
            self._submit(load, pieces)
            try:
                # The stream runs loads in order: once one is late, those behind it are not given time of their own.
                in_time = self._stream.wait_for(load.events[pieces - 1], 0.0 if late else self._timeout_s)
            except GpuFailedError:
                raise
            except Exception as error:
                load.lost, load.error = True, error
                continue  # `collect` tells
            if in_time:
                self._submit(load, pieces + self._stream.lookahead)
            else:
                load.lost = True
                late += len(load.pairs)
        self._gates = [load for load in self._gates if load.waited < len(load.layers) and not load.lost]
        if late:
            raise LayerSwapTimeoutError(
                f"layer {layer} of {late} blocks was not on the device after {self._timeout_s:g} s: their load is "
                "given up and what needs them is computed again; allow loads more time if this happens often"
            )

    def collect(self) -> list[Load]:
        """Every load so far, none of which writes any more: complete, or ``lost``.

        Waits for loads under way. Those that are not in time are given up, and the piece that is just running is
        waited for: until then its blocks cannot be anybody else's.

        Raises:
            LayerSwapTimeoutError: that piece does not end; nothing is collected.
        """
        self._gates = []
        self.submit_all()
        for load in self._loads:
            if not load.lost and not load.settle(self._timeout_s):
                load.lost = True
            if load.lost and not load.settle(self._timeout_s):
                raise LayerSwapTimeoutError(
                    f"a copy to the device of {len(load.pairs)} blocks was given up but has not ended after "
                    f"{self._timeout_s:g} s more: their memory cannot be used again; restart the worker"
                )
        collected, self._loads = self._loads, []
        self._free += [load.events for load in collected]
        return collected

    def _make_events(self) -> list[Event]:
        return [self._stream.make_event() for _ in range(self._num_pieces)]


def _run_piece(load: Load, layer: int) -> None:
    if load.lost:
        return
    try:
        load.copy_piece(layer)
    except BaseException as error:
        load.lost, load.error = True, error
        raise
