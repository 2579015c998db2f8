"""A file of byte sequences and their ranks (``tiktoken.model``) as a byte-level tokenizer of ``tokenizers``.

The file says neither how text is cut before its bytes are merged, nor which control tokens there are. The former is in
the code that comes with a model, which is not run: it is known here, by the name of that code. The latter are in
``tokenizer_config.json``.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

RANKS = "tiktoken.model"

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_KIMI = (
    r"[\p{Han}]+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_PATTERNS = {"tokenization_kimi": "|".join(_KIMI)}
"""By the module of a model's ``auto_map``: what text is cut into."""

_RESERVED = 256
"""Control tokens behind the ranks, whether they are named or not."""


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> Backend:
    """The tokenizer of a file of ranks.

    config: the ``tokenizer_config.json`` beside it

    Raises:
        ModelError: the file cannot be read, or it is not known how the model cuts text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    pattern = _pattern_of(path, config)
    ranks = _ranks(path)
    letters = _letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(written[left], written[right]) for left, right in _merges(ranks)]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    controls = _control_tokens(path, config, len(ranks))
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in controls])
    return backend


def _pattern_of(path: Path, config: Mapping[str, Any]) -> str:
    code = config.get("auto_map")
    named = str(code.get("AutoTokenizer")) if isinstance(code, dict) else ""
    pattern = next((pattern for module, pattern in _PATTERNS.items() if module in named), None)
    if pattern is None:
        raise ModelError(
            f"{path} does not say how text is cut, which is known of {', '.join(_PATTERNS)} only: save the model's "
            "fast tokenizer beside it, as tokenizer.json"
        )
    return pattern


def _ranks(path: Path) -> dict[bytes, int]:
    """Byte sequences by ascending rank: all numbers from 0 on, of which some are single bytes."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as ranks of tokens: {error}; fetch the model again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(f"{path} does not rank every byte, or leaves out a rank: fetch the model again")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every two tokens that make a third one, in the order in which they are merged: by the rank of that."""
    merges = []
    for token in ranks:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        found = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _control_tokens(path: Path, config: Mapping[str, Any], first: int) -> list[str]:
    """Names of the tokens behind the ranks, by their ids from ``first`` on."""
    names = {first + index: f"<|reserved_token_{first + index}|>" for index in range(_RESERVED)}
    given = config.get("added_tokens_decoder") or {}
    try:
        named = {int(token): str(entry["content"]) for token, entry in given.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path.parent / 'tokenizer_config.json'}: 'added_tokens_decoder' must have a 'content' for each id"
        ) from None
    if odd := sorted(named.keys() - names.keys()):
        raise ModelError(
            f"{path.parent / 'tokenizer_config.json'} names the token {odd[0]}, of {path.name} those from {first} to "
            f"{first + _RESERVED - 1} are control tokens: the two do not belong together"
        )
    return list({**names, **named}.values())


def _letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself, if it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in seen)
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
