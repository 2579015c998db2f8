"""The actor of the attention store."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from headwise import heap
from headwise.actors.ending import Ending
from headwise.actors.front import About, Front
from headwise.actors.remote import remote
from headwise.log_lines import show_log_lines
from headwise.runtime.config.engine_config import EngineConfig
from headwise.sockets.curve import ServerKeys
from headwise.storage.index.store_server import StoreServer

_BIND_TIMEOUT_S = 10.0
"""How long a restarted store waits for its predecessor's process to free the port."""


@remote(max_concurrency=5)
class AttentionStore:
    """Serves the index. A restarted store binds the same endpoint: the engines find it again and tell it all they hold.

    front: where that is, and the scheduler: an owner that is started again hears it of whoever is left
    start: how many times the store was started before
    """

    def __init__(self, config: EngineConfig, front: Front, keys: ServerKeys | None, start: int = 0) -> None:
        show_log_lines()
        options = {"max_blocks": config.index_blocks, "keys": keys}
        self._front = front
        self._ending = Ending()
        self._server = _bind(front.store_endpoint, front.namespace, options)
        heap.settle()
        self._server.start()

    def ready(self) -> str:
        """The endpoint, once it serves."""
        return self._server.endpoint

    def ended(self) -> None:
        """Return when it is stopped. A caller that waits here learns at once when the process dies."""
        self._ending.wait()

    def about(self) -> About:
        return About(self._front)

    def stats(self) -> dict[str, Any]:
        return self._server.stats()

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, tuple[int, int, int]]:
        return self._server.match(block_hashes)

    def worth(self, without: Collection[str]) -> dict[str, float]:
        """See `PrefixIndex.worth`."""
        return self._server.worth(without)

    def sole_blocks(self, node: str, without: Collection[str], most: int) -> bytes:
        """See `AttentionStore.sole_blocks`."""
        return self._server.sole_blocks(node, without, most)

    def shares_storage(self, node: str, without: Collection[str]) -> bool:
        """See `PrefixIndex.shares_storage`."""
        return self._server.shares_storage(node, without)

    def worth_storing(self, node: str, without: Collection[str]) -> int:
        """See `headwise.storage.index.storable`."""
        return self._server.worth_storing(node, without)

    def allowances(self, node: str, takers: Collection[str], without: Collection[str]) -> dict[str, int]:
        """See `headwise.storage.index.allowances`."""
        return self._server.allowances(node, takers, without)

    def loop_count(self) -> int:
        """See `StoreServer`."""
        return self._server.loop_count

    def stop(self) -> None:
        self._server.stop()
        self._ending.come()


def _bind(endpoint: str, namespace: str, options: dict[str, Any]) -> StoreServer:
    import zmq

    deadline = time.monotonic() + _BIND_TIMEOUT_S
    while True:
        try:
            return StoreServer(endpoint, namespace, **options)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() >= deadline:
                raise
        time.sleep(0.1)
