"""Links between the stages of a pipeline by NCCL: from each rank's GPU to that of the rank in its place in the next
stage, in the dtype of the tensors. Two neighbours have a communicator of their own.

    a stage       compute stream   ... step n | copy -> slot | step n + 1 ...
                  its stream                    wait, send
    the next one  compute stream   ... step n - 1          | receive | step n ...

A send is over when the next stage receives, which it does once it is through with the steps before. On the compute
stream it would stall this stage for as long; so it has a stream of its own, and a slot, which is free again behind it.
A receive is on the compute stream: its step can begin no earlier, and a kernel that waited for it beside the step
before would keep multiprocessors from that.

Nobody waits in a circle: all stages run the same steps in the same order, so what a send waits for are earlier steps of
later stages, and what a receive waits for is the same step of an earlier one. As of collectives, no host waits here; if
a neighbour is gone, kernels wait for ever, and hosts for their results, until the engine ends the processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cupy
import numpy as np

from headwise.errors import EngineDiedError, first_line
from headwise.kernels.cuda.launch import address_of
from headwise.runtime.ops.array_ops import Array, ArrayOps
from headwise.runtime.ops.nccl import (
    CONNECT,
    ID_BYTES,
    TOLD,
    WHY_NOT,
    codes_of,
    connect,
    current_stream,
    load_nccl,
    new_id,
    told_of,
    verdict_of,
)
from headwise.runtime.ops.stage_links import (
    HostIncoming,
    HostLink,
    HostOutgoing,
    Incoming,
    LinkedStage,
    Outgoing,
    StageLinks,
    place_for,
)
from headwise.transfer.cuda_stream import COPY_PRIORITY

log = logging.getLogger(__name__)

SLOTS = 2
"""Steps that may be on their way to the next stage; a further one's copy waits for the oldest. While one is, this stage
computes the next. Where that is not enough, the next stage is the slower one, and has enough to do."""

_SENDER, _RECEIVER = range(2)
"""Ranks of a boundary's communicator."""


def connect_stages(ops: ArrayOps, link: HostLink, stage: LinkedStage) -> StageLinks:
    """Links of this rank's current device with its neighbours, who must call this, too; ``link`` carries what they
    agree on. Where NCCL is missing at one end, or both have the same GPU, that boundary goes through host memory, and
    its sender logs why.

    Raises:
        DeploymentError: NCCL is there, and fails to connect.
        EngineDiedError: a neighbour did not call this in time.
    """
    nccl, place = load_nccl(), place_for(ops, stage)
    # From the first stage on: each one waits for the stage before alone.
    before = None if place is None else _incoming(nccl, ops, link, stage, place)
    return StageLinks(before, None if stage.is_last else _outgoing(nccl, ops, link, stage))


def _incoming(nccl: ModuleType | None, ops: ArrayOps, link: HostLink, stage: LinkedStage, place: Array) -> Incoming:
    told = link.receive((TOLD + ID_BYTES,))
    verdict = verdict_of(np.stack([told[:TOLD], told_of(nccl)]))
    link.answer(np.array([verdict], np.float32))
    if nccl is None or verdict != CONNECT:
        return HostIncoming(ops, link, stage.hidden, place)
    unique_id = told[TOLD:].astype(np.uint8).tobytes()
    return NcclIncoming(nccl, connect(nccl, 2, unique_id, _RECEIVER, f"rank {stage.rank}"), stage.rank, place)


def _outgoing(nccl: ModuleType | None, ops: ArrayOps, link: HostLink, stage: LinkedStage) -> Outgoing:
    who = f"rank {stage.rank}"
    unique_id = bytes(ID_BYTES) if nccl is None else new_id(nccl, who)
    # Its bytes as numbers: what carries them may be of floats alone.
    link.send(np.concatenate([told_of(nccl), np.frombuffer(unique_id, np.uint8)]).astype(np.float32))
    verdict = int(link.answered((1,))[0])
    if nccl is None or verdict != CONNECT:
        log.warning("%s reaches the next stage of the pipeline through host memory: %s", who, WHY_NOT[verdict])
        return HostOutgoing(ops, link)
    return NcclOutgoing(nccl, connect(nccl, 2, unique_id, _SENDER, who), stage, ops.dtype)


class NcclIncoming:
    """`Incoming` of CuPy arrays. rank: for errors; place: as `place_for` gives it

    Raises `EngineDiedError` if NCCL reports a failure: the stages are then out of step for good.
    """

    name, holds_host = "nccl", False

    def __init__(self, nccl: ModuleType, communicator: Any, rank: int, place: Array) -> None:
        self._communicator, self._rank, self._place = communicator, rank, place
        self._code = codes_of(nccl)[place.dtype.name]

    def place(self, rows: int) -> Array:
        return self._place[:rows]

    def receive(self, rows: int) -> Array:
        stream = self._place[:rows]
        with _checked(self._rank, "receives from the stage before"):
            self._communicator.recv(address_of(stream), stream.size, self._code, _SENDER, current_stream())
        return stream


class _Slot:
    """What is sent of a step, in device memory, and when it is ready, and sent."""

    def __init__(self, stage: LinkedStage, dtype: np.dtype[Any]) -> None:
        self.stream = cupy.empty((stage.rows, stage.hidden), dtype)
        self.ready, self.sent = (cupy.cuda.Event(disable_timing=True) for _ in range(2))


class NcclOutgoing:
    """`Outgoing` of CuPy arrays of ``dtype``. Raises as `NcclIncoming`."""

    name, holds_host = "nccl", False

    def __init__(self, nccl: ModuleType, communicator: Any, stage: LinkedStage, dtype: np.dtype[Any]) -> None:
        self._communicator, self._rank, self._code = communicator, stage.rank, codes_of(nccl)[dtype.name]
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=COPY_PRIORITY)
        self._slots, self._next = [_Slot(stage, dtype) for _ in range(SLOTS)], 0

    def send(self, stream: Array) -> None:
        slot, compute = self._slots[self._next], cupy.cuda.get_current_stream()
        self._next = (self._next + 1) % SLOTS
        compute.wait_event(slot.sent)  # at first, of nothing
        sent = slot.stream[: len(stream)]
        sent[...] = stream
        slot.ready.record(compute)
        self._stream.wait_event(slot.ready)
        with _checked(self._rank, "sends to the next stage"):
            self._communicator.send(address_of(sent), sent.size, self._code, _RECEIVER, int(self._stream.ptr))
        slot.sent.record(self._stream)


@contextmanager
def _checked(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineDiedError(f"NCCL failed where rank {rank} {what}: {first_line(error)}") from error
