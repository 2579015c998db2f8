"""How long a step may take before its workers count as hung: by how long steps like it took."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from headwise.runtime.protocol.batch import BatchRequest

LEAST_S = 15.0
"""No step counts as hung sooner: kernels may be compiled and graphs recorded for a shape at any time, and a machine
that is short of memory or cores stands still for seconds."""

FACTOR = 10.0
"""A step may take so many times what was measured."""

MEASURED = 3
"""So many steps of a size must have been measured before one of them counts as late: the first ones compile."""

KEPT = 8
"""The latest measurements of a size, of which the slowest counts."""

LOAD_WAITS = 3
"""Times in a row that a step may wait for loads: in its layers, at its end, and for those that it gave up."""


@dataclass(frozen=True)
class Work:
    """What a device has to do until a step is over.

    A step that samples nothing may be over for the host before the device has begun with it: what it has to do counts
    for the next one, up to one that samples.

    tokens:   of all of its sequences
    pairs:    of a token and one before it that it may look at
    loads:    whether blocks come from the host meanwhile
    is_whole: it samples, so that nothing of it is left for the next step
    """

    tokens: int = 0
    pairs: int = 0
    loads: bool = False
    is_whole: bool = True

    def then(self, batch: BatchRequest) -> Work:
        """What there is to do for a batch, and before it."""
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
    """Of a step: seconds, and how to call them."""

    seconds: float
    text: str


class StepLimits:
    """Seconds that steps may take. To be told of each step in order, when it is sent and when it came back.

    step_timeout_s: at most, and while too little is known
    load_timeout_s: seconds that a step waits for loads, each time that it does
    """

    def __init__(self, step_timeout_s: float, load_timeout_s: float) -> None:
        self._longest = Limit(step_timeout_s, f"step_timeout_s = {step_timeout_s:g} s")
        self._loading_s = LOAD_WAITS * load_timeout_s
        self._sent = Work()
        self._measured: defaultdict[int, deque[tuple[Work, float]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._spent_s = 0.0

    def sent(self, batch: BatchRequest) -> tuple[Work, Limit]:
        """What there is to do for a step, and how long it may take."""
        work = self._sent = self._sent.then(batch)
        known = self._measured[work.size]
        if len(known) < MEASURED:
            return work, self._longest
        slowest = max(seconds * done.times(work) for done, seconds in known)
        limit = max(LEAST_S, FACTOR * slowest) + work.loads * self._loading_s
        if limit >= self._longest.seconds:
            return work, self._longest
        return work, Limit(limit, f"{limit:.3g} s, although such steps take at most {slowest:.2g} s,")

    def came_back(self, work: Work, compute_s: float) -> None:
        """A step took the workers so long. What it waited for loads says nothing of how long others take."""
        self._spent_s += compute_s
        if not work.is_whole:
            return
        if not work.loads:
            self._measured[work.size].append((work, self._spent_s))
        self._spent_s = 0.0

    def forget(self) -> None:
        """The workers load the model again, and make anew what they compute with."""
        self._measured.clear()
