"""A model's tokenizer: text to token ids, ids to text, at once or as they come, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.loader.chat import Chat, ChatTemplate, plain_chat, read_template
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.control_tokens import Marks, Rendered, unmarked
from headwise.runtime.loader.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer, detokenizer_factory
from headwise.runtime.loader.tiktoken_file import RANKS, read_tiktoken
from headwise.runtime.models.image_text import ImageText, image_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SHRINKS = 4
"""By how much normalising can shorten a text: a character of at most four bytes becomes one byte or more."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Safe to share between threads.

    backend:        the ``tokenizers`` library's
    special_tokens: ``bos_token``, ``eos_token`` and the like -> their texts, for the chat template
    chat_template:  Jinja source; None if the model has none
    bos_token_id:   the token that texts begin with, if the model has one
    eos_token_ids:  every token that ends the model's output, ascending
    image_text:     what stands for an image in a chat; None: what the template writes

    Raises `ModelError` if its ids cannot be decoded as they come.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        image_text: ImageText | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = special_tokens
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._image_text = image_text
        added = backend.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, entry in added.items() if entry.special)
        self._normalises_control_tokens = backend.normalizer is not None and any(
            entry.special and entry.normalized for entry in added.values()
        )
        self._added = {token: entry.content for token, entry in added.items()}
        decoder = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._make_detokenizer = detokenizer_factory(json.loads(decoder))

    @classmethod
    def from_directory(cls, directory: Path, chat_template: str = "") -> Tokenizer:
        """Load ``tokenizer.json``, or a file of ranks, and, where they exist, the files that configure it.

        chat_template: a file to take instead of the model's own template; empty: none

        Raises:
            ModelError: there is neither ``tokenizer.json`` nor ``tiktoken.model``, or a file cannot be read or used.
            ConfigError: the file ``chat_template`` cannot be read.
        """
        files = {
            name: _optional(directory / f"{name}.json") for name in ("tokenizer_config", "generation_config", "config")
        }
        backend = _backend(directory, files["tokenizer_config"])
        named = _special_tokens(files["tokenizer_config"])
        return cls(
            backend,
            named,
            read_template(chat_template) if chat_template else _chat_template(directory, files["tokenizer_config"]),
            _bos_token_id(backend, named, files),
            _eos_token_ids(backend, named, files),
            image_text(files["config"]),
        )

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def serialized(self) -> str:
        """The ``tokenizers`` library's own form of it, as ``tokenizer.json`` has it."""
        return str(self._backend.to_str())

    @cached_property
    def longest_token(self) -> int:
        """An upper bound of the bytes of text, in UTF-8, that can become one token."""
        entries = self._backend.get_vocab(with_added_tokens=False)
        is_bytes = isinstance(self.detokenizer(), ByteLevelDetokenizer)  # whose entries have one character per byte
        longest = max((len(entry) if is_bytes else len(entry.encode()) for entry in entries), default=1)
        added = max((len(content.encode()) for content in self._added.values()), default=1)
        return max(longest, added) * (_SHRINKS if _may_shorten(self._backend) else 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Control tokens written in the text become control tokens: it is the model's raw input.

        add_special_tokens: whether to add those that begin and end every text. False for text from `render_chat`, which
                            has them already
        """
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, chat: Rendered) -> list[int]:
        """Token ids of a conversation from `render`. Control tokens that users wrote are encoded as ordinary text."""
        if not chat.user_at and not self._normalises_control_tokens:
            return self.encode(chat.text, add_special_tokens=False)
        encoding = self._backend.encode(chat.text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            written = chat.text[start:end]
            is_literal = written.strip() == self._added.get(token, "").strip()  # as the template writes its own
            is_control = token in self._hidden and (is_literal or token != self._unknown)
            if is_control and not (is_literal and not chat.is_users(start, end)):
                ids += self._as_text(written)
            else:
                ids.append(token)
        return ids

    def _as_text(self, text: str) -> list[int]:
        """Token ids of text that would be a control token, as ordinary text."""
        ids = self._plain_backend.encode(text, add_special_tokens=False).ids
        if self._hidden.isdisjoint(ids):
            return list(ids)
        characters = [self._plain_backend.encode(character, add_special_tokens=False).ids for character in text]
        return [token for each in characters for token in each if token not in self._hidden or token == self._unknown]

    @cached_property
    def _plain_backend(self) -> Backend:
        """A tokenizer that treats control tokens as ordinary text."""
        from tokenizers import Tokenizer as Backend

        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _unknown(self) -> int | None:
        """The id that stands for text that the vocabulary has no token for; None if there is none."""
        unknown = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)

    def control_token(self, text: str) -> int | None:
        """The id of the control token that is written so; None: there is none, or users' text may become it."""
        return next((token for token in self._hidden if self._added[token] == text), None)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text, without special tokens."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def written(self, ids: Sequence[int]) -> str:
        """The ids' text, with special tokens as they are written."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def detokenizer(self, shown_tokens: Collection[str] = ()) -> IncrementalDetokenizer:
        """A new detokenizer, for one sequence. Special tokens give no text, but for those with these texts."""
        if not shown_tokens:
            return self._make_detokenizer(self._piece)
        shown = {token for token in self._hidden if self._added[token] in shown_tokens}
        return self._make_detokenizer(lambda token: self._added[token] if token in shown else self._piece(token))

    def token_bytes(self, token: int) -> bytes | None:
        """What one token stands for, in UTF-8, of which it may be part of a character; a control token stands for its
        name. None: the tokenizer has no such token, though the model may have a logit for it.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self._backend.id_to_token(token)
        return None if piece is None else self._detokenizer.bytes_of(piece)

    @cached_property
    def _detokenizer(self) -> IncrementalDetokenizer:
        """One that decodes no sequence."""
        return self.detokenizer()

    def render_chat(self, chat: Chat, add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the model's chat template.

        chat:                  see `plain_chat`
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer

        Raises:
            InvalidRequestError: the model has no template, the chat is malformed, or the template refuses it.
            ModelError: the template is not valid Jinja.
        """
        return self.render(chat, add_generation_prompt).text

    def render(self, chat: Chat, add_generation_prompt: bool = True) -> Rendered:
        """`render_chat`, with the places where users' text could pass for control tokens: for `encode_chat`."""
        if self._template is None:
            raise InvalidRequestError("this model has no chat template: send a plain prompt instead of messages")
        marked, marks = self._marks.on(plain_chat(chat))
        text = self._template.render(marked, add_generation_prompt)
        if self._image_text is not None:  # the template's own alone: users' has marks
            text = text.replace(self._image_text.written, self._image_text.read)
        return unmarked(text, marks)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate(self.chat_template, self._special_tokens) if self.chat_template else None

    @cached_property
    def _marks(self) -> Marks:
        return Marks([self._added[token] for token in self._hidden])

    def _piece(self, token: int) -> str | None:
        return None if token in self._hidden else self._backend.id_to_token(token)


def _backend(directory: Path, config: Mapping[str, Any]) -> Backend:
    """Of ``tokenizer.json`` or, without that file, of the ranks that there are."""
    from tokenizers import Tokenizer as Backend

    path, ranks = directory / "tokenizer.json", directory / RANKS
    if not path.is_file() and ranks.is_file():
        return read_tiktoken(ranks, config)
    if not path.is_file():
        raise ModelError(f"{directory} lacks tokenizer.json; save the model's fast tokenizer into it")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}; fetch the model again") from None


def _may_shorten(backend: Backend) -> bool:
    """Whether normalising may shorten a text, in bytes."""
    if backend.normalizer is None:
        return False
    state = json.loads(backend.normalizer.__getstate__())
    steps = state["normalizers"] if state["type"] == "Sequence" else [state]
    return not all(
        step["type"] == "Prepend"
        or (
            step["type"] == "Replace"
            and "String" in step["pattern"]
            and len(step["content"].encode()) >= len(step["pattern"]["String"].encode())
        )
        for step in steps
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens. The file has each as a string, or as a mapping with its ``content``."""
    values = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template in ``chat_template.jinja``, or ``chat_template.json``, as older checkpoints with images have it, or,
    without these files, in ``config``: of several there, ``default``."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _optional(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
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
    """All end tokens that the files name, ascending: some end the text, some a turn, and each ends the output."""
    found: set[int] = set()
    for name in ("generation_config", "config"):
        value = files[name].get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if "eos_token" in named:
        token = backend.token_to_id(named["eos_token"])
        found.update([] if token is None else [token])
    return tuple(sorted(found))
