"""Which engine gets the next request. Pure arithmetic: no I/O, no clock (``now`` is handed in), randomness injected.

base       what goes in and what comes out
engines    the engines that report, and what was sent their way since (reservations)
expected   what an engine's cache has or soon will have, although the index does not know yet
costs      seconds to the first token, for all engines at once
policies   cache_aware, least_loaded, round_robin
router     select and reserve in one step
"""

from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S, Choice, Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.router import Router

__all__ = ["STATUS_TIMEOUT_S", "Choice", "Matches", "RoutedRequest", "Router", "RouterOptions"]
