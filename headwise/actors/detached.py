"""Detached deployments: starting one, finding it again, and stopping it, from any process in its Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import ray

from headwise.actors.calls import cause_of, error_of, get
from headwise.actors.cluster import connection
from headwise.actors.cluster_probe import NO_LOCAL
from headwise.actors.found import deployments, end_all, find_actor, find_scheduler, wait_until_gone
from headwise.actors.front import Keys
from headwise.actors.names import NAMESPACE, OWNER, actor_name
from headwise.actors.owner import Owner, OwnerState
from headwise.actors.placement import on_node, resolve, this_node
from headwise.errors import DeploymentError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.progress import Progress, SilentProgress

log = logging.getLogger(__name__)

_SECRET = ("api_key",)
"""Keys of a configuration whose values nobody is to read."""
_ASK_S = 0.5
_ANSWER_S = 15.0
"""Longest wait for an owner's answer. It answers at once, unless its process is being started, or hangs."""
_AGAIN_S = 60.0
"""So long an owner that is being started again is waited for."""
_END_S = 60.0
"""Longest wait for a deployment's end, besides ``drain_timeout_s``."""


def start_detached(config: EngineConfig, address: str, progress: Progress | None = None) -> tuple[str, bool]:
    """Start a deployment that outlives this process, and wait until it serves. Returns the address of its clients, and
    whether it was there before, with the same configuration.

    address: of the Ray cluster: ``HOST:PORT``, or ``auto``

    Raises `DeploymentError`, also if another deployment has the name, and what `Deployment.start` raises; then, as
    after any other exception, nothing is left of what was begun.
    """
    progress = progress or SilentProgress()
    progress.stage(f"connecting to the Ray cluster at {address}")
    with connection(address, NO_LOCAL):
        owner = find_actor(config.name, OWNER)
        if owner is not None:
            return _running(config, owner), True
        if find_scheduler(config.name) is not None:
            raise DeploymentError(
                f"a deployment named {config.name!r} already runs on this Ray cluster, and is not detached: end the "
                "`headwise serve` that started it, or choose another --name"
            )
        return _start(config, progress), False


def stop_detached(name: str, cluster: str, client_address: str = "") -> None:
    """Drain and end a detached deployment, so that nothing is left of it.

    name:           of the deployment
    cluster:        address of its Ray cluster: ``HOST:PORT``, or ``auto``
    client_address: ``HOST:PORT`` of the deployment, instead of its name; empty: the name counts

    Raises `DeploymentError` if there is no such deployment, or another process owns it.
    """
    with connection(cluster) as found:
        if client_address:
            name = _named_by(client_address, found)
        owner = find_actor(name, OWNER)
        if owner is None:
            raise _nothing_to_stop(name, found)
        _stop(name, owner, drain=True)


def _start(config: EngineConfig, progress: Progress) -> str:
    resolved = resolve(config)
    options = {
        "name": actor_name(config.name, OWNER),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        **on_node(this_node(), or_another=True),
    }
    owner_class: Any = Owner
    try:
        owner = owner_class.options(**options).remote(config, resolved, Keys.generate(config))
    except ValueError:
        raise DeploymentError(
            f"a deployment named {config.name!r} is being started by another command; repeat this one for its address"
        ) from None
    try:
        return _wait_until_it_serves(config.name, owner, progress)
    except BaseException:
        _stop(config.name, owner, drain=False)
        raise


def _wait_until_it_serves(name: str, owner: Any, progress: Progress) -> str:
    """The deployment's address; tells of its stages and log lines meanwhile. Raises what keeps it from serving."""
    serving, news = owner.serves.remote(), _News(owner, progress)
    while True:
        if not ray.wait([serving], timeout=_ASK_S)[0]:
            news.tell()
            continue
        try:
            address: str = ray.get(serving)
            news.tell()
            return address
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError) or find_actor(name, OWNER) is None:
                raise error_of(error) from None
        time.sleep(_ASK_S)  # its process has died, and is started again
        serving, news = owner.serves.remote(), _News(owner, progress)


