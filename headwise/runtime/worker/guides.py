"""Masks of the outputs that must have some form. They are made on a thread of their own, while the model runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.runtime.loader.grammar import GrammarError, Matcher, Vocabulary
from headwise.runtime.protocol.guided import Guided

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
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headwise-grammar")
        return Guide(self._thread, lambda: self._matcher(guided), output)

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
    """One sequence's. The mask of its next token is in the making from the moment on at which its last one is known."""

    def __init__(self, thread: ThreadPoolExecutor, make: Callable[[], Matcher], output: list[int]) -> None:
        self._thread = thread
        self._made: Matcher | None = None
        self._make = make
        self._mask: Future[Mask] = thread.submit(self._advance, output)
        self.failure: str | None = None

    def sampled(self, token: int) -> None:
        """The output goes on with this token."""
        self._mask = self._thread.submit(self._advance, [token])

    def mask(self) -> Mask | None:
        """Of the next token; waits for it. None: there is none, see ``failure``."""
        try:
            return self._mask.result()
        except (GrammarError, HeadwiseError) as error:
            self.failure = f"the output's form cannot be kept: {error}"
            return None

    def _advance(self, tokens: list[int]) -> Mask:
        matcher = self._made = self._made or self._make()
        if tokens:
            matcher.take(tokens)
        return matcher.mask()
