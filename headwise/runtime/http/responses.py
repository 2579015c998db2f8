"""The form of answers at `/v1/responses`: one object with items, and the events that build it up."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from headwise.runtime.http.form import Form
from headwise.runtime.http.logprobs import ChatLogprobs
from headwise.runtime.http.response_bodies import ResponseBody
from headwise.runtime.http.response_output import Event, ResponseOutput
from headwise.runtime.http.tools.answer import ChatAnswer, MakeAnswer
from headwise.runtime.http.tools.select import Tokens
from headwise.runtime.protocol.request import FinishReason, GenerationResult, OutputDelta

_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""What responses call an error of a type; all others are the server's."""


class ResponseForm(Form):
    """Of one response.

    make_answer: makes what finds calls and reasoning in its text
    logprobs:    the form of log-probabilities; None: they are not told
    """

    repeats = True

    def __init__(self, model: str, body: ResponseBody, make_answer: MakeAnswer, logprobs: ChatLogprobs | None) -> None:
        self.has_logprobs = logprobs is not None
        self._logprobs = logprobs
        self._make_answer = make_answer
        self._answer: ChatAnswer
        self._events = 0
        self._output = ResponseOutput()
        self._common = _common(model, body)

    def start(self, index: int, prompt: Tokens) -> None:
        self._answer = self._make_answer(prompt)

    def take(self, index: int, delta: OutputDelta) -> None:
        """Usage is told at the end."""

    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        (result,) = results
        told = chain(self._taken(result.text, True, self.logprobs(0, "", result)), self._output.finish(_status(result)))
        deque(told, maxlen=0)  # what events tell, the items have
        return self._ended(result)

    def begin(self, index: int, echoed: str) -> bytes:
        response = {"response": self._response("in_progress", [])}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def logprobs(self, index: int, echoed: str, output: OutputDelta | GenerationResult) -> Any:
        return [] if self._logprobs is None else self._logprobs.told(output)["content"]

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> bytes:
        return self._events_of(self._taken(text, finish_reason is not None, logprobs or []))

    def end(self, results: Sequence[GenerationResult], n: int) -> bytes:
        (result,) = results
        told = self._events_of(self._output.finish(_status(result)))
        response = self._ended(result)
        return told + self._event(f"response.{response['status']}", {"response": response})

    def failed(self, error: dict[str, Any]) -> bytes:
        why = {"code": _CODES.get(error["type"], "server_error"), "message": error["message"]}
        return self._event("response.failed", {"response": {**self._response("failed", []), "error": why}})

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        states = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._common, **states, "status": status, "output": output}

    def _ended(self, result: GenerationResult) -> dict[str, Any]:
        status = _status(result)
        return {
            **self._response(status, self._output.items),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": _usage(result),
        }

    def _taken(self, text: str, is_last: bool, logprobs: list[Any]) -> Iterator[Event]:
        self._output.take_logprobs(logprobs)
        for delta in self._answer.push(text, is_last):
            yield from self._output.take(delta)

    def _events_of(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(f"response.{kind}", data) for kind, data in events)

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        told = json.dumps({"type": kind, "sequence_number": self._events, **data})
        self._events += 1
        return f"event: {kind}\ndata: {told}\n\n".encode()


def _common(model: str, body: ResponseBody) -> dict[str, Any]:
    """What a response says whatever comes of it."""
    given = body.model_extra or {}
    reasoning = body.reasoning
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": _or(given.get("temperature"), 1.0),
        "text": {"format": (None if body.text is None else body.text.format) or {"type": "text"}},
        "tool_choice": _or(body.tool_choice, "auto"),
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _or(given.get("top_p"), 1.0),
        "truncation": "disabled",
    }


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _status(result: GenerationResult) -> str:
    return "incomplete" if result.finish_reason is FinishReason.LENGTH else "completed"


def _usage(result: GenerationResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
