"""What the index says of engines' caches, asked of the store's actor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray

from headwise.actors.calls import cause_of

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Longest wait for the store, which may hang. It is asked only when an engine is to go."""
MOST_BLOCKS = 200_000
"""Most blocks that an engine is told to put into storage before it goes: 3 MB of hashes."""


class StoreWorth:
    """The `CacheWorth` of a deployment. Where the store does not answer, nothing is known (None, or no worth).

    store: returns the handle of the store's actor; None while none serves
    """

    def __init__(self, store: Callable[[], Any | None]) -> None:
        self._store = store

    def worth(self, without: Collection[str] = ()) -> Mapping[str, float]:
        """See `CacheWorth.worth`."""
        worth: Mapping[str, float] = self._ask("worth", list(without)) or {}
        return worth

    def sole_blocks(self, node: str, without: Collection[str]) -> bytes | None:
        """Hashes of the blocks that would be lost with the node, as a run, the most asked for first."""
        hashes: bytes | None = self._ask("sole_blocks", node, list(without), MOST_BLOCKS)
        return hashes

    def shares_storage(self, node: str, without: Collection[str]) -> bool:
        """Whether an engine that stays can read what the node puts into storage; where nothing is known, it can."""
        shared: bool | None = self._ask("shares_storage", node, list(without))
        return shared is not False

    def worth_storing(self, node: str, without: Collection[str]) -> int | None:
        """How many of the node's sole blocks, the first ones, even full storage should get; None: not known."""
        count: int | None = self._ask("worth_storing", node, list(without))
        return count

    def allowances(self, node: str, takers: Collection[str], without: Collection[str]) -> Mapping[str, int]:
        """By engine that stays, how many token blocks it may evict for those of the leaving node; where nothing is
        known, none."""
        known: Mapping[str, int] | None = self._ask("allowances", node, list(takers), list(without))
        return dict.fromkeys(takers, 0) if known is None else known

    def _ask(self, method: str, *arguments: Any) -> Any:
        store = self._store()
        if store is None:
            return None
        try:
            return ray.get(getattr(store, method).remote(*arguments), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            log.warning("the index does not say what engines have cached: %s", cause_of(error))
            return None
