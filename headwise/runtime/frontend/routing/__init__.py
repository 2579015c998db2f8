"""Chooses the engine for a request. Pure arithmetic: no I/O, no clock (``now`` is an argument), randomness injected.

base       the router's input and output
engines    the engines' reports, and the requests sent to them since (reservations)
expected   blocks that engines have or will soon have, and that the index does not know yet
peers      what engines could fetch from each other
costs      the cost of a request on each engine, in seconds
apart      prefill and decode on two engines
policies   cache_aware, least_loaded, round_robin
router     select and reserve in one step
"""

from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S, Choice, Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.router import Router

__all__ = ["STATUS_TIMEOUT_S", "Choice", "Matches", "RoutedRequest", "Router", "RouterOptions"]
