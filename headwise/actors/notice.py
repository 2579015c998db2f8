"""How long an engine may take to go whose node is about to be taken away: by clocks of which some may be wrong.

A notice says when the node goes, by the clock of whoever gave it: an autoscaler's, or the node's own.
"""

from __future__ import annotations

FAREWELL_S = 5.0
PASSED_S = 30.0
"""How long a node is believed to live whose end has passed when its notice comes: then a clock is wrong. No cloud gives
less, and an engine that is lost early has handed over what is worth most."""


def drain_time(timeout_s: float, left_s: float) -> float:
    """Seconds that an engine may take to go whose node is taken away in ``left_s``: the last tenth, at most
    `FAREWELL_S`, is for its processes to end and for requests to be sent elsewhere.
    """
    if left_s <= 0:
        left_s = PASSED_S
    return min(timeout_s, left_s - min(FAREWELL_S, left_s / 10))


def at_its_node(timeout_s: float, until: float, now: float) -> float:
    """The same, as the node's own clock sees it, which may have given the notice; at most ``timeout_s``, which another
    clock says. A clock that has passed the end knows nothing.

    until, now: when the node goes and what time it is, as `time.time` counts
    """
    return drain_time(timeout_s, until - now) if until > now else timeout_s
