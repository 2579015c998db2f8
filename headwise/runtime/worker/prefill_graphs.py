"""Prefill and mixed steps as CUDA graphs in pieces: each has all that lies between the attention of two layers.

What attention launches depends on how many sequences a step has, and how long they are, so it is enqueued anew in each
step. All else depends on the number of tokens alone: it is recorded for a few numbers, at start, and steps are padded
up to the next one. Padding has no sequence, so it writes nothing to the cache and asks nothing of experts; its rows
stay its own, whatever numbers they hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import first_line
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import Between, CapturingOps, Cut, KernelArray, StepUpload, Tensor
from headwise.runtime.worker.padding import all_sizes, padded

log = logging.getLogger(__name__)

FEWEST_TOKENS = 16
"""Smaller steps are padded to so many, which takes a matrix product no longer."""

FINE_TOKENS = 256
"""Numbers of tokens are halves of powers of two apart up to this one, and quarters beyond: there a step's time grows
with its padding, at most by a quarter."""

ENQUEUED_S = 245e-6
"""What the host takes to enqueue a layer of a step launch by launch, by docs/gpu.md: our Python, and ten calls."""

SHARE = 0.6
"""Of its products that a card is taken to get done in a step."""

UNKNOWN_TOKENS = 1024
"""Most tokens of steps that are recorded where nothing is known of the card."""

Attend = Callable[[int, Sequence[Any], KernelArray], object]
"""A layer's attention, of what the model projected for it, into an array."""


@dataclass(frozen=True)
class _Cut:
    """What attention is asked between two pieces."""

    layer: int
    projected: Sequence[Any]
    out: KernelArray


class _CuttingAttention:
    """The `AttentionLayer` of a recording: ends a piece, and begins the next one with the array that attention is to
    fill. padding: int32 ``[1]``, which row the padding begins with, when the graphs run"""

    def __init__(
        self, ops: CapturingOps, attention: CachedAttention, padding: KernelArray, cuts: list[_Cut], cut: Cut
    ) -> None:
        self._ops, self._attention, self._padding = ops, attention, padding
        self._cuts, self._cut = cuts, cut

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        assert wanted is None, "pieces are recorded of all rows"
        out = self._attention.result_of(*projected)
        kept = _each_array(projected, self._ops.borrowed)
        self._cuts.append(_Cut(layer, kept, self._ops.borrowed(out)))
        self._cut()
        return self._ops.from_kernel_array(out)

    def tokens(self) -> KernelArray:
        """See `PagedAttentionLayer.tokens`."""
        return self._padding


