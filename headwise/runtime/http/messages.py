"""The form of answers at `/v1/messages`: one message of blocks, and the events that build it up."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.runtime.http.errors import anthropic_error
from headwise.runtime.http.form import Form
from headwise.runtime.http.tools.answer import ChatAnswer, MakeAnswer
from headwise.runtime.http.tools.select import Tokens
from headwise.runtime.protocol.request import FinishReason, GenerationResult, OutputDelta


@dataclass(frozen=True)
class _Piece:
    """More of a block of that type. call: of a call that begins here, its id and name"""

    kind: str
    text: str
    call: dict[str, str] | None = None

    def begins(self, kind: str) -> bool:
        """Whether this is of another block than the one of that type before it."""
        return self.kind != kind or self.call is not None


def _piece(delta: dict[str, Any]) -> _Piece:
    """Of a delta as `ChatAnswer` makes it."""
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        began = {"id": call["id"], "name": function["name"]} if "id" in call else None
        return _Piece("tool_use", function["arguments"], began)
    if "reasoning_content" in delta:
        return _Piece("thinking", delta["reasoning_content"])
    return _Piece("text", delta["content"])


def _block(kind: str, text: str, call: dict[str, str] | None) -> dict[str, Any]:
    """A block with that text, or those arguments; what is no JSON object becomes one's only member."""
    if kind == "text":
        return {"type": kind, "text": text}
    if kind == "thinking":
        return {"type": kind, "thinking": text, "signature": ""}
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return {"type": kind, **(call or {}), "input": arguments if isinstance(arguments, dict) else {"arguments": text}}


_GROWING = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Of a block of a type, how more of it is told."""


class MessageForm(Form):
    """Of one answer.

    max_tokens:  that were asked for
    make_answer: makes what finds calls and reasoning in its text
    """

    def __init__(self, model: str, max_tokens: int, make_answer: MakeAnswer) -> None:
        self._ident, self._model, self._max_tokens = f"msg_{secrets.token_hex(12)}", model, max_tokens
        self._make_answer = make_answer
        self._answer: ChatAnswer
        self._read = 0
        self._blocks = 0  # that have begun
        self._open = ""  # type of the one that is being told

    def start(self, index: int, prompt: Tokens) -> None:
        self._answer, self._read = self._make_answer(prompt), len(prompt)

    def take(self, index: int, delta: OutputDelta) -> None:
        """Usage is told at the end."""

    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        (result,) = results
        blocks: list[tuple[str, list[str], dict[str, str] | None]] = []
        for piece in self._pieces(result.text, is_last=True):
            if piece.begins(blocks[-1][0] if blocks else ""):
                blocks.append((piece.kind, [], piece.call))
            blocks[-1][1].append(piece.text)
        content = [_block(kind, "".join(texts), call) for kind, texts, call in blocks]
        return {**self._message(content, _usage(result)), **self._stop(result)}

    def begin(self, index: int, echoed: str) -> bytes:
        none = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._read, "output_tokens": 0}
        return _event("message_start", {"message": {**self._message([], usage), **none}})

    def logprobs(self, index: int, echoed: str, output: OutputDelta | GenerationResult) -> None:
        return None

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> bytes:
        return b"".join(self._told(piece) for piece in self._pieces(text, is_last=finish_reason is not None))

    def end(self, results: Sequence[GenerationResult], n: int) -> bytes:
        (result,) = results
        end = {"delta": self._stop(result), "usage": _usage(result)}
        return self._close() + _event("message_delta", end) + _event("message_stop", {})

    def failed(self, error: dict[str, Any]) -> bytes:
        return _event("error", {"error": anthropic_error(error)["error"]})

    def _pieces(self, text: str, is_last: bool) -> Iterator[_Piece]:
        for delta in self._answer.push(text, is_last):
            piece = _piece(delta)
            if piece.text or piece.call is not None:
                yield piece

    def _told(self, piece: _Piece) -> bytes:
        told = b""
        if piece.begins(self._open):
            told = self._close()
            self._open = piece.kind
            block = _block(piece.kind, "", piece.call)
            told += _event("content_block_start", {"index": self._blocks, "content_block": block})
        kind, field = _GROWING[piece.kind]
        if piece.text:
            told += _event("content_block_delta", {"index": self._blocks, "delta": {"type": kind, field: piece.text}})
        return told

    def _close(self) -> bytes:
        """The end of the block that is being told, if there is one."""
        if not self._open:
            return b""
        self._open = ""
        self._blocks += 1
        return _event("content_block_stop", {"index": self._blocks - 1})

    def _stop(self, result: GenerationResult) -> dict[str, Any]:
        """Why the answer has ended."""
        if self._answer.finish_reason("stop") == "tool_calls" and result.finish_reason is FinishReason.STOP:
            reason = "tool_use"
        elif result.finish_reason is FinishReason.LENGTH:
            is_all = result.usage.completion_tokens >= self._max_tokens
            reason = "max_tokens" if is_all else "model_context_window_exceeded"
        else:
            reason = "stop_sequence" if result.stop else "end_turn"
        return {"stop_reason": reason, "stop_sequence": result.stop or None}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._ident, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "usage": usage}


def _usage(result: GenerationResult) -> dict[str, Any]:
    """Tokens that the cache served are not among those of the input."""
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
