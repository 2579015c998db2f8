"""The encoders of images that the scheduler knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError, InvalidRequestError, NotReadyError
from headwise.runtime.protocol.messages import EncoderStatus

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
        gone = [endpoint for endpoint, known in self._known.items() if known.identity in ended]
        for endpoint in gone:
            del self._known[endpoint]
        return gone

    def endpoints(self, now: float) -> tuple[str, ...] | HeadwiseError:
        """Of those that serve, or why there is none."""
        if self._refusal:
            return InvalidRequestError(self._refusal)
        found = tuple(sorted(known.status.endpoint for known in self._heard(now)))
        return found or NotReadyError(
            "no encoder of images is ready: it is starting, or was lost and is started again; try again later"
        )

    def stats(self, now: float) -> dict[str, dict[str, Any]]:
        """By name."""
        return {known.status.name: known.status.stats for known in self._heard(now)}

    def _heard(self, now: float) -> list[_Known]:
        return [known for known in self._known.values() if now - known.heard < _SILENT_S]
