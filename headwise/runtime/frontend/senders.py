"""How much of what is scarce each sender of calls has: nobody is refused because another one has taken it all."""

from __future__ import annotations

from collections import Counter

from headwise.runtime.frontend.dispatcher import PendingCall


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


def _take(counts: Counter[str], name: str, count: int) -> None:
    counts[name] -= count
    if not counts[name]:
        del counts[name]
