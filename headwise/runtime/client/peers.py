"""A client's connections to the scheduler and the engines, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.runtime.client.embeds_sender import EmbedsSender
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.images import EncodedImage, embeds_of
from headwise.runtime.protocol.messages import Reroute, Route, Submit
from headwise.runtime.protocol.prompt_items import PromptEmbeds, embed_places
from headwise.runtime.protocol.request import GenerateRequest, OutputDelta
from headwise.sockets.curve import ClientKeys, secure_client
from headwise.sockets.pieces import split

if TYPE_CHECKING:
    import zmq

Event = OutputDelta | HeadwiseError
"""What a call delivers: deltas, or an error. An error, or a delta with a finish reason, is the last event."""

CUT_S = 1.0
"""A server that cuts off every handshake for so long has another key: a server that starts takes no connections yet."""
_WANTS_KEYS = (
    "it wants keys: give Client(..., keys=ClientKeys(SERVER_KEY, API_KEY)), or --server-key and --client-key-file"
)

LAST_WORDS_MS = 100
"""Time for the last messages to be sent when a socket is closed."""


@dataclass(eq=False)
class Call:
    """One request, from the route to the last delta. ``tell`` is called on the I/O thread, with each event.

    Once started, only the I/O thread uses it, but for ``prompt`` and ``waits``.

    key:      of the latest question to the scheduler
    embeds:   of the prompt's items: each engine that serves the request gets them, and nobody else. Of encoded images
              once the request is known
    files:    of the chat's images, to be encoded before it is routed
    encoded:  what stands for them, once that is known
    is_encoding: whether that is waited for
    end_encoding: ends that
    request:  as submitted to ``engine``, but for the embeddings. Each attempt has its own request id, so that a late
              message about an earlier attempt is not taken for one about the present attempt
    name:     the id by which the caller knows the request
    prompt:   the token ids of the prompt, once the scheduler has told them
    produced: the delivered tokens
    prompt_told: tokens of the prompt whose log-probabilities were delivered
    engines_lost: how many engines were lost while they served the request
    waits:    why no engine was found yet, in words, if the scheduler has said so. Read by any thread
    needs_all: whether an engine is to want all embeddings, as one lacked some that it did not want
    is_in_doubt: whether the last one counted may live, and only the relay to it was lost
    """

    route: Route
    tell: Callable[[Event], None]
    embeds: Sequence[PromptEmbeds] = ()
    files: Sequence[ImageFile] = ()
    encoded: Sequence[EncodedImage] = ()
    is_encoding: bool = False
    end_encoding: Callable[[], None] = lambda: None
    key: int = 0
    request: GenerateRequest | None = None
    engine: Peer | None = None
    name: str = ""
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    produced: list[int] = field(default_factory=list)
    prompt_told: int = 0
    attempts: int = 0
    engines_lost: int = 0
    waits: str = ""
    needs_all: bool = False
    is_in_doubt: bool = False

    def submit(self, request: GenerateRequest, engine: Peer) -> None:
        """Give the request to an engine; its embeddings follow."""
        self.name = self.name or request.request_id
        self.request, self.engine, self.is_in_doubt, self.waits = request, engine, False, ""
        self.prompt = request.prompt_token_ids
        if self.encoded:
            self.embeds = embeds_of(request, self.encoded)
        engine.send(Submit(self.key, request, embed_places(self.embeds), self.needs_all))
        engine.embeds.begin(request.request_id, self.embeds)

    def reroute(self, key: int, is_lost: bool) -> Reroute:
        """The message that asks for an engine: another one than the present one, if that is lost."""
        assert self.request is not None
        assert self.engine is not None
        self.attempts += 1
        request = replace(
            self.request,
            request_id=f"{self.name}~{self.attempts}",
            output_token_ids=tuple(self.produced),
            prompt_told=self.prompt_told,
        )
        lost, self.engine, self.request, self.key = self.engine.endpoint, None, request, key
        return Reroute(key, request, lost if is_lost else "")

    def deliver(self, event: Event) -> None:
        """Tell of an event. With the last one, nobody gets the embeddings any more."""
        if isinstance(event, HeadwiseError) or event.finish_reason is not None:
            self.embeds = self.encoded = ()
        self.tell(event)

    def take(self, delta: OutputDelta) -> None:
        """Deliver a delta under the id that the caller knows."""
        self.produced += delta.token_ids
        self.prompt_told += len(delta.prompt_logprobs)
        self.deliver(delta if delta.request_id == self.name else replace(delta, request_id=self.name))


class GatheredAnswers:
    """Collects the answers of several engines. When all are there, delivers them by name, or the first error."""

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
    """The connection to a scheduler or an engine, and the answers that are awaited from it.

    awaiting:     by a question's key, the function that gets the answer (or its `Call`); by a request's id, its `Call`
    heard:        when it last sent something, or when the first awaited question was asked, if that is later
    has_answered: whether it ever sent something
    instance:     identifies the process; if it changes, the process was replaced
    is_made:      whether there is a connection, on which both sides have said hello
    refusal:      why the other side does not take this client; empty: nothing is known
    is_trial:     whether messages are held back until there is one, so that they can go another way instead (`go_by`)
    relay:        the scheduler whose relay it leads through, if it leads through one
    embeds:       on their way to it
    """

    _refused_at: float | None = None  # since when every attempt to connect has failed

    _cut_since: float | None = None  # since when every handshake has been cut off

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ClientKeys | None = None,
        address: str = "",
        is_trial: bool = False,
    ) -> None:
        """
        keys:    with which to connect; None: in the clear
        address: where to connect to, if not to ``endpoint``
        """
        self.endpoint = endpoint
        self._keys = keys
        self.refusal = ""
        self._address = address or endpoint
        self.is_trial = is_trial
        self.relay = ""
        self.embeds = EmbedsSender()
        self._held: list[bytes] = []
        self.awaiting: dict[Any, Any] = {}
        self.heard = self.pinged = 0.0
        self.has_answered = False
        self.instance = ""
        self._context = context
        self._questions: dict[int, bytes] = {}
        self._open()

    def _open(self) -> None:
        import zmq

        self.is_made = False
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 100)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.IPV6, "[" in self._address)  # not for names: they may lead to both, and one listens
        secure_client(self.socket, self._keys)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        handshakes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        handshakes |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self.monitor = self.socket.get_monitor_socket(events | handshakes)
        self.socket.connect(self._address)

    # ---- out ----

    def ask(self, key: int, what: Any, question: bytes, now: float) -> None:
        """Send a question; ``what`` gets the answer."""
        if self.refusal:  # nothing goes over this connection any more; what is there may be another deployment now
            self.reconnect()
            self.refusal, self._cut_since = "", None
        self.wait_for(key, what, now)
        self._questions[key] = question
        self._send(question)

    def wait_for(self, key: Any, what: Any, now: float) -> None:
        """Await an answer. The timeout starts with the first one awaited."""
        if not self.awaiting:
            self.heard = self.pinged = now
        self.awaiting[key] = what

    def answered(self, key: Any) -> Any:
        """Stop waiting for this answer. Returns what waited for it, or None."""
        self._questions.pop(key, None)
        return self.awaiting.pop(key, None)

    def ask_again(self) -> None:
        """Send all open questions again, to the process that is there now."""
        for question in self._questions.values():
            self._send(question)

    def send(self, message: Any) -> None:
        self._send(wire.encode(message))

    def send_embeds(self) -> None:
        """Send the parts of embeddings that are due."""
        for part in self.embeds.due():
            self.send(part)

    def _send(self, data: bytes) -> None:
        import zmq

        if self.is_trial:
            self._held.append(data)
            return
        try:
            for piece in split(data):
                self.socket.send(piece, zmq.NOBLOCK)
        except zmq.Again:  # refused for its keys: libzmq has ended the connection for good, as `connection_events` tell
            pass

    # ---- in ----

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived; raises `WireError` for a malformed one."""
        import zmq

        while not self.socket.closed:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield wire.decode(data)

    def connection_events(self, now: float) -> tuple[bool, bool]:
        """Whether, since the last call, a connection has ended, and whether one was refused."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        events = 0
        while self.monitor.poll(0):
            told = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            event = told["event"]
            events |= event
            if event == zmq.EVENT_CONNECTED:
                self._refused_at = None
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_made, self._cut_since = True, None
                self._end_trial()
            elif event == zmq.EVENT_CONNECT_RETRIED and self._refused_at is None:
                self._refused_at = now
            else:
                self._note_handshake(event, told["value"], now)
        return bool(events & zmq.EVENT_DISCONNECTED), bool(events & zmq.EVENT_CONNECT_RETRIED)

    def _note_handshake(self, event: int, detail: int, now: float) -> None:
        """Whether a handshake failed for its keys. One that is only cut off may succeed the next time."""
        import zmq

        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = "it does not know this API key"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and detail == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refusal = _WANTS_KEYS if self._keys is None else "it has no keys: connect without"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._keys is not None and not self.has_answered:
            self._cut_since = now if self._cut_since is None else self._cut_since
            if now - self._cut_since > CUT_S:
                self.refusal = "it hangs up: its server key is another one, or it is no deployment"

    def refused_s(self, now: float) -> float:
        """Seconds for which every attempt to connect has failed; 0 if the last one has not."""
        return 0.0 if self._refused_at is None else now - self._refused_at

    def reconnect(self) -> None:
        """Open a new connection. Messages that are under way on the old one are lost."""
        self.close(linger_ms=0)
        self.instance = ""
        self._open()

    def move(self, endpoint: str) -> None:
        """The process that answers is at another endpoint now."""
        self.endpoint = self._address = endpoint
        self._refused_at = None
        self.reconnect()

    def go_by(self, address: str) -> None:
        """Connect there instead, in a trial. Whatever was sent goes there, and nothing of it has gone elsewhere."""
        self.close(linger_ms=0)
        self._address = address
        self._open()
        self._end_trial()

    @property
    def is_relayed(self) -> bool:
        return self._address != self.endpoint

    def _end_trial(self) -> None:
        self.is_trial = False
        held, self._held = self._held, []
        for data in held:
            self._send(data)

    def close(self, linger_ms: int = LAST_WORDS_MS) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
