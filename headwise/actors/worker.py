"""The actor of one tensor-parallel rank."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from headwise.actors.addresses import engine_host
from headwise.actors.front import Keys
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.log_lines import LatestLines, show_log_lines
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.protocol.step_channel import serve_steps
from headwise.runtime.worker.shared_memory_comm import SharedMemoryComm
from headwise.runtime.worker.worker import ModelWorker
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
        self._stopping = threading.Event()

    def serve(self, endpoint: str, comm_name: str, comm_bytes: int) -> None:
        """Load, warm up, and execute steps until `stop`. Raises what goes wrong."""
        comm = self._communicator(comm_name, comm_bytes)
        try:
            worker = ModelWorker(self._config, self._model_dir, self._rank, comm, peers=self._peers())
            worker.initialize_cache()
            log.info(worker.describe())
            serve_steps(worker, endpoint, self._rank, self._stopping.is_set)
            worker.close()
        finally:
            comm.close()

    def _communicator(self, name: str, max_bytes: int) -> Communicator:
        if self._config.tp_size == 1:
            return SingleRank()
        timeout_s = self._config.step_timeout_s
        return SharedMemoryComm(name, self._rank, self._config.tp_size, max_bytes, timeout_s, create=self._rank == 0)

    def _peers(self) -> PeerAccess:
        host = engine_host(self._config.host, node_address())
        return PeerAccess(host, parse_ports(self._config.peer_ports, "peer_ports"), self._keys.inner, self._keys.own)

    def stop(self) -> None:
        self._stopping.set()

    def pid(self) -> int:
        return os.getpid()

    def log_lines(self, since: int) -> tuple[int, list[tuple[int, str]]]:
        """See `LatestLines.since`."""
        return self._lines.since(since)
