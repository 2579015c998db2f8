"""The forms of completions' and chats' answers: OpenAI's JSON objects and the events of their streams."""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.runtime.http.errors import invalid
from headwise.runtime.http.form import Form
from headwise.runtime.http.logprobs import AnswerLogprobs
from headwise.runtime.http.tools.answer import ChatAnswer, MakeAnswer, message_of
from headwise.runtime.http.tools.base import PlainText
from headwise.runtime.http.tools.select import Tokens
from headwise.runtime.protocol.request import GenerationResult, OutputDelta

DONE = b"data: [DONE]\n\n"
MAX_PROMPT_IDS = 1 << 22
"""Most tokens of prompts that one request is told, each as often as it has answers: about 30 MB."""


@dataclass(frozen=True)
class Telling:
    """What is told besides the answers.

    has_usage:  whether a stream ends with its usage
    counts:     whether each event of a stream has the usage of its answer so far
    logprobs:   the form of log-probabilities of an answer behind an echoed text; None: they are not told
    prompt_logprobs: the form of those of a result's prompt, likewise
    token_ids:  whether tokens of prompts and answers are told by their ids, in vLLM's form
    n:          answers that there are to each prompt
    """

    model: str
    has_usage: bool = False
    counts: bool = False
    logprobs: Callable[[str], AnswerLogprobs] | None = None
    prompt_logprobs: Callable[[GenerationResult], Any] | None = None
    token_ids: bool = False
    n: int = 1


class Choices(Form):
    """Answers are choices. ``json.dumps`` escapes all that is not ASCII, so no event can be split within a character,
    nor at what some readers take for the end of a line.

    ident: names the answer
    _has_prompts: whether each choice has the tokens of its prompt; else they are told once, beside the choices
    """

    _has_prompts = False
    _prefix = ""
    _whole = ""
    _part = ""

    def __init__(self, telling: Telling) -> None:
        self.ident = f"{self._prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._telling = telling
        self._head = json.dumps(self._common(self._part))[:-1]
        self._tail = ', "usage": null}\n\n' if telling.has_usage else "}\n\n"
        self.has_logprobs = telling.logprobs is not None or telling.prompt_logprobs is not None
        self._logprobs_of: dict[int, AnswerLogprobs] = {}
        self.has_tokens = telling.token_ids
        self._prompts: dict[int, list[int]] = {}  # token ids, by the prompt's number, if they are told
        self._prompts_told: dict[int, str] = {}  # of streams, as JSON
        self._prompt_ids_told = 0
        self._untold: dict[int, list[int]] = {}  # those of an answer that no event has told yet
        self._begun: set[int] = set()  # answers of which an event has told something
        self._counts: dict[int, tuple[int, int]] = {}  # tokens of the prompt, and of the answer so far
        self._weights: dict[int, str] = {}  # by which what comes next was sampled, if that is to be told

    def start(self, index: int, prompt: Tokens) -> None:
        self._counts[index] = len(prompt), 0
        if self.has_tokens:
            self._untold[index] = []
            self._keep_prompt(index // self._telling.n, prompt)

    def _keep_prompt(self, number: int, prompt: Tokens) -> None:
        """Raises `ApiError` for more than a request is told."""
        if number not in self._prompts:
            self._prompts[number] = np.asarray(prompt).tolist()
        elif not self._has_prompts:
            return
        self._prompt_ids_told += len(prompt)
        if self._prompt_ids_told > MAX_PROMPT_IDS:
            raise invalid(
                f"the prompts' tokens, told with each answer, are more than {MAX_PROMPT_IDS}: ask for fewer answers, "
                "or leave return_token_ids out",
                "return_token_ids",
            )

    def take(self, index: int, delta: OutputDelta) -> None:
        read, written = self._counts[index]
        self._counts[index] = read, written + len(delta.token_ids)
        if delta.weights:
            self._weights[index] = delta.weights
        if self.has_tokens:
            self._untold[index] += delta.token_ids

    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        choices = [
            self._choice(index, echoed[index // n] if echoed else "", result) | self._also(index // n, result)
            for index, result in enumerate(results)
        ]
        beside = self._prompt_ids(0) if not self._has_prompts else {}
        return {**self._common(self._whole), "choices": choices, "usage": usage_of(results, n), **beside}

    def logprobs(self, index: int, echoed: str, output: OutputDelta | GenerationResult) -> dict[str, Any] | None:
        if self._telling.logprobs is None:
            return None
        if index not in self._logprobs_of:
            self._logprobs_of[index] = self._telling.logprobs(echoed)
        return self._logprobs_of[index].told(output)

    def end(self, results: Sequence[GenerationResult], n: int) -> bytes:
        if not self._telling.has_usage:
            return DONE
        return event({**self._common(self._part), "choices": [], "usage": usage_of(results, n)}) + DONE

    def failed(self, error: dict[str, Any]) -> bytes:
        return event({"error": error}) + DONE

    @abstractmethod
    def _choice(self, index: int, echoed: str, result: GenerationResult) -> dict[str, Any]:
        """What came of a choice."""

    def _of_prompt(self, result: GenerationResult) -> dict[str, Any]:
        """What is told of a prompt, where it is asked for."""
        form = self._telling.prompt_logprobs
        return {} if form is None else {"prompt_logprobs": form(result)}

    def _also(self, prompt: int, result: GenerationResult) -> dict[str, Any]:
        """What a choice tells of its tokens: by which weights they are if others took the place of those of the start,
        and which they are."""
        told: dict[str, Any] = {"weights": [list(each) for each in result.weights]} if result.weights else {}
        if self.has_tokens:
            told |= {"token_ids": result.token_ids}
        return told | (self._prompt_ids(prompt) if self._has_prompts else {})

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[prompt]} if self.has_tokens else {}

    def _also_new(self, index: int) -> dict[str, Any]:
        """The same of an event: what is new since the one before."""
        told: dict[str, Any] = {"weights": self._weights.pop(index)} if index in self._weights else {}
        if self.has_tokens:
            told["token_ids"], self._untold[index] = self._untold[index], []
        return told

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.ident, "object": kind, "created": self._created, "model": self._telling.model}

    def _event(self, choice: dict[str, Any]) -> bytes:
        tail, index = self._tail, choice["index"]
        if self._telling.counts:
            tail = f', "usage": {json.dumps(_usage(*self._counts[index]))}}}\n\n'
        choice = choice | self._also_new(index)
        if self.has_tokens and index not in self._begun:
            self._begun.add(index)
            prompt = self._prompt_told(index // self._telling.n)
            if self._has_prompts:
                return f'data: {self._head}, "choices": [{json.dumps(choice)[:-1]}, {prompt}}}]{tail}'.encode()
            tail = f", {prompt}{tail}"
        return f'data: {self._head}, "choices": [{json.dumps(choice)}]{tail}'.encode()

    def _prompt_told(self, prompt: int) -> str:
        """`_prompt_ids` as a part of a JSON object, made once for all answers: it may be long."""
        if prompt not in self._prompts_told:
            self._prompts_told[prompt] = json.dumps(self._prompt_ids(prompt))[1:-1]
        return self._prompts_told[prompt]


class Chat(Choices):
    """answers: makes what finds calls and reasoning in a choice's text"""

    _prefix, _whole, _part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, telling: Telling, answers: MakeAnswer = lambda prompt: ChatAnswer(PlainText())) -> None:
        super().__init__(telling)
        self._make_answer = answers
        self._answers: dict[int, ChatAnswer] = {}

    def start(self, index: int, prompt: Tokens) -> None:
        super().start(index, prompt)
        self._answers[index] = self._make_answer(prompt)

    def whole(self, results: Sequence[GenerationResult], n: int, echoed: Sequence[str]) -> dict[str, Any]:
        return super().whole(results, n, echoed) | self._of_prompt(results[0])

    def _choice(self, index: int, echoed: str, result: GenerationResult) -> dict[str, Any]:
        answer = self._answers[index]
        message = message_of(answer.push(result.text, is_last=True))
        logprobs, reason = self.logprobs(index, echoed, result), answer.finish_reason(_reason(result))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int, echoed: str) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        answer, is_last = self._answers[index], finish_reason is not None
        deltas = answer.push(text, is_last) or ([{}] if is_last or logprobs else [])
        reason, last = answer.finish_reason(finish_reason), len(deltas) - 1
        return b"".join(
            self._delta(index, delta, None if at < last else reason, None if at else logprobs)
            for at, delta in enumerate(deltas)
        )

    def _delta(
        self, index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})


