"""Reads the bodies of requests, within bounds: of each, of all that arrive at once, and of the time that they take."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect, Request

from headwise.runtime.http.errors import ApiError

BODY_S = 60.0
"""Longest time for a body to arrive."""
MAX_BODIES_BYTES = 256 << 20
"""Most bytes of bodies that a server holds at once."""


@dataclass(eq=False)
class _Arriving:
    """A body that arrives. sender: who sends it; is_refused: it has to make room for others"""

    sender: str
    data: bytearray = field(default_factory=bytearray)
    task: asyncio.Task[None] | None = None
    is_refused: bool = False


class BodyReader:
    """Reads JSON bodies of at most ``most`` bytes, and at most `MAX_BODIES_BYTES` at the same time.

    Where these are there already, who has most of them loses the body that has been arriving longest: nobody keeps
    others out by sending large ones, or by sending them slowly.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._arriving: dict[_Arriving, None] = {}  # in the order in which they began

    async def read(self, request: Request, sender: str) -> bytes:
        """sender: whose it is, as far as that is known. Raises `ApiError`."""
        self._check_head(request)
        body = _Arriving(sender)
        self._arriving[body] = None
        body.task = asyncio.ensure_future(self._gather(request, body))
        try:
            await asyncio.wait_for(body.task, BODY_S)
            return bytes(body.data)
        except asyncio.CancelledError:
            if not body.is_refused:
                raise
            raise _overloaded() from None
        except ClientDisconnect:
            raise ApiError(400, "the connection ended within the body") from None
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        finally:
            self._forget(body)

    def _check_head(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of another origin cannot send without being asked for leave
            raise ApiError(415, f"the body must be JSON: send `Content-Type: application/json`, not {kind!r:.80}")
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(415, f"the body is encoded as {coding!r:.80}, which is not served: send it as it is")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > self._most):
            raise self._too_large(f"{declared:.20}")

    async def _gather(self, request: Request, body: _Arriving) -> None:
        async for part in request.stream():
            if len(body.data) + len(part) > self._most:
                raise self._too_large(f"more than {self._most}")
            self._make_room(body, len(part))
            body.data += part
            self._held += len(part)

    def _make_room(self, body: _Arriving, more: int) -> None:
        """Raises `ApiError` where it is this body that has to go."""
        while self._held + more > MAX_BODIES_BYTES:
            held = Counter({body.sender: more})
            for each in self._arriving:
                held[each.sender] += len(each.data)
            ((sender, _),) = held.most_common(1)
            victim = next((each for each in self._arriving if each.sender == sender and each.data), body)
            if victim is body or victim.task is None:
                raise _overloaded()
            victim.is_refused = True
            victim.task.cancel()
            self._forget(victim)

    def _forget(self, body: _Arriving) -> None:
        """At once: what is given up keeps no other body out."""
        if body in self._arriving:
            del self._arriving[body]
            self._held -= len(body.data)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413, f"the body has {size} bytes; at most {self._most} are taken (http_max_body)", code="request_too_large"
        )


def _overloaded() -> ApiError:
    return ApiError(
        429,
        "too many large requests arrive at once; try again later",
        kind="rate_limit_error",
        code="overloaded",
        headers={"retry-after": "1"},
    )
