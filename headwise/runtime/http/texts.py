"""Text to token ids and back, for who asks for it by HTTP. Prompts that are to be answered the scheduler tokenises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headwise.errors import InvalidRequestError, OverloadedError
from headwise.runtime.frontend.prompts import TextLimits
from headwise.runtime.frontend.tokenizer_pool import TokenizerPool
from headwise.runtime.http.logprobs import Decoder, TokenTexts
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.images import ImagePlaces, PromptImage, with_images

T = TypeVar("T")

MAX_WAITING = 32
_THREADS = 2


class Texts(TokenTexts, Protocol):
    """limits: how long a text may be. Raises `InvalidRequestError`, and `OverloadedError` if too many ask at once."""

    limits: TextLimits

    async def encode(self, prompt: str | None, messages: Any, images: Sequence[PromptImage] = ()) -> list[int]:
        """Of a prompt, or of a chat with these images in their places."""

    async def decode(self, tokens: Sequence[int]) -> str: ...


class ModelTexts:
    """By the model's tokenizer. Texts are encoded in a process of its own, which is started when one asks first: a text
    that takes long, or kills it, is nobody else's trouble.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        limits: TextLimits,
        vocab_size: int,
        chat_template: str = "",
        image_tokens: tuple[str, str] = ("", ""),
    ) -> None:
        """image_tokens: that the model's template writes for an image, and for a video; empty: it takes none"""
        self.limits = limits
        self._chat_template = chat_template
        self._places = ImagePlaces(*map(tokenizer.control_token, image_tokens))
        self._directory = directory
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_THREADS, "headwise-texts")
        self._waiting = 0
        self._starting = threading.Lock()
        self._pool: TokenizerPool | None = None

    async def encode(self, prompt: str | None, messages: Any, images: Sequence[PromptImage] = ()) -> list[int]:
        self.limits.size(prompt, messages)
        return await self._run(lambda: self._encode(prompt, messages, images))

    async def decode(self, tokens: Sequence[int]) -> str:
        if len(tokens) > self.limits.tokens:
            raise InvalidRequestError(f"{len(tokens)} tokens were given; at most {self.limits.tokens} fit the model")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(f"token id {token} is not in the model's vocabulary of {self._vocab_size}")
        return await self._run(lambda: self._tokenizer.decode(tokens))

    def token_bytes(self, token: int) -> bytes | None:
        return self._tokenizer.token_bytes(token)

    def decoder(self) -> Decoder:
        return self._tokenizer.detokenizer()

    def close(self) -> None:
        with self._starting:
            if self._pool is not None:
                self._pool.close()
        self._threads.shutdown()

    def _encode(self, prompt: str | None, messages: Any, images: Sequence[PromptImage]) -> list[int]:
        with self._starting:
            pool = self._pool = self._pool or TokenizerPool(self._directory, self.limits, 1, self._chat_template)
        tokens = pool.chat(messages) if prompt is None else pool.text(prompt)
        if images:
            tokens = with_images(tokens, images, self._places, self._vocab_size)[0]
        return [int(token) for token in tokens]

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} texts wait to be encoded or decoded already; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1
