"""Whom a client talks to, and the calls that it has with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import Reroute, Route, Submit
from headwise.runtime.protocol.request import GenerateRequest, OutputDelta

if TYPE_CHECKING:
    import zmq

Event = OutputDelta | HeadwiseError
"""What a call hears: deltas, of which one with a finish reason is the last, or an error, which is the last too."""

LAST_WORDS_MS = 100
"""Time that what was sent last has to leave a socket that is closed."""


@dataclass(eq=False)
class Call:
    """One request from route to last delta. ``deliver`` is called on the I/O thread.

    Touched by the I/O thread only, once it was started.

    key:      of the latest question to the scheduler
    request:  as it was submitted to ``engine``; its id differs between engines, so that nothing that is said of an
              earlier attempt can be taken for the present one
    name:     the id by which the caller knows the request
    produced: tokens that were delivered
    lost:     engines that were lost with the request
    """

    route: Route
    deliver: Callable[[Event], None]
    key: int = 0
    request: GenerateRequest | None = None
    engine: Peer | None = None
    name: str = ""
    produced: list[int] = field(default_factory=list)
    attempts: int = 0
    lost: int = 0

    def submit(self, request: GenerateRequest, engine: Peer) -> Submit:
        """The message that has the engine go on with the request."""
        self.name = self.name or request.request_id
        self.request, self.engine = request, engine
        return Submit(self.key, request)

    def reroute(self, key: int) -> Reroute:
        """The message that asks for another engine than the present one, which is left."""
        assert self.request is not None
        assert self.engine is not None
        self.attempts += 1
        request = replace(
            self.request, request_id=f"{self.name}~{self.attempts}", output_token_ids=tuple(self.produced)
        )
        lost, self.engine, self.request, self.key = self.engine.endpoint, None, request, key
        return Reroute(key, request, lost)

    def take(self, delta: OutputDelta) -> None:
        """Deliver a delta under the name that the caller knows."""
        self.produced += delta.token_ids
        self.deliver(delta if delta.request_id == self.name else replace(delta, request_id=self.name))


class Gathered:
    """The answers of several engines to one question: delivered by name when all are there, or the first error then."""

    def __init__(self, names: Iterable[str], deliver: Callable[[dict[str, Any] | HeadwiseError], None]) -> None:
        self._answers: dict[str, Any] = {}
        self._missing = set(names)
        self._deliver = deliver

    def take(self, name: str, answer: Any) -> None:
        self._answers[name] = answer
        self._missing.discard(name)
        if not self._missing:
            errors = (answer for answer in self._answers.values() if isinstance(answer, HeadwiseError))
            self._deliver(next(errors, self._answers))


class Peer:
    """A scheduler or an engine: the connection to it, and what is awaited of it.

    awaiting:     what hears the answer, by the question's key; or a `Call`, by its request's id
    heard:        when it last spoke, or the time was awaited from which on it should
    has_answered: whether it ever did
    instance:     who it is; another one has started in its place if this changes
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.awaiting: dict[Any, Any] = {}
        self.heard = self.pinged = 0.0
        self.has_answered = False
        self.instance = ""
        self._context = context
        self._questions: dict[int, bytes] = {}
        self._open()

    def _open(self) -> None:
        import zmq

        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 100)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.socket.connect(self.endpoint)

    # ---- out ----

    def ask(self, key: int, what: Any, question: bytes, now: float) -> None:
        """Send a question; ``what`` awaits the answer."""
        self.wait_for(key, what, now)
        self._questions[key] = question
        self.socket.send(question)

    def wait_for(self, key: Any, what: Any, now: float) -> None:
        """Await an answer; the time to give it starts with the first one awaited."""
        if not self.awaiting:
            self.heard = self.pinged = now
        self.awaiting[key] = what

    def answered(self, key: Any) -> Any:
        """Await no answer to this any more; what did await it, or None."""
        self._questions.pop(key, None)
        return self.awaiting.pop(key, None)

    def ask_again(self) -> None:
        """Send all questions that are not answered to whoever is there now."""
        for question in self._questions.values():
            self.socket.send(question)

    def send(self, message: Any) -> None:
        self.socket.send(wire.encode(message))

    # ---- in ----

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived; raises `WireError` on one that is none."""
        import zmq

        while not self.socket.closed:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield wire.decode(data)

    def lost_connection(self) -> tuple[bool, bool]:
        """Whether there was a connection that has ended, and whether one could not be made, since the last call."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        events = 0
        while self.monitor.poll(0):
            events |= recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
        return bool(events & zmq.EVENT_DISCONNECTED), bool(events & zmq.EVENT_CONNECT_RETRIED)

    def reconnect(self) -> None:
        """Begin anew: whatever is under way to or from the old connection is forgotten."""
        self.close(linger_ms=0)
        self.instance = ""
        self._open()

    def close(self, linger_ms: int = LAST_WORDS_MS) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
