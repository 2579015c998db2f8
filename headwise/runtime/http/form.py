"""The contract between a request that is carried out and the form in which its answers are told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from headwise.runtime.http.tools.select import Tokens
from headwise.runtime.protocol.request import GenerationResult, OutputDelta


class Form(ABC):
    """Answers as JSON, once each of them has its `start`: all at once by `whole`; or as the events of a stream: for
    each answer `begin` and its `part`s, and then `end`, or `failed`.

    has_logprobs: whether log-probabilities are told
    repeats:      whether the end of a stream tells once more what came before
    has_tokens:   whether tokens are told by their ids, also those that have no text
    """

    has_logprobs = False
    repeats = False
    has_tokens = False

    @abstractmethod
    def start(self, index: int, prompt: Tokens) -> None:
        """Told before anything else of an answer: its prompt."""

    @abstractmethod
    def take(self, index: int, delta: OutputDelta) -> None:
        """Told of each delta of an answer, behind its `start` and before its events."""

    @abstractmethod
    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        """All at once: ``n`` results for each prompt, behind the prompt's text where there is one."""

    @abstractmethod
    def begin(self, index: int, echoed: str) -> bytes:
        """What an answer's stream begins with; may be nothing."""

    @abstractmethod
    def logprobs(self, index: int, echoed: str, output: OutputDelta | GenerationResult) -> Any:
        """Those of an answer's next tokens; None where they are not told."""

    @abstractmethod
    def part(self, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> bytes:
        """Events: what is new of an answer, or its end."""

    @abstractmethod
    def end(self, results: Sequence[GenerationResult], n: int) -> bytes:
        """What a stream ends with."""

    @abstractmethod
    def failed(self, error: dict[str, Any]) -> bytes:
        """What a stream ends with that fails. ``error``: as `ApiError` has it, without its envelope"""
