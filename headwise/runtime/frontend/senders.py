"""How much of what is scarce each sender of calls has: nobody is refused because another one has taken it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headwise.runtime.frontend.dispatcher import PendingCall

MOST_TENANTS = 4096
"""As many as there may be API keys."""


class Senders:
    """Tenants, and connections of others.

    calls: that are not answered yet, of each
    text:  bytes of theirs that are still to be tokenised
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.text: Counter[str] = Counter()

    def add(self, call: PendingCall) -> None:
        """A call has come that is to be tokenised."""
        self.calls[call.sender] += 1
        self.text[call.sender] += call.num_bytes

    def tokenised(self, call: PendingCall) -> None:
        """It is, or it need not be any more."""
        _take(self.text, call.sender, call.num_bytes)

    def remove(self, call: PendingCall) -> None:
        """A call that was added is over."""
        _take(self.calls, call.sender, 1)
        if call.prepared is None:
            self.tokenised(call)

    @staticmethod
    def who_has_more(held: Counter[str], sender: str, more: int) -> str:
        """Who has most of it, if that is more than ``sender`` would have with so much more; empty: nobody has."""
        most = max(held, key=lambda each: held[each], default="")
        return most if held[most] > held[sender] + more else ""


class TenantCounts:
    """What became of each tenant's requests since this scheduler serves. At most `MOST_TENANTS` are told apart: there
    are more only where operators' clients say whose requests are whose."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, int]] = {}

    def routed(self, tenant: str, prompt_tokens: int) -> None:
        """A request of so many tokens was sent to an engine."""
        self._add(tenant, routed=1, prompt_tokens=prompt_tokens)

    def refused(self, tenant: str) -> None:
        self._add(tenant, refused=1)

    def _add(self, tenant: str, **more: int) -> None:
        if not tenant or (tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS):
            return
        counts = self._tenants.setdefault(tenant, {"routed": 0, "refused": 0, "prompt_tokens": 0})
        for name, count in more.items():
            counts[name] += count

    def stats(self, waiting: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """By tenant. waiting: calls that are not answered yet, by sender"""
        return {name: {**counts, "waiting": waiting.get(name, 0)} for name, counts in self._tenants.items()}


def _take(counts: Counter[str], name: str, count: int) -> None:
    counts[name] -= count
    if not counts[name]:
        del counts[name]
