"""The workers of one engine, from their start until the first of them is lost."""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from headwise.actors.addresses import check_reachable_from_others, engine_host
from headwise.actors.calls import cause_of
from headwise.actors.front import Keys
from headwise.actors.placement import address_of, as_rank, node_address, nodes_of, nodes_of_ranks, this_node
from headwise.actors.start_lines import StartLines
from headwise.actors.worker import Surroundings, Worker
from headwise.errors import EngineDiedError, HeadwiseError, ModelError
from headwise.runtime.config.block_storage import SharedBlocks
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.protocol.step_channel import ZmqExecutor
from headwise.runtime.protocol.weights import Weights, WeightsToLoad
from headwise.sockets.scratch import ScratchDirectory

log = logging.getLogger(__name__)

COMM_BUFFER_BYTES = 4 << 20
"""Size of each of a rank's two buffers in shared memory. Containers have little of it; larger payloads are split."""

_LOST_NODE = "a node of its ranks is no more"
_LOOK_S = 1.0
"""How often ranks that start on several nodes are looked for on all of them."""

SOCKETS_PREFIX = "headwise-"
"""Prefix of the directories for groups' sockets, in the node's temporary directory."""


class WorkerGroup:
    """The actors of all ranks, and the executor that reaches them. A group that lost a worker is closed, not repaired.

    pids: process ids by rank, once the group is ready
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        placement: PlacementGroup,
        keys: Keys,
        blocks: SharedBlocks,
        weights: WeightsToLoad | None = None,
    ) -> None:
        """
        blocks:  what all ranks' model and storage have to agree on, where they are on several nodes
        weights: in place of those in ``model_dir``

        Raises:
            EngineDiedError: a node of the ranks is no more.
            DeploymentError: ranks on several nodes could not reach this one.
        """
        self._config, self._placement, self._weights = config, placement, weights
        self.pids: list[int] = []
        nodes = _nodes_apart(config, placement)
        self._is_across = bool(nodes)
        if nodes:
            check_reachable_from_others(config.host, node_address(), config.pipeline_parallel_size)
        self._scratch = ScratchDirectory(tempfile.gettempdir(), SOCKETS_PREFIX)
        steps = f"tcp://{engine_host(config.host, node_address())}:*" if nodes else self._ipc("s")
        self.executor = ZmqExecutor(
            steps,
            config.ranks,
            config.step_timeout_s,
            start_timeout_s=config.start_timeout_s,
            load_timeout_s=config.load_timeout_s,
            keys=keys.inner if nodes else None,
            sampling=config.ranks - config.tp_size,
        )
        self._workers = [self._start(rank, model_dir, keys, nodes) for rank in range(config.ranks)]
        self._serving = self._serve(nodes, blocks)

    def _start(self, rank: int, model_dir: Path, keys: Keys, nodes: Sequence[str]) -> Any:
        """The actor of a rank; it does nothing yet."""
        threads = str(threads_per_worker(self._config, nodes.count(nodes[rank]) if nodes else 0))
        # Read by the libraries at import, hence before the worker's process imports anything.
        env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        worker_class: Any = Worker
        options = as_rank(self._config, self._placement, rank)
        return worker_class.options(**options, runtime_env={"env_vars": env}).remote(
            self._config, model_dir, rank, keys, self._weights
        )

    def _serve(self, nodes: Sequence[str], blocks: SharedBlocks) -> list[Any]:
        """Have all ranks find each other, load and take steps: what tells that they have ended, by rank.

        nodes: of the ranks; none where the engine's has all of them
        """
        size, ranks, name = self._config.tp_size, range(self._config.ranks), uuid.uuid4().hex
        checked = {
            node: self._workers[nodes.index(node)].check_node.remote(nodes.count(node), blocks)
            for node in {*nodes} - {this_node()}
        }
        links = [""] * len(ranks)  # of each rank, where the one in its place in the stage before reaches it, in a ring
        for rank in ranks if len(ranks) > size else ():
            links[rank] = self._workers[rank].listen_to_stage.remote("" if nodes else self._ipc(f"l{rank}"))
        serving: list[Any] = []
        for first in ranks[::size]:
            is_apart = len({*nodes[first : first + size]}) > 1
            hub = self._workers[first].listen.remote() if is_apart else ""
            for rank in ranks[first : first + size]:
                here = nodes.count(nodes[rank]) if nodes else len(ranks)
                around = Surroundings(
                    self.executor.endpoint, "" if is_apart else name, COMM_BUFFER_BYTES, bool(nodes), here
                )
                others = links[rank], links[(rank + size) % len(ranks)], checked.get(nodes[rank]) if nodes else None
                serving.append(self._workers[rank].serve.remote(around, hub, *others))
        return serving

    def _ipc(self, name: str) -> str:
        """An endpoint for the processes of this node."""
        return f"ipc://{self._scratch.path}/{name}"

    def wait_ready(self) -> None:
        """Wait until all ranks are loaded and take steps; raises what the first failing one raised.

        What the first rank of each stage logs meanwhile is logged here, too: the others' lines are like its.
        """
        pids = [worker.pid.remote() for worker in self._workers]
        lines = StartLines(log, lambda who: "")

        looked_at = time.monotonic()

        def check() -> None:
            nonlocal looked_at
            self.watch(0.0)
            for rank in range(0, self._config.ranks, self._config.tp_size):
                lines.look(f"rank {rank}", self._workers[rank])
            if self._is_across and time.monotonic() - looked_at >= _LOOK_S:
                looked_at = time.monotonic()
                if not nodes_of(self._placement):  # its rank would wait for another node
                    raise EngineDiedError(_LOST_NODE)

        self.executor.wait_ready(self._config.start_timeout_s, check)
        lines.finish()
        try:
            self.pids = ray.get(pids)
        except ray.exceptions.RayError as error:
            raise EngineDiedError(f"a worker died as soon as it was ready: {cause_of(error)}") from None

    def have_weights(self, weights: Weights) -> None:
        """Return when all nodes of the ranks have them; raises what keeps one from it, and `EngineDiedError` if it is
        no more."""
        if self._is_across:
            asked = [worker.have_weights.remote(weights.model, weights.adapters) for worker in self._workers]
            try:
                ray.get(asked)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, HeadwiseError) else ModelError(cause_of(error))) from None
            except ray.exceptions.RayError as error:
                raise EngineDiedError(f"a rank that was to have weights is no more: {cause_of(error)}") from None

    def keep_weights(self, weights: Weights) -> None:
        """Their nodes need no others from now on."""
        for worker in self._workers if self._is_across else ():
            worker.keep_weights.remote(weights.model, weights.adapters)

    def watch(self, timeout_s: float) -> None:
        """Return after ``timeout_s``; raise if a worker has ended by then: its own error, or `EngineDiedError`."""
        ended, _ = ray.wait(self._serving, timeout=timeout_s)
        if not ended:
            return
        rank = self._serving.index(ended[0])
        try:
            ray.get(ended[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, HeadwiseError):
                raise error.cause from None
            raise EngineDiedError(f"the worker of rank {rank} failed: {error.cause!r}") from None
        except ray.exceptions.RayError as error:
            raise EngineDiedError(f"the worker of rank {rank} died: {cause_of(error)}") from None
        raise EngineDiedError(f"the worker of rank {rank} stopped serving")

    def close(self) -> None:
        """End the processes and the channel. The executor must not be in use any more."""
        for worker in self._workers:
            worker.stop.remote()
        with suppress(ray.exceptions.RayError):
            ray.wait(self._serving, num_returns=len(self._serving), timeout=1.0)
        for worker in self._workers:
            ray.kill(worker)
        self.executor.close()
        self._scratch.close()


def _nodes_apart(config: EngineConfig, placement: PlacementGroup) -> list[str]:
    """The nodes of the ranks, by rank, where these, or they and their engine, are on several; says so. Else empty.

    Raises `EngineDiedError` if they are not there any more.
    """
    may_ranks = config.tp_size > 1 and config.on_gpu and config.tp_placement != "node"
    if not may_ranks and config.pipeline_parallel_size == 1:
        return []
    nodes = nodes_of_ranks(config, placement)
    if not nodes:
        raise EngineDiedError(_LOST_NODE)
    if {*nodes} == {this_node()}:
        return []
    log.info("ranks are on several nodes: %s", _in_words(nodes))
    return nodes


def _in_words(nodes: Sequence[str]) -> str:
    """Which ranks are on which node, by the nodes of all ranks."""
    runs = [(node, [rank for rank, _ in run]) for node, run in groupby(enumerate(nodes), key=lambda each: each[1])]
    return ", ".join(
        f"{ranks[0]}-{ranks[-1]} on {address_of(node)}" if len(ranks) > 1 else f"{ranks[0]} on {address_of(node)}"
        for node, ranks in runs
    )
