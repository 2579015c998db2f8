"""In which order prompts are computed: that in which they would be through if all were computed at once.

Prompts are computed one behind the other, as far as a step's tokens go, for of two at once both would be through only
when the second one is. In the order in which they came, whoever sends a few words behind books waits until all of those
are computed. So the order is that in which they would be through if each had an equal part of every step: a short
prompt, or one of which little is not cached, goes before the rest of a long one.

How far all would have got is one number, in tokens: a prompt that comes at `PromptTurns.now`, and of which ``n``
tokens are to be computed, would be through at ``now + n``. With each token that is computed, of whichever prompt, it
grows by one over the number of parts. So a long prompt is not put off for ever: what comes once `now` has passed its
end goes behind it. Of later prompts fewer than ``2 n`` tokens are computed before it for each prompt that is there at a
time.

All prompts of one tenant have one part together, in which each has an equal one: until one of ``n`` tokens is through,
those of its tenant that are there get as many each, or all that they lack. So whoever sends a thousand of them waits
for their like, and others go between. A tenant may have a share of several parts: it gets as many times as much.

An engine has turns for its prompts, and the scheduler for those that wait until an engine has room.

After fair queueing (Demers, Keshav and Shenker, "Analysis and simulation of a fair queueing algorithm", 1989), whose
flows are single prompts here, and Friedman and Henderson, "Fairness and efficiency in web server protocols", 2003.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Beside:
    """Prompts of one tenant: how many, and the tokens that are still to be computed of them."""

    prompts: int = 0
    tokens: int = 0


NONE_BESIDE = Beside()


ShareOf = Callable[[str], float]
"""How many parts a tenant's prompts have together; 1 of one that nothing is said of, and of nobody's."""


def equal_shares(tenant: str) -> float:
    """Every tenant has one."""
    return 1.0


def turn_of(since: float, lacking: int, beside: Beside = NONE_BESIDE, share: float = 1.0) -> float:
    """Where a prompt is through that came when `PromptTurns.now` was ``since`` and lacks so many tokens: the lowest is
    next.

    beside: prompts of its tenant that were there then
    share:  parts that these have
    """
    return since + (lacking + min(beside.prompts * lacking, beside.tokens)) / share


class PromptTurns:
    """Of the prompts of one engine, or one queue.

    now: tokens that a prompt which was there from the first one on would have by now
    share_of: of tenants, from now on
    """

    def __init__(self, share_of: ShareOf = equal_shares) -> None:
        self.now = 0.0
        self.share_of = share_of

    def turn(self, since: float, lacking: int, beside: Beside = NONE_BESIDE, tenant: str = "") -> float:
        """See `turn_of`. tenant: whose prompt it is; empty: nobody's"""
        return turn_of(since, lacking, beside, self.share_of(tenant))

    def computed(self, tokens: int, parts: float) -> None:
        """So many tokens are computed, while prompts have so many parts: see `Present`."""
        self.now += tokens / max(1.0, parts)


class Present:
    """Prompts that are there, by their tenants; an empty name is nobody's."""

    def __init__(self) -> None:
        self._tenants: dict[str, Beside] = {}

    def add(self, tenant: str, tokens: int) -> None:
        """A prompt is there now, of which so many tokens are to be computed."""
        others = self._tenants.get(tenant, NONE_BESIDE)
        self._tenants[tenant] = Beside(others.prompts + 1, others.tokens + tokens)

    def remove(self, tenant: str, tokens: int) -> None:
        """One that was added so is not there any more."""
        with_it = self._tenants.pop(tenant)
        if with_it.prompts > 1:
            self._tenants[tenant] = Beside(with_it.prompts - 1, with_it.tokens - tokens)

    def with_more(self, prompts: Iterable[tuple[str, int]]) -> Present:
        """These, and others beside them."""
        both = Present()
        both._tenants = dict(self._tenants)
        for tenant, tokens in prompts:
            both.add(tenant, tokens)
        return both

    @property
    def tenants(self) -> dict[str, Beside]:
        """What there is of each; not to be changed."""
        return self._tenants

    def parts(self, tenants: Collection[str] = (), share_of: ShareOf = equal_shares) -> float:
        """Each tenant has its share, and each prompt of nobody's has one. tenants: of prompts that are there besides"""
        of_nobody = self.of("").prompts + sum(not each for each in tenants)
        return of_nobody + sum(map(share_of, {*self._tenants, *tenants} - {""}))

    def of(self, tenant: str) -> Beside:
        """This tenant's."""
        return self._tenants.get(tenant, NONE_BESIDE)

    def beside(self, tenant: str) -> Beside:
        """What is beside one more prompt of this tenant in its part; nobody's have parts of their own."""
        return self.of(tenant) if tenant else NONE_BESIDE
