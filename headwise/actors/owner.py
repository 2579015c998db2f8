"""The actor that owns a detached deployment: what `headwise serve` does in its own process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from headwise.actors.cluster import Cluster
from headwise.actors.deployment import Deployment
from headwise.actors.ending import end_this_actor
from headwise.actors.found import end_all, find_parts
from headwise.actors.front import Keys
from headwise.actors.remote import remote
from headwise.actors.restarts import Restarts
from headwise.errors import DeploymentError, HeadwiseError
from headwise.log_lines import LatestLines, show_log_lines
from headwise.runtime.config.engine_config import EngineConfig

log = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0
"""An owner that owns nothing any more ends so long after: then whoever waits for its answers has them."""
_ABANDON_S = 30.0
"""Longest wait for a start that is given up."""


@dataclass(frozen=True)
class OwnerState:
    """How far a detached deployment is.

    given:   as it was configured
    address: where clients connect to; empty: it does not serve yet
    stages:  of the start, so far
    """

    given: EngineConfig
    address: str
    stages: tuple[str, ...]


@remote(max_concurrency=16, max_restarts=-1)
class Owner:
    """Starts the deployment as soon as it is made. Ray starts it again, on another node if need be, when its process
    dies: then it adopts the actors that still run, by their names, and starts those that do not.

    given:  the configuration as the user gave it
    config: the same, with what depends on the cluster resolved: as long as the deployment lives, that stays
    """

    def __init__(self, given: EngineConfig, config: EngineConfig, keys: Keys) -> None:
        show_log_lines()
        self._lines = LatestLines.kept()
        self._given = given
        self._config = config
        self._keys = keys
        self._progress = _Stages()
        self._deployment = self._new_deployment()
        self._failure: HeadwiseError | None = None
        self._settled, self._stopping = threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._is_again = ray.get_runtime_context().was_current_actor_reconstructed
        run = self._go_on if self._is_again else self._begin
        self._thread = threading.Thread(target=self._run, args=(run,), name="headwise-owner", daemon=True)
        self._thread.start()

    # ---- for commands ----

    def serves(self) -> str:
        """Wait until the deployment serves; its address. Raises what keeps it from serving."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._deployment.client_address

    def state(self) -> OwnerState:
        is_serving = self._settled.is_set() and self._failure is None
        address = self._deployment.client_address if is_serving else ""
        return OwnerState(self._given, address, tuple(self._progress.stages))

    def log_lines(self, since: int) -> tuple[int, list[tuple[int, str]]]:
        """See `LatestLines.since`. Stages are among them, and are in `state` before."""
        return self._lines.since(since)

    def stop(self, drain: bool) -> None:
        """End the deployment, with `drain` as `Deployment.drain` does. Returns when all its actors have ended, but for
        this one, which ends some seconds later. A second caller waits for the same end.
        """
        self._stopping.set()
        with self._ending:
            if not self._settled.is_set() and not self._is_again:
                self._deployment.abandon(DeploymentError("it was stopped while it started"))
            if self._settled.wait(_ABANDON_S) and self._failure is None and drain:
                self._deployment.drain()
            self._deployment.stop()
        end_this_actor(_LAST_WORDS_S)

    # ---- the owner's thread ----

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except HeadwiseError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the owner failed")
            self._fail(DeploymentError(f"the owner of the deployment failed: {type(error).__name__}: {error}"))
        finally:
            self._settled.set()

    def _begin(self) -> None:
        """The deployment's first start. If it fails, so does the command that waits for it."""
        self._progress = _Stages()
        self._deployment.begin(self._progress)

    def _go_on(self) -> None:
        """What another owner began. That served, maybe: what fails now is tried again for as long as the deployment is
        to live.
        """
        log.warning("the owner was started again: it looks for the deployment's actors")
        restarts = Restarts()
        while not self._stopping.is_set():
            try:
                self._adopt_or_begin()
                return
            except Exception as error:
                delay_s = restarts.ended(time.monotonic())
                log.exception("the deployment cannot be taken over: %s; tried again in %.0f s", error, delay_s)
                self._stopping.wait(delay_s)
                self._deployment = self._new_deployment()
        raise DeploymentError("it was stopped while it started")

    def _adopt_or_begin(self) -> None:
        found = find_parts(self._config.name)
        if found.front is None:
            log.warning("none is left: the deployment starts anew")
            end_all(self._config.name)
            try:
                self._begin()
            except BaseException:
                self._deployment.stop()
                raise
        else:  # what runs is left alone, also where this fails
            log.warning("adopted: %s", ", ".join(sorted(found.actors)))
            self._deployment.adopt(found)

    def _new_deployment(self) -> Deployment:
        return Deployment(self._config, Cluster(), self._keys, is_detached=True)

    def _fail(self, error: HeadwiseError) -> None:
        self._failure = error
        self._deployment.stop()
        end_this_actor(_LAST_WORDS_S)


class _Stages:
    """The progress of a start, for whoever asks."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)
        log.info("%s", text)

    def update(self, done: int, total: int) -> None:
        pass
