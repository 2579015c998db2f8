"""When an engine should go from a crowded node to one that has come. Pure: no clock, no Ray."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headwise.runtime.config.engine_config import EngineConfig

AFTER_S = 30.0
"""A better place must have been free for so long, and nothing else been going on."""


@dataclass(frozen=True)
class Move:
    """One of ``engines``, which share the node ``source``, should go, so that another one starts on ``target``.

    there: engines that are on ``target`` already
    """

    engines: tuple[str, ...]
    source: str
    target: str
    there: int


def is_wanted(config: EngineConfig) -> bool:
    """Whether engines are moved at all: where those of a node share its cores, so that each is slower for the others.

    A move costs what the engine has cached and not stored, and the time to load the weights. It gains nothing but
    tolerance of a node's loss where each engine has processors of its own: GPUs, or ``engine_cpus`` of Ray's.
    """
    if config.placement != "spread":
        return False
    shares_cores = not config.on_gpu and not config.engine_cpus
    return config.rebalance == "always" or (config.rebalance == "auto" and shares_cores)


def better_place(homes: Mapping[str, str], with_room: Collection[str]) -> Move | None:
    """The move that evens out the numbers of engines on nodes the most; None: no move makes them more even.

    homes:     the node of each engine
    with_room: nodes that have room for one more
    """
    counts = Counter(homes.values())
    if not counts or not with_room:
        return None
    source = max(sorted(counts), key=lambda node: counts[node])
    target = min(sorted(with_room), key=lambda node: counts[node])
    if counts[source] - counts[target] < 2:
        return None
    return Move(tuple(sorted(name for name in homes if homes[name] == source)), source, target, counts[target])


class Rebalancer:
    """Decides when an engine is moved: one at a time, once a better place has been free for `AFTER_S` in which all
    engines served. A node on which the engine of a move did not come to serve is not tried again.
    """

    def __init__(self) -> None:
        self._since = math.inf
        self._move: Move | None = None
        self._refused: set[str] = set()

    def look(self, homes: Mapping[str, str] | None, with_room: Collection[str], now: float) -> Move | None:
        """The move to make now, if there is one.

        homes: the node of each engine; None: not all of them serve
        now:   of any clock that does not go back
        """
        if homes is None:
            self._since = math.inf
            return None
        self._take_outcome(homes)
        move = better_place(homes, set(with_room) - self._refused)
        if move is None:
            self._since = math.inf
            return None
        self._since = min(self._since, now)
        if now - self._since < AFTER_S:
            return None
        self._since, self._move = math.inf, move
        return move

    def _take_outcome(self, homes: Mapping[str, str]) -> None:
        """See what has become of the last move."""
        move, self._move = self._move, None
        if move is not None and list(homes.values()).count(move.target) <= move.there:
            self._refused.add(move.target)
