"""The encoders of images that the scheduler knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError, InvalidRequestError, NotReadyError
from headwise.runtime.protocol.encoder_messages import EncoderStatus

WAIT_S = 10.0
"""Longest wait for an encoder, where none serves."""
MAX_WAITING = 4096
"""Questions that may wait for one; further ones are answered at once."""
_SILENT_S = 5.0
"""One that says nothing for so long is not named any more."""


@dataclass(frozen=True)
class _Known:
    identity: bytes
    status: EncoderStatus
    heard: float


class KnownEncoders:
    """Used by the scheduler's thread.

    refusal: why images are refused; empty: they are not
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._known: dict[str, _Known] = {}  # by endpoint
        self._waiting: dict[tuple[bytes, int], float] = {}  # until when, by client and its question's key

    def update(self, identity: bytes, status: EncoderStatus, now: float) -> None:
        """One has said that it is there: one of the same name that was elsewhere is not any more."""
        self._known = {
            endpoint: known
            for endpoint, known in self._known.items()
            if known.status.name != status.name and now - known.heard < _SILENT_S
        }
        self._known[status.endpoint] = _Known(identity, status, now)

    def forget(self, ended: frozenset[bytes]) -> list[str]:
        """Connections have ended; the endpoints of those that reported by them."""
        self._waiting = {which: until for which, until in self._waiting.items() if which[0] not in ended}
        gone = [endpoint for endpoint, known in self._known.items() if known.identity in ended]
        for endpoint in gone:
            del self._known[endpoint]
        return gone

    def ask(self, identity: bytes, key: int, now: float) -> None:
        """A client asks who encodes: see `answers`. That it asks again changes nothing."""
        may_wait = not self._refusal and len(self._waiting) < MAX_WAITING
        self._waiting.setdefault((identity, key), now + (WAIT_S if may_wait else 0.0))

    def answers(self, now: float) -> list[tuple[bytes, int, tuple[str, ...] | HeadwiseError]]:
        """Who is answered now, and what: the endpoints of those that serve; or why there is none, once that is sure, or
        none has come for `WAIT_S`: one that is lost is started again, and a scheduler that is new hears of them soon.
        """
        if not self._waiting:
            return []
        found = tuple(sorted(known.status.endpoint for known in self._heard(now)))
        answer: tuple[str, ...] | HeadwiseError = found or NotReadyError(
            "no encoder of images is ready: it is starting, or was lost and is started again; try again later"
        )
        if self._refusal:
            answer = InvalidRequestError(self._refusal)
        over = [which for which, until in self._waiting.items() if self._refusal or found or now >= until]
        for which in over:
            del self._waiting[which]
        return [(identity, key, answer) for identity, key in over]

    def stats(self, now: float) -> dict[str, dict[str, Any]]:
        """By name."""
        return {known.status.name: known.status.stats for known in self._heard(now)}

    def _heard(self, now: float) -> list[_Known]:
        return [known for known in self._known.values() if now - known.heard < _SILENT_S]
