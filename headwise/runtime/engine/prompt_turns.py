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

All prompts of one tenant, told by a `cache_salt`, have one part together: the ``k``-th of them would be through at
``now + k n``. So whoever sends a thousand of them waits for their like, and others go between.

After fair queueing (Demers, Keshav and Shenker, "Analysis and simulation of a fair queueing algorithm", 1989), whose
flows are single prompts here, and Friedman and Henderson, "Fairness and efficiency in web server protocols", 2003.
"""

from __future__ import annotations

from collections import Counter


class PromptTurns:
    """Of the prompts of one engine.

    now: tokens that a prompt which was there from the first one on would have by now
    """

    def __init__(self) -> None:
        self.now = 0.0

    def turn(self, since: float, lacking: int, own: int) -> float:
        """Where a prompt is through that came when `now` was ``since`` and lacks so many tokens: the lowest is next.

        own: prompts of its tenant that were there then, with this one; 1 where it is nobody's
        """
        return since + lacking * own

    def computed(self, tokens: int, there: Counter[str]) -> None:
        """So many tokens are computed while so many prompts of each tenant are there, by whose salt, which is empty of
        those that are nobody's."""
        self.now += tokens / max(1, there[""] + len(there) - ("" in there))
