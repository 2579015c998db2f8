"""Log-probabilities of tokens in OpenAI's forms: that of chats, and that of completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from headwise.errors import OverloadedError
from headwise.runtime.http.errors import ApiError
from headwise.runtime.protocol.request import TokenLogprobs

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
    def told(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens', which may be none."""


class ChatLogprobs(AnswerLogprobs):
    def told(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {**self.entry(token, each.chosen), "top_logprobs": [self.entry(*top) for top in each.top]}
            for token, each in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {
            "token": name.text,
            "logprob": max(logprob, LEAST),
            "bytes": None if name.data is None else list(name.data),
        }


class CompletionLogprobs(AnswerLogprobs):
    """offset: characters of the answer before its first token: of the prompt, if that is told, too"""

    def __init__(self, name: Callable[[int], TokenName], decoder: Decoder, offset: int) -> None:
        super().__init__(name)
        self._decoder = decoder
        self._offset = offset

    def told(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push([token]))
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [max(each.chosen, LEAST) for each in logprobs],
            "top_logprobs": [self._top(token, each) for token, each in pairs],
            "text_offset": offsets,
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

    def chat(self, echoed: str) -> ChatLogprobs:
        return ChatLogprobs(self._name)

    def completion(self, echoed: str) -> CompletionLogprobs:
        """``echoed``: what is told before the answer."""
        return CompletionLogprobs(self._name, self._texts.decoder(), len(echoed))


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

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Raises `ApiError` or `OverloadedError` when there are too many."""
        if not logprobs:
            return
        count = sum(1 + len(each.top) for each in logprobs)
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
