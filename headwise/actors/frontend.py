"""The scheduler, the attention store and the HTTP servers of a deployment: where they are, and how each is made."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from headwise.actors.addresses import client_host, endpoint_to, free_ports
from headwise.actors.calls import get
from headwise.actors.found import Found, find_scheduler, wait_until_gone
from headwise.actors.front import Front, Keys
from headwise.actors.names import HTTP, SCHEDULER, STORE, in_turn, next_turn
from headwise.actors.placement import FrontendSite
from headwise.actors.restarts import Life
from headwise.errors import DeploymentError
from headwise.runtime.config.addresses import is_loopback
from headwise.runtime.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from headwise.actors.role import Role

log = logging.getLogger(__name__)

PORT_ATTEMPTS = 3


class Frontend:
    """The actors' roles, by name, once `start` or `adopt` has made them.

    site: the node that they are on

    Their ports are chosen here, before the actors are made, and kept: an actor that is started again keeps its address,
    or where its node has died, its port.
    """

    def __init__(self, config: EngineConfig, keys: Keys, is_detached: bool) -> None:
        self.roles: dict[str, Role] = {}
        self._config = config
        self._keys = keys
        self.site = FrontendSite(config.host, is_detached)
        self._port = self._store_port = 0
        self._namespace = ""

    @property
    def front(self) -> Front:
        """Where they are, or will be."""
        return self._front_at(self.site)

    def _front_at(self, site: FrontendSite) -> Front:
        host = "127.0.0.1" if is_loopback(self._config.host) else site.address
        return Front(site.address, self._port, f"tcp://{host}:{self._store_port}", self._namespace)

    @property
    def client_address(self) -> str:
        """Where clients connect to: ``tcp://HOST:PORT``."""
        host = self._config.advertise_host or client_host(self._config.host, self.site.address)
        return f"tcp://{host}:{self._port}"

    def adopt(self, found: Found, now: float) -> None:
        """Take over what there is; what there is not is left to be started."""
        front = found.front
        assert front is not None
        self.site.adopt(front.node)
        self._port, self._store_port = front.port, int(front.store_endpoint.rpartition(":")[2])
        self._namespace = front.namespace
        for role in (self._scheduler_role(self.site), self._store_role(self.site), *self._http_roles(self.site)):
            self.roles[role.name] = role
            role.starts = 1  # whatever is made next follows another one
            name = found.name_of(role.name)
            if name in found.serving:
                role.adopt(found.actors[name], now, name)
            else:
                role.known_as = in_turn(role.name, found.turn)

    def successors(self, site: FrontendSite, taken: Collection[str]) -> dict[str, Role]:
        """Roles of the actors that are to have those of `roles`, by their names, when they serve at another site. Until
        then HTTP servers there ask the scheduler that there is.

        taken: names that actors of the deployment have
        """
        turn = next_turn({*taken, *(role.known_as for role in self.roles.values())})
        made = {
            role.name: role for role in (self._scheduler_role(site), self._store_role(site), *self._http_roles(site))
        }
        for name, role in made.items():
            role.name, role.known_as, role.starts = f"next {name}", in_turn(name, turn), self.roles[name].starts
        return made

    def start(self) -> None:
        """Start all, and wait until they serve. Raises `DeploymentError`.

        Another process may take a free port before it is bound: then other ports are tried.
        """
        if find_scheduler(self._config.name) is not None:
            raise self._name_taken()
        self._start_scheduler_and_store()
        for role in [self._create(role) for role in self._http_roles(self.site)]:
            get(role.is_ready)

    def _start_scheduler_and_store(self) -> None:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            front = self.front
            store_host = front.store_endpoint.removeprefix("tcp://").rpartition(":")[0]
            port, self._store_port = free_ports(self._config.host, store_host)
            self._port = self._config.port or port
            try:
                self._try_to_start()
                return
            except _PortTaken as taken:
                if attempt == PORT_ATTEMPTS:
                    raise taken.error from None
                log.warning("%s; trying other ports", taken.error)
                for role in self.roles.values():
                    role.kill()
                wait_until_gone(self._config.name, list(self.roles))
                self.roles.clear()

    def _try_to_start(self) -> None:
        scheduler = self._create(self._scheduler_role(self.site))
        try:
            get(scheduler.is_ready)
        except DeploymentError as error:
            if self._config.port:
                raise
            raise _PortTaken(error) from None
        assert scheduler.handle is not None
        self._namespace = get(scheduler.handle.namespace.remote())
        store = self._create(self._store_role(self.site))
        try:
            get(store.is_ready)
        except DeploymentError as error:
            raise _PortTaken(error) from None

    def _create(self, role: Role) -> Role:
        """Make an actor under the deployment's name; raises `DeploymentError` if there is one already."""
        try:
            role.create()
        except ValueError:
            raise self._name_taken() from None
        self.roles[role.name] = role
        return role

    def _name_taken(self) -> DeploymentError:
        name = self._config.name
        return DeploymentError(
            f"a deployment named {name!r} is already running on this Ray cluster; stop it (`headwise stop --name "
            f"{name}`, if it is detached), or choose another name"
        )

    def _scheduler_role(self, site: FrontendSite) -> Role:
        from headwise.actors.role import Role
        from headwise.actors.scheduler import GlobalScheduler

        def arguments() -> tuple[Any, ...]:
            return self._config, self._keys, self._port, self._front_at(site).store_endpoint

        life = Life(self._config.start_timeout_s)
        return Role(self._config.name, SCHEDULER, GlobalScheduler, arguments, site, life, has_streams=True)

    def _store_role(self, site: FrontendSite) -> Role:
        from headwise.actors.role import Role
        from headwise.actors.store import AttentionStore

        def arguments() -> tuple[Any, ...]:
            return self._config, self._front_at(site), self._keys.inner

        life = Life(self._config.start_timeout_s)
        return Role(self._config.name, STORE, AttentionStore, arguments, site, life)

    def _http_roles(self, site: FrontendSite) -> list[Role]:
        from headwise.actors.http_server import HttpServerActor
        from headwise.actors.role import Role

        def role(name: str) -> Role:
            def arguments() -> tuple[Any, ...]:
                host, node = self._config.host, self.site.address
                scheduler = endpoint_to(host, node, self._port, is_here=site.address == node)
                return self._config, name, scheduler, self._keys.own

            life = Life(self._config.start_timeout_s)
            return Role(self._config.name, name, HttpServerActor, arguments, site, life, has_streams=True)

        return [role(f"{HTTP}{number}") for number in range(self._config.http_servers if self._config.http else 0)]


class _PortTaken(Exception):
    """A port that was free a moment ago is taken; ``error`` says which address."""

    def __init__(self, error: DeploymentError) -> None:
        super().__init__(str(error))
        self.error = error
