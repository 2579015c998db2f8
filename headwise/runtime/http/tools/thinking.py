"""Reasoning between ``<think>`` and ``</think>``, before the answer: DeepSeek R1, Qwen 3, SmolLM 3 and others."""

from __future__ import annotations

from headwise.runtime.http.tools.base import AnswerParser, Part, Reasoning, Trim, cut_at

OPEN, CLOSE = "<think>", "</think>"
_MAX_SPACE = 64
"""White space before ``<think>``."""


class Thinking(AnswerParser):
    """Splits reasoning off, and gives what follows to another parser. An answer that is cut off within its reasoning
    has nothing else. White space at the ends of both is left out.

    answer:    parses what follows
    has_begun: whether the prompt ended with the first of ``marks``
    """

    def __init__(self, answer: AnswerParser, has_begun: bool, marks: tuple[str, str] = (OPEN, CLOSE)) -> None:
        self._open, self._close = self.shown_tokens = marks
        self._answer = answer
        self._has_begun = has_begun
        self._buffer = ""
        self._state = self._at_start
        self._reasoning, self._content = Trim(), Trim()

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return self._state()

    def finish(self) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        if self._state == self._thinking or (self._has_begun and self._state == self._at_start):
            return _reasoning(self._reasoning.push(rest))
        space = self._content.space if self._state == self._answering else ""
        return [*self._answer.push(rest + space), *self._answer.finish()]

    def _at_start(self) -> list[Part]:
        """Before anything but white space has come."""
        text = self._buffer.lstrip()
        may_open = len(self._buffer) - len(text) <= _MAX_SPACE
        if may_open and text != self._open and self._open.startswith(text):
            return []
        if may_open and text.startswith(self._open):
            self._buffer, self._state = text.removeprefix(self._open), self._thinking
        else:
            self._state = self._thinking if self._has_begun else self._plain
        return self._state()

    def _thinking(self) -> list[Part]:
        before, mark, self._buffer = cut_at(self._buffer, (self._close,))
        parts = _reasoning(self._reasoning.push(before))
        if mark:
            self._state = self._answering
            parts += self._state()
        return parts

    def _answering(self) -> list[Part]:
        """Behind the reasoning."""
        text, self._buffer = self._content.push(self._buffer), ""
        return self._answer.push(text) if text else []

    def _plain(self) -> list[Part]:
        """There is no reasoning."""
        text, self._buffer = self._buffer, ""
        return self._answer.push(text)


def _reasoning(text: str) -> list[Part]:
    return [Reasoning(text)] if text else []
