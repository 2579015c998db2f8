"""Grammars of outputs, by llguidance: which tokens may come next. It is imported where a request asks for it only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError, first_line
from headwise.runtime.loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MAX_LEXER_STATES = 20_000
"""Of one matcher, at 1 to 2 kB: more end its request."""
ANY_OBJECT = '{"type":"object"}'
IS_LOOSE = False
"""Whether JSON may have white space between its tokens: small models would write it for ever. A schema may say
otherwise, by its key ``x-guidance``."""

Form = str | tuple[str, ...] | bool
"""What an output's form is given by; see `headwise.runtime.protocol.guided.Guided` for the names of forms."""


class GrammarError(Exception):
    """A grammar cannot be compiled, has become too large, or does not allow a token."""


def check_grammar(name: str, form: Form) -> None:
    """Compile the grammar of a form and forget it: milliseconds, in which other Python threads run.

    A grammar may name a model's control tokens, so of it only the syntax is checked: the rest a matcher finds out.

    Raises:
        InvalidRequestError: it is not valid, asks for what llguidance does not support, or is too large.
    """
    from llguidance import LLMatcher, LLTokenizer

    grammar = _grammar(name, form)
    error = LLMatcher.validate_grammar(grammar, limits=_limits())
    if not error and name != "grammar":
        error = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=_limits()).get_error()
    if error:
        raise InvalidRequestError(f"{name} cannot be used: {_shortened(error)}")


class Vocabulary:
    """A model's tokens, as grammars read them. Making one takes seconds where there are many tokens.

    size: of the model's logits, which may be more than the tokenizer has
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        from llguidance import LLTokenizer

        self.words = -(-size // 32)
        self._tokenizer = LLTokenizer(tokenizer.serialized, n_vocab=size, eos_token=list(tokenizer.eos_token_ids))

    def matcher(self, name: str, form: Form) -> Matcher:
        """At the beginning of a form's grammar. Raises `GrammarError`, and `InvalidRequestError` as `check_grammar`."""
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokenizer, _grammar(name, form), log_level=0, limits=_limits()), self.words)


class Matcher:
    """What may come next in one output. Not safe to share between threads."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words = matcher, words
        self._check()

    def copy(self) -> Matcher:
        """In the same state, and from there on on its own."""
        return Matcher(self._matcher.deep_copy(), self._words)

    def take(self, tokens: Iterable[int]) -> None:
        """Go on behind these tokens. Raises `GrammarError` if the grammar does not allow one of them."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarError(_shortened(self._matcher.get_error()))

    def mask(self) -> NDArray[np.uint32]:
        """``[words]``: token ``t`` may be next if bit ``t % 32`` of word ``t // 32`` is set; an end token if the output
        may end. Other Python threads run meanwhile. Raises `GrammarError`.
        """
        mask = np.zeros(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_shortened(self._matcher.get_error()))


def _grammar(name: str, form: Form) -> str:
    """llguidance's own form of it. Raises `InvalidRequestError` if a schema is no JSON."""
    from llguidance import LLMatcher

    if isinstance(form, bool):
        form, name = ANY_OBJECT, "json_schema"
    if isinstance(form, tuple):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in form))
    if name == "regex":
        return LLMatcher.grammar_from_regex(form)
    if name == "grammar":
        return LLMatcher.grammar_from_lark(form)
    try:
        return LLMatcher.grammar_from_json_schema(form, defaults={"whitespace_flexible": IS_LOOSE})
    except ValueError as error:
        raise InvalidRequestError(f"{name} cannot be used: {_shortened(str(error))}") from None


def _limits() -> LLParserLimits:
    """llguidance's own bound the time, about 20 ms a token at worst; these bound the memory, too."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _shortened(reason: str) -> str:
    return first_line(ValueError(" ".join(reason.split())))[:300]
