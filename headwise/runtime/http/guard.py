"""What stands before every endpoint: keys, limits of heads and bodies, and errors in OpenAI's form."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Collection, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.errors import ConfigError
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.metrics import RequestMetrics
from headwise.runtime.http.page import PATHS as PAGE_PATHS
from headwise.runtime.protocol.users import NO_USERS, Tenant, Users

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8 << 10
"""Of a request's path and headers."""

_TENANT = "headwise.tenant"
"""Where a request's scope has whose key it bears."""
_OPEN = frozenset(("/health", "/ready", *PAGE_PATHS))
"""Paths that need no key: who probes has none, and the page asks for it."""


class ApiKeys:
    """The keys of which every request must bear one; none: anybody may ask. Keeps digests only.

    users:  whose each is
    source: tells of others, that are the keys from then on, and never waits; None: it is as before
    """

    def __init__(self, users: Users = NO_USERS, source: Callable[[], Users | None] = lambda: None) -> None:
        self._source = source
        self._digests = _digests(users)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def bearer(self, authorization: bytes | None) -> Tenant | None:
        """Whose key this header bears; None: an operator's, or none is wanted. Takes as long for any wrong one. Raises
        `ApiError` for those."""
        self._look()
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest, _ in self._digests]
        if self._digests and not (scheme.lower() == b"bearer" and any(matches)):
            raise ApiError(
                401,
                "this server wants an API key: send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return next((who for (_, who), is_its in zip(self._digests, matches, strict=True) if is_its), None)

    def _look(self) -> None:
        try:
            users = self._source()
        except ConfigError as error:
            log.warning("API keys stay as they were: %s", error)
            return
        if users is not None:
            self._digests = _digests(users)


def _digests(users: Users) -> list[tuple[bytes, Tenant | None]]:
    return [(_digest(key.encode()), who) for key, who in users.by_key.items()]


def tenant_of(request: Request) -> Tenant | None:
    """Whose key a request bears; None: no tenant's. It has passed the `Guard`."""
    tenant: Tenant | None = request.scope[_TENANT]
    return tenant


class Guard:
    """Refuses what no endpoint should see, and answers for endpoints that fail.

    is_local: requests must be for this machine, by an address or as localhost. A web page whose own name leads here
              (DNS rebinding) is of the same origin as this server, as far as its browser knows
    paths:    known ones, by which responses are counted
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, is_local: bool, metrics: RequestMetrics, paths: Collection[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._is_local = is_local
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # nothing else is served
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.response(path, message["status"])
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, counted)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("an HTTP request failed")
            if has_begun:
                raise
            await ApiError.of(error).response(scope["path"])(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if size > MAX_HEAD_BYTES:
            raise ApiError(431, f"path and headers have {size} bytes; at most {MAX_HEAD_BYTES} are taken")
        host = dict(headers).get(b"host", b"localhost").decode("latin-1")
        if self._is_local and not _is_here(host):
            raise ApiError(
                403,
                f"this server has no API keys, so it answers to localhost and addresses only, not to {host!r:.80}: "
                "serve it with keys, or as insecure",
                code="host_not_allowed",
            )
        if scope["path"] not in _OPEN:
            scope[_TENANT] = self._keys.bearer(_bearing(dict(headers)))


def _bearing(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The header that bears a key; Anthropic's clients have one of their own for it."""
    own = headers.get(b"x-api-key")
    return headers.get(b"authorization", None if own is None else b"Bearer " + own)


def _is_here(host: str) -> bool:
    """Whether a request for this host, by its header, is for an address or for localhost."""
    name = re.sub(r":[0-9]*$", "", host).strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
