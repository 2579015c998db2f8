"""The form of answers at `/v1/responses`: one object with one message, and the events that build it up."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from headwise.runtime.http.form import Form
from headwise.runtime.http.logprobs import ChatLogprobs
from headwise.runtime.http.response_bodies import ResponseBody
from headwise.runtime.http.tools.select import Tokens
from headwise.runtime.protocol.request import FinishReason, GenerationResult, OutputDelta

_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""What responses call an error of a type; all others are the server's."""


class ResponseForm(Form):
    """Of one response.

    logprobs: the form of log-probabilities; None: they are not told
    """

    repeats = True

    def __init__(self, model: str, body: ResponseBody, logprobs: ChatLogprobs | None) -> None:
        self.has_logprobs = logprobs is not None
        self._logprobs = logprobs
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._events = 0
        given = body.model_extra or {}
        described = None if body.text is None else body.text.format
        self._common = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": _or(given.get("temperature"), 1.0),
            "text": {"format": described or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _or(given.get("top_p"), 1.0),
            "truncation": "disabled",
        }

    def start(self, index: int, prompt: Tokens) -> None:
        """All of an answer's text is its message's, whatever its prompt."""

    def take(self, index: int, delta: OutputDelta) -> None:
        """Usage is told at the end."""

    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        (result,) = results
        status = _status(result)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._response(status, [self._item(status, [self._content(result)])]),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": why,
            "usage": _usage(result),
        }

    def begin(self, index: int, echoed: str) -> bytes:
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        response = {"response": self._response("in_progress", [])}
        return (
            self._event("response.created", response)
            + self._event("response.in_progress", response)
            + self._event("response.output_item.added", {"output_index": 0, "item": self._item("in_progress", [])})
            + self._event("response.content_part.added", {**self._place, "part": empty})
        )

    def logprobs(self, index: int, echoed: str, output: OutputDelta | GenerationResult) -> Any:
        return [] if self._logprobs is None else self._logprobs.told(output)["content"]

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> bytes:
        if not text and not logprobs:
            return b""
        return self._event("response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs})

    def end(self, results: Sequence[GenerationResult], n: int) -> bytes:
        response = self.whole(results, n, ())
        (item,) = response["output"]
        (content,) = item["content"]
        told = {"text": content["text"], "logprobs": content["logprobs"]}
        return (
            self._event("response.output_text.done", {**self._place, **told})
            + self._event("response.content_part.done", {**self._place, "part": content})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
            + self._event(f"response.{response['status']}", {"response": response})
        )

    def failed(self, error: dict[str, Any]) -> bytes:
        why = {"code": _CODES.get(error["type"], "server_error"), "message": error["message"]}
        return self._event("response.failed", {"response": {**self._response("failed", []), "error": why}})

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        states = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._common, **states, "status": status, "output": output}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _content(self, result: GenerationResult) -> dict[str, Any]:
        logprobs = self.logprobs(0, "", result)
        return {"type": "output_text", "text": result.text, "annotations": [], "logprobs": logprobs}

    @property
    def _place(self) -> dict[str, Any]:
        """Where in the response a text is."""
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, data: dict[str, Any]) -> bytes:
        told = json.dumps({"type": kind, "sequence_number": self._events, **data})
        self._events += 1
        return f"event: {kind}\ndata: {told}\n\n".encode()


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
