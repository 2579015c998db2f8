"""Stages on GPUs give each other their streams by NCCL, if they can: here as threads, by a stand-in for its binding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.engine.ranks import links_of
from support.gpu.host_nccl import HostNccl, NcclError, linked_by_nccl
from support.gpu.nccl_ranks import Ranks
from support.waiting import PATIENCE_S, eventually

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import DeploymentError, EngineDiedError
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.stage_links import LinkedStage, StageLinks
from headwise.runtime.worker.network_link import NetworkLink

MODULE = "headwise.runtime.ops.nccl_links"
HIDDEN, ROWS = 6, 16


@pytest.fixture
def nccl() -> Iterator[HostNccl]:
    with linked_by_nccl("nccl", "nccl_links") as nccl:
        yield nccl


@pytest.fixture
def module(nccl: HostNccl) -> ModuleType:
    return import_module(MODULE)


@contextmanager
def linked(
    nccl: HostNccl, module: ModuleType, stages: int = 2, gpus: int | None = None, dtype: str = "float32"
) -> Iterator[tuple[Ranks, list[StageLinks]]]:
    """One rank of each stage."""
    ranks, hosts = Ranks(nccl, stages, gpus, stage=1), links_of(1, stages)
    try:
        yield ranks, ranks.each(lambda rank: connect(module, hosts[rank], rank, stages, dtype))
    finally:
        for host in hosts:
            host.close()


def connect(module: ModuleType, host: NetworkLink, rank: int, stages: int, dtype: str = "float32") -> StageLinks:
    stage = LinkedStage(rank, HIDDEN, ROWS, rank == 0, rank == stages - 1)
    links: StageLinks = module.connect_stages(NumpyOps(numpy_dtype(dtype)), host, stage)
    return links


def stream(step: int, rows: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(step).standard_normal((rows, HIDDEN)).astype(numpy_dtype(dtype))


def of_steps(rows: list[int], act: Callable[[int, int], Any]) -> list[Any]:
    return [act(step, count) for step, count in enumerate(rows)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_streams_come_in_order_in_their_dtype_at_one_address(nccl: HostNccl, module: ModuleType, dtype: str) -> None:
    rows = [3, ROWS, 1, 5, 2]
    with linked(nccl, module, dtype=dtype) as (ranks, (first, last)):
        assert (first.name, last.name) == ("nccl", "nccl")
        assert not first.holds_host | last.holds_host

        def receive(step: int, count: int) -> np.ndarray:
            found = last.receive(count)
            assert np.shares_memory(found, last.place(ROWS))
            assert found.ctypes.data == last.place(1).ctypes.data
            kept = found.copy()
            found[:] = np.nan  # the caller may
            return kept

        def work(rank: int) -> Any:
            if rank:
                return of_steps(rows, receive)
            return of_steps(rows, lambda step, count: first.send(stream(step, count, dtype)))

        for step, found in enumerate(ranks.each(work)[1]):
            assert found.dtype == numpy_dtype(dtype)
            np.testing.assert_array_equal(found, stream(step, rows[step], dtype))
    code = {"float32": 7, "bfloat16": 9, "float16": 6}[dtype]
    assert nccl.log[0] == [("eager", "send", count * HIDDEN, code, 1) for count in rows]
    assert nccl.log[1] == [("eager", "recv", count * HIDDEN, code, 0) for count in rows]


def test_a_stage_goes_on_while_what_it_sends_waits_for_the_next_and_never_overwrites_it(
    nccl: HostNccl, module: ModuleType
) -> None:
    with linked(nccl, module) as (ranks, (first, last)):

        def send(step: int) -> None:
            computed = stream(step, 4)
            first.send(computed)
            computed[:] = np.nan  # the next step is computed there

        for step in range(module.SLOTS):
            ranks.tell(lambda rank, step=step: None if rank else send(step))[0].result(PATIENCE_S)
        assert not nccl.waits.is_set()
        waiting = ranks.tell(lambda rank: None if rank else send(module.SLOTS))[0]
        eventually(lambda: waiting.done() or nccl.waits.is_set())
        found = [
            ranks.tell(lambda rank: last.receive(4).copy() if rank else None)[1].result() for _ in range(module.SLOTS)
        ]
        waiting.result(PATIENCE_S)
        found.append(ranks.tell(lambda rank: last.receive(4).copy() if rank else None)[1].result())
    for step, each in enumerate(found):
        np.testing.assert_array_equal(each, stream(step, 4))


def test_a_stage_in_the_middle_receives_and_sends(nccl: HostNccl, module: ModuleType) -> None:
    with linked(nccl, module, stages=3) as (ranks, links):

        def work(rank: int) -> Any:
            received = links[rank].receive(2)
            if rank == 2:
                return received.copy()
            return links[rank].send(stream(0, 2) if rank == 0 else received * 2)

        np.testing.assert_array_equal(ranks.each(work)[2], stream(0, 2) * 2)
        assert links[0].place(2) is None
        assert [each.is_last for each in links] == [False, False, True]


@pytest.mark.parametrize(
    ("gpus", "available", "reason"),
    [
        (1, True, "two of them have the same GPU"),
        (2, False, "NCCL is not to be had on every rank (`pip install nvidia-nccl-cu12`, for CUDA 13 -cu13)"),
    ],
)
def test_stages_that_cannot_connect_go_through_host_memory_and_say_why(
    nccl: HostNccl, module: ModuleType, caplog: pytest.LogCaptureFixture, gpus: int, available: bool, reason: str
) -> None:
    nccl.available = available
    with caplog.at_level(logging.INFO), linked(nccl, module, gpus=gpus, dtype="bfloat16") as (ranks, (first, last)):
        assert (first.name, last.name) == ("host", "host")
        assert first.holds_host & last.holds_host
        sent, found = ranks.each(lambda rank: last.receive(3) if rank else first.send(stream(0, 3, "bfloat16")))
        assert sent is None
        np.testing.assert_array_equal(found, stream(0, 3, "bfloat16"))
        assert np.shares_memory(found, last.place(3)), "graphs read it there, however it came"
    assert caplog.messages == [f"rank 0 reaches the next stage of the pipeline through host memory: {reason}"]
    assert not nccl.log


@pytest.mark.parametrize(("without", "name"), [(0, "host+nccl"), (1, "host")])
def test_each_boundary_goes_as_its_own_two_ends_can(
    nccl: HostNccl, module: ModuleType, monkeypatch: pytest.MonkeyPatch, without: int, name: str
) -> None:
    monkeypatch.setattr(module, "load_nccl", lambda: None if nccl.thread.stream == 0x5000 + without else nccl)
    with linked(nccl, module, stages=3) as (_, links):
        assert links[1].name == name
        assert links[1].holds_host


def test_a_failure_to_connect_names_the_rank_and_the_remedy(nccl: HostNccl, module: ModuleType) -> None:
    def refuse(ndev: int, unique_id: bytes, rank: int) -> None:
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)")

    nccl.NcclCommunicator = refuse
    ranks, hosts = Ranks(nccl, 2, stage=1), links_of(1, 2)
    for rank, future in enumerate(ranks.tell(lambda rank: connect(module, hosts[rank], rank, 2))):
        with pytest.raises(DeploymentError, match=rf"cannot connect the GPU of rank {rank} .*NCCL_DEBUG=INFO"):
            future.result()
    for host in hosts:
        host.close()


def test_a_neighbour_that_never_comes_ends_the_start(nccl: HostNccl, module: ModuleType) -> None:
    ranks, host = Ranks(nccl, 1), NetworkLink(timeout_s=0.05)
    host.listen("tcp://127.0.0.1:*", None)
    with pytest.raises(EngineDiedError, match=r"pipeline before this one sent nothing for 0\.05 s"):
        ranks.each(lambda rank: connect(module, host, 1, 2))
    alone = NetworkLink(timeout_s=0.05)
    alone.connect(host.endpoint, None)
    with pytest.raises(EngineDiedError, match=r"pipeline behind this one sent nothing for 0\.05 s"):
        ranks.each(lambda rank: connect(module, alone, 0, 2))
    alone.close()
    host.close()


@pytest.mark.parametrize(("call", "told"), [("send", "sends to the next stage"), ("recv", "receives from the stage")])
def test_what_nccl_reports_ends_the_engine(nccl: HostNccl, module: ModuleType, call: str, told: str) -> None:
    def fail(*arguments: int) -> None:
        raise NcclError("NCCL_ERROR_INTERNAL_ERROR: internal error")

    with linked(nccl, module) as (ranks, (first, last)):
        failing = int(call == "recv")
        end = last.before if failing else first.next
        setattr(end._communicator, call, fail)
        act = ranks.tell(lambda rank: last.receive(2) if failing else first.send(stream(0, 2)))[failing]
        with pytest.raises(EngineDiedError, match=f"NCCL failed where rank {failing} {told}.*INTERNAL_ERROR"):
            act.result()
