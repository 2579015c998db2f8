"""Requests over HTTP that are made again and again while the servers move, as a load balancer would make them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from support.waiting import PATIENCE_S

REST_S = 0.2


class NewRequests:
    """Asks one of the hosts until `end`, each time on a new connection; the next one where that is not taken.

    hosts:  where servers are, or will be
    asked:  arguments of `httpx.post` for a host
    answer: of every request
    """

    def __init__(self, hosts: Sequence[str], asked: Callable[[str], Mapping[str, Any]], answer: str) -> None:
        self._hosts, self._asked, self._answer = list(hosts), asked, answer
        self.longest_s = 0.0  # for which no host took a request
        self.served: dict[str, int] = dict.fromkeys(hosts, 0)
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._asking = self._pool.submit(self._ask)

    def _ask(self) -> None:
        while not self._is_over.wait(REST_S):
            began = time.monotonic()
            while (host := self._ask_once(began)) is None:
                assert time.monotonic() - began < PATIENCE_S, "nobody takes requests"
                time.sleep(0.02)
            self.served[host] += 1

    def _ask_once(self, began: float) -> str | None:
        """Which host has answered; None: none takes requests."""
        for host in list(self._hosts):
            at = time.monotonic()
            try:
                response = httpx.post(**self._asked(host))
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError):
                continue
            self.longest_s = max(self.longest_s, at - began)
            assert response.status_code == 200, (host, response.text)
            assert response.json()["choices"][0]["text"] == self._answer
            self._hosts.remove(host)
            self._hosts.insert(0, host)  # as long as it takes them
            return host
        return None

    def check(self) -> None:
        """Raise what a request has raised."""
        if self._asking.done():
            self._asking.result()

    def end(self) -> None:
        """Raise what a request has raised."""
        self._is_over.set()
        self._asking.result(PATIENCE_S)
        self._pool.shutdown()
