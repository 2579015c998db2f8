"""The actor of one tensor-parallel rank."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from headwise.actors.addresses import engine_host, interface_of
from headwise.actors.front import Keys
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.log_lines import LatestLines, show_log_lines
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.block_storage import SharedBlocks, check_shared
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.protocol.step_channel import serve_steps
from headwise.runtime.worker.network_comm import NetworkComm
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm
from headwise.runtime.worker.worker import ModelWorker
from headwise.sockets.curve import ClientKeys
from headwise.transfer.connectors.select import PeerAccess

log = logging.getLogger(__name__)


@remote(max_concurrency=4)
class Worker:
    """Holds a `ModelWorker`; `serve` keeps one thread, so that the other methods stay responsive."""

    def __init__(self, config: EngineConfig, model_dir: Path, rank: int, keys: Keys) -> None:
        show_log_lines()
        self._lines = LatestLines.kept()
        self._config = config
        self._keys = keys
        self._model_dir = model_dir
        self._rank = rank
        self._hub: NetworkComm | None = None
        self._stopping = threading.Event()

    def serve(self, endpoint: str, comm_name: str, comm_bytes: int) -> None:
        """Load, warm up, and execute steps until `stop`. Raises what goes wrong. All ranks are on one node."""
        size, timeout_s = self._config.tp_size, self._config.step_timeout_s
        comm: Communicator = SingleRank()
        if size > 1:
            comm = SharedMemoryComm(comm_name, self._rank, size, comm_bytes, timeout_s, create=self._rank == 0)
        self._serve(endpoint, comm)

    def listen(self) -> str:
        """Where the other ranks reach this one, which is rank 0 of ranks on several nodes."""
        size, timeout_s = self._config.tp_size, self._config.step_timeout_s
        self._hub = NetworkComm.listen(self._host(), size, timeout_s, self._keys.inner)
        return self._hub.endpoint

    def serve_across(self, endpoint: str, hub: str, blocks: SharedBlocks) -> None:
        """`serve`, where ranks are on several nodes.

        hub:    what rank 0's `listen` returned
        blocks: those of the engine's node, which this one's have to be
        """
        name = interface_of(self._host())
        if name:  # by which NCCL is to reach the others: it would take the first that there is
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        self._model_dir = resolve_model(self._config.model, self._config.cache_path)
        check_shared(f"TP rank {self._rank} on node {node_address()}", self._config, self._model_dir, blocks)
        size, timeout_s = self._config.tp_size, self._config.step_timeout_s
        comm = self._hub or NetworkComm.connect(hub, self._rank, size, timeout_s, self._keys.own)
        self._serve(endpoint, comm, self._keys.own)

    def _serve(self, endpoint: str, comm: Communicator, keys: ClientKeys | None = None) -> None:
        try:
            worker = ModelWorker(self._config, self._model_dir, self._rank, comm, peers=self._peers())
            worker.initialize_cache()
            log.info(worker.describe())
            serve_steps(worker, endpoint, self._rank, self._stopping.is_set, keys)
            worker.close()
        finally:
            comm.close()

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
