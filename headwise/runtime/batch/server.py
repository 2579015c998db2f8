"""The server that answers requests, over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from headwise.errors import ConfigError, DeploymentError

CONNECT_S = 10.0
LATER_S = 1.0
"""When to ask again, where the server does not say."""
LONGEST_PAUSE_S = 60.0

_LATER = frozenset((429, 502, 503, 504, 529))
"""Status of answers that say: ask again."""
_MAX_TOLD = 500
"""Characters of an answer that is no JSON."""


@dataclass(frozen=True)
class Answer:
    """status: as HTTP has it
    body:    what the JSON says
    """

    status: int
    body: Any


class LaterError(Exception):
    """The server does not answer now.

    after_s:       when to ask again
    is_overloaded: it says that it has enough to do
    lost:          the answer of a request that was lost while it was computed, which it may have caused; None: it was
                   not begun
    """

    def __init__(
        self, why: str, after_s: float = LATER_S, *, is_overloaded: bool = False, lost: Answer | None = None
    ) -> None:
        super().__init__(why)
        self.after_s = min(max(after_s, 0.0), LONGEST_PAUSE_S)
        self.is_overloaded = is_overloaded
        self.lost = lost


class Server:
    """Asks over as many connections as there are requests at a time.

    url:       ``http://HOST:PORT`` or ``https://``
    timeout_s: longest time until an answer is there
    ca_file:   PEM file of the certificates that one of the server's must follow from; empty: those that httpx brings
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 3600.0, ca_file: str = "") -> None:
        """Raises `ConfigError` for what is no such URL, and no such file."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r:.200} is no URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.path not in ("", "/"):
            raise ConfigError(f"the server's URL must be http://HOST:PORT (or https://), got {url!r:.200}")
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=parsed,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=30.0),
            trust_env=False,
            verify=_trusting(ca_file) if ca_file else True,
        )

    async def check(self) -> None:
        """Raises `ConfigError` if it does not let this key ask, `DeploymentError` if nothing answers."""
        try:
            response = await self._http.get("/v1/models", timeout=CONNECT_S)
        except httpx.HTTPError as error:
            raise DeploymentError(f"no server answers at {self.url}: {_what(error)}") from None
        if response.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses: {_error(_json(response)).get('message', response.status_code)}")
        if response.status_code != 200:
            raise DeploymentError(f"{self.url} serves no OpenAI API: /v1/models is answered by {response.status_code}")

    async def engines(self) -> int:
        """How many engines take requests; 1 where a server does not say."""
        try:
            response = await self._http.get("/ready", timeout=CONNECT_S)
            return max(1, int(_json(response)["engines"])) if response.status_code == 200 else 1
        except (httpx.HTTPError, LookupError, TypeError, ValueError):
            return 1

    async def ask(self, url: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a request; raises `LaterError` where it may be asked again."""
        try:
            response = await self._http.post(url, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise LaterError(f"{self.url}: {_what(error)}") from None
        except httpx.HTTPError as error:
            why = f"no answer came: {_what(error)}"
            raise LaterError(f"{self.url}: {why}", lost=Answer(504, {"error": {"message": why}})) from None
        answer = Answer(response.status_code, _json(response))
        if response.status_code in _LATER:
            said = _error(answer.body)
            raise LaterError(
                f"{self.url}: {said.get('message', f'status {response.status_code}')}",
                _seconds(response.headers.get("retry-after")),
                is_overloaded=response.status_code == 429,
                lost=answer if said.get("code") == "engine_lost" else None,
            )
        return answer

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an error of OpenSSL is one, too
        raise ConfigError(f"{ca_file} has no certificates in PEM: {error.strerror or error}") from None


def _json(response: httpx.Response) -> Any:
    """What a response says; what is no JSON, as text."""
    try:
        return json.loads(response.content)
    except ValueError:
        return response.text[:_MAX_TOLD]


def _error(body: Any) -> Mapping[str, Any]:
    """The error that an answer is, in OpenAI's form or Anthropic's; empty: it is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _seconds(header: str | None) -> float:
    try:
        return LATER_S if header is None else float(header)
    except ValueError:
        return LATER_S


def _what(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
