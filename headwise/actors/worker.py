"""The actor of one rank."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from headwise import heap
from headwise.actors.addresses import engine_host, interface_of
from headwise.actors.front import Keys
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.actors.weights_at_hand import WeightsAtHand
from headwise.log_lines import LatestLines, show_log_lines
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.block_storage import SharedBlocks, check_shared
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.protocol.step_channel import serve_steps
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.runtime.worker.memory_check import check_memory
from headwise.runtime.worker.network_comm import NetworkComm
from headwise.runtime.worker.network_link import NetworkLink
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm
from headwise.runtime.worker.worker import ModelWorker
from headwise.transfer.connectors.select import PeerAccess

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What a rank is told of the group that it is of.

    steps:      the endpoint of the step channel
    comm_name:  of the memory that the ranks of its stage share; empty: they are on several nodes
    comm_bytes: size of each of a rank's two buffers there
    is_across:  whether the engine and its ranks are on several nodes
    ranks_here: of the engine, on this rank's node
    """

    steps: str
    comm_name: str
    comm_bytes: int
    is_across: bool
    ranks_here: int


@remote(max_concurrency=4)
class Worker:
    """Holds a `ModelWorker`; `serve` keeps one thread, so that the other methods stay responsive."""

    def __init__(
        self, config: EngineConfig, model_dir: Path, rank: int, keys: Keys, weights: WeightsToLoad | None = None
    ) -> None:
        """weights: in place of those in ``model_dir``"""
        show_log_lines()
        self._lines = LatestLines.kept()
        self._config = config
        self._keys = keys
        self._model_dir = model_dir
        self._rank = rank
        self._weights = weights
        self._at_hand = WeightsAtHand(config)
        self._stage, self._tp_rank = divmod(rank, config.tp_size)
        self._hub: NetworkComm | None = None
        self._link: NetworkLink | None = None
        self._stopping = threading.Event()

    # ---- what others of its group wait for ----

    def check_node(self, ranks_here: int, blocks: SharedBlocks) -> None:
        """Raise `DeploymentError` or `ConfigError` unless the engine's ``ranks_here`` can be on this node, which is not
        the engine's. blocks: those of the engine's node, which this one's have to be"""
        directory = resolve_model(self._config.model, self._config.cache_path)
        check_shared(f"rank {self._rank} on node {node_address()}", self._config, directory, blocks)
        check_memory(self._config, read_model_card(self._config, directory, identify=False), ranks_here)

    def have_weights(self, model: str, adapters: str | None) -> None:
        """See `WeightsAtHand.have`."""
        self._at_hand.have(model, adapters)

    def keep_weights(self, model: str, adapters: str | None) -> None:
        """See `WeightsAtHand.keep`."""
        self._at_hand.keep(model, adapters)

    def listen(self) -> str:
        """Where the other ranks of its stage reach this one, which is the first of them, where they are on several
        nodes."""
        size, timeout_s = self._config.tp_size, self._config.step_timeout_s
        self._hub = NetworkComm.listen(self._host(), size, timeout_s, self._keys.inner)
        return self._hub.endpoint

    def listen_to_stage(self, endpoint: str) -> str:
        """Where the rank in its place in the stage before, of the first stage in the last, reaches this one: at
        ``endpoint``, or if that is empty, at a port that any node reaches."""
        self._link = self._open_link()
        self._link.listen(endpoint or f"tcp://{self._host()}:*", None if endpoint else self._keys.inner)
        return self._link.endpoint

    # ---- steps ----

    def serve(self, around: Surroundings, hub: str, before: str, following: str, checked: None) -> None:
        """Load, warm up, and execute steps until `stop`. Raises what goes wrong.

        What is only waited for is an argument, too: calls of an actor may overtake each other.

        hub:       what `listen` of its stage's first rank returned; empty: ranks of a stage share memory
        before:    what its own `listen_to_stage` returned; empty: there is one stage
        following: what `listen_to_stage` of the rank in its place in the next stage returned, of the last stage in the
                   first; empty: there is one stage
        checked:   what `check_node` of a rank on its node returned
        """
        if around.is_across:
            name = interface_of(self._host())
            if name:  # by which NCCL is to reach the others: it would take the first that there is
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            self._model_dir = resolve_model(self._config.model, self._config.cache_path)
            if self._weights is not None:
                self._at_hand.have(self._weights.model, self._weights.adapters)
        keys = self._keys.own if around.is_across else None
        config = replace(self._config, cpu_threads=threads_per_worker(self._config, around.ranks_here))
        if following:
            self._link = self._link or self._open_link()
            self._link.connect(following, keys)
        with ExitStack() as stack:
            if self._link is not None:
                stack.callback(self._link.close)
            comm = self._comm(around, hub)
            stack.callback(comm.close)
            where = config, self._model_dir, self._rank
            heap.settle()
            worker = ModelWorker(*where, comm, peers=self._peers(), link=self._link, weights=self._weights)
            worker.initialize_cache()
            log.info(worker.describe())
            serve_steps(worker, around.steps, self._rank, self._stopping.is_set, keys)
            worker.close()

    def _open_link(self) -> NetworkLink:
        return NetworkLink(self._config.step_timeout_s)

    def _comm(self, around: Surroundings, hub: str) -> Communicator:
        """Of the ranks of its stage."""
        rank, size, timeout_s = self._tp_rank, self._config.tp_size, self._config.step_timeout_s
        if size == 1:
            return SingleRank()
        if around.comm_name:
            name = f"{around.comm_name}{self._stage}"
            return SharedMemoryComm(name, rank, size, around.comm_bytes, timeout_s, create=rank == 0)
        return self._hub or NetworkComm.connect(hub, rank, size, timeout_s, self._keys.own)

    def _host(self) -> str:
        """This node's address for others."""
        return engine_host(self._config.host, node_address())

    def _peers(self) -> PeerAccess:
        ports = parse_ports(self._config.peer_ports, "peer_ports")
        return PeerAccess(self._host(), ports, self._keys.inner, self._keys.own)

    def stop(self) -> None:
        self._stopping.set()

    def pid(self) -> int:
        return os.getpid()

    def log_lines(self, since: int) -> tuple[int, list[tuple[int, str]]]:
        """See `LatestLines.since`."""
        return self._lines.since(since)
