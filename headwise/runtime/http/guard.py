"""What stands before every endpoint: keys, limits of heads and bodies, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Collection, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.errors import ConfigError
from headwise.runtime.http.errors import ApiError
from headwise.runtime.http.metrics import RequestMetrics
from headwise.runtime.http.page import PATHS as PAGE_PATHS
from headwise.runtime.protocol.users import NO_USERS, Tenant, Users

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8 << 10
"""Of a request's path and headers."""
BODY_S = 60.0
"""Longest time for a body to arrive."""
MAX_BODIES_BYTES = 256 << 20
"""Most bytes of bodies that a server holds at once."""

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


class BodyReader:
    """Reads JSON bodies of at most ``most`` bytes, and at most `MAX_BODIES_BYTES` at the same time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Raises `ApiError`."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another origin cannot send without being asked for leave
            raise ApiError(415, f"the body must be JSON: send `Content-Type: application/json`, not {kind!r:.80}")
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(415, f"the body is encoded as {coding!r:.80}, which is not served: send it as it is")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._most):
            raise self._too_large(f"{declared:.20}")
        body = bytearray()
        try:
            await asyncio.wait_for(self._gather(request, body), BODY_S)
            return bytes(body)
        except ClientDisconnect:
            raise ApiError(400, "the connection ended within the body") from None
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        finally:
            self._held -= len(body)

    async def _gather(self, request: Request, body: bytearray) -> None:
        try:
            async for part in request.stream():
                self._check(len(body) + len(part), len(part))
                body += part
                self._held += len(part)
        except BaseException:
            self._held -= len(body)  # at once: what is given up here keeps no other body out
            body.clear()
            raise

    def _check(self, size: int, more: int) -> None:
        if size > self._most:
            raise self._too_large(f"more than {self._most}")
        if self._held + more > MAX_BODIES_BYTES:
            raise ApiError(
                429,
                "too many large requests arrive at once; try again later",
                kind="rate_limit_error",
                code="overloaded",
                headers={"retry-after": "1"},
            )

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413, f"the body has {size} bytes; at most {self._most} are taken (http_max_body)", code="request_too_large"
        )


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
