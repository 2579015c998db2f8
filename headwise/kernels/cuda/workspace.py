"""Memory for partial results of attention, which the splits of a sequence leave for the last of them."""

from __future__ import annotations

from collections.abc import Callable

from headwise.kernels.cuda.launch import Array, address_of
from headwise.kernels.cuda.parameters import Argument

COUNTER_BYTES = 4
NUMBER_BYTES = 4
ALIGNMENT = 16
BESIDE = 4
"""Numbers behind a mean, the first of which is its log-sum-exp: `merge_jit.BESIDE`."""
MOST_KV_HEADS = 256
"""Of a rank, for whose splits there is room on any card."""


class PartsWorkspace:
    """Counters, and behind them partial results of one shape at a time: all layers share it, one after the other.

    ``counters`` is how many there are. They are zero before a launch, and each launch leaves them so (`merge_jit`),
    whatever its shape: their place depends on none. ``allocate`` is that of `attention.TritonAttention`.
    """

    def __init__(self, allocate: Callable[[int], Array], counters: int) -> None:
        self._allocate = allocate
        self._counters_bytes = -(-counters * COUNTER_BYTES // ALIGNMENT) * ALIGNMENT
        self._memory: Array | None = None

    def reserve(self, parts: int, size: int) -> None:
        """Have memory for ``parts`` partial results of ``size`` numbers each, and their log-sum-exps."""
        needed = self._counters_bytes + parts * (size + 1) * NUMBER_BYTES
        if self._memory is None or self._memory.nbytes < needed:
            self._memory = self._allocate(needed)
            self._memory[: self._counters_bytes].fill(0)

    def arguments(self, parts: int, size: int) -> dict[str, Argument]:
        """Where all this is, by the kernels' parameters, for as many partial results as were reserved."""
        counters = address_of(self._memory)
        partial = counters + self._counters_bytes
        return {
            "counters": counters,
            "partial": partial,
            "partial_lse": partial + parts * size * NUMBER_BYTES,
        }
