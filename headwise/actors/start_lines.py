"""What an actor logs while it starts, logged here, too: whoever waits for it is told what for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from headwise.actors.calls import get
from headwise.errors import HeadwiseError

EVERY_S = 0.5
_LAST_S = 5.0
"""Longest wait for an actor's last lines."""


class StartLines:
    """Asks actors that start for what they log, and logs it. A line that one of them said already, in the same words,
    is not said again: those of alike engines are alike.

    name: of an actor whose line is logged -> what stands before it
    """

    def __init__(
        self,
        log: logging.Logger,
        name: Callable[[str], str] = lambda who: f"{who}: ",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._name, self._clock = log, name, clock
        self._sources: dict[str, _Source] = {}
        self._told: set[str] = set()

    def look(self, who: str, actor: Any) -> None:
        """Log what has come from an actor that has a method ``log_lines``, and ask it for more. Never waits."""
        source = self._sources.get(who)
        if source is None or source.actor != actor:
            source = self._sources[who] = _Source(actor)
        if source.answer is None:
            if self._clock() < source.next_at:
                return
            source.answer = actor.log_lines.remote(source.count)
        if ray.wait([source.answer], timeout=0)[0]:
            self._take(who, source)

    def finish(self) -> None:
        """Log all that the actors have logged by now; of one that does not answer, nothing."""
        until = self._clock() + _LAST_S
        for who, source in self._sources.items():
            for _ in range(2):  # an answer under way may lack the last lines
                if source.answer is None:
                    source.answer = source.actor.log_lines.remote(source.count)
                if ray.wait([source.answer], timeout=max(0.0, until - self._clock()))[0]:
                    self._take(who, source)

    def _take(self, who: str, source: _Source) -> None:
        answer, source.answer, source.next_at = source.answer, None, self._clock() + EVERY_S
        try:
            source.count, lines = get(answer)
        except HeadwiseError:
            return  # it has ended: whoever waits for it learns why
        for level, text in lines:
            if text not in self._told:
                self._told.add(text)
                self._log.log(level, "%s%s", self._name(who), text)


class _Source:
    """What is known of an actor's lines. answer: to the question under way; None: there is none"""

    def __init__(self, actor: Any) -> None:
        self.actor, self.answer = actor, None
        self.count, self.next_at = 0, 0.0
