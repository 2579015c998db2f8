"""A client's calls, from the scheduler's ticket to the last token, over as many engines as they lose."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headwise.errors import (
    DeploymentError,
    EmbedsLackingError,
    EngineDiedError,
    EngineLeavingError,
    HeadwiseError,
    RequestAbortedError,
)
from headwise.runtime.client.connections import Connections, deliver_error
from headwise.runtime.client.peers import Call, Peer
from headwise.runtime.protocol.messages import Abort, Failed, Ticket, Waits, Withdraw, error_of
from headwise.runtime.protocol.request import FinishReason, OutputDelta

log = logging.getLogger(__name__)

MAX_REROUTES = 3
"""Most engines that one request may lose and still continue. A request that kills engines must not kill all."""


class ServedCalls:
    """Owned by the I/O thread. When an engine is lost, its requests continue on another engine, behind the tokens that
    were delivered.
    """

    def __init__(self, connections: Connections, clock: Callable[[], float]) -> None:
        self._connections, self._clock = connections, clock
        self._calls: dict[str, Call] = {}  # those that engines serve, by request id
        self._has_told = False  # that calls wait, since the last one that found an engine

    # ---- from the scheduler ----

    def take_ticket(self, ticket: Ticket) -> None:
        """A call has an engine: submit it there."""
        call = self._connections.scheduler.answered(ticket.key)
        if call is None:
            return
        self._has_told = False
        engine, request_id = self._connections.engine(ticket.endpoint), ticket.request.request_id
        self._calls[request_id] = call
        engine.wait_for(request_id, call, self._clock())
        call.submit(ticket.request, engine)

    def take_waits(self, peer: Peer, waits: Waits) -> None:
        """A call has no engine yet, and why."""
        call = peer.awaiting.get(waits.key)
        if not isinstance(call, Call):
            return
        if not self._has_told:
            log.warning("%s", waits.reason)
        self._has_told, call.waits = True, waits.reason

    # ---- from engines ----

    def take_delta(self, peer: Peer, delta: OutputDelta) -> None:
        """Tokens have come, or a call is over."""
        call = self._calls.get(delta.request_id)
        if call is None or call.engine is not peer:
            return
        if delta.finish_reason is FinishReason.ERROR:
            self._end(call, EngineDiedError(delta.error or "the engine failed"))
        elif delta.finish_reason is FinishReason.ABORT:
            self._end(call, RequestAbortedError(f"request {call.name} was aborted by the engine"))
        else:
            if delta.finish_reason is not None:
                self._detach(call)
            call.take(delta)

    def take_failure(self, peer: Peer, failed: Failed) -> None:
        """A peer refuses a call or a question; or, if it names none, everybody."""
        call = self._calls.get(failed.request_id)
        if call is not None and call.engine is peer:
            error = error_of(failed)
            if isinstance(error, EmbedsLackingError):
                call.needs_all = True
                self._reroute(call, error, was_served=False, is_lost=False)
            elif isinstance(error, EngineDiedError | RequestAbortedError):
                is_sent_away = failed.key != 0 or isinstance(error, EngineLeavingError)  # it killed nobody
                self._reroute(call, error, was_served=not is_sent_away)
            else:
                self._end(call, error)
        elif failed.key:
            what = peer.answered(failed.key)
            if what is not None:
                deliver_error(what, error_of(failed))
        elif not failed.request_id:
            error = error_of(failed)
            self._connections.fail(peer, error)
            peer.has_answered &= not isinstance(error, DeploymentError)  # it has stopped, and is not restarted

    def lost(self, call: Call, error: HeadwiseError, is_lost: bool) -> None:
        """The engine that served a call is given up. is_lost: False: only the relay to it is lost"""
        self.abort(call)
        self._reroute(call, error, was_served=is_lost, is_lost=is_lost)

    def _reroute(self, call: Call, error: HeadwiseError, was_served: bool = True, is_lost: bool = True) -> None:
        """Continue a call on another engine. If it has lost too many engines, it ends with ``error`` instead.

        is_lost: False: it may continue on the same engine, to which only the relay was lost
        """
        call.is_in_doubt = was_served and call.engine is not None and call.engine.is_relayed
        call.engines_lost += was_served
        if call.engines_lost > MAX_REROUTES:
            self._end(call, error)
            return
        self._detach(call)
        self._connections.ask(self._connections.scheduler, call, lambda key: call.reroute(key, is_lost))

    # ---- the end ----

    def cancel(self, call: Call) -> None:
        """End a call with a `RequestAbortedError`, wherever it is; nothing if it is over."""
        scheduler = self._connections.scheduler
        if scheduler.answered(call.key) is not None:
            scheduler.send(Withdraw(call.key))
            call.deliver(RequestAbortedError("the request was cancelled"))
        elif call.is_encoding:
            call.is_encoding = False
            call.end_encoding()
            call.deliver(RequestAbortedError("the request was cancelled"))
        elif self._is_served(call):
            self.abort(call)
            self._end(call, RequestAbortedError(f"request {call.name} was cancelled"))

    def abort(self, call: Call) -> None:
        """Tell a call's engine that it is not wanted any more."""
        if call.engine is not None and call.request is not None:
            call.engine.send(Abort(call.request.request_id))

    def _is_served(self, call: Call) -> bool:
        return call.request is not None and self._calls.get(call.request.request_id) is call

    def _detach(self, call: Call) -> None:
        """Expect nothing more from a call's engine."""
        if call.request is not None:
            self._calls.pop(call.request.request_id, None)
            if call.engine is not None:
                call.engine.answered(call.request.request_id)
                call.engine.embeds.end(call.request.request_id)

    def _end(self, call: Call, error: HeadwiseError) -> None:
        self._detach(call)
        call.deliver(error)
