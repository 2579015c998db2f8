"""The actor of the attention store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from headwise.actors.placement import is_loopback, node_address
from headwise.runtime.config import EngineConfig
from headwise.storage.store_server import StoreServer


@ray.remote(max_restarts=20, max_concurrency=4)
class AttentionStore:
    """Starts empty, also after a restart: the engines find it again and tell it all they hold."""

    def __init__(self, config: EngineConfig) -> None:
        host = "127.0.0.1" if is_loopback(config.host) else node_address()
        self._server = StoreServer(f"tcp://{host}:*")
        self._server.start()

    def endpoint(self) -> str:
        return self._server.endpoint

    def stats(self) -> dict[str, Any]:
        return self._server.stats()

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, dict[str, int]]:
        return self._server.match(block_hashes)

    def stop(self) -> None:
        self._server.stop()
