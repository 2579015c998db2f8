"""Carries steps from the engine to every worker, and the results back, over ZeroMQ.

    engine   ROUTER, bound            worker   DEALER, connected, identity = rank
             <- WorkerReady                    once, after it connected
             -> BatchRequest                   the same bytes to every rank, several may be queued
             <- StepResult                     one per batch, in order
             <- WorkerFailed                   instead of a result, and the last message

A channel serves one set of workers. After a worker is lost it is closed, and new workers get a new channel.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import EngineDiedError
from headwise.liveness_clock import LivenessClock
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.batch import CHANGE_WEIGHTS, WAKE, BatchRequest, StepResult
from headwise.runtime.protocol.copies import MergedReports
from headwise.runtime.protocol.executor import Worker, death, exports_of_all
from headwise.runtime.protocol.running_step import StepRunner
from headwise.runtime.protocol.shared_rows import MemoryProbe, SharedRowReader, can_map
from headwise.runtime.protocol.step_limits import Limit, StepLimits, Work
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import Authenticator, ClientKeys, ServerKeys, secure_client, secure_server

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

MAX_RESULT_BYTES = 256 << 20
"""Most bytes of a worker's message. Only workers reach the channel, where its socket lies in the user's own directory,
or is encrypted."""

_IPC = "ipc://"
_SLICE_S = 0.1
"""Longest wait before the loop checks again whether a worker was lost, or a stop was asked for."""


@wire.register
@dataclass(frozen=True)
class WorkerReady:
    """A worker's first message: it is connected and ready for steps, with so many blocks in its pool.

    exports: where its host cache can be read: encoded `ExportAddress`es, the best first
    maps:    whether it can read the engine's memory
    """

    rank: int
    num_blocks: int = 0
    exports: tuple[bytes, ...] = ()
    maps: bool = False


@wire.register
@dataclass(frozen=True)
class WorkerFailed:
    """A worker's last message: after a failure its memory may be inconsistent, so it ends."""

    rank: int
    reason: str


@dataclass
class _Step:
    """A step in flight, and the results that have come, by rank. work: None for a command"""

    step_id: int
    work: Work | None
    limit: Limit
    results: dict[int, StepResult] = field(default_factory=dict)


