"""Files of ranks (``tiktoken.model``) are read as tokenizers that merge as their ranks say."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import ModelError
from headwise.runtime.loader.tiktoken_file import RANKS
from headwise.runtime.loader.tokenizer import Tokenizer

CONFIG = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "eos_token": "[EOS]"}


def ranks() -> dict[bytes, int]:
    """Bytes in an order of their own, and words behind them, of which each is made of two that come before it."""
    tokens = [bytes([(7 * byte + 3) % 256]) for byte in range(256)]
    for word in ("th", "he", "the", "in", "ing", " t", " the", "12", "中", "中文", "ee", "ein", "'s", "ge"):
        whole = word.encode()
        for end in range(2, len(whole) + 1):
            if whole[:end] not in tokens and whole[: end - 1] in tokens:
                tokens.append(whole[:end])
    return {token: rank for rank, token in enumerate(tokens)}


def write(directory: Path, config: dict[str, Any] | None = None, known: dict[bytes, int] | None = None) -> Path:
    known = ranks() if known is None else known
    directory.mkdir(exist_ok=True)
    lines = [b64encode(token) + b" %d" % rank for token, rank in known.items()]
    (directory / RANKS).write_bytes(b"\n".join(reversed(lines)) + b"\n")
    count = len(known)
    named = {str(count): {"content": "[BOS]"}, str(count + 2): {"content": "[EOS]", "special": True}}
    given = {**CONFIG, "added_tokens_decoder": named} if config is None else config
    (directory / "tokenizer_config.json").write_text(json.dumps(given))
    return directory


def merged(piece: bytes) -> list[int]:
    """The two neighbours that make the token of lowest rank, again and again, as the file's own reader does."""
    known, parts = ranks(), [bytes([byte]) for byte in piece]
    if piece in known:
        return [known[piece]]
    while True:
        pairs = [(known.get(left + right, 1 << 30), at) for at, (left, right) in enumerate(pairwise(parts))]
        if not pairs or min(pairs)[0] == 1 << 30:
            return [known[part] for part in parts]
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the thing", ["the", " thing"]),
        ("theein's", ["theein's"]),
        ("12345", ["123", "45"]),
        ("中文then 中", ["中文", "then", " ", "中"]),
        ("ABCdef", ["ABCdef"]),
        ("a  b\n\n c!?\n", ["a", " ", " b", "\n\n", " c", "!?\n"]),
        ("\N{GRINNING FACE}", ["\N{GRINNING FACE}"]),
    ],
)
def test_text_is_cut_as_kimis_is_and_merged_by_ranks(tmp_path: Path, text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    ids = tokenizer.encode(text)
    assert ids == [token for piece in pieces for token in merged(piece.encode())]
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_those_behind_the_ranks_named_or_not(tmp_path: Path) -> None:
    tokenizer, count = Tokenizer.from_directory(write(tmp_path)), len(ranks())
    assert tokenizer.vocab_size == count + 256
    assert tokenizer.encode("the[EOS]") == [ranks()[b"the"], count + 2]
    assert tokenizer.encode("[BOS]") == [count]
    assert tokenizer.encode(f"<|reserved_token_{count + 255}|>") == [count + 255]
    assert tokenizer.eos_token_ids == (count + 2,)
    assert tokenizer.decode([count, ranks()[b"the"]]) == "the"


def test_a_tokenizer_json_beside_it_is_what_counts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "known", "message"),
    [
        ({}, None, r"does not say how text is cut.*tokenization_kimi only.*tokenizer\.json"),
        ({"auto_map": {"AutoTokenizer": "tokenization_qwen.X"}}, None, "does not say how text is cut"),
        (
            {**CONFIG, "added_tokens_decoder": {"5": {"content": "[X]"}}},
            None,
            "names the token 5.*not belong together",
        ),
        ({**CONFIG, "added_tokens_decoder": {"x": {}}}, None, "'added_tokens_decoder' must have a 'content'"),
        (None, {b"a": 0}, "does not rank every byte"),
        (None, {**ranks(), b"zz": 9999}, "leaves out a rank"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any] | None, known: dict[bytes, int] | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        Tokenizer.from_directory(write(tmp_path, config, known))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", [b"not base64! 3\n", b"YQ==\n", b"YQ== one\n"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path)
    (tmp_path / RANKS).write_bytes(damage)
    with pytest.raises(ModelError, match="cannot be read as ranks of tokens"):
        Tokenizer.from_directory(tmp_path)
