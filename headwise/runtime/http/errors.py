"""Errors as OpenAI's API tells them, ``{"error": {"message", "type", "param", "code"}}``, and as Anthropic's does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from headwise.errors import (
    DeploymentError,
    EngineDiedError,
    HeadwiseError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestAbortedError,
)

INVALID = "invalid_request_error"
_SERVER = "server_error"
_AGAIN_S = {"retry-after": "1"}
_LATER_S = {"retry-after": "5"}

_OF_CLASS: tuple[tuple[type[HeadwiseError], int, str, str | None, Mapping[str, str]], ...] = (
    (InvalidRequestError, 400, INVALID, None, {}),
    (NotReadyError, 503, "service_unavailable", "no_engine", _LATER_S),
    (OverloadedError, 429, "rate_limit_error", "overloaded", _AGAIN_S),
    (EngineDiedError, 503, "service_unavailable", "engine_lost", _AGAIN_S),
    (RequestAbortedError, 503, "service_unavailable", "aborted", _AGAIN_S),
    (DeploymentError, 503, "service_unavailable", "no_scheduler", _LATER_S),
    (HeadwiseError, 500, _SERVER, None, {}),
)
"""Status, type, code and headers of our own errors; the first class that fits."""


MESSAGES = "/v1/messages"
"""What the paths of Anthropic's API begin with."""


class ApiError(Exception):
    """What a request is answered with instead.

    param: the request's field that is at fault
    code:  for programs
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: Exception, param: str | None = None) -> ApiError:
        """The answer to an error. What is no error of ours tells nothing of itself: the log has it."""
        if isinstance(error, cls):
            return error
        for known, status, kind, code, headers in _OF_CLASS:
            if isinstance(error, known):
                return cls(status, str(error), kind=kind, param=param, code=code, headers=headers)
        return cls(500, "the server failed over this request; its log says how", kind=_SERVER)

    def response(self, path: str) -> JSONResponse:
        """The answer to a request for that path, whose API says in which form."""
        body = anthropic_error(self.body["error"], self.status) if path.startswith(MESSAGES) else self.body
        return JSONResponse(body, self.status, self.headers)


_KINDS = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: Mapping[str, Any], status: int | None = None) -> dict[str, Any]:
    """An error, as `ApiError` has it without its envelope, as Anthropic's API tells it.

    status: where it has one; else the type of the error says which it would be
    """
    by_type = {INVALID: 400, "rate_limit_error": 429, "service_unavailable": 503}
    known = by_type.get(error["type"], 500) if status is None else status
    kind = _KINDS.get(known, INVALID if 400 <= known < 500 else "api_error")
    where = "" if error["param"] is None or error["param"] in error["message"] else f"{error['param']}: "
    return {"type": "error", "error": {"type": kind, "message": where + error["message"]}}


def invalid(message: str, param: str | None) -> ApiError:
    """A request that can never be served as it stands."""
    return ApiError(400, message, param=param)
