"""Keeps users' text from becoming control tokens: in a rendered chat, only those that the template wrote count.

A template mixes its own text with the users'. So characters of the users' messages are replaced by marks before the
template is rendered; where marks are afterwards, there is users' text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import InvalidRequestError

_FIRST, _LAST = 0x100000, 0x10FFFD  # marks are of the last private-use plane; one that a user wrote is marked, too
_MARK = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


@dataclass(frozen=True)
class Rendered:
    """A rendered chat.

    user_at: positions in ``text``, ascending, of users' characters that could be part of a control token
    """

    text: str
    user_at: tuple[int, ...]

    def is_users(self, start: int, end: int) -> bool:
        """Whether a control token found at ``text[start:end]`` has characters that a user wrote."""
        index = bisect_left(self.user_at, start)
        return index < len(self.user_at) and self.user_at[index] < end


class Marks:
    """Replaces users' characters by marks before a template is rendered; `unmarked` puts them back.

    Each different character has a mark of its own: a private-use character that no control token contains, and that
    stays one character whatever the template does with it (strip, change case). Only characters are marked that could
    begin a control token within the text, or complete one that begins before it. All other text is left unchanged.

    control_tokens: their texts
    """

    def __init__(self, control_tokens: Collection[str]) -> None:
        tokens = [token for token in control_tokens if token]
        self._tokens = frozenset(tokens)
        self._lengths = sorted({len(token) for token in tokens})
        self._heads = frozenset(token[:cut] for token in tokens for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in tokens for cut in range(1, len(token)))
        firsts = "".join(sorted({token[0] for token in tokens}))
        self._first = re.compile(f"[{re.escape(firsts)}{chr(_FIRST)}-{chr(_LAST)}]")
        self._longest = max(self._lengths, default=0)

    def positions(self, text: str) -> Iterator[int]:
        """Positions of the characters to mark in a user's text, in no order; some may come twice."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())  # templates strip
        if any(text[start : start + length] in self._tails for length in range(1, min(self._longest, end - start) + 1)):
            yield start
        for match in self._first.finditer(text):
            at = match.start()
            is_mark = ord(text[at]) >= _FIRST
            is_token = is_mark or any(text[at : at + length] in self._tokens for length in self._lengths)
            if is_token or (end - at < self._longest and text[at:end] in self._heads):
                yield at

    def on(self, chat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
        """A chat, as `plain_chat` returns it, with marks, and mark (as a code point) -> character.

        The messages' roles, and the types of content parts, are left alone: they are words of the template, not of
        users.

        Raises:
            InvalidRequestError: there are more different characters to mark than marks.
        """
        marks: dict[str, str] = {}
        messages = [
            {key: value if key == "role" else self._on_field(key, value, marks) for key, value in message.items()}
            for message in chat["messages"]
        ]
        others = {key: self._on(value, marks) for key, value in chat.items() if key != "messages"}
        return {"messages": messages, **others}, {ord(mark): character for character, mark in marks.items()}

    def _on_field(self, key: str, value: Any, marks: dict[str, str]) -> Any:
        if key != "content" or not isinstance(value, list):
            return self._on(value, marks)
        return [
            {name: each if name == "type" else self._on(each, marks) for name, each in part.items()} for part in value
        ]

    def _on(self, value: Any, marks: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._on_text(value, marks)
        if isinstance(value, Mapping):
            return {self._on_text(key, marks): self._on(each, marks) for key, each in value.items()}
        if isinstance(value, list):
            return [self._on(each, marks) for each in value]
        return value

    def _on_text(self, text: str, marks: dict[str, str]) -> str:
        parts: list[str] = []
        done = 0
        for at in sorted(set(self.positions(text))):
            parts += (text[done:at], _mark(text[at], marks))
            done = at + 1
        return "".join((*parts, text[done:])) if parts else text


def unmarked(text: str, marks: Mapping[int, str]) -> Rendered:
    """A rendering of marked messages, with the characters that the marks stand for.

    marks: mark (as a code point) -> character, from `Marks.on`
    """
    if not marks:
        return Rendered(text, ())
    return Rendered(text.translate(dict(marks)), tuple(match.start() for match in _MARK.finditer(text)))


def _mark(character: str, marks: dict[str, str]) -> str:
    if character not in marks:
        if _FIRST + len(marks) > _LAST:
            raise InvalidRequestError("the messages have too many different private-use characters")
        marks[character] = chr(_FIRST + len(marks))
    return marks[character]
