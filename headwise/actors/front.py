"""Where a deployment's front is, and what its processes know each other by."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.keys import ApiKey, KeyFile, KeyWatch, read_keys, server_secret
from headwise.runtime.protocol.users import ANY_PRIORITY, NO_USERS, Tenant, Users
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, public_key

if TYPE_CHECKING:
    from headwise.runtime.frontend.scaling import Wish


@dataclass(frozen=True)
class Front:
    """Where the scheduler and the store are, as all engines know. Both are on one node, and may move to another one.

    node:           its address, by Ray's count
    port:           of the scheduler
    store_endpoint: ``tcp://HOST:PORT``
    namespace:      of the index: which model and cache layout its blocks belong to
    """

    node: str
    port: int
    store_endpoint: str
    namespace: str


@dataclass(frozen=True)
class About:
    """What an actor says of itself to a new owner.

    front:      where it knows scheduler and store to be; None: it knows nothing
    is_leaving: whether it is being drained
    wish:       what clients asked for last, and the owner before did
    """

    front: Front | None = None
    is_leaving: bool = False
    wish: Wish | None = None


@dataclass(frozen=True)
class Notice:
    """What an actor is told that has the role no more, and leaves.

    stay_s: it ends within so many seconds
    until:  when its node is taken away, as `time.time` counts somewhere
    front:  where scheduler and store are now, or soon; None: nobody knows
    """

    stay_s: float
    until: float = math.inf
    front: Front | None = None


@dataclass(frozen=True)
class Keys:
    """What only a deployment's own processes have, for as long as it lives.

    secret: engines report with it, and it is the token of the deployment's own clients
    curve:  secret key of all its servers; empty: nothing is encrypted
    users:  those who have its API keys
    """

    secret: str = field(repr=False)
    curve: str = field(default="", repr=False)
    users: Users = NO_USERS

    @classmethod
    def generate(cls, config: EngineConfig) -> Keys:
        """New ones, but for what files have. Raises `ConfigError` for files that have none."""
        secret = secrets.token_hex(16)
        if not config.is_encrypted:
            return cls(secret)
        users = users_with(read_keys(config.api_key, config.api_key_file), client_key)
        return cls(secret, server_secret(config.server_key_file), users)

    @property
    def own(self) -> ClientKeys | None:
        """Of the deployment's own clients."""
        return ClientKeys(public_key(self.curve), self.secret) if self.curve else None

    @property
    def inner(self) -> ServerKeys | None:
        """Of a server for the deployment's own processes, and for ``users``, where it has these, too."""
        return ServerKeys(self.curve, frozenset((client_key(self.secret),))) if self.curve else None


def users_with(keys: Iterable[ApiKey], known_by: Callable[[str], str]) -> Users:
    """Who has these keys. known_by: what an API key is known by: `client_key` of connections, or over HTTP itself"""
    return Users({known_by(each.key): _tenant_of(each) for each in keys})


def _tenant_of(key: ApiKey) -> Tenant | None:
    """Whose a key is; None: an operator's."""
    if not key.tenant:
        return None
    return Tenant(key.tenant, ANY_PRIORITY if key.priority is None else key.priority, key.share)


def users_now(config: EngineConfig, keys: Keys) -> tuple[Users, bool]:
    """Who may connect to a scheduler that starts, perhaps long after the deployment did and on another node; whether
    that is certain: where the file of keys cannot be read, it is who could when the deployment started."""
    if not config.is_encrypted:
        return keys.users, True
    try:
        return users_with(read_keys(config.api_key, config.api_key_file), client_key), True
    except ConfigError:
        return keys.users, False


class UsersOfFile:
    """Tells of those who have the keys of ``api_key_file``, when these have changed: see `KeyWatch`.

    known_by: see `users_with`
    """

    def __init__(self, config: EngineConfig, known_by: Callable[[str], str]) -> None:
        file = KeyFile(config.api_key, config.api_key_file)
        self._watch = KeyWatch(file) if config.api_key_file else None
        self._known_by = known_by

    def __call__(self) -> Users | None:
        """Those who are users from now on; None: there are no others. Never waits. Raises `ConfigError`."""
        keys = None if self._watch is None else self._watch.news()
        return None if keys is None else users_with(keys, self._known_by)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
