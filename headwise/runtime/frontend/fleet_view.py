"""The fleet of engines as its owner tells of it, and what clients ask of the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.errors import HeadwiseError, InvalidRequestError
from headwise.runtime.frontend.client_socket import Send
from headwise.runtime.frontend.scaling import Exchange, FleetState, Split
from headwise.runtime.frontend.scaling.requests import ScaleRequests
from headwise.runtime.protocol.messages import Roll, Scale, Scaled, failure
from headwise.runtime.protocol.weights import Weights


class FleetView:
    """Used by the scheduler's thread.

    exchange:    with the owner
    replicas:    engines of the deployment, until the owner has called
    instance:    of the scheduler
    may_split:   whether engines may compute prompts apart: they fetch blocks from each other
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: int,
        instance: str,
        may_split: bool,
        clock: Callable[[], float],
        send: Send,
    ) -> None:
        self.exchange = exchange
        self._unknown = FleetState(replicas, "the owner of the engines has not called yet", expected=replicas)
        self._questions = ScaleRequests(exchange, instance)
        self._may_split = may_split
        self._clock, self._send = clock, send

    @property
    def state(self) -> FleetState:
        """What the owner told last, or what is known without it."""
        return self.exchange.fleet or self._unknown

    @property
    def is_awaited(self) -> bool:
        """Whether the owner said that requests may wait for an engine."""
        return self.exchange.fleet is not None and self.exchange.fleet.is_awaited

    def scale(self, identity: bytes, scale: Scale) -> None:
        """A client asks for a number of engines."""
        try:
            split = self._checked(scale.split)
            self._questions.scale((identity, scale.key), scale.replicas, self._clock(), split)
        except HeadwiseError as error:
            self._send(identity, failure(error, scale.key))

    def roll(self, identity: bytes, roll: Roll) -> None:
        """A client asks that all engines be replaced."""
        try:
            self._questions.roll((identity, roll.key), self._clock())
        except HeadwiseError as error:
            self._send(identity, failure(error, roll.key))

    def want_weights(self, weights: Weights) -> None:
        """The owner is to start engines with these from now on."""
        self._questions.want_weights(weights)

    @property
    def is_asking(self) -> bool:
        """Whether the owner has yet to take what was asked for last."""
        return self._questions.is_asking

    def answer(self, now: float) -> None:
        """Tell clients what was decided by now."""
        for (identity, key), told in self._questions.answers(now):
            self._send(identity, failure(told, key) if isinstance(told, HeadwiseError) else Scaled(key, told))

    def forget(self, ended: frozenset[bytes]) -> None:
        """Connections have ended."""
        self._questions.forget(ended)

    def stats(self) -> dict[str, Any]:
        state = self.state
        return {
            "number": state.number,
            "reason": state.reason,
            "replicas": dict(state.replicas),
            "is_on_demand": state.is_on_demand,
        }

    def _checked(self, split: tuple[int, int] | None) -> Split | None:
        if split is None:
            return None
        if any(split) and not self._may_split:
            raise InvalidRequestError(
                "prompts are computed apart only where engines fetch blocks from each other: see peer_loads"
            )
        try:
            return Split(*split)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
