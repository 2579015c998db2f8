"""Tokenizers of GGUF files split and merge text as llama.cpp does, or as their models' own files say."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from support.tiny_ggufs import TINY_GGUFS, vocabulary, write_tiny_gguf
from support.tiny_models import SPACE
from tokenizers import Tokenizer

from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_splits import NORMALISED, SPLITS
from headwise.runtime.loader.gguf_tokenizer import build_tokenizer

DEPARTURES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35", "command-r"), (5,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "tekken"), (5,)),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), (5,)),
    "kimi-k2": (0, 3, 5),
}
"""Texts that llama.cpp splits otherwise than the tokenizers' own expressions say: it composes no accents, has no
combining marks in words, knows spaces that these do not know, and does not part Kimi's words where capitals begin."""

ONE = ["x y"]
"""Merges: a file must have some."""


def references() -> dict[str, Any]:
    """What llama.cpp said (see `make_gguf_references.py`)."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[2] / "references" / "gguf.json").read_text())
    return found


def tokenizer_of(path: Path, tokens: list[str], **others: Any) -> Tokenizer:
    """The tokenizer of a file. others: keys below ``tokenizer.ggml``"""
    known = {"tokens": tokens, "token_type": [1] * len(tokens), "add_bos_token": False, **others}
    keys = {f"tokenizer.ggml.{key}": value for key, value in known.items()}
    return build_tokenizer(GgufFile(write_tiny_gguf(path / "x.gguf", TINY_GGUFS["ernie"], keys=keys)))


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_llama_cpp_splits_it(pre: str, tmp_path: Path) -> None:
    told = references()
    tokenizer = tokenizer_of(tmp_path, vocabulary(told["merges"]), pre=pre, merges=told["merges"])
    for at, (text, ids) in enumerate(zip(told["texts"], told["splits"][pre], strict=True)):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert (found == ids) == (at not in DEPARTURES.get(pre, ())), text
        assert tokenizer.decode(found) == (unicodedata.normalize("NFC", text) if pre in NORMALISED else text)


def test_words_that_combining_marks_are_in_stay_whole(tmp_path: Path) -> None:
    """Where their models' expressions say so, which llama.cpp's do not."""
    for pre in ("gpt-4o", "llama4", "minimax-m2", "tekken", "kimi-k2", "qwen35", "deepseek-v3", "afmoe"):
        tokenizer = tokenizer_of(tmp_path, vocabulary(ONE), pre=pre, merges=ONE)
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("हिन्दी x")]
        assert len(pieces) == 2, pre


def test_kimis_words_part_where_capitals_begin_and_at_chinese(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, vocabulary(ONE), pre="kimi-k2", merges=ONE)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str("CamelCase中文ab don't")]
    assert ["CamelCase中文ab don't"[first:last] for first, last in spans] == ["Camel", "Case", "中文", "ab", " don't"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("glm4", ["x", "123", "456", "7", ".\n", "y"]),
        ("seed-coder", ["x", *"1234567", ".", "\n", "y"]),
        ("command-r", ["x", *"1234567", ".", "\n", "y"]),
        ("refact", ["x", *"1234567", ".", "\n", "y"]),
        ("afmoe", ["x", "1", "234", "567", ".\n", "y"]),
    ],
)
def test_numbers_and_ends_of_lines_part_as_a_models_own_expressions_say(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, vocabulary(ONE), pre=pre, merges=ONE)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str("x1234567.\ny")]
    assert ["x1234567.\ny"[first:last] for first, last in spans] == pieces


def test_without_merges_the_union_that_comes_first_is_merged_first(tmp_path: Path) -> None:
    """As Kimi-K2's tokens are ranked, in files that were made before converters wrote merges."""
    tokens = [*vocabulary([]), "bc", "ab", "abc"]
    tokenizer = tokenizer_of(tmp_path, tokens, pre="kimi-k2", merges=None)
    assert [tokens[token] for token in tokenizer.encode("ab abc").ids] == ["ab", "Ġ", "abc"]
    tokenizer = tokenizer_of(tmp_path, [*vocabulary([]), "bc", "ab"], pre="kimi-k2", merges=None)
    assert [tokens[token] for token in tokenizer.encode("abc").ids] == ["a", "bc"]


def test_gemma_4_merges_by_its_own_list_and_splits_nothing(tmp_path: Path) -> None:
    tokens = ["<unk>", "\n", "\n\n", "<0xC3>", "<0xA9>", SPACE, "a", "b", f"a{SPACE}", f"a{SPACE}b", f"{SPACE}b"]
    kinds = [2, 1, 1, 6, 6, *[1] * 6]
    merges = [f"a {SPACE}", f"a{SPACE} b", f"{SPACE} b", "\n \n"]
    more = {"model": "gemma4", "token_type": kinds, "merges": merges, "add_space_prefix": False, "pre": None}
    tokenizer = tokenizer_of(tmp_path, tokens, unknown_token_id=0, **more)
    ids = tokenizer.encode("a b b\n\né").ids
    assert [tokens[token] for token in ids] == [f"a{SPACE}b", f"{SPACE}b", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "a b b\n\né"


@pytest.mark.parametrize(("pre", "begins"), [("tekken", True), ("llama-bpe", True), ("gpt-4o", False)])
def test_a_file_that_does_not_say_begins_texts_as_its_kind_does(tmp_path: Path, pre: str, begins: bool) -> None:
    tokens = vocabulary(ONE)
    tokenizer = tokenizer_of(tmp_path, tokens, pre=pre, merges=ONE, add_bos_token=None, bos_token_id=7)
    assert tokenizer.encode("ab").tokens == ([tokens[7]] if begins else []) + ["a", "b"]
