"""How byte-level tokenizers split text before they merge, by the names that GGUF has for it.

Each is a sequence of regular expressions, those of the tokenizers' own ``tokenizer.json``: what one matches is split
off, and so is what lies between; the next one splits the pieces further.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(but: str = "", endings: str = "") -> str:
    """Words of capitals that others may follow, and of others that capitals may precede. but: none of these letters"""
    upper, lower = (rf"[{letters}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for letters in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before, after = r"[^\r\n\p{L}\p{N}]?", f"{endings}?" if endings else ""
    return f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"


_GPT4O = _words(endings=_ENDINGS) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_TEKKEN = _words() + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
_KIMI = (
    r"[\p{Han}]+|" + _words(r"&&[^\p{Han}]", _ENDINGS) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
)  # fmt: skip

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _REST,
)

_LATER = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10fa\u10fd-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7ca\ua7d0-\ua7d9"
    "\ua7f5-\ua7fa\uab30-\uab68\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e"
)
"""Letters with a case that DeepSeek's first tokenizer, which lists them one by one, does not know."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?(?:(?![{_LATER}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")

# Groups of three digits from a number's end, then scripts without spaces between words.
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK3[2],
)

SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "glm4", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (_SEED,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("command-r", "refact"), (r"\p{N}", _GPT2)),
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "afmoe": _AFMOE,
}
"""By what ``tokenizer.ggml.pre`` says."""

NORMALISED = ("qwen2", "deepseek-r1-qwen", "qwen35", "command-r")
"""Those whose text is normalised (NFC) first."""

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
"""Those whose vocabularies have words that no sequence of their merges leads to."""

BEGINNING = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
"""Those whose texts get a token that begins them, where the file does not say."""
