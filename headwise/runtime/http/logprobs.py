"""Log-probabilities of tokens in OpenAI's forms: that of chats, and that of completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from headwise.errors import OverloadedError
from headwise.runtime.http.errors import ApiError
from headwise.runtime.protocol.request import GenerationResult, OutputDelta, TokenLogprobs

LEAST = -9999.0
"""What OpenAI says for a probability of 0, whose logarithm JSON has no number for."""
MAX_HELD = 1 << 20
"""Most log-probabilities, of some 150 bytes each, that a server holds for answers which it tells whole."""
MAX_HELD_BY_ONE = MAX_HELD // 4
"""And for the answers of one request."""
_NAMED = 1 << 15
"""Tokens whose names are kept."""


class Decoder(Protocol):
    """Decodes a sequence token by token. Returns the text that no later token can change."""

    def push(self, ids: Sequence[int]) -> str: ...


class TokenTexts(Protocol):
    """What tokens stand for."""

    def token_bytes(self, token: int) -> bytes | None:
        """See `headwise.runtime.loader.tokenizer.Tokenizer.token_bytes`."""

    def decoder(self) -> Decoder:
        """A new one."""


@dataclass(frozen=True)
class TokenName:
    """text: the token, where it is UTF-8; else its bytes, as a Python literal has them
    data:    its bytes; None: the tokenizer has no such token
    """

    text: str
    data: bytes | None

    @classmethod
    def of(cls, token: int, data: bytes | None) -> TokenName:
        if data is None:
            return cls(f"token_id:{token}", None)
        try:
            return cls(data.decode("utf-8"), data)
        except UnicodeDecodeError:
            return cls("".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in data), data)

    @property
    def is_text(self) -> bool:
        return self.data is None or self.text.encode() == self.data


class AnswerLogprobs(ABC):
    """Those of one answer, as its tokens come.

    name: a token's name
    """

    def __init__(self, name: Callable[[int], TokenName]) -> None:
        self._name = name

    @abstractmethod
    def told(self, output: OutputDelta | GenerationResult) -> dict[str, Any]:
        """The next tokens', which may be none."""


class ChatLogprobs(AnswerLogprobs):
    def told(self, output: OutputDelta | GenerationResult) -> dict[str, Any]:
        content = [
            {**self._entry(token, each.chosen), "top_logprobs": [self._entry(*top) for top in each.top]}
            for token, each in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {
            "token": name.text,
            "logprob": max(logprob, LEAST),
            "bytes": None if name.data is None else list(name.data),
        }


class _Offsets:
    """Where the tokens of a text begin in it. at: characters before the next one"""

    def __init__(self, decoder: Decoder, at: int) -> None:
        self._decoder = decoder
        self._at = at

    def next(self, token: int) -> int:
        begin = self._at
        self._at += len(self._decoder.push([token]))
        return begin


class CompletionLogprobs(AnswerLogprobs):
    """prompt: where the prompt's tokens begin, whose log-probabilities are told first; None: they are not told
    answer: where those of the answer do
    """

    def __init__(self, name: Callable[[int], TokenName], prompt: _Offsets | None, answer: _Offsets) -> None:
        super().__init__(name)
        self._prompt = prompt
        self._answer = answer

    def told(self, output: OutputDelta | GenerationResult) -> dict[str, Any]:
        answer = self._part(self._answer, output.token_ids, output.logprobs)
        if self._prompt is None:
            return answer
        prompt = self._part(self._prompt, output.prompt_token_ids, output.prompt_logprobs)
        return {name: prompt[name] + values for name, values in answer.items()}

    def _part(
        self, offsets: _Offsets, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [None if each is None else max(each.chosen, LEAST) for each in logprobs],
            "top_logprobs": [None if each is None else self._top(token, each) for token, each in pairs],
            "text_offset": [offsets.next(token) for token in tokens],
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the chosen one in any case. Of two with one text, the likelier one stands."""
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token, logprobs.chosen)):
            top.setdefault(self._text(other), max(logprob, LEAST))
        return top

    def _text(self, token: int) -> str:
        name = self._name(token)
        return name.text if name.is_text else f"bytes:{name.text}"


class LogprobForms:
    """Makes the forms of answers, of a model with these texts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._name = lru_cache(_NAMED)(lambda token: TokenName.of(token, texts.token_bytes(token)))

    def chat(self, echoed: str = "") -> ChatLogprobs:
        return ChatLogprobs(self._name)

    def completion(self, echoed: str) -> CompletionLogprobs:
        return CompletionLogprobs(self._name, None, _Offsets(self._texts.decoder(), 0))

    def echoing_completion(self, echoed: str) -> CompletionLogprobs:
        """``echoed``: the prompt, which is told before the answer."""
        prompt = _Offsets(self._texts.decoder(), 0)
        return CompletionLogprobs(self._name, prompt, _Offsets(self._texts.decoder(), len(echoed)))

    def prompt(self, result: GenerationResult) -> list[dict[str, Any] | None]:
        """vLLM's form of a prompt's: for each token the chosen one and the likeliest ones, by id."""
        pairs = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
        return [None if each is None else self._of_prompt(token, each) for token, each in pairs]

    def _of_prompt(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, 1)}
        return {
            str(other): {
                "logprob": max(logprob, LEAST),
                "rank": ranks.get(other),
                "decoded_token": self._name(other).text,
            }
            for other, logprob in ((token, logprobs.chosen), *logprobs.top)
        }


class HeldLogprobs:
    """Counts the log-probabilities that a server holds until their answers are told whole."""

    def __init__(self) -> None:
        self.count = 0

    def open(self) -> HeldByOne:
        """The count of one request, which ends with it."""
        return HeldByOne(self)


class HeldByOne:
    """Of one request: a context, at whose end they are told or dropped."""

    def __init__(self, every: HeldLogprobs) -> None:
        self._every = every
        self._count = 0

    def add(self, delta: OutputDelta) -> None:
        """Raises `ApiError` or `OverloadedError` when there are too many."""
        logprobs = (*delta.prompt_logprobs, *delta.logprobs)
        if not logprobs:
            return
        count = sum(1 if each is None else 1 + len(each.top) for each in logprobs)
        self._count += count
        self._every.count += count
        if self._count > MAX_HELD_BY_ONE:
            raise ApiError(
                400,
                f"the answer has more than {MAX_HELD_BY_ONE} log-probabilities: stream it, or ask for fewer of them",
                param="logprobs",
            )
        if self._every.count > MAX_HELD:
            raise OverloadedError("too many log-probabilities wait to be told: stream them, or try again later")

    def __enter__(self) -> HeldByOne:
        return self

    def __exit__(self, *error: object) -> None:
        self._every.count -= self._count
        self._count = 0
