"""What a worker needs to read other engines' caches, and to have its own part of one read by them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headwise.errors import first_line
from headwise.kernels.block_copy import RunCopy, Runs
from headwise.kernels.select import make_run_copy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.config.peer_blocks import exchange_with_ranks, identity_of_blocks
from headwise.transfer.base import Stream
from headwise.transfer.connectors.base import DeviceExport, Export
from headwise.transfer.connectors.select import Memories, PeerAccess, open_exports, open_readers
from headwise.transfer.peer_reads import MAX_OWNERS, PeerBlocks, PeerReads

log = logging.getLogger(__name__)

COPY_THREADS = 1
"""Threads that copy what comes, of all owners together: the forward pass wants the cores."""


class PeerParts:
    """The exports of one rank's arenas, and its reads of others.

    transports: names of those that may be used; none: nobody reads, and what is asked for is missed
    """

    def __init__(
        self,
        config: EngineConfig,
        card: ModelCard,
        rank: int,
        transports: Sequence[str],
        access: PeerAccess,
        memories: Memories,
        background: Callable[[str], Stream],
    ) -> None:
        self.transports = transports
        copy = make_run_copy(config.kernels if config.kernels != "cuda" else "auto", COPY_THREADS)
        blocks = PeerBlocks(
            identity_of_blocks(config, card),
            rank,
            card.layout.block_bytes,
            lambda ranks: exchange_with_ranks(config, card, ranks),
        )
        self.exports: list[Export] = open_exports(transports, access, memories, blocks.identity, copy)
        self.reads = PeerReads(
            open_readers(transports, access, _one_at_a_time(copy), memories.sharing),
            blocks,
            memories.host.array,
            streams=[background(f"headwise-peer-{at}") for at in range(MAX_OWNERS)],
            timeout_s=config.load_timeout_s,
        )

    def attach_device(self, arena: Any | None) -> None:
        """Let another device arena be read; None: that there was is about to be freed."""
        for export in self.exports:
            if isinstance(export, DeviceExport):
                with _and_the_others_go_on(export):
                    export.attach(arena)

    def close(self, timeout_s: float) -> None:
        """Read no more, and be read no more. The last call."""
        for export in self.exports:
            with _and_the_others_go_on(export):
                export.close()
        self.reads.close(timeout_s)


def _one_at_a_time(copy: RunCopy) -> RunCopy:
    """Owners are waited for at the same time; what comes of them is copied in turn."""
    lock = threading.Lock()

    def copy_in_turn(source: Any, target: Any, runs: Runs) -> None:
        with lock:
            copy(source, target, runs)

    return copy_in_turn


@contextmanager
def _and_the_others_go_on(export: Export) -> Iterator[None]:
    """Whatever one export raises: memory that is about to be freed must be let go of by all."""
    try:
        yield
    except Exception as error:  # of kinds that only its library knows
        log.error("peers may still read this worker by %s: %s", export.address.transport, first_line(error))