class _News:
    """What an owner says of the start, told here as it comes: stages, and log lines that are not stages."""

    def __init__(self, owner: Any, progress: Progress) -> None:
        self._owner, self._progress = owner, progress
        self._stages = self._lines = 0

    def tell(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            # Lines first: each stage is in the state before it is a line.
            count, lines = ray.get(self._owner.log_lines.remote(self._lines), timeout=_ANSWER_S)
            stages = ray.get(self._owner.state.remote(), timeout=_ANSWER_S).stages
            for stage in stages[self._stages :]:
                self._progress.stage(stage)
            for level, text in lines:
                if text not in stages:
                    log.log(level, "%s", text)
            self._lines, self._stages = count, len(stages)


def _running(config: EngineConfig, owner: Any) -> str:
    """The address of the deployment that has the name. Raises `DeploymentError` if it is configured otherwise."""
    state = _state(owner, config.name)
    address: str = state.address or get(owner.serves.remote())
    differences = [
        f.name if f.name in _SECRET else f"{f.name} {getattr(state.given, f.name)!r}, not {getattr(config, f.name)!r}"
        for f in fields(config)
        if getattr(state.given, f.name) != getattr(config, f.name)
    ]
    if differences:
        raise DeploymentError(
            f"a deployment named {config.name!r} already runs at {address} with another configuration "
            f"({'; '.join(differences)}): stop it by `headwise stop --name {config.name}`, or choose another --name"
        )
    return address


def _state(owner: Any, name: str) -> OwnerState:
    """What an owner says of itself; waits while it is being started again."""
    until = time.monotonic() + _AGAIN_S
    while True:
        try:
            state: OwnerState = ray.get(owner.state.remote(), timeout=_ANSWER_S)
            return state
        except ray.exceptions.RayError as error:
            if time.monotonic() >= until:
                raise DeploymentError(
                    f"the owner of the deployment {name!r} does not answer ({cause_of(error)}): try again later, or "
                    f"end all of it by `headwise stop --name {name}`"
                ) from None
        time.sleep(_ASK_S)


def _stop(name: str, owner: Any, drain: bool) -> None:
    """Have the owner end the deployment; if it cannot, end it without the owner. The owner goes last: for as long as it
    is there, nobody else gets the name.
    """
    is_stopped = False
    with contextlib.suppress(DeploymentError):
        until = time.monotonic() + _END_S + (_state(owner, name).given.drain_timeout_s if drain else 0.0)
        is_stopped = _have_it_stop(name, owner, drain, until)
    if find_actor(name, OWNER) is None:
        return  # who stopped it at the same time has seen to the rest
    if not is_stopped:
        log.warning("the owner of the deployment %r does not stop it: all of it is killed", name)
        end_all(name)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(owner, no_restart=True)
    if not wait_until_gone(name, [OWNER]):
        raise DeploymentError(f"the owner of the deployment {name!r} did not end; try again later")


def _have_it_stop(name: str, owner: Any, drain: bool, until: float) -> bool:
    """Whether it says that it has. Asked again if it is started again meanwhile."""
    while (left := until - time.monotonic()) > 0:
        try:
            ray.get(owner.stop.remote(drain), timeout=left)
            return True
        except ray.exceptions.RayActorError:
            if find_actor(name, OWNER) is None:
                return True
            time.sleep(_ASK_S)
        except ray.exceptions.RayError as error:
            log.warning("stopping failed: %s", cause_of(error))
            return False
    return False


def _named_by(client_address: str, cluster: str) -> str:
    """The name of the detached deployment whose clients connect to this address."""
    wanted = client_address.removeprefix("tcp://")
    known = dict(_addresses())
    for name, address in known.items():
        if address.removeprefix("tcp://") == wanted:
            return name
    there = ", ".join(f"{name!r} at {address}" for name, address in known.items()) or "none"
    raise DeploymentError(
        f"no detached deployment of the Ray cluster at {cluster} is at {client_address}; there is: {there}"
    )


def _addresses() -> Iterator[tuple[str, str]]:
    for name in deployments():
        with contextlib.suppress(DeploymentError):  # its owner does not answer
            if (owner := find_actor(name, OWNER)) is not None:
                yield name, _state(owner, name).address


def _nothing_to_stop(name: str, cluster: str) -> DeploymentError:
    if find_scheduler(name) is None:
        return DeploymentError(f"no deployment named {name!r} runs on the Ray cluster at {cluster}")
    return DeploymentError(
        f"the deployment {name!r} is not detached: it ends with the `headwise serve` that started it, by SIGTERM or "
        "`ray job stop`"
    )
