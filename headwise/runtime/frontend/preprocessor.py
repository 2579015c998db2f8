"""Turns what a user wrote into a request for an engine: chat template, tokens, limits."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import extend_hashes
from headwise.cache_controller.windows import GroupWindows
from headwise.errors import InvalidRequestError
from headwise.runtime.config.block_storage import storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.frontend.prompts import LocalPromptEncoder, PromptEncoder, TextLimits
from headwise.runtime.loader.chat import Chat
from headwise.runtime.loader.grammar import check_grammar
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.images import ImagePlaces, PromptImage, with_images
from headwise.runtime.protocol.prompt_items import PromptItem, check_items, placed
from headwise.runtime.protocol.request import (
    GenerateRequest,
    SamplingParams,
    as_priority,
    as_retention,
    as_string,
    as_token_ids,
)
from headwise.runtime.protocol.request_checks import check_one_sample

if TYPE_CHECKING:
    from headwise.runtime.frontend.tokenizer_pool import TokenizerPool

TYPICAL_PROMPT = 4096
"""Tokens of the prompt for which `blocks_per_token` is computed: of longer ones, window heads keep only a part."""


class Preprocessor:
    """Checks and tokenises requests. Holds no state between calls; safe to use from several threads.

    encoder: tokenises texts in other processes; None: they are tokenised in this one
    naming:  what block hashes start from, and which adapters there are: the card's, or that of the model with other
             weights or adapters
    """

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, encoder: PromptEncoder | None = None) -> None:
        self.card = card
        self.naming = card.naming
        self.tokenizer = tokenizer
        self._other_encoder = encoder

    @classmethod
    def open(cls, config: EngineConfig) -> Preprocessor:
        directory = resolve_model(config.model, config.cache_path)
        return cls(read_model_card(config, directory), Tokenizer.from_directory(directory, config.chat_template))

    @cached_property
    def _encoder(self) -> PromptEncoder:
        """Made when it is needed: an engine's preprocessor has nothing to tokenise."""
        return self._other_encoder or LocalPromptEncoder(self.tokenizer, self.limits)

    def with_pool(self, config: EngineConfig) -> tuple[Preprocessor, TokenizerPool]:
        """A preprocessor that tokenises in the processes of a new pool, and that pool, which the caller closes."""
        from headwise.runtime.frontend.tokenizer_pool import TokenizerPool  # a local engine has none

        directory = resolve_model(config.model, config.cache_path)
        pool = TokenizerPool(directory, self.limits, config.tokenizer_processes, config.chat_template)
        return Preprocessor(self.card, self.tokenizer, pool), pool

    @property
    def limits(self) -> TextLimits:
        return TextLimits(self.card.max_model_len, self.tokenizer.longest_token)

    @property
    def namespace(self) -> str:
        """Names the model and the cache layout: blocks of another namespace cannot be used here."""
        blocks, sizes = storage_namespace(self.card, 0), self.card.tp_sizes
        if not sizes:
            return f"{blocks.model}/{blocks.layout}/tp{blocks.tp_size}"
        slots = dict.fromkeys(layout.slot_identity for layout in self.card.layouts)
        return f"{blocks.model}/{'+'.join(slots)}/tp{'+'.join(map(str, sizes))}"

    @property
    def blocks_per_token(self) -> float:
        """Blocks of an engine's pool that each token of a prompt takes, over all head groups."""
        tokens = min(TYPICAL_PROMPT, self.card.max_model_len)
        blocks = GroupWindows(self.card.kept, self.card.layout.block_size).peak_blocks(tokens, 1)
        return float(int(blocks) / tokens)

    def hashes(self, request: GenerateRequest) -> list[bytes]:
        """The block hashes of the prompt and of the tokens that a lost engine had already produced."""
        if request.sampling.prompt_logprobs is not None:
            return []  # what is cached of it does not serve it
        tokens = request.prompt_token_ids
        if request.output_token_ids:
            tokens = np.concatenate((tokens, np.array(request.output_token_ids, np.int32)))
        hashes: list[bytes] = []
        seed = self.naming.hash_seed(request.cache_salt, request.lora_id)
        extend_hashes(hashes, seed, tokens, self.card.layout.block_size, request.extra_keys)
        return hashes

    def prepare(
        self,
        *,
        prompt: str | Sequence[int] | None = None,
        messages: Chat | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str | None = None,
        items: Sequence[PromptItem] = (),
        adapter: str = "",
        images: Sequence[PromptImage] = (),
        retain_s: float = 0.0,
        retain_tokens: int = 0,
    ) -> GenerateRequest:
        """A request for one prompt (text or token ids) or one chat; raises `InvalidRequestError`.

        A missing seed is drawn here, once, so that the request samples the same tokens on every engine.

        items: the prompt's multimodal items; the prompt must be token ids, for by these they are placed
        adapter: name of the one that it is computed with; empty: none
        images: of the chat, in their order: they become items, whose embeddings the caller has
        retain_s, retain_tokens: see `Retention`; 0 seconds: none
        """
        if (prompt is None) == (messages is None):
            raise InvalidRequestError("give either a prompt or messages")
        sampling, priority = SamplingParams.of(sampling), as_priority(priority)
        cache_salt, adapter = as_string("cache_salt", cache_salt), as_string("adapter", adapter)
        retention = as_retention(retain_s, retain_tokens)
        self.naming.check_adapter(adapter)
        self._check_sampling(sampling)
        check_items(items, prompt)
        tokens = self._tokens(prompt, messages)
        if images:
            tokens, items = self._with_images(tokens, messages, images)
        of_items = placed(items, len(tokens))
        room = self.card.max_model_len - len(tokens)
        least = 1 if sampling.fit_max_tokens else sampling.max_tokens or 1
        if room < least:
            raise InvalidRequestError(
                f"{len(tokens)} prompt tokens and {least} to generate are more than the "
                f"{self.card.max_model_len} tokens that fit (the model's length, or what the KV cache holds)"
            )
        sampling = replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        )
        return GenerateRequest(
            request_id or uuid.uuid4().hex,
            tokens,
            sampling,
            priority,
            cache_salt,
            adapter,
            extra_keys=of_items.extra_keys,
            embeds=of_items.embeds,
            retention=retention,
        )

    def _with_images(
        self, tokens: NDArray[np.int32], messages: Chat | None, images: Sequence[PromptImage]
    ) -> tuple[NDArray[np.int32], list[PromptItem]]:
        if messages is None:
            raise InvalidRequestError("images are parts of a chat's messages: a prompt has items instead")
        places = ImagePlaces(*map(self.tokenizer.control_token, self.card.config.image_tokens))
        return with_images(tokens, images, places, self.card.config.vocab_size)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Raise `InvalidRequestError` for parameters that no request of this model can have."""
        check_one_sample(sampling)
        biased, vocab_size = max(sampling.logit_bias, default=0), self.card.config.vocab_size
        if biased >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias names token id {biased}, which is not in the model's vocabulary of {vocab_size}"
            )
        if sampling.guided is not None:
            if not self.tokenizer.eos_token_ids:
                raise InvalidRequestError("this model has no end token, so a guided output could not end")
            check_grammar(*sampling.guided.form)

    def _tokens(self, prompt: str | Sequence[int] | None, messages: Chat | None) -> NDArray[np.int32]:
        if messages is not None:
            return self._encoder.chat(messages)
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty")
            return self._encoder.text(prompt)
        tokens = as_token_ids(prompt if prompt is not None else [])
        if not len(tokens):
            raise InvalidRequestError("the prompt is empty")
        if int(tokens.max()) >= self.card.config.vocab_size:
            raise InvalidRequestError(
                f"token id {int(tokens.max())} is not in the model's vocabulary of {self.card.config.vocab_size}"
            )
        return tokens
