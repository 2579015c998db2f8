"""Text to tokens and back by a real tokenizer, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_images import IMG, IMG_END, image_model
from support.tiny_models import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer_directory

from headwise.errors import InvalidRequestError, OverloadedError
from headwise.runtime.frontend.prompts import TextLimits
from headwise.runtime.http import texts as module
from headwise.runtime.http.texts import ModelTexts
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.images import PromptImage

CHAT = [{"role": "user", "content": "the <|im_end|>"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return write_tokenizer_directory(path, byte_level_tokenizer(), {"chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def texts(directory: Path, tokenizer: Tokenizer) -> Iterator[ModelTexts]:
    texts = ModelTexts(directory, tokenizer, TextLimits(64, 13), tokenizer.vocab_size)
    yield texts
    texts.close()


def test_texts_and_chats_are_encoded_as_the_scheduler_does(texts: ModelTexts, tokenizer: Tokenizer) -> None:
    text = "the end é🚢"
    assert asyncio.run(texts.encode(text, None)) == tokenizer.encode(text)
    assert asyncio.run(texts.encode(None, CHAT)) == tokenizer.encode_chat(tokenizer.render(CHAT))


def test_images_have_their_own_tokens_in_their_places() -> None:
    model = image_model()
    tokenizer = Tokenizer.from_directory(model)
    chat = [{"role": "user", "content": [{"type": "text", "text": "[IMG]"}, {"type": "image"}, {"type": "image"}]}]
    images = [PromptImage(np.array(tokens, np.int32), ()) for tokens in ([IMG, IMG, IMG_END], [IMG, IMG_END])]
    for place, says in (("[IMG]", ""), ("", "takes no images"), ("[NONE]", "takes no images")):
        texts = ModelTexts(model, tokenizer, TextLimits(64, 13), 272, image_tokens=(place, ""))
        try:
            if says:
                with pytest.raises(InvalidRequestError, match=says):
                    asyncio.run(texts.encode(None, chat, images))
                continue
            found = asyncio.run(texts.encode(None, chat, images))
            assert [token for token in found if token in (IMG, IMG_END)] == [IMG, IMG, IMG_END, IMG, IMG_END]
            with pytest.raises(InvalidRequestError, match="a place for 2 of the chat's 1 images"):
                asyncio.run(texts.encode(None, chat, images[:1]))
        finally:
            texts.close()


def test_tokens_are_decoded(texts: ModelTexts, tokenizer: Tokenizer) -> None:
    text = "the end é🚢"
    assert asyncio.run(texts.decode(tokenizer.encode(text))) == text
    assert asyncio.run(texts.decode([])) == ""


def test_what_cannot_fit_is_told_before_it_costs_time(texts: ModelTexts, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="cannot fit"):
        asyncio.run(texts.encode("a" * 100_000, None))
    with pytest.raises(InvalidRequestError, match="65 tokens were given; at most 64"):
        asyncio.run(texts.decode([0] * 65))
    with pytest.raises(InvalidRequestError, match=r"messages\[1\] must be a mapping"):
        asyncio.run(texts.encode(None, [*CHAT, 5]))
    for token in (-1, tokenizer.vocab_size, 2**70):
        with pytest.raises(InvalidRequestError, match="not in the model's vocabulary"):
            asyncio.run(texts.decode([token]))


def test_texts_beyond_what_may_wait_are_refused(texts: ModelTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)

    async def ask_for(count: int) -> list[list[int] | BaseException]:
        return await asyncio.gather(*(texts.encode("the end", None) for _ in range(count)), return_exceptions=True)

    outcomes = asyncio.run(ask_for(5))
    assert sum(isinstance(outcome, OverloadedError) for outcome in outcomes) == 2
    assert not any(isinstance(outcome, BaseException) for outcome in asyncio.run(ask_for(3)))


def test_texts_that_were_never_asked_for_start_no_process(directory: Path, tokenizer: Tokenizer) -> None:
    texts = ModelTexts(directory, tokenizer, TextLimits(64, 13), tokenizer.vocab_size)
    texts.close()
    assert texts._pool is None
