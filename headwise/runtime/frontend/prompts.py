"""Turns texts and chats into token ids. Texts that cannot fit the model's length are refused before they cost time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.request import as_token_ids

_ENTRY_BYTES = 128
"""Each entry of a list or mapping counts as so many bytes, besides its text."""
_SLICE = 4
"""Texts with more characters than so many times the model's length are first counted in slices: most cannot fit."""


@dataclass(frozen=True)
class TextLimits:
    """Limits for the length of texts.

    tokens:      the model's length, prompt and output together
    token_bytes: most bytes of text, in UTF-8, that become one token
    """

    tokens: int
    token_bytes: int

    @property
    def bytes(self) -> int:
        """Most bytes of a text that could fit."""
        return self.tokens * self.token_bytes

    @property
    def chat_bytes(self) -> int:
        """Most bytes of messages that are rendered at all. More than `bytes`: a template may leave parts out."""
        return 4 * self.bytes + (1 << 20)

    def size(self, prompt: Any, messages: Any) -> int:
        """A lower bound of the bytes of text to encode. Raises `InvalidRequestError` if they cannot fit."""
        most = self.bytes if messages is None else self.chat_bytes
        num_bytes = prompt_bytes(prompt, messages, most)
        if num_bytes > most:
            raise self._too_long("a text" if messages is None else "a chat", num_bytes, most)
        return num_bytes

    def _too_long(self, what: str, num_bytes: int, most: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"{what} of at least {num_bytes} bytes cannot fit: send at most {most}, as {self.tokens} tokens fit "
            f"(the model's length, or what the KV cache holds) and a token has at most {self.token_bytes} bytes"
        )


class PromptEncoder(Protocol):
    """Turns what users write into token ids ``int32 [n]``. Raises `InvalidRequestError`."""

    def text(self, text: str) -> NDArray[np.int32]: ...

    def chat(self, messages: Any) -> NDArray[np.int32]: ...


class LocalPromptEncoder:
    """Encodes in this process. The limits bound its time and memory, however long the text."""

    def __init__(self, tokenizer: Tokenizer, limits: TextLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def text(self, text: str) -> NDArray[np.int32]:
        self._check(text)
        return as_token_ids(self._tokenizer.encode(text))

    def chat(self, messages: Any) -> NDArray[np.int32]:
        self._limits.size(None, messages)
        rendered = self._tokenizer.render(messages)
        self._check(rendered.text)
        return as_token_ids(self._tokenizer.encode_chat(rendered))

    def _check(self, text: str) -> None:
        """Raise `InvalidRequestError` for a long text that cannot fit, by counting the tokens of its slices.

        A cut between two slices may split a token into its bytes, and the words beside it differently. So the slices
        may have more tokens than the text: at most twice as many, and the bytes of one token per cut.
        """
        self._limits.size(text, None)
        size, counted, most = _SLICE * self._limits.tokens, 0, 2 * self._limits.tokens
        if len(text) <= size:
            return
        for start in range(0, len(text), size):
            counted += len(self._tokenizer.encode(text[start : start + size], add_special_tokens=False))
            most += self._limits.token_bytes
            if counted > most:
                raise InvalidRequestError(
                    f"a text of {len(text)} characters cannot fit: its first {min(len(text), start + size)} make about "
                    f"{counted} tokens, and {self._limits.tokens} fit (the model's length, or what the KV cache holds)"
                )


def text_bytes(text: str) -> int:
    """Bytes in UTF-8; raises `InvalidRequestError` if the text is not valid Unicode."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is no valid Unicode: character {error.start} is half of a surrogate pair"
        ) from None


def any_size(prompt: Any, messages: Any) -> int:
    """Like `TextLimits.size`, without limits."""
    return prompt_bytes(prompt, messages, sys.maxsize)


def prompt_bytes(prompt: Any, messages: Any, most: int) -> int:
    """A lower bound of the bytes of text to encode; counting stops beyond ``most``. Token ids count as 0."""
    if messages is None:
        return text_bytes(prompt) if isinstance(prompt, str) else 0
    counted, left = 0, [messages]
    while left and counted <= most:
        value = left.pop()
        if isinstance(value, str):
            counted += text_bytes(value)
        elif isinstance(value, Mapping):
            counted += _ENTRY_BYTES * len(value)
            left += (*value.keys(), *value.values()) if counted <= most else ()
        elif isinstance(value, list | tuple):
            counted += _ENTRY_BYTES * len(value)
            left += value if counted <= most else ()
    return counted
