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
from headwise.actors.placement import address_of, in_bundle, node_address, nodes_of
from headwise.actors.start_lines import StartLines
from headwise.actors.worker import Worker
from headwise.errors import EngineDiedError, HeadwiseError
from headwise.runtime.config.block_storage import SharedBlocks
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.protocol.step_channel import ZmqExecutor
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
        self, config: EngineConfig, model_dir: Path, placement: PlacementGroup, keys: Keys, blocks: SharedBlocks
    ) -> None:
        """
        blocks: what all ranks' model and storage have to agree on, where they are on several nodes

        Raises:
            EngineDiedError: a node of the ranks is no more.
            DeploymentError: ranks on several nodes could not reach this one.
        """
        self._config, self._placement = config, placement
        self.pids: list[int] = []
        self._spans = _are_on_several_nodes(config, placement)
        if self._spans:
            check_reachable_from_others(config.host, node_address())
        self._scratch = ScratchDirectory(tempfile.gettempdir(), SOCKETS_PREFIX)
        steps = (
            f"tcp://{engine_host(config.host, node_address())}:*" if self._spans else f"ipc://{self._scratch.path}/s"
        )
        self.executor = ZmqExecutor(
            steps,
            config.tp_size,
            config.step_timeout_s,
            start_timeout_s=config.start_timeout_s,
            load_timeout_s=config.load_timeout_s,
            keys=keys.inner if self._spans else None,
        )
        threads = str(threads_per_worker(config))
        # Read by the libraries at import, hence before the worker's process imports anything.
        env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        worker_class: Any = Worker
        self._workers = [
            worker_class.options(**in_bundle(placement, rank + 1), runtime_env={"env_vars": env}).remote(
                config, model_dir, rank, keys
            )
            for rank in range(config.tp_size)
        ]
        endpoint = self.executor.endpoint
        if self._spans:
            hub = self._workers[0].listen.remote()
            self._serving = [worker.serve_across.remote(endpoint, hub, blocks) for worker in self._workers]
        else:
            name = uuid.uuid4().hex
            self._serving = [worker.serve.remote(endpoint, name, COMM_BUFFER_BYTES) for worker in self._workers]

    def wait_ready(self) -> None:
        """Wait until all ranks are loaded and take steps; raises what the first failing one raised.

        What the first rank logs meanwhile is logged here, too: the others' lines are like its.
        """
        pids = [worker.pid.remote() for worker in self._workers]
        lines = StartLines(log, lambda who: "")

        looked_at = time.monotonic()

        def check() -> None:
            nonlocal looked_at
            self.watch(0.0)
            lines.look("rank 0", self._workers[0])
            if self._spans and time.monotonic() - looked_at >= _LOOK_S:
                looked_at = time.monotonic()
                if not nodes_of(self._placement):  # its rank would wait for another node
                    raise EngineDiedError(_LOST_NODE)

        self.executor.wait_ready(self._config.start_timeout_s, check)
        lines.finish()
        try:
            self.pids = ray.get(pids)
        except ray.exceptions.RayError as error:
            raise EngineDiedError(f"a worker died as soon as it was ready: {cause_of(error)}") from None

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
            raise EngineDiedError(f"the worker of TP rank {rank} failed: {error.cause!r}") from None
        except ray.exceptions.RayError as error:
            raise EngineDiedError(f"the worker of TP rank {rank} died: {cause_of(error)}") from None
        raise EngineDiedError(f"the worker of TP rank {rank} stopped serving")

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


def _are_on_several_nodes(config: EngineConfig, placement: PlacementGroup) -> bool:
    """Whether ranks, or they and their engine, are; says where they are. Raises `EngineDiedError` if they are not there
    any more."""
    if config.tp_size == 1 or not config.on_gpu or config.tp_placement == "node":
        return False
    nodes = nodes_of(placement)
    if not nodes:
        raise EngineDiedError(_LOST_NODE)
    if len(set(nodes)) == 1:
        return False
    log.info("ranks are on several nodes: %s", _in_words(nodes[1:]))
    return True


def _in_words(nodes: Sequence[str]) -> str:
    """Which ranks are on which node, by the nodes of all ranks."""
    runs = [(node, [rank for rank, _ in run]) for node, run in groupby(enumerate(nodes), key=lambda each: each[1])]
    return ", ".join(
        f"{ranks[0]}-{ranks[-1]} on {address_of(node)}" if len(ranks) > 1 else f"{ranks[0]} on {address_of(node)}"
        for node, ranks in runs
    )
