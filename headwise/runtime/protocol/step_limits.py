"""How long a step may take before its workers count as hung, estimated from similar steps."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from headwise.runtime.protocol.batch import BatchRequest

LEAST_S = 15.0
"""No limit is shorter: a new shape may need kernels compiled or graphs recorded at any time, and a machine that is
short of memory or cores stands still for seconds."""

FACTOR = 10.0
"""A step may take so many times as long as measured."""

MEASURED = 3
"""So many steps of a size must be measured before the limit uses them: the first steps also compile."""

KEPT = 8
"""So many of the latest measurements of a size are kept, and the slowest counts."""

LOAD_WAITS = 3
"""How often in a row a step may wait for loads: in its layers, at its end, and for loads that it gave up."""


@dataclass(frozen=True)
class Work:
    """The device's work until a step is over.

    A step that samples nothing may be over for the host before the device has begun it. Then its work counts for the
    next step, up to the next step that samples.

    tokens:   of all sequences in the step
    pairs:    pairs of a token and an earlier one that it may attend to
    loads:    whether blocks are loaded from the host meanwhile
    is_whole: the step samples, so that none of its work is left for the next step
    forms:    whether it waits for the first mask of a guided output: a tokenizer may be loaded for that
    """

    tokens: int = 0
    pairs: int = 0
    loads: bool = False
    is_whole: bool = True
    forms: bool = False

    def then(self, batch: BatchRequest) -> Work:
        """The work of the next batch, with the work that is left from before."""
        before = Work() if self.is_whole else self
        pairs = int((batch.query_lens.astype(int) * (batch.starts + batch.query_lens)).sum())
        return Work(
            before.tokens + batch.num_tokens,
            before.pairs + pairs,
            before.loads or len(batch.cache_swap_metadata.loads) > 0,
            bool(batch.sample.any()) or not before.tokens + batch.num_tokens,
        )

    @property
    def size(self) -> int:
        """Work of the same size differs in its tokens by a factor of two at most."""
        return self.tokens.bit_length()

    def times(self, other: Work) -> float:
        """At least how many times more than this the other is: time grows with tokens and pairs, at most as they do."""
        return max(1.0, other.tokens / max(1, self.tokens), other.pairs / max(1, self.pairs))


@dataclass(frozen=True)
class Limit:
    """The time limit of a step: seconds, and words for it."""

    seconds: float
    text: str


class StepLimits:
    """Computes how long steps may take. It must be told of each step, in order, when it is sent and when it is done.

    step_timeout_s: at most, and while too little is known
    load_timeout_s: seconds that a step waits for loads, each time that it does
    """

    def __init__(self, step_timeout_s: float, load_timeout_s: float) -> None:
        self._longest = Limit(step_timeout_s, f"step_timeout_s = {step_timeout_s:g} s")
        self._loading_s = LOAD_WAITS * load_timeout_s
        self._sent = Work()
        self._measured: defaultdict[int, deque[tuple[Work, float]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._spent_s = 0.0
        self._new_forms: set[int] = set()  # rows of guided outputs that have no token yet

    def sent(self, batch: BatchRequest) -> tuple[Work, Limit]:
        """The work of a step, and how long it may take."""
        work = self._sent = replace(self._sent.then(batch), forms=self._begins_forms(batch))
        known = self._measured[work.size]
        if len(known) < MEASURED or work.forms:
            return work, self._longest
        slowest = max(seconds * done.times(work) for done, seconds in known)
        limit = max(LEAST_S, FACTOR * slowest) + work.loads * self._loading_s
        if limit >= self._longest.seconds:
            return work, self._longest
        return work, Limit(limit, f"{limit:.3g} s, although such steps take at most {slowest:.2g} s,")

    def _begins_forms(self, batch: BatchRequest) -> bool:
        """Whether the first token of a guided output is sampled."""
        for new in batch.new_sequences:
            (self._new_forms.discard if new.sampling.guided is None else self._new_forms.add)(new.row)
        begun = self._new_forms.intersection(batch.rows[batch.sample].tolist()) if self._new_forms else None
        if begun:
            self._new_forms -= begun
        return bool(begun)

    def came_back(self, work: Work, compute_s: float) -> None:
        """Note how long a step took. Steps with loads, and those that begin a form, are not kept: their waiting
        says nothing about other steps."""
        self._spent_s += compute_s
        if not work.is_whole:
            return
        if not work.loads and not work.forms:
            self._measured[work.size].append((work, self._spent_s))
        self._spent_s = 0.0

    def forget(self) -> None:
        """Drop all measurements: the workers load the model again, and must compile again."""
        self._measured.clear()