class StepGraphs:
    """The pieces of steps of up to ``tokens``.

    upload: all sizes use one, with room for the largest
    """

    def __init__(self, tokens: int, sequences: int, upload: StepUpload) -> None:
        self.tokens, self._sequences, self._upload = tokens, sequences, upload
        self._cuts: list[_Cut] = []
        self._replay: Callable[[Between], Sequence[KernelArray]] | None = None

    def record(self, ops: CapturingOps, model: Model, attention: CachedAttention) -> None:
        """Record the model's pieces."""
        nobody = np.zeros(0, np.int32)
        tokens, positions, begins, _, _ = self._padded(nobody, nobody, np.zeros(1, np.int32), nobody, nobody)
        cuts = self._cuts

        def work(cut: Cut) -> Sequence[KernelArray]:
            cuts.clear()
            layer = _CuttingAttention(ops, attention, begins[-1:], cuts, cut)
            return [ops.kernel_array(model.forward(tokens, positions, layer))]

        self._replay = ops.capture_pieces(work)

    def upload(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        begins: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> tuple[KernelArray, ...]:
        """The step's arrays on the device, where the pieces read them: two of ``[T]``, and of sequences ``[n + 1]``
        and twice ``[n]``. What stands behind them is padding."""
        of_tokens, of_sequences = len(token_ids), len(rows)
        tokens, places, starts, lengths, tables = self._padded(token_ids, positions, begins, seq_lens, rows)
        sequences = starts[: of_sequences + 1], lengths[:of_sequences], tables[:of_sequences]
        return tokens[:of_tokens], places[:of_tokens], *sequences

    def _padded(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        begins: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> Sequence[KernelArray]:
        tokens, sequences = self.tokens, self._sequences
        return self._upload(
            padded(token_ids, tokens),
            padded(positions, tokens),
            padded(begins, sequences + 1, int(begins[-1])),  # so the last one is where padding begins
            padded(seq_lens, sequences),
            padded(rows, sequences),
        )

    def forward(self, attend: Attend) -> Tensor:
        """Run the step whose arrays were uploaded last: hidden states ``[tokens, hidden]``, valid until the next step,
        those of padding last."""
        assert self._replay is not None, "recorded first"

        def between(number: int) -> None:
            cut = self._cuts[number]
            attend(cut.layer, cut.projected, cut.out)

        return self._replay(between)[0]


class PrefillGraphs:
    """All numbers of tokens up to ``most``, for steps of at most ``sequences``.

    all_ranks: see `DecodeGraphs`
    """

    def __init__(self, ops: CapturingOps, most: int, sequences: int, all_ranks: Callable[[bool], bool] = bool) -> None:
        self._ops, self._all_ranks, self._sequences = ops, all_ranks, sequences
        self._most = most
        self._recorded: list[StepGraphs] = []
        self._layers = 0

    def record(self, model: Model, attention: CachedAttention) -> None:
        """Record the pieces of ``model`` for all numbers of tokens, or as many as can be on every rank."""
        self._layers = model.config.num_layers
        sizes = all_sizes(padded_tokens, self._most)
        log.info("recording prefill of %d sizes, up to %d tokens, as CUDA graphs", len(sizes), sizes[-1])
        # One for all: graphs read where it wrote when they were recorded.
        upload = self._ops.step_upload(capacity=2 * sizes[-1] + 3 * self._sequences + 1)
        for tokens in reversed(sizes):  # the largest first: see `CapturingOps`
            graphs, trouble = StepGraphs(tokens, self._sequences, upload), ""
            try:
                graphs.record(self._ops, model, attention)
            except Exception as error:  # CuPy's own kinds
                trouble = first_line(error)
            if not self._all_ranks(not trouble):
                why = trouble or "they cannot be recorded on another rank"
                log.warning("prefill of %d tokens and less runs without CUDA graphs: %s", tokens, why)
                return
            self._recorded.insert(0, graphs)

    @property
    def captured(self) -> int:
        """Graphs that there are: of each size, one for each layer's attention that comes behind it, and the last."""
        return len(self._recorded) * (self._layers + 1)

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens that are recorded, ascending."""
        return [graphs.tokens for graphs in self._recorded]

    def of(self, tokens: int) -> StepGraphs | None:
        """Those that steps of so many tokens run by; None: by none.

        Where the least are not recorded, the next ones would be mostly padding: such steps run without.
        """
        size = padded_tokens(tokens)
        return next((graphs for graphs in self._recorded if graphs.tokens == size), None)


def worthwhile_tokens(elements: float, layers: int, products_per_s: float) -> int:
    """The most tokens of a step for which the card takes less time, by a model of it, than the host to enqueue the step
    launch by launch: a number that steps are padded to, so that padding costs nothing either.

    elements: numbers in all layers' matrices on this rank that a token is multiplied with
    products_per_s: of the card; 0: not known
    """
    if not products_per_s:
        return UNKNOWN_TOKENS
    most = ENQUEUED_S * layers * SHARE * products_per_s / elements
    best = FINE_TOKENS  # as small, a step reads weights for longer than it multiplies: padding takes no time
    while (more := padded_tokens(best + 1)) <= most:
        best = more
    return best


def padded_tokens(tokens: int) -> int:
    """The number of tokens that a step's are padded to."""
    if tokens <= FEWEST_TOKENS:
        return FEWEST_TOKENS
    steps = 2 if tokens <= FINE_TOKENS else 4
    step = (1 << (tokens - 1).bit_length()) // (2 * steps)
    return -(-tokens // step) * step


def _each_array(value: Any, change: Callable[[KernelArray], KernelArray]) -> Any:
    """``value`` with all arrays in it changed, however deep they are in tuples and dataclasses."""
    if isinstance(value, tuple):
        return tuple(_each_array(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _each_array(getattr(value, field.name), change) for field in fields(value)}
        )
    return change(value) if hasattr(value, "strides") else value
