"""The engine behind a socket: one thread that owns an `EngineCore` and talks to its clients.

The thread never waits for a client: what a client does not read in time is dropped with its requests. The core can
be replaced while the server runs (new workers after a lost one); requests that arrive meanwhile are sent elsewhere.
"""

from __future__ import annotations

import hmac
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import (
    DeploymentError,
    EngineDiedError,
    HeadwiseError,
    InvalidRequestError,
    OverloadedError,
)
from headwise.liveness_clock import LivenessClock
from headwise.runtime.engine.base import Core, HasFileno
from headwise.runtime.engine.client_requests import ClientRequests
from headwise.runtime.engine.peers.base import Ask, Takers
from headwise.runtime.engine.peers.connections import PeerConnections
from headwise.runtime.engine.reports import EngineReports, Reporting
from headwise.runtime.engine.weights_follower import WeightsFollower
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.lease_messages import AskLease, EndLease, LeaseEmbeds, Offer, RenewLease
from headwise.runtime.protocol.messages import (
    CLIENT_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    Abort,
    EmbedsPart,
    EngineLoad,
    EngineStatus,
    Failed,
    GetStats,
    Operate,
    Operated,
    Ping,
    Stats,
    Submit,
    failure,
)
from headwise.runtime.protocol.request import OutputDelta
from headwise.runtime.protocol.request_checks import check_request
from headwise.runtime.protocol.users import NO_USERS, LetIn, Users
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ServerKeys, secure_client
from headwise.sockets.listener import Listener

if TYPE_CHECKING:
    import zmq

    from headwise.runtime.engine.operations import Operation
    from headwise.storage.index.flusher import Flusher

log = logging.getLogger(__name__)

IDLE_S = 0.05
"""Longest wait for a message: stops, lost workers and silent clients are noticed that fast."""

_BURST, _BURST_S = 64, 0.005
"""Messages taken in before the next step, and the time after which no further one is begun: clients that flood the
engine, and those whose messages take long, keep the others' tokens waiting for so long and no longer."""

_STOPPING = DeploymentError("the deployment is stopping")
_MESSAGES = (Submit, EmbedsPart, Abort, GetStats, Operate, Ping, AskLease, LeaseEmbeds, RenewLease, EndLease, Offer)


@dataclass
class _Leave:
    """The engine is to end. until: when it does not wait any longer; on_left: called once it serves nobody."""

    until: float
    on_left: Callable[[], None]
    is_over: bool = False


