"""Turns a request's tokens into text, and ends it at stop strings, stop ids and end tokens."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.request import FinishReason, SamplingParams


class OutputText:
    """One request's text so far. Text that may turn out to begin a stop string is held back.

    ends: the tokens that end the request
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer(sampling.shown_tokens)
        self._sampling = sampling
        self.ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.ends |= frozenset(tokenizer.eos_token_ids)
        self._num_tokens = 0
        self._held = ""
        self.stopped_by = ""

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that a token makes certain, and `FinishReason.STOP` if it ends the request."""
        self._num_tokens += 1
        if token in self.ends:
            return self.flush(), FinishReason.STOP
        text = self._detokenizer.push([token])
        if self._num_tokens <= self._sampling.min_tokens:
            return text, None  # no stop string begins here
        return self._release(text)

    def push_all(self, tokens: Sequence[int]) -> tuple[str, FinishReason | None, int]:
        """`push` of tokens one after the other; and how many of them count: the first one that ends the request is the
        last."""
        text, reason, count = "", None, 0
        for token in tokens:
            more, reason = self.push(token)
            text, count = text + more, count + 1
            if reason is not None:
                break
        return text, reason, count

    def replay(self, tokens: Sequence[int]) -> tuple[str, FinishReason | None]:
        """Go on behind ``tokens``, whose text was told already: what the last of them, or the one that ends the
        request, made certain."""
        text, reason = "", None
        for token in tokens:
            text, reason = self.push(token)
            if reason is not None:
                break
        return text, reason

    def flush(self) -> str:
        """The rest of the text, when nothing more will come."""
        text, _ = self._release(self._detokenizer.flush())
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> tuple[str, FinishReason | None]:
        text = self._held + text
        found = [(at, stop) for stop in self._sampling.stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self._held = ""
            return text[:at], FinishReason.STOP
        keep = max((_overlap(text, stop) for stop in self._sampling.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
