"""Prefill and mixed steps as CUDA graphs in pieces: each has all that lies between the attention of two layers.

What attention launches depends on how many sequences a step has, and how long they are, so it is enqueued anew in each
step. All else depends on the number of tokens alone: it is recorded for a few numbers, at start, and steps are padded
up to the next one. Padding has no sequence, so it writes nothing to the cache and asks nothing of experts; its rows
stay its own, whatever numbers they hold.

Of a sequence one row is wanted at most. So in steps of more tokens than there may be sequences, pieces behind the last
layer that keeps anything are of as many rows: those wanted, and padding. Where none is, these pieces do not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import first_line
from headwise.kernels.base import AttentionBatch
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.attention.wanted import ending_at
from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import Between, CapturingOps, Cut, KernelArray, StepUpload, Tensor
from headwise.runtime.ops.stage_links import StageLinks
from headwise.runtime.worker.drafts import turned
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

WHOLE = StageLinks()
"""Of a rank that has all layers."""


@dataclass(frozen=True)
class _Asked:
    """What attention is asked between two pieces.

    projected: by the model, for that layer
    out:       what it sees goes there
    is_last_kept: no layer behind this one keeps anything, and of what it sees the wanted rows go to ``out``, the first
    is_behind: the layer is such a one: each wanted row is a sequence's one query, which ends there
    """

    layer: int
    projected: Sequence[Any]
    out: KernelArray
    is_last_kept: bool = False
    is_behind: bool = False


class Attend(Protocol):
    """A layer's attention."""

    def __call__(
        self,
        step: AttentionBatch,
        layer: int,
        projected: Sequence[Any],
        out: KernelArray | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """What it sees, of what the model projected for it; ``out, wanted``: see `LayerCache`."""


class _CuttingAttention:
    """The `PagedAttentionLayer` of a recording: ends a piece, and begins the next one with the array that attention is
    to fill. padding: int32 ``[1]``, which row the padding begins with, when the graphs run; of_wanted: likewise, among
    the wanted ones, of which that of layers behind the last one that keeps anything ``is_behind``"""

    def __init__(
        self,
        ops: CapturingOps,
        attention: CachedAttention,
        padding: KernelArray,
        of_wanted: KernelArray,
        asked: list[_Asked],
        cut: Cut,
        is_behind: bool = False,
    ) -> None:
        self._ops, self._attention, self._padding, self._of_wanted = ops, attention, padding, of_wanted
        self._asked, self._cut, self._is_behind = asked, cut, is_behind

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        out = self._attention.result_of(*projected)
        if wanted is not None:
            out = self._ops.empty_like(out, (len(wanted), *out.shape[1:]))
        kept = _each_array(projected, self._ops.borrowed)
        self._asked.append(_Asked(layer, kept, self._ops.borrowed(out), wanted is not None, self._is_behind))
        self._cut()
        return self._ops.from_kernel_array(out)

    def paged(self) -> None:
        """See `PagedAttentionLayer.paged`."""

    def ending_at(self, rows: NDArray[np.int64]) -> _CuttingAttention:
        """See `PagedAttentionLayer.ending_at`."""
        count = self._of_wanted
        return _CuttingAttention(self._ops, self._attention, count, count, self._asked, self._cut, is_behind=True)

    def tokens(self) -> KernelArray:
        """See `PagedAttentionLayer.tokens`."""
        return self._padding


class StepGraphs:
    """The pieces of steps of up to ``tokens``.

    upload: all sizes use one, with room for the largest
    wanted: rows that come of a step at most, where it has more; 0: all of its tokens'
    tells_follows: whether steps may say which sequences follow others
    links:  of the rank's stage
    axes:   positions of a token
    kept:   of a model that drafts, and of the last step: see `Model.for_drafts`; valid until the next one
    """

    def __init__(
        self,
        ops: CapturingOps,
        tokens: int,
        sequences: int,
        wanted: int,
        upload: StepUpload,
        tells_follows: bool = False,
        links: StageLinks = WHOLE,
        axes: int = 1,
    ) -> None:
        self._ops, self.tokens, self._sequences, self._upload = ops, tokens, sequences, upload
        self._tells_follows, self._links, self._axes = tells_follows, links, axes
        self.wanted = wanted if wanted < tokens else 0
        self.kept: Tensor = None
        self._asked: list[_Asked] = []
        self._replay: Callable[[Between], Sequence[KernelArray]] | None = None

    def record(self, model: Model, attention: CachedAttention) -> None:
        """Record the model's pieces."""
        ops, nobody, asked = self._ops, np.zeros(0, np.int32), self._asked
        tokens, positions, begins, _, _, rows, count, *_ = self._padded(
            nobody, turned(nobody, self._axes), np.zeros(1, np.int32), nobody, nobody, nobody, nobody
        )

        def work(cut: Cut) -> Sequence[KernelArray]:
            asked.clear()
            layer = _CuttingAttention(ops, attention, begins[-1:], count, asked, cut)
            wanted = rows if self.wanted else None
            hidden = model.forward(tokens, positions, layer, wanted=wanted, stream=self._links.place(self.tokens))
            has_drafts = model.config.draft_layers and self._links.is_last
            drafts = [model.for_drafts(hidden)] if has_drafts else []
            return [ops.kernel_array(rows) for rows in (hidden, *drafts)]

        self._replay = ops.capture_pieces(work)

    def upload(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        begins: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
        follows: NDArray[np.int32] | None = None,
        *,
        wanted: NDArray[np.int64] | None = None,
    ) -> tuple[KernelArray, ...]:
        """The step's arrays on the device, where the pieces read them: two of its tokens, and of sequences ``[n + 1]``,
        twice ``[n]``, and once more, where it is given what ``follows`` (see `AttentionBatch`). What stands behind them
        is padding. wanted: see `Model.forward`"""
        of_tokens, of_sequences, nothing = len(token_ids), len(rows), np.zeros(0, np.int32)
        some = nothing if wanted is None or not self.wanted else wanted.astype(np.int32)
        told = nothing if follows is None else follows
        tokens, places, starts, lengths, tables, _, _, *more = self._padded(
            token_ids, positions, begins, seq_lens, rows, some, told
        )
        sequences = starts[: of_sequences + 1], lengths[:of_sequences], tables[:of_sequences]
        given = () if follows is None else (more[0][:of_sequences],)
        return tokens[:of_tokens], places[:of_tokens], *sequences, *given

    def _padded(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        begins: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
        wanted: NDArray[np.int32],
        follows: NDArray[np.int32],
    ) -> Sequence[KernelArray]:
        tokens, sequences = self.tokens, self._sequences
        return self._upload(
            padded(token_ids, tokens),
            padded(positions, tokens),
            padded(begins, sequences + 1, int(begins[-1])),  # so the last one is where padding begins
            padded(seq_lens, sequences),
            padded(rows, sequences),
            padded(wanted, self.wanted),
            np.array([len(wanted)], np.int32),
            *([padded(follows, sequences)] if self._tells_follows else []),
        )

    def forward(
        self, attend: Attend, step: AttentionBatch, tokens: int, wanted: NDArray[np.int64] | None = None
    ) -> Tensor | None:
        """Run the step of so many ``tokens`` whose arrays were uploaded last: what `Model.forward` gives, valid until
        the next step. None: nothing is wanted of it."""
        assert self._replay is not None, "recorded first"
        ending: AttentionBatch | None = None

        def between(number: int) -> bool:
            nonlocal ending
            asked = self._asked[number]
            batch = step
            if wanted is not None and asked.is_last_kept:
                self._attend_wanted(attend, step, asked, wanted)
                return len(wanted) > 0
            if wanted is not None and asked.is_behind:
                batch = ending = ending or ending_at(step, wanted, self._ops)
            attend(batch, asked.layer, asked.projected, asked.out)
            return True

        found = self._replay(between)
        if wanted is None:
            self.kept = found[-1][:tokens]
            return found[0][:tokens]
        if not len(wanted):
            return None
        return found[0][: len(wanted)] if self.wanted else self._ops.take_rows(found[0], wanted)

    def _attend_wanted(self, attend: Attend, step: AttentionBatch, asked: _Asked, wanted: NDArray[np.int64]) -> None:
        """Padding goes through the MLP, too, and may choose experts: it sees 0."""
        found = attend(step, asked.layer, asked.projected, wanted=wanted)
        asked.out[: len(wanted)] = self._ops.kernel_array(found)
        asked.out[len(wanted) :] = 0


class PrefillGraphs:
    """All numbers of tokens up to ``most``, for steps of at most ``sequences``.

    followers: sequences that there may be besides, each of which follows another one, as of models that keep states
               steps then say
    all_ranks: see `DecodeGraphs`
    gives_all: whether all rows of a step come of it, not those alone that are wanted; they do on other stages than the
               last
    links:     of the rank's stage
    layers:    of the decoder's, that it has
    axes:      positions of a token
    """

    def __init__(
        self,
        ops: CapturingOps,
        most: int,
        sequences: int,
        all_ranks: Callable[[bool], bool] = bool,
        gives_all: bool = False,
        followers: int = 0,
        links: StageLinks = WHOLE,
        layers: int = 0,
        axes: int = 1,
    ) -> None:
        self._ops, self._all_ranks, self._sequences = ops, all_ranks, sequences + followers
        self._tells_follows = followers > 0
        self._wanted = 0 if gives_all or not links.is_last else padded_tokens(sequences)
        self._most, self._links, self._layers, self._axes = most, links, layers, axes
        self._recorded: list[StepGraphs] = []

    def record(self, model: Model, attention: CachedAttention) -> None:
        """Record the pieces of ``model`` for all numbers of tokens, or as many as can be on every rank."""
        sizes = all_sizes(padded_tokens, self._most)
        log.info("recording prefill of %d sizes, up to %d tokens, as CUDA graphs", len(sizes), sizes[-1])
        # One for all: graphs read where it wrote when they were recorded.
        of_sequences = (3 + self._tells_follows) * self._sequences
        upload = self._ops.step_upload(capacity=(1 + self._axes) * sizes[-1] + of_sequences + self._wanted + 2)
        for tokens in reversed(sizes):  # the largest first: see `CapturingOps`
            sizes_of_step = tokens, self._sequences, self._wanted
            graphs = StepGraphs(self._ops, *sizes_of_step, upload, self._tells_follows, self._links, self._axes)
            trouble = ""
            try:
                graphs.record(model, attention)
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
