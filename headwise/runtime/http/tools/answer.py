"""A chat's answer in OpenAI's form: the deltas of its message as they come, or the message as a whole."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any

from headwise.runtime.http.tools.base import AnswerParser, CallArguments, CallBegin, Part, Reasoning, joined
from headwise.runtime.http.tools.select import Tokens

_PIECE = 4096
"""Characters of a whole answer that are parsed at once: parsers copy what follows a mark, and there may be many."""
_LETTERS = string.ascii_letters + string.digits


def call_id() -> str:
    """Names a call. Mistral's templates take no ids but those of nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class ChatAnswer:
    """Makes the deltas of one choice.

    is_one_call: whether calls after the first are left out
    """

    def __init__(self, parser: AnswerParser, is_one_call: bool = False) -> None:
        self._parser = parser
        self._is_one_call = is_one_call
        self._num_calls = 0

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer has ended, if a model that ended it did so for this reason."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def push(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text, and at the end of all that was held back."""
        parts = [part for at in range(0, len(text), _PIECE) for part in self._parser.push(text[at : at + _PIECE])]
        if is_last:
            parts += self._parser.finish()
        return [delta for part in joined(parts) if (delta := self._delta(part))]

    def _delta(self, part: Part) -> dict[str, Any]:
        """Empty: there is nothing to tell."""
        if isinstance(part, CallBegin):
            self._num_calls += 1
        if isinstance(part, CallBegin | CallArguments):
            if self._is_one_call and self._num_calls > 1:
                return {}
            return {"tool_calls": [self._call(part)]}
        return {"reasoning_content" if isinstance(part, Reasoning) else "content": part.text}

    def _call(self, part: CallBegin | CallArguments) -> dict[str, Any]:
        index = self._num_calls - 1
        if isinstance(part, CallArguments):
            return {"index": index, "function": {"arguments": part.text}}
        function = {"name": part.name, "arguments": ""}
        return {"index": index, "id": call_id(), "type": "function", "function": function}


MakeAnswer = Callable[[Tokens], ChatAnswer]
"""Makes what reads an answer to a prompt."""


def message_of(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that these deltas amount to. Without text beside calls, its content is None."""
    texts = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content")}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message |= {"content": texts["content"] or None, "tool_calls": calls}
    return message
