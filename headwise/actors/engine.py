"""The actor of one replica: an engine, its server, and the supervision of its workers."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from headwise import heap
from headwise.actors.addresses import (
    check_reachable,
    engine_host,
    listen_at_free_port,
    ports_in_turn,
    scheduler_host,
)
from headwise.actors.ending import Ending
from headwise.actors.front import About, Front, Keys
from headwise.actors.notice import at_its_node
from headwise.actors.placement import node_address, nodes_of_ranks, this_node
from headwise.actors.remote import remote
from headwise.actors.restarts import Restarts
from headwise.actors.watchdog import Watchdog
from headwise.actors.weights_at_hand import WeightsAtHand
from headwise.actors.worker_group import SOCKETS_PREFIX, WorkerGroup
from headwise.errors import DeploymentError, EngineDiedError, HeadwiseError
from headwise.log_lines import LatestLines, show_log_lines
from headwise.runtime.config.addresses import is_loopback, parse_ports
from headwise.runtime.config.block_storage import SharedBlocks, check_agrees, open_lookup, storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, with_pool
from headwise.runtime.config.new_weights import with_weights
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.engine.reports import Reporting
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.engine.weights_follower import WeightsFollower
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.protocol.weights import FIRST, Weights
from headwise.runtime.worker.memory_check import check_memory
from headwise.sockets.scratch import sweep
from headwise.storage.index.flusher import Flusher
from headwise.storage.index.messages import HASH_BYTES
from headwise.storage.lookup import StorageLookup

log = logging.getLogger(__name__)

_WATCH_S = 1.0
_LAST_WORDS_S = 5.0
"""Time for the driver to learn why the process ends, before it ends."""
_LOOK_S = 0.1
"""Between two looks at whether there are workers again."""
_ROOM_S = 1.0
"""Longest wait for storage to say how much room it has, when the engine is to go."""
_REACH_S = 10.0
"""How long an engine that is started for the first time tries to reach the scheduler."""


@remote(max_concurrency=8)
class Engine:
    """Starts to serve as soon as it is made. `ended` raises when the engine cannot go on, and says why.

    When a worker is lost, the requests move to other engines, and all ranks are started again with an empty cache and
    a new epoch. An engine that loses workers again and again, or cannot start new ones, ends: its node may be bad.
    A server whose thread hangs ends the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        front: Front,
        keys: Keys,
        weights: Weights = FIRST,
        start: int = 0,
    ) -> None:
        """
        front: where scheduler and store are; the index's namespace must be this engine's, too
        weights: those of the deployment now
        start: how many times this engine was started before
        """
        show_log_lines()
        self._lines = LatestLines.kept()
        self._config = config
        self._name = name
        self._placement = ray.util.get_current_placement_group()
        self._front = front
        self._keys = keys
        self._start = start
        self._weights = weights
        self._at_hand = WeightsAtHand(config)
        self._group: WorkerGroup | None = None
        self._server: EngineServer | None = None
        self._flusher: Flusher | None = None
        self._lookup: StorageLookup | None = None
        self._watchdog: Watchdog | None = None
        self._core_died = threading.Event()
        self._leaving = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._ending = Ending()
        self._failure: HeadwiseError | None = None
        self._lost: EngineDiedError | None = None  # why the last group of workers is no more
        self._thread = threading.Thread(target=self._supervise, name="headwise-supervisor", daemon=True)
        self._thread.start()

    # ---- for the driver ----

    def ready(self) -> str:
        """Wait until the engine serves; its endpoint. Raises what keeps it from serving."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self._server is not None
        return self._server.endpoint

    def ended(self) -> None:
        """Return when it is stopped; raises why it cannot go on."""
        self._ending.wait()
        if self._failure is not None:
            raise self._failure

    def about(self) -> About:
        return About(self._front, self._leaving.is_set())

    def follow(self, front: Front) -> None:
        """The scheduler and the store are there from now on. A second time changes nothing."""
        if front == self._front:
            return
        log.warning("%s follows the scheduler to node %s", self._name, front.node)
        self._front = front
        if self._server is not None:
            self._server.follow(self._scheduler_endpoint, front.store_endpoint)

    def log_lines(self, since: int) -> tuple[int, list[tuple[int, str]]]:
        """See `LatestLines.since`; what its stages' first workers log while it starts is among them."""
        return self._lines.since(since)

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank; empty while they are being started."""
        group = self._group
        return [] if group is None else group.pids

    def drain(
        self,
        timeout_s: float,
        sole_blocks: bytes | None,
        takers: Mapping[str, int] | None = None,
        until: float = math.inf,
        worth_storing: int | None = None,
    ) -> None:
        """Begin to leave: see `EngineServer.leave`. The engine ends when it is done, and `ended` returns.

        sole_blocks: hashes of what only this engine has cached, as a run, the most valuable first; None: not known
        takers: engines that stay and take some of it, and how many token blocks each may evict for that
        until: when the node is taken away, as `time.time` counts somewhere
        worth_storing: how many of ``sole_blocks``, the first ones, storage gets even if it is full; None: not known
        """
        self._leaving.set()
        if self._server is None or not self._settled.is_set():
            self._stopping.set()
            return
        hashes = None
        if sole_blocks is not None:
            hashes = [sole_blocks[at : at + HASH_BYTES] for at in range(0, len(sole_blocks), HASH_BYTES)]
        timeout_s = at_its_node(timeout_s, until, time.time())
        room = None if self._lookup is None or worth_storing is None else self._lookup.room(_ROOM_S)
        storable = None if room is None or worth_storing is None else max(room, worth_storing)
        self._server.leave(timeout_s, hashes, self._stopping.set, takers, storable)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    # ---- the supervisor's thread ----

    def _supervise(self) -> None:
        try:
            self._open()
            self._serve()
        except HeadwiseError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("the engine's supervisor failed")
            self._give_up(DeploymentError(f"{self._name} failed: {type(error).__name__}: {error}"))
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
            if self._server is not None:
                self._server.stop()
            if self._flusher is not None:
                if self._leaving.is_set():
                    self._flusher.leave()
                self._flusher.close()
            if self._lookup is not None:
                self._lookup.close()
            self._at_hand.let_go()
            self._settled.set()
            self._ending.come()

    def _open(self) -> None:
        """Open everything that outlives the workers: model, flusher, server and its watchdog."""
        address = engine_host(self._config.host, node_address())
        self._check_scheduler_is_reachable()
        sweep(tempfile.gettempdir(), SOCKETS_PREFIX)
        self._preprocessor = Preprocessor.open(self._config)
        check_agrees(f"{self._name} on node {address}", self._preprocessor.namespace, self._front.namespace)
        self._model_dir = resolve_model(self._config.model, self._config.cache_path)
        assert self._placement is not None, "started in its placement group"
        ranks_here = nodes_of_ranks(self._config, self._placement).count(this_node())
        check_memory(self._config, self._preprocessor.card, ranks_here)
        self._new = NewWeights(self._weights, self._read_weights(self._weights))
        self._lookup = open_lookup(self._config, self._preprocessor.card)
        epoch = time.time_ns()
        lookup, front, keys = self._lookup, self._front, self._keys
        ranks = self._config.tp_size if self._preprocessor.card.tp_sizes else 0
        volume = str if lookup is None else lambda: _volume(lookup.volume, ranks)
        self._flusher = Flusher(self._name, epoch, front.store_endpoint, front.namespace, keys.own, volume=volume)
        reporting = Reporting(
            self._scheduler_endpoint,
            keys.secret,
            self._name,
            self._config.advertise_host,
            keys.own,
            self._config.tp_size,
        )
        flusher = self._flusher
        self._follower = WeightsFollower(self._read_new_weights, self._new, self._have_changed)
        self._server = listen_at_free_port(
            address,
            node_address(),
            ports_in_turn(parse_ports(self._config.engine_ports), self._name),
            lambda endpoint: EngineServer(
                endpoint,
                reporting=reporting,
                flusher=flusher,
                epoch=epoch,
                most_of_one=self._config.most_seqs + 2 * self._config.engine_queue,
                keys=keys.inner,
                users=keys.users,
                follower=self._follower,
                on_died=self._on_died,
            ),
        )
        if self._start:
            self._server.fault("the engine's process was started again")
        heap.settle()
        self._server.start()
        server = self._server
        self._watchdog = Watchdog(lambda: server.loop_count, self._config.engine_timeout_s, self._exit_stuck)
        self._watchdog.start()

    def _read_weights(self, weights: Weights) -> ModelCard:
        """The card with these weights. Raises `ModelError`, `ConfigError`."""
        card = self._preprocessor.card
        if weights == FIRST:
            return card
        self._at_hand.have(weights.model, weights.adapters)
        return with_weights(card, self._config, weights.model, weights.adapters)

    def _read_new_weights(self, weights: Weights) -> ModelCard:
        """The same, once the nodes of all ranks have them, too. Raises likewise."""
        card = self._read_weights(weights)
        while self._config.copy_weights and not self._stopping.wait(_LOOK_S):
            group = self._group
            with suppress(EngineDiedError):  # its successor is asked
                if group is not None:
                    group.have_weights(weights)
                    break
        return card

    def _have_changed(self, new: NewWeights) -> None:
        """On the server's thread: the next workers start with these, too."""
        self._new, group = new, self._group
        if group is not None:
            group.keep_weights(new.weights)
        threading.Thread(target=self._keep, args=(new.weights,), name="headwise-weights", daemon=True).start()

    def _keep(self, weights: Weights) -> None:
        self._at_hand.keep(weights.model, weights.adapters)

    @property
    def _scheduler_endpoint(self) -> str:
        return f"tcp://{scheduler_host(self._config.host, self._front.node)}:{self._front.port}"

    def _check_scheduler_is_reachable(self) -> None:
        """Raise `DeploymentError` if a starting deployment's scheduler cannot be reached from this node.

        An engine that is restarted does not check: the scheduler may be restarting too, and comes back.
        """
        node, port, host = self._front.node, self._front.port, scheduler_host(self._config.host, self._front.node)
        if is_loopback(host) and node_address() != node:
            raise DeploymentError(
                f"{self._name} was placed on node {node_address()}, which cannot reach {host} of node {node}: set host "
                "to 0.0.0.0"
            )
        if self._start:
            return
        try:
            check_reachable(host, port, _REACH_S)
        except OSError as error:
            raise DeploymentError(
                f"{self._name} on node {node_address()} cannot reach the scheduler at {host}:{port}: {error}; set host "
                "to an address that every node reaches, or to 0.0.0.0"
            ) from None

    def _serve(self) -> None:
        """Run one group of workers after the other, until stopped. Raises what keeps the engine from going on."""
        restarts = Restarts()
        while not self._stopping.is_set():
            assert self._placement is not None, "started in its placement group"
            parts = self._placement, self._keys, self._shared_blocks()
            new = self._new
            group = WorkerGroup(self._config, self._model_dir, *parts, None if new.weights == FIRST else new.to_load)
            try:
                group.wait_ready()
                self._attach(group, new)
                self._settled.set()
                self._watch(group)
            finally:
                self._group = None
                group.close()
            if self._lost is not None and self._leaving.is_set():
                return
            if self._lost is not None and restarts.ended(time.monotonic()):
                raise EngineDiedError(f"its workers are lost again and again, the last time: {self._lost}")

    def _shared_blocks(self) -> SharedBlocks:
        return SharedBlocks(
            storage_namespace(self._preprocessor.card, 0), "" if self._lookup is None else self._lookup.volume
        )

    def _attach(self, group: WorkerGroup, new: NewWeights) -> None:
        assert self._server is not None
        card, tokenizer = new.card, self._preprocessor.tokenizer
        card = with_pool(card, self._config, group.executor.num_blocks * card.layout.block_bytes)
        peers = None if self._config.without_peer_loads else self._server.peers
        core = EngineCore(
            self._config, card, tokenizer, group.executor, lookup=self._lookup, peers=peers, weights=new.weights
        )
        self._core_died.clear()
        wakers: list[Any] = [*group.executor.sockets, *([] if self._lookup is None else [self._lookup])]
        self._server.attach(core, wakers)
        self._group = group

    def _watch(self, group: WorkerGroup) -> None:
        """Return when stopped, or when a worker was lost and the server's thread uses the group no more."""
        assert self._server is not None
        self._lost = None
        while not self._core_died.is_set():
            if self._stopping.is_set():
                self._server.stop()
                return
            try:
                group.watch(_WATCH_S)
            except HeadwiseError as error:
                self._server.fail(EngineDiedError(str(error)))
                self._core_died.wait()

    def _on_died(self, error: EngineDiedError) -> None:
        """On the server's thread: it uses the executor no more."""
        log.error("%s: %s", self._name, error)
        self._lost = error
        self._core_died.set()

    def _exit_stuck(self) -> None:
        """The workers end with this process."""
        if self._stopping.is_set():
            return
        self._give_up(DeploymentError(f"it has not got on for {self._config.engine_timeout_s:g} s"))
        self._ending.come()
        time.sleep(_LAST_WORDS_S)
        os._exit(1)

    def _give_up(self, error: HeadwiseError) -> None:
        log.error("%s ends: %s", self._name, error)
        self._failure = error
        self._settled.set()


def _volume(volume: str, ranks: int) -> str:
    """The volume that engines of so many ranks share: others cannot read what they store. 0: all have as many."""
    return f"{volume}/tp{ranks}" if volume and ranks else volume
