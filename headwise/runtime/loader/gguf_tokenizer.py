"""A GGUF file's tokenizer as Hugging Face's ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_splits import BEGINNING, NORMALISED, SPLITS, WHOLE_WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PRE_TOKENIZERS = ("gpt-2", "smollm", *SPLITS)


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The file's tokenizer, as the ``tokenizers`` library has it.

    Raises:
        ModelError: it is of a kind that cannot be converted, or the file lacks a part of it.
    """
    kind = source.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(source)
    elif kind in ("llama", "gemma4"):
        tokenizer = _sentencepiece(source, _derive_merges(source) if kind == "llama" else _merges(source))
    else:
        raise ModelError(f"{source.path} has a tokenizer of kind {kind!r}; gpt2, llama and gemma4 can be converted")
    _add_tokens(tokenizer, source)
    _add_template(tokenizer, source)
    return tokenizer


def build_tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside it: special tokens, chat template, longest context in tokens."""
    tokens = source.require("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(source, "bos"),
        "add_eos_token": _adds(source, "eos"),
        "model_max_length": source.require(f"{source.require('general.architecture')}.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = source.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if template := source.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _byte_level(source: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = source.get("tokenizer.ggml.pre", "gpt-2")
    # Kimi-K2's files of before there were merges: of two neighbours, those whose union comes first are merged.
    has_merges = pre != "kimi-k2" or "tokenizer.ggml.merges" in source.metadata
    merges = _merges(source) if has_merges else _ranked_merges(source, lambda index: -index)
    model = models.BPE(vocab=_vocabulary(source), merges=merges, ignore_merges=pre in WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, source)
    if pre in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(source: GgufFile) -> list[tuple[str, str]]:
    """The merges that a file lists, in order."""
    pairs = [merge.partition(" ") for merge in source.require("tokenizer.ggml.merges")]
    return [(left, right) for left, _, right in pairs]


def _pre_tokenizer(pre: str, source: GgufFile) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in SPLITS:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, plain])
    raise ModelError(
        f"{source.path} splits text by {pre!r} before its tokenizer; {', '.join(_PRE_TOKENIZERS)} can be converted: "
        "use the model's Hugging Face directory, which has its tokenizer.json"
    )


def _sentencepiece(source: GgufFile, merges: list[tuple[str, str]]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(source)
    unknown = source.require("tokenizer.ggml.tokens")[source.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if source.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _derive_merges(source: GgufFile) -> list[tuple[str, str]]:
    """BPE merges, in order, equivalent to SentencePiece's scores: the pair whose union scores highest comes first."""
    scores = source.require("tokenizer.ggml.scores")
    return _ranked_merges(source, lambda index: scores[index])


def _ranked_merges(source: GgufFile, score: Callable[[int], float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is one, those with the highest ``score`` of the union first."""
    tokens, types = source.require("tokenizer.ggml.tokens"), source.require("tokenizer.ggml.token_type")
    normal = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    ranked = []
    for token, index in normal.items():
        for cut in range(1, len(token)):
            left, right = normal.get(token[:cut]), normal.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score(index), index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _vocabulary(source: GgufFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(source.require("tokenizer.ggml.tokens"))}


def _add_tokens(tokenizer: Tokenizer, source: GgufFile) -> None:
    """Register the tokens that are matched whole: control tokens, which are left out of decoded text, and user-defined
    ones, which are not."""
    from tokenizers import AddedToken

    tokens, types = source.require("tokenizer.ggml.tokens"), source.require("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise ModelError(f"{source.path} is corrupt: {len(tokens)} tokens have {len(types)} types; download it again")
    chosen = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in chosen if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in chosen if kind == _USER_DEFINED])


def _add_template(tokenizer: Tokenizer, source: GgufFile) -> None:
    """Have the post-processor add the tokens that begin and end every text."""
    from tokenizers.processors import TemplateProcessing

    tokens = source.require("tokenizer.ggml.tokens")
    ids = {name: source.require(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos") if _adds(source, name)}
    if ids:
        before = [tokens[ids["bos"]]] if "bos" in ids else []
        after = [tokens[ids["eos"]]] if "eos" in ids else []
        single = [*before, "$A", *after]
        tokenizer.post_processor = TemplateProcessing(
            single=single,
            pair=[*single, *before, "$B", *after],
            special_tokens=[(tokens[index], index) for index in ids.values()],
        )


def _adds(source: GgufFile, name: str) -> bool:
    """Whether every text gets a ``bos`` or ``eos`` token (``name``). Where the file does not say, its kind of tokenizer
    decides."""
    custom = name == "bos" and (
        source.get("tokenizer.ggml.model") == "llama" or source.get("tokenizer.ggml.pre") in BEGINNING
    )
    return bool(source.get(f"tokenizer.ggml.add_{name}_token", custom))