class Completion(Choices):
    _has_prompts = True
    _prefix, _whole, _part = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, echoed: str, result: GenerationResult) -> dict[str, Any]:
        logprobs = self.logprobs(index, echoed, result)
        choice = self._text(index, echoed + result.text, _reason(result), logprobs)
        return choice | self._of_prompt(result)

    def begin(self, index: int, echoed: str) -> bytes:
        return self._event(self._text(index, echoed, None)) if echoed else b""

    def part(self, index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        return self._event(self._text(index, text, finish_reason, logprobs))

    @staticmethod
    def _text(
        index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n".encode()


def usage_of(results: Sequence[GenerationResult], n: int) -> dict[str, Any]:
    """Tokens of all answers. A prompt counts once, as its first answer found it in the cache."""
    prompts = [result.usage for result in results[::n]]
    read = sum(usage.prompt_tokens for usage in prompts)
    written = sum(result.usage.completion_tokens for result in results)
    cached = sum(usage.cached_tokens for usage in prompts)
    return {**_usage(read, written), "prompt_tokens_details": {"cached_tokens": cached}}


def _usage(read: int, written: int) -> dict[str, Any]:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def likeliest(results: Sequence[GenerationResult], n: int, kept: int) -> list[GenerationResult]:
    """Of ``n`` results for each prompt the ``kept`` ones whose tokens are likeliest on average, the best one first."""
    best: list[GenerationResult] = []
    for begin in range(0, len(results), n):
        best += sorted(results[begin : begin + n], key=_mean_logprob, reverse=True)[:kept]
    return best


def _mean_logprob(result: GenerationResult) -> float:
    return sum(each.chosen for each in result.logprobs) / max(1, len(result.logprobs))


def _reason(result: GenerationResult) -> str | None:
    return None if result.finish_reason is None else result.finish_reason.value
