"""Incremental detokenization: text from tokens as they come, in the end the same as decoding all of them at once.

A token is not a piece of text: a character's bytes may be spread over several tokens. A detokenizer holds back only
what later tokens can still change, and looks at every token once.

The ``tokenizers`` library's ``DecodeStream`` would be wrong here. A run of byte-fallback tokens that is not valid UTF-8
decodes to replacement characters as a whole, and ``DecodeStream`` has by then returned its valid beginning as text.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headwise.errors import ModelError

Piece = Callable[[int], "str | None"]
"""Token id -> its entry in the vocabulary; ``None`` for ids that give no text (special tokens, unknown ids)."""


class IncrementalDetokenizer(ABC):
    """The text of one sequence, token by token."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def push(self, ids: Sequence[int]) -> str:
        """Take the sequence's next token ids. Returns the new text that no later token can change; often empty."""
        return self._push(piece for token in ids if (piece := self._piece(token)) is not None)

    @abstractmethod
    def _push(self, pieces: Iterable[str]) -> str: ...

    @abstractmethod
    def flush(self) -> str:
        """The text that was held back. To be called once, at the end of the sequence."""

    @abstractmethod
    def bytes_of(self, piece: str) -> bytes:
        """The bytes of text that an entry of the vocabulary stands for within a sequence; maybe part of a character."""


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """Byte-level BPE: a vocabulary entry's characters each stand for one byte."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _push(self, pieces: Iterable[str]) -> str:
        return self._decoder.decode(b"".join(map(_to_bytes, pieces)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def bytes_of(self, piece: str) -> bytes:
        return _to_bytes(piece)


class ByteFallbackDetokenizer(IncrementalDetokenizer):
    """SentencePiece: entries are text; characters without an entry come as byte tokens, ``<0xNN>``.

    A run of byte tokens is either valid UTF-8 as a whole, or decodes to one replacement character for each byte. So it
    is held back until a token of another kind ends it.

    marker: what stands for a space in entries
    strip:  most spaces that are dropped at the start of the text
    """

    def __init__(self, piece: Piece, marker: str, strip: int) -> None:
        super().__init__(piece)
        self._marker, self._strip = marker, strip
        self._run = bytearray()

    def _push(self, pieces: Iterable[str]) -> str:
        parts: list[str] = []
        for piece in pieces:
            if _BYTE.fullmatch(piece):
                self._run += self.bytes_of(piece)
            else:
                parts += (self._end_run(), piece.replace(self._marker, " "))
        return self._stripped("".join(parts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def bytes_of(self, piece: str) -> bytes:
        if _BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(self._marker, " ").encode("utf-8")

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "�" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class WordDetokenizer(IncrementalDetokenizer):
    """A tokenizer without a decoder: entries are words, joined by spaces."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self._separator = ""

    def _push(self, pieces: Iterable[str]) -> str:
        text = ""
        for piece in pieces:
            text += self._separator + piece
            self._separator = " "
        return text

    def flush(self) -> str:
        return ""

    def bytes_of(self, piece: str) -> bytes:
        return piece.encode("utf-8")


def detokenizer_factory(decoder: Mapping[str, Any] | None) -> Callable[[Piece], IncrementalDetokenizer]:
    """A function that makes one sequence's detokenizer.

    decoder: the value of ``decoder`` in a ``tokenizer.json``

    Raises:
        ModelError: it is of a kind that cannot be decoded token by token.
    """
    if decoder is None:
        return WordDetokenizer
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDetokenizer
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace = steps[0]
        strip: Mapping[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        marker = replace["pattern"].get("String")
        if marker and replace["content"] == " " and strip["content"] == " " and not strip["stop"]:
            return lambda piece: ByteFallbackDetokenizer(piece, marker, strip["start"])
    raise ModelError(
        f"tokenizer.json decodes by {' + '.join(kinds)}, which cannot be streamed; byte-level BPE (ByteLevel) and "
        "SentencePiece (Replace + ByteFallback + Fuse) can"
    )


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for what follows U+00FF."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _to_bytes(piece: str) -> bytes:
    """The bytes an entry stands for; added tokens outside the alphabet stand for themselves."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")