class EngineServer:
    """Serves clients at ``endpoint`` (the one bound, where port ``*`` was asked for).

    reporting:  tell this scheduler of the engine; None: nobody
    flusher:    gets the cache's index updates; used by the server's thread only
    epoch:      of the cache that the first core starts with, and that the flusher has; higher with every new core
    most_of_one: requests that a tenant, or a client, may have here: who goes by way of the scheduler, which sends no
                more than engines have room for, never has so many
    send_queue: messages a client may leave unread before it is dropped
    keys:       only clients with these keys may connect, encrypted; None: all may
    users:      that may connect, until the scheduler tells of others
    on_died:    called with the error, on the server's thread, when the core died; give a new one by `attach`
    loop_count: counts up for as long as the server's thread gets on
    peers:      other engines, for a core that has blocks to fetch from them; None: nobody tells of them
    follower:   has the core have the weights that the scheduler wants; None: it keeps its own

    Raises `zmq.ZMQError` if it cannot listen there.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        reporting: Reporting | None = None,
        flusher: Flusher | None = None,
        epoch: int = 0,
        most_of_one: int = 1 << 31,
        send_queue: int = 1000,
        keys: ServerKeys | None = None,
        users: Users = NO_USERS,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
        follower: WeightsFollower | None = None,
        on_died: Callable[[EngineDiedError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = open_context()
        try:
            self._listener = Listener(
                self._context,
                endpoint,
                max_message_bytes=MAX_MESSAGE_BYTES,
                send_queue=send_queue,
                keys=keys,
                users=users.by_key,
                clock=clock,
            )
        except Exception:
            close_context(self._context)
            raise
        self.endpoint = self._listener.endpoint
        self.loop_count = 0
        self._burst_clock = clock
        self._clock = LivenessClock(clock)
        self._reports = None if reporting is None else EngineReports(self._context, reporting, self._clock)
        self._flusher = flusher
        self._users = LetIn(self._listener, users)
        self._follower = follower
        self._epoch = epoch
        self._on_died = on_died
        self._requests = ClientRequests(
            self._listener.send,
            self._clock,
            self._reports,
            instance=uuid.uuid4().hex,
            most_of_one=most_of_one,
            timeout_s=client_timeout_s,
        )
        self._core_sockets: Sequence[zmq.Socket[bytes] | HasFileno] = ()
        self.peers = None if self._reports is None else self._open_peers(self._reports)
        self._operations: list[tuple[bytes, int, Operation]] = []  # under way, and who waits for their end
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._leave: _Leave | None = None
        self._malformed = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-engine", daemon=True)

    def _open_peers(self, reports: EngineReports) -> PeerConnections:
        return PeerConnections(
            self._context,
            reports.reporting.engine,
            reports.reporting.secret,
            directory=lambda: reports.directory,
            answer=self._requests.tell,
            clock=self._clock,
            prepare=lambda socket: secure_client(socket, reports.reporting.keys),
        )

    # ---- from any thread ----

    def start(self) -> None:
        self._thread.start()

    def attach(self, core: Core, sockets: Sequence[zmq.Socket[bytes] | HasFileno] = ()) -> None:
        """Serve with this core from now on; ``sockets`` become readable when its `step` has something to do."""
        self._commands.put(lambda: self._attach(core, sockets))

    def call(self, command: Callable[[], None]) -> None:
        """Run ``command`` on the server's thread, between steps."""
        self._commands.put(command)

    def fail(self, error: EngineDiedError) -> None:
        """The core is dead, although it may not have noticed: end its requests, and call ``on_died``."""
        self._commands.put(lambda: self._die(error))

    def fault(self, text: str) -> None:
        """Have the scheduler be told of something that went wrong."""
        self._commands.put(lambda: self._fault(text))

    def follow(self, scheduler: str, store: str) -> None:
        """The scheduler and the store have moved to these endpoints."""
        self._commands.put(lambda: self._follow(scheduler, store))

    def leave(
        self,
        timeout_s: float,
        hashes: list[bytes] | None,
        on_left: Callable[[], None],
        takers: Mapping[str, int] | None = None,
        storable: int | None = None,
    ) -> None:
        """Take no new requests from now on. Those that have not begun are sent away at once: other engines serve them.
        The others end here, or are sent away after ``timeout_s``. Meanwhile ``hashes``, the most valuable first, go to
        storage and to ``takers``, and then what was computed since; None: all that is cached. ``on_left`` is called on
        the server's thread when all that is done, or after ``timeout_s``. A second call changes nothing.

        takers: engines that stay, and how many token blocks of their hosts they may evict for it
        storable: how many of ``hashes``, the first ones, storage gets; None: all
        """
        self._commands.put(lambda: self._begin_to_leave(timeout_s, hashes, on_left, takers or {}, storable))

    def stop(self) -> None:
        """End the thread and close the sockets; live requests get an error."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()
        close_context(self._context, linger_ms=100)

    # ---- the loop ----

    def _run(self) -> None:
        import zmq

        busy = False
        while not self._stopping.is_set():
            poller = zmq.Poller()
            for socket in (self._listener.socket, *self._core_sockets, *self._peer_sockets):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(0 if busy else int(IDLE_S * 1000)))
            self._run_commands()
            self._take_messages()
            # A step may have been collected without an output: as long as something happens, look again at once.
            busy = self._step() or bool(ready)
            self._answer_operations()
            self._follow_weights()
            self._go_on_leaving()
            self._requests.drop_silent()
            self._requests.end_stalled()
            if self.peers is not None:
                self.peers.service()
            if self._reports is not None:
                self._reports.service(self._status)
                self._users.follow(self._reports.users)
            if self._flusher is not None:
                self._flusher.service()
                self._epoch = self._flusher.epoch  # it may have had to exceed what the index knows
            self.loop_count += 1
        self._end_all(_STOPPING)

    def _follow_weights(self) -> None:
        if self._follower is None or self._reports is None or self._leave is not None:
            return
        if self._follower.follow(self._reports.wanted, self._core):
            self._reports.hurry()

    @property
    def _core(self) -> Core | None:
        return self._requests.core

    @property
    def _peer_sockets(self) -> list[zmq.Socket[bytes]]:
        return [] if self.peers is None else self.peers.sockets

    def _run_commands(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _step(self) -> bool:
        if self._core is None:
            return False
        deltas: list[OutputDelta] = []
        try:
            self._core.serve_peers()
            if self._core.has_work():
                deltas = self._core.step(0)
            if self._flusher is not None:
                self._flusher.flush(self._core.drain_index_updates())
        except EngineDiedError as error:
            self._die(error)
        except Exception as error:
            log.exception("the engine failed")
            self._die(EngineDiedError(f"the engine failed: {type(error).__name__}: {error}"))
        self._requests.deliver(deltas)
        self._requests.end_lacking()
        return bool(deltas)

    def _attach(self, core: Core, sockets: Sequence[zmq.Socket[bytes] | HasFileno]) -> None:
        core.share_by(self._users.share_of)
        self._requests.core, self._core_sockets = core, sockets
        if self._reports is not None:
            self._reports.hurry()

    def _die(self, error: EngineDiedError) -> None:
        """The core is no more. The scheduler hears of it first: its clients will ask it where to go now."""
        if self._core is None:
            return
        core, self._requests.core, self._core_sockets = self._core, None, ()
        core.fail_all(str(error))
        if self._follower is not None:
            self._follower.failed(error)
        self._on_died(error)
        self._forget_cache()
        self._fault(str(error))
        if self._reports is not None:
            self._reports.service(self._status)
        self._end_all(error)

    def _forget_cache(self) -> None:
        """What the index knows of the engine is void at once, not only when there are workers again."""
        self._epoch = max(self._epoch + 1, time.time_ns())
        if self._flusher is not None:
            self._flusher.restart(self._epoch)
            self._flusher.service()

    def _end_all(self, error: HeadwiseError) -> None:
        """End every request with ``error``. Deltas are not sent: each request gets the error itself."""
        operations, self._operations = self._operations, []
        for identity, key, _ in operations:
            self._requests.tell(identity, failure(error, key))
        for request_id in self._requests.ids:
            self._requests.end(request_id, error)

    def _follow(self, scheduler: str, store: str) -> None:
        if self._reports is not None:
            self._reports.follow(scheduler)
        if self._flusher is not None:
            self._flusher.follow(store)

    # ---- leaving ----

    def _begin_to_leave(
        self,
        timeout_s: float,
        hashes: list[bytes] | None,
        on_left: Callable[[], None],
        takers: Mapping[str, int],
        storable: int | None,
    ) -> None:
        if self._leave is not None:
            return
        self._leave = _Leave(self._clock() + timeout_s, on_left)
        self._requests.is_leaving = True
        if self._reports is not None:  # the scheduler hears of it first: clients will ask it where to go now
            self._reports.hurry()
            self._reports.service(self._status)
        self._requests.send_away_not_begun()
        if self._core is not None:
            name = "" if self._reports is None else self._reports.reporting.engine
            self._core.hand_over(hashes, Takers(name, self._epoch, takers) if takers else None, storable)

    def _go_on_leaving(self) -> None:
        leave = self._leave
        if leave is None or leave.is_over:
            return
        if self._clock() >= leave.until:
            self._requests.send_away(self._requests.ids)
        elif len(self._requests) or (self._core is not None and self._core.is_handing_over):
            return
        leave.is_over = True
        leave.on_left()

    # ---- messages in ----

    def _take_messages(self) -> None:
        until = self._burst_clock() + _BURST_S
        for identity, frames in self._listener.receive(_BURST):
            self._requests.heard(identity)
            try:
                if len(frames) != 1:
                    raise wire.WireError(f"a message must be one frame, got {len(frames)}")
                self._take(identity, self._users.as_sent(wire.decode(frames[0], *_MESSAGES)))
            except HeadwiseError as error:
                self._malformed += 1
                self._requests.tell(identity, failure(error))
            if self._burst_clock() >= until:
                break
        for identity in self._listener.ended():
            self._requests.drop(identity, "is gone")

    def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Submit):
            self._requests.submit(identity, message)
        elif isinstance(message, EmbedsPart):
            self._requests.take_embeds(identity, message)
        elif isinstance(message, Abort):
            self._requests.abort(identity, message.request_id)
        elif isinstance(message, GetStats):
            self._requests.tell(identity, Stats(message.key, self.stats()))
        elif isinstance(message, Operate):
            self._operate(identity, message)
        elif isinstance(message, (AskLease, LeaseEmbeds, RenewLease, EndLease, Offer)):
            self._lease(identity, message)
        elif isinstance(message, Failed):
            self._requests.tell(identity, message)
        else:
            self._requests.ping(identity, message)

    def _operate(self, identity: bytes, message: Operate) -> None:
        try:
            if self._core is None:
                raise OverloadedError(f"the engine is starting; try to {message.action} it later")
            self._operations.append((identity, message.key, self._core.operate(message.action, message.tier)))
        except HeadwiseError as error:
            self._requests.tell(identity, failure(error, message.key))

    def _lease(self, identity: bytes, message: Ask) -> None:
        """Another engine asks for blocks. Who does not know the deployment's secret is told nothing of them."""
        secret = "" if self._reports is None else self._reports.reporting.secret
        if not secret or not hmac.compare_digest(message.secret.encode(), secret.encode()):
            raise InvalidRequestError("only engines of this deployment may ask for its blocks")
        if self._core is None:
            return  # it asks again
        prompt = message.prompt if isinstance(message, AskLease) else None
        begins = prompt is not None or isinstance(message, LeaseEmbeds)
        if prompt is not None:
            check_request(prompt)
            if self._reports is not None:
                self._reports.received(prompt.request_id)
        if message.epoch == self._epoch and not (self._leave is not None and begins):
            self._core.asked(identity, message)
        else:
            self._core.refuse(identity, message)

    # ---- messages out ----

    def _answer_operations(self) -> None:
        done = [entry for entry in self._operations if entry[2].is_done]
        for identity, key, operation in done:
            self._operations.remove((identity, key, operation))
            if operation.has_emptied_storage and self._flusher is not None:
                self._flusher.emptied()
            self._requests.tell(identity, Operated(key, operation.blocks))
        if done and self._reports is not None:
            self._reports.hurry()

    # ---- the outside ----

    def stats(self) -> dict[str, Any]:
        """The core's statistics and the server's own; for the server's thread."""
        server = {
            "ready": self._core is not None,
            "clients": self._requests.num_clients,
            "malformed": self._malformed,
        }
        return {**(self._core.stats() if self._core is not None else {}), "server": server}

    def _status(self, reporting: Reporting, received: tuple[str, ...], faults: tuple[str, ...]) -> EngineStatus:
        return EngineStatus(
            reporting.secret,
            reporting.engine,
            reporting.advertised(self.endpoint),
            len(self._requests),
            self.stats(),
            address=self.endpoint,
            epoch=self._epoch,
            work=EngineLoad(accepts=False) if self._core is None else self._core.load(),
            received=received,
            faults=faults,
            is_leaving=self._leave is not None,
            tp_size=reporting.tp_size,
            users=self._users.users.version,
            **({} if self._follower is None else self._follower.told),
        )

    def _fault(self, text: str) -> None:
        if self._reports is not None:
            self._reports.fault(text)
