"""The tokenizer of a model's directory: ids, text, streamed text and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.loader.chat import ChatTemplate
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.detokenizer import IncrementalDetokenizer, detokenizer_factory

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Safe to share between threads.

    bos_token_id:  the token texts begin with, if the model has one
    eos_token_ids: every token that ends the model's output, ascending
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = special_tokens
        self._template_source = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        added = backend.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, entry in added.items() if entry.special)
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._make_detokenizer = detokenizer_factory(json.loads(decoder), self._piece)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load ``tokenizer.json`` and what the other files say of it; raises `ModelError` if that cannot be."""
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory} lacks tokenizer.json; save the model's fast tokenizer into it")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}; fetch the model again") from None
        files = {
            name: _optional(directory / f"{name}.json") for name in ("tokenizer_config", "generation_config", "config")
        }
        named = _special_tokens(files["tokenizer_config"])
        return cls(
            backend,
            named,
            _chat_template(directory, files["tokenizer_config"]),
            _bos_token_id(backend, named, files),
            _eos_token_ids(backend, named, files),
        )

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Text from `render_chat` already has its special tokens: encode it without more."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text, without special tokens."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh detokenizer for one sequence."""
        return self._make_detokenizer()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; raises `InvalidRequestError` if the model has no template or refuses it."""
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: send a plain prompt instead of messages")
        return self._template.render(messages, add_generation_prompt)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate(self._template_source, self._special_tokens) if self._template_source else None

    def _piece(self, token: int) -> str | None:
        return None if token in self._hidden else self._backend.id_to_token(token)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; the file has each as a string or as an added token's fields."""
    values = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja`` comes before the configuration's, which may hold several by name."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _bos_token_id(backend: Backend, named: Mapping[str, str], files: Mapping[str, Mapping[str, Any]]) -> int | None:
    token = files["config"].get("bos_token_id")
    if token is None and "bos_token" in named:
        token = backend.token_to_id(named["bos_token"])
    return token


def _eos_token_ids(
    backend: Backend, named: Mapping[str, str], files: Mapping[str, Mapping[str, Any]]
) -> tuple[int, ...]:
    """The files name different tokens (end of text, end of turn): each of them ends the output."""
    found: set[int] = set()
    for name in ("generation_config", "config"):
        value = files[name].get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if "eos_token" in named:
        token = backend.token_to_id(named["eos_token"])
        found.update([] if token is None else [token])
    return tuple(sorted(found))