class ZmqExecutor:
    """The `Executor` whose workers are processes.

    Owned by one thread; only `lost` may be called from any thread.

    endpoint: to bind: ``ipc://PATH``, or ``tcp://HOST:*``; the attribute `endpoint` is the bound one
    size:     ranks
    sampling: the rank that samples
    step_timeout_s: seconds after which the oldest step in flight counts as lost; see `StepLimits` for shorter limits
    start_timeout_s: the same for a command, which may load the model; None: as for a step
    load_timeout_s: seconds that workers wait for blocks from the host
    keys:     whom to let connect over TCP; None: whoever does, and in the clear
    """

    def __init__(
        self,
        endpoint: str,
        size: int,
        step_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        start_timeout_s: float | None = None,
        load_timeout_s: float = 0.0,
        keys: ServerKeys | None = None,
        sampling: int = 0,
    ) -> None:
        import zmq

        self._context = open_context()
        self._authenticator = None if keys is None else Authenticator(self._context, keys.clients)
        self._socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            secure_server(self._socket, keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_RESULT_BYTES)
        self._socket.bind(endpoint)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        path = _path_of(self.endpoint)
        self._probe = None if path is None else MemoryProbe(path)
        self._ranks = [_identity(rank) for rank in range(size)]
        self._ready: dict[int, WorkerReady] = {}  # by rank
        self._limits = StepLimits(step_timeout_s, load_timeout_s)
        start_timeout_s = step_timeout_s if start_timeout_s is None else start_timeout_s
        self._command_limit = Limit(start_timeout_s, f"start_timeout_s = {start_timeout_s:g} s")
        self._clock = LivenessClock(clock)
        self._steps: deque[_Step] = deque()
        self._head_since = 0.0
        self._copies = MergedReports(size)
        self._lost: str | None = None
        self._sampling = sampling

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets that become readable when `poll` may have a result."""
        return () if self._socket.closed else (self._socket,)

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker is connected; raises `EngineDiedError` if one is lost or late.

        ``check`` is called meanwhile; it raises if it knows that a worker has failed.
        """
        deadline = self._clock() + timeout_s
        while len(self._ready) < len(self._ranks):
            check()
            self._check()
            if self._clock() > deadline:
                missing = sorted(set(range(len(self._ranks))) - set(self._ready))
                raise EngineDiedError(f"rank {missing} did not connect to {self.endpoint} within {timeout_s:g} s")
            self._receive(_SLICE_S)

    @property
    def num_blocks(self) -> int:
        """Blocks in every worker's pool, once they are ready."""
        return min(ready.num_blocks for ready in self._ready.values())

    @property
    def exports(self) -> tuple[tuple[bytes, ...], ...]:
        """See `Executor.exports`."""
        return exports_of_all([self._ready[rank].exports for rank in range(len(self._ranks)) if rank in self._ready])

    @property
    def shares_memory(self) -> bool:
        """See `Executor.shares_memory`."""
        return len(self._ready) == len(self._ranks) and all(ready.maps for ready in self._ready.values())

    def submit(self, batch: BatchRequest) -> None:
        import zmq

        self._check()
        data = wire.encode(batch)
        for rank, identity in enumerate(self._ranks):
            try:
                self._socket.send_multipart((identity, data), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._drain()  # it may have said why it went
                self.lost(f"rank {rank} cannot be reached for step {batch.step_id}: {error}")
                self._check()
        if not self._steps:
            self._head_since = self._clock()
        if batch.command in (WAKE, CHANGE_WEIGHTS):
            self._limits.forget()
        work, limit = (None, self._command_limit) if batch.command else self._limits.sent(batch)
        self._steps.append(_Step(batch.step_id, work, limit))

    def poll(self, timeout_s: float | None) -> StepResult | None:
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._drain()
            self._check()
            if self._steps and len(self._steps[0].results) == len(self._ranks):
                self._head_since = self._clock()
                return self._take(self._steps.popleft())
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - self._clock())
            if left <= 0:
                return None
            self._socket.poll(math.ceil(left * 1000))

    def _take(self, step: _Step) -> StepResult:
        result = self._merge(step)
        if step.work is not None:
            self._limits.came_back(step.work, result.compute_s)
        return result

    def lost(self, reason: str) -> None:
        """Declare the workers dead; from now on `submit` and `poll` raise. The first reason stays."""
        if self._lost is None:
            self._lost = reason

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        if self._probe is not None:
            self._probe.close()
        close_context(self._context)

    def _check(self) -> None:
        if self._lost is None and self._steps and self._clock() - self._head_since > self._steps[0].limit.seconds:
            step = self._steps[0]
            silent = sorted(set(range(len(self._ranks))) - set(step.results))
            self._lost = f"step {step.step_id} did not end within {step.limit.text} on rank {silent}"
        if self._lost is not None:
            raise EngineDiedError(self._lost)

    def _drain(self) -> None:
        while self._receive(0):
            pass

    def _receive(self, timeout_s: float) -> bool:
        """Handle one message; False if none comes in time."""
        import zmq

        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return False
        identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 1:
            self.lost(f"{identity!r} sent a message of {len(frames)} frames; a worker's has one")
            return True
        message = wire.decode(frames[0], WorkerReady, StepResult, WorkerFailed)
        rank = self._ranks.index(identity) if identity in self._ranks else -1
        if message.rank != rank:
            self.lost(f"a worker sent a message as rank {message.rank} over the connection of {identity!r}")
        elif isinstance(message, WorkerReady):
            self._ready[rank] = message
        elif isinstance(message, WorkerFailed):
            self.lost(message.reason)
        else:
            self._file(message)
        return True

    def _file(self, result: StepResult) -> None:
        for step in self._steps:
            if step.step_id == result.step_id:
                step.results[result.rank] = result
                return
        self.lost(f"rank {result.rank} answered step {result.step_id}, which is not in flight")

    def _merge(self, step: _Step) -> StepResult:
        """One result: tokens of the rank that samples, the slowest one's time, copies that all ranks have made."""
        results = [step.results[rank] for rank in range(len(self._ranks))]
        sampled = results[self._sampling]
        errors = [r.error if len(results) == 1 else f"rank {r.rank}: {r.error}" for r in results if r.error]
        if step.work is None and 0 < len(errors) < len(results):
            self.lost(f"only some ranks have obeyed in step {step.step_id}: {'; '.join(errors)}")
            self._check()
        return StepResult(
            step_id=step.step_id,
            rank=0,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            broken=sampled.broken,
            copies=self._copies.merge([r.copies for r in results]),
            forgotten=max(r.forgotten for r in results),
            compute_s=max(r.compute_s for r in results),
            error="; ".join(errors) or None,
            prompt_logprobs=sampled.prompt_logprobs,
            accepted=sampled.accepted,
            proposed=sampled.proposed,
        )


def serve_steps(
    worker: Worker, endpoint: str, rank: int, should_stop: Callable[[], bool], keys: ClientKeys | None = None
) -> None:
    """Run the worker's side until ``should_stop``: receive, begin, reply, in order. keys: of a channel that has some

    An error of a step is sent to the engine and then raised. Later steps are not served, however many are queued.
    """
    import zmq

    context = open_context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, _identity(rank))
        secure_client(socket, keys)
        socket.connect(endpoint)
        path = _path_of(endpoint)
        maps = path is not None and can_map(path)
        socket.send(wire.encode(WorkerReady(rank, worker.num_blocks, worker.exports, maps)))
        _serve(worker, socket, rank, should_stop)
    finally:
        close_context(context, linger_ms=200)


def _serve(worker: Worker, socket: zmq.Socket[bytes], rank: int, should_stop: Callable[[], bool]) -> None:
    embeds = SharedRowReader()

    def take(wait_s: float) -> BatchRequest | None:
        if not socket.poll(math.ceil(wait_s * 1000)):
            embeds.sweep()
            return None
        return embeds.resolved(wire.decode(socket.recv(), BatchRequest))

    runner = StepRunner(worker.begin, take, lambda result: socket.send(wire.encode(result)))
    while not should_stop():
        try:
            runner.turn(_SLICE_S)
        except Exception as error:
            failed = failure_of(error, rank)
            socket.send(wire.encode(failed))
            raise EngineDiedError(failed.reason) from error


def failure_of(error: Exception, rank: int) -> WorkerFailed:
    """What to tell of an error that a rank's worker raised, which is not to be given another batch."""
    log.error("rank %d failed", rank, exc_info=error)
    return WorkerFailed(rank, str(death(error)))


def _path_of(endpoint: str) -> Path | None:
    """Of a socket of one machine."""
    return Path(endpoint.removeprefix(_IPC)) if endpoint.startswith(_IPC) else None


def _identity(rank: int) -> bytes:
    return f"rank-{rank}".encode()
