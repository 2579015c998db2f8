"""The scheduler's side of the attention store: sends queries, and collects the answers later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headwise.sockets.curve import ClientKeys
from headwise.storage.index.connection import Connection
from headwise.storage.index.messages import GetIndexStats, Gone, IndexStats, Matches, Query

if TYPE_CHECKING:
    import zmq

GONE_INTERVAL_S = 0.5
GONE_REPEATS = 6
"""Often enough for a store that is being restarted to hear it."""
_SEND_QUEUE = 1000


class StoreClient:
    """Never waits. A query that cannot be sent is dropped, and gets no answer. Owned by one thread."""

    def __init__(
        self,
        endpoint: str,
        namespace: str = "",
        keys: ClientKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = Connection(endpoint, namespace, keys, _SEND_QUEUE)
        self._clock = clock
        self._gone: dict[str, tuple[Gone, int]] = {}  # what to repeat, and how often
        self._repeat_at = 0.0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when `poll` has something to collect."""
        return self._connection.socket

    def query(self, key: int, block_hashes: bytes | Sequence[bytes]) -> bool:
        """Ask who holds how much of a path; `Matches` with this key answers. False: there is no store to ask."""
        path = block_hashes if isinstance(block_hashes, bytes) else b"".join(block_hashes)
        return self._connection.send([Query(key, path)])

    def ask_stats(self, key: int) -> bool:
        """Ask for the index's statistics; `IndexStats` with this key answers. False: there is no store to ask."""
        return self._connection.send([GetIndexStats(key)])

    def gone(self, node: str, epoch: int) -> None:
        """Make void all that the node said in this and earlier epochs. Repeated for a few seconds."""
        gone = Gone(node, epoch)
        self._connection.send([gone])
        self._gone[node] = gone, GONE_REPEATS
        self._repeat_at = self._clock() + GONE_INTERVAL_S

    def poll(self) -> list[Matches | IndexStats]:
        """The answers that have arrived, in any order, late ones too. Call it every second or more often."""
        if self._gone and self._clock() >= self._repeat_at:
            self._repeat_at = self._clock() + GONE_INTERVAL_S
            self._connection.send([gone for gone, _ in self._gone.values()])
            self._gone = {node: (gone, left - 1) for node, (gone, left) in self._gone.items() if left > 1}
        return [message for message in self._connection.receive() if isinstance(message, Matches | IndexStats)]

    def close(self) -> None:
        self._connection.close()
