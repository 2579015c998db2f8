"""A worker's copies from the host caches of other engines' workers, in batches and reports as the engine sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.engine.simulated_copies import Faults
from support.engine.simulated_model import SimulatedDevice
from support.engine.simulation import simulated_card
from support.waiting import eventually

from headwise.cache_controller.memories import HOST
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.peer_blocks import exchange_with, identity_of_blocks
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.copies import PeerFetch, SwapIn
from headwise.runtime.worker.kv_offload import KVOffload
from headwise.transfer.connectors.base import ExportAddress
from headwise.transfer.connectors.select import PeerAccess
from headwise.transfer.host_memory import HostArena
from headwise.transfer.stats import TransferStats

CARD = simulated_card([FULL, HeadPolicy(window=5)], block_size=4, num_blocks=16, max_rows=4, host_blocks=16)
ACCESS = PeerAccess()
NOBODY = np.empty(0, dtype=np.int32)


class DeviceWithRealHost(SimulatedDevice):
    """Its host arena can be shared."""

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> Any:
        self.arena = HostArena(num_bytes, is_shared=is_shared)
        return self.arena


class Rank:
    """The copies of one engine's only rank, whose host blocks are full of ``number``."""

    def __init__(self, number: int, peers: PeerAccess | None = ACCESS, **options: Any) -> None:
        config = EngineConfig(**{"host_cache": "1MiB", "load_timeout_s": 0.5, **options})
        device = DeviceWithRealHost(Faults())
        device_arena = np.zeros(CARD.spec.num_blocks * CARD.layout.block_bytes, dtype=np.uint8)
        self.copies = KVOffload(config, CARD, 0, device, device_arena, peers=peers)
        self.blocks = device.arena.array.reshape(CARD.spec.num_host_blocks, -1)
        self.blocks[:] = number
        self.is_shared = device.arena.shared is not None
        self.step, self.is_closed = 0, False

    def close(self) -> None:
        if not self.is_closed:
            self.copies.close()
        self.is_closed = True

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        return (self.copies.exports,)

    def run(self, *fetches: PeerFetch) -> tuple[list[int], list[int], dict[str, TransferStats]]:
        """A step without sequences: (host blocks fetched, missed, statistics) in its report."""
        self.step += 1
        no_table = np.empty((0, 4), dtype=np.int32)
        batch = BatchRequest(
            self.step, *(NOBODY,) * 4, np.empty(0, np.bool_), no_table, cache_swap_metadata=SwapIn(from_peers=fetches)
        )
        self.copies.start(batch)
        report = self.copies.finish(batch)
        return report.fetched.tolist(), report.missed.tolist(), report.transfers

    def runs_until(self, *fetches: PeerFetch) -> tuple[list[int], list[int], dict[str, TransferStats]]:
        """Steps until all is told; sorted, and the last statistics."""
        wanted = {block for fetch in fetches for block in fetch.blocks[:, 3].tolist()}
        fetched, missed, stats = self.run(*fetches)

        def is_over() -> bool:
            more_fetched, more_missed, news = self.run()
            fetched.extend(more_fetched)
            missed.extend(more_missed)
            stats.update(news)
            return {*fetched, *missed} == wanted

        eventually(is_over)
        return sorted(fetched), sorted(missed), stats


def rows(*blocks: tuple[int, int], group: int = 0) -> np.ndarray:
    return np.array([(group, theirs, group, ours, HOST) for theirs, ours in blocks], dtype=np.int32)


@pytest.fixture(params=["auto", "shared_memory", "tcp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    ranks = [Rank(number, peer_transports=request.param) for number in (1, 2)]
    yield ranks
    for rank in ranks:
        rank.close()


def test_host_blocks_of_another_engine_are_reported_as_those_of_storage_are(ranks) -> None:
    owner, ours = ranks
    owner.blocks[3], owner.blocks[4] = 33, 44
    fetches = PeerFetch(owner.exports, rows((3, 7), (4, 5))), PeerFetch(owner.exports, rows((3, 9), group=1))
    fetched, missed, stats = ours.runs_until(*fetches)
    assert (fetched, missed) == ([5, 7, 9], [])
    assert [int(ours.blocks[block, 0]) for block in (5, 7, 9, 8)] == [44, 33, 33, 2]
    assert (ours.blocks[5] == 44).all()
    assert stats["peer"].blocks == 3
    assert stats["peer"].bytes == 3 * CARD.layout.block_bytes
    assert (owner.blocks[5] == 1).all(), "an owner's blocks stay as they are"


def test_an_owner_that_is_gone_makes_blocks_missed_and_the_worker_goes_on(ranks) -> None:
    owner, ours = ranks
    exports = owner.exports
    owner.close()
    assert ours.runs_until(PeerFetch(exports, rows((3, 7))))[:2] == ([], [7])
    assert (ours.blocks[7] == 2).all()
    other = Rank(5)
    assert ours.runs_until(PeerFetch(other.exports, rows((3, 7))))[:2] in (([7], []), ([], [7]))
    other.close()


def test_the_best_transport_comes_first_and_an_address_says_whose_blocks_they_are(ranks) -> None:
    addresses = [ExportAddress.decode(export) for export in ranks[0].copies.exports]
    assert ranks[0].is_shared == ("shared_memory" in ranks[0].copies.transports), "only where it is of use"
    assert ranks[0].copies.transports == ",".join(address.transport for address in addresses)
    assert {address.identity for address in addresses} == {identity_of_blocks(EngineConfig(), CARD)}
    assert {address.arena_bytes for address in addresses} == {ranks[0].blocks.size}


@pytest.mark.parametrize(
    ("peers", "options"),
    [(None, {}), (PeerAccess(), {"peer_transports": "none"}), (PeerAccess(), {"peer_loads": False})],
)
def test_where_there_are_no_peers_memory_stays_private_and_nothing_can_be_read(peers, options) -> None:
    rank, owner = Rank(1, peers, **options), Rank(2)
    assert rank.copies.exports == ()
    assert rank.copies.transports == "none"
    fetched, missed, stats = rank.runs_until(PeerFetch(owner.exports, rows((3, 7))))
    assert (fetched, missed) == ([], [7])
    assert "peer" not in stats
    for each in (rank, owner):
        each.close()


def test_a_number_of_ranks_that_the_model_does_not_have_is_said() -> None:
    with pytest.raises(Exception, match="engines have 1 ranks each, got 5"):
        exchange_with(EngineConfig(), CARD, 5)
    assert exchange_with(EngineConfig(), CARD, 1).needs.tolist() == [[True, False], [False, True]]


class ScriptedExport:
    """A `DeviceExport` that notes what is asked of it, and then may raise."""

    address = ExportAddress("scripted", "", b"", b"", 0)

    def __init__(self, does_raise: bool) -> None:
        self.does_raise, self.asked = does_raise, list[str]()

    def attach(self, arena: object) -> None:
        self.asked.append("attach")
        if self.does_raise:
            raise RuntimeError("the driver is gone")

    def close(self) -> None:
        self.attach(None)


def test_memory_that_is_freed_is_let_go_of_by_all_exports_whatever_one_of_them_raises(caplog) -> None:
    rank = Rank(1)
    ours = [ScriptedExport(does_raise) for does_raise in (False, True, False)]
    rank.copies._peers.exports[:0] = ours
    rank.copies.attach_device(None)
    rank.close()
    assert [export.asked for export in ours] == [["attach"] * 2] * 3
    assert caplog.text.count("peers may still read this worker by scripted: the driver is gone") == 2
