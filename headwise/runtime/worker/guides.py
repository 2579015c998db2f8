"""Masks of the outputs that must have some form. They are made on a thread of their own, while the model runs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.runtime.loader.grammar import GrammarError, Matcher, Vocabulary
from headwise.runtime.protocol.guided import Guided

log = logging.getLogger(__name__)

Mask = NDArray[np.uint32]

KEPT = 64
"""Compiled grammars that are kept for later requests, the latest used ones."""


class Guides:
    """Makes the `Guide` of each guided sequence. The tokenizer is loaded, and the thread started, with the first one.

    load: reads the model's vocabulary; called on the thread
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Guided, Matcher] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def open(self, guided: Guided, output: list[int]) -> Guide:
        """For a sequence that has this output so far."""
        guide = Guide(lambda: self._matcher(guided))
        self.sampled([(guide, output)])
        return guide

    def sampled(self, outputs: Sequence[tuple[Guide, list[int]]]) -> None:
        """These sequences' outputs go on with these tokens: begin to make the masks of the next ones."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwise-grammar")
        made = self._thread.submit(_advance, outputs)
        for guide, _ in outputs:
            guide.made = made

    def close(self) -> None:
        """End the thread. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _matcher(self, guided: Guided) -> Matcher:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        if guided not in self._compiled:
            self._compiled[guided] = self._vocabulary.matcher(*guided.form)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(guided)
        return self._compiled[guided].copy()


class Guide:
    """One sequence's: only the thread that makes masks uses it while one is in the making.

    start: gives a matcher at the beginning of the form
    made:  done when the mask of the next token is there
    failure: why there is none
    """

    made: Future[None]
    failure: str | None = None

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self._start = start
        self._matcher: Matcher | None = None
        self._mask: Mask | None = None

    def mask(self) -> Mask | None:
        """Of the next token; waits for it. None: there is none, see ``failure``."""
        self.made.result()
        return self._mask

    def advance(self, tokens: list[int]) -> None:
        """Make the mask of what comes behind these tokens, which go on the output."""
        try:
            matcher = self._matcher = self._matcher or self._start()
            if tokens:
                matcher.take(tokens)
            self._mask = matcher.mask()
        except Exception as error:  # whatever it is, it is this request's: the worker goes on
            if not isinstance(error, GrammarError | HeadwiseError):
                log.exception("a mask could not be made")
            self._mask = None
            self.failure = f"the output's form cannot be kept: {error}"


def _advance(outputs: Sequence[tuple[Guide, list[int]]]) -> None:
    for guide, tokens in outputs:
        guide.advance(tokens)
