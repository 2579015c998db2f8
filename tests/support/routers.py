"""Routers, engines' reports, and requests of a few numbers."""

from __future__ import annotations

import itertools
import random
from typing import Any

from headwise.runtime.frontend.routing import Choice, RoutedRequest, Router, RouterOptions
from headwise.runtime.protocol.messages import EngineLoad, EngineStatus

BLOCK = 64
SPEEDS = {"prefill_token_s": 1e-3, "decode_step_s": 0.02, "host_token_s": 1e-4, "storage_token_s": 2e-4}

_numbers = itertools.count()


def router(**options: Any) -> Router:
    return Router(RouterOptions(**{"block_size": BLOCK, **options}), random.Random(0))


def report(
    router: Router,
    *names: str,
    now: float = 0.0,
    epoch: int = 1,
    received: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    **work: Any,
) -> None:
    for name in names:
        load = EngineLoad(**{**SPEEDS, **work})
        requests = load.running + load.waiting
        router.update(EngineStatus("", name, f"tcp://{name}", requests, {}, epoch, load, received, faults), now)


def path(blocks: int, name: str = "", shared: int = 0) -> list[bytes]:
    """Hashes of a prompt: the first ``shared`` blocks are everybody's, the others its own."""
    return [f"{'' if block < shared else name}/{block}".encode() for block in range(blocks)]


def request(blocks: int = 16, name: str = "", **fields: Any) -> RoutedRequest:
    fields = {"hashes": path(blocks, name), "num_tokens": blocks * BLOCK + 1, **fields}
    return RoutedRequest(fields.pop("request_id", f"r{next(_numbers)}"), **fields)


def choose(router: Router, *args: Any, now: float = 0.0, **fields: Any) -> Choice:
    choice = router.select_and_reserve(request(*args, **fields), fields.pop("matches", None), now)
    assert choice is not None
    return choice


def choose_with(router: Router, matches: dict[str, tuple[int, int, int]], now: float = 0.0, **fields: Any) -> Choice:
    choice = router.select_and_reserve(request(**fields), matches, now)
    assert choice is not None
    return choice
