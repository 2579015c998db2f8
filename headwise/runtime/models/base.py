"""What the engine and the model runner need of a model, whatever its architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.runtime.models.low_rank import AdaptedRows
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.base import KernelArray, Tensor

Rotation = tuple[KernelArray, KernelArray]
"""Cosines and sines of the tokens' positions, as `TensorOps.rotation` gives them."""


Embeds = tuple[NDArray[np.int32], NDArray[np.float32] | NDArray[np.uint16]]
"""Embeddings that stand for those of some tokens: which of a step's ``T``, ``[k]``; and they, ``[k, embed_size]``, the
bits of bfloat16 where these are uint16."""


class AttentionLayer(Protocol):
    """Given to `Model.forward` by the model runner: rotates, writes what is kept, waits for loads, attends."""

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        """What this rank's heads see, ``[T, q_heads, size of a head's values]``: all rows, or those that are wanted, as
        of `Model.forward`.

        ``projected`` is what the model made of its input for this layer, as its attention variant takes it; see
        `headwise.runtime.models.attention`. Only the layer uses that, so it may rotate it in place.
        """


@dataclass(frozen=True)
class PagedCache:
    """The cache that a step's attention is over, for models that read and write it themselves.

    layouts, heads: of every layer of the rank's; the same objects in all steps
    wait_layer: to be called before a layer, where its cache is still being loaded; None: all is there
    """

    arena: KernelArray
    layouts: Sequence[BlockLayout]
    batch: AttentionBatch
    heads: Sequence[HeadTable]
    wait_layer: Callable[[int], None] | None


class PagedAttentionLayer(AttentionLayer, Protocol):
    """An `AttentionLayer` over a paged cache."""

    def paged(self) -> PagedCache | None:
        """The cache; None where only the call may compute with it."""

    def ending_at(self, rows: NDArray[np.int64]) -> PagedAttentionLayer:
        """The same for these rows' queries alone, of layers that write nothing."""

    def tokens(self) -> KernelArray | None:
        """int32 ``[1]``: rows of the step from this one on are padding, which nobody reads; None: there is none."""


class Model(ABC):
    """A decoder, or a stage of one: some of its layers. Built with its weights; holds nothing between calls but room
    for the next one's results."""

    config: ModelConfig
    adapted: AdaptedRows | None
    """Which rows of the next steps go by adapters; None: none."""

    @abstractmethod
    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Hidden states ``[T, hidden]`` after the final norm, the same on every rank, until the next call.

        Of another stage than the last the residual stream behind its layers, of all of the ``T`` in any case; another
        one than the first begins with that of the stage before, ``stream [T, stream_size]``, which it may overwrite.

        ``wanted`` are the rows that come of it, ascending, and may be none: once all is written that layers keep,
        nothing is computed for others. With them ``attention`` is a `PagedAttentionLayer`. None: all of the ``T``. In
        a step that is recorded they are a kernel array, int32: which rows they are, is told when it runs.

        ``token_ids`` and ``positions`` are ``int32 [T]``, as `TensorOps.upload` gives them. ``embeds`` takes the place
        of what `Decoder.embedded` makes of these tokens; whatever else a model looks up, it looks up by ``token_ids``.
        """

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """Hidden states that `drafted` scores the token behind the next one by, where `ModelConfig.draft_layers` is 1.

        Of ``hidden [T, hidden]``, as `for_drafts` gave them, or as this did of the tokens before, of tokens at
        ``positions``, and of the tokens ``following int32 [T]`` that come next. The layer keeps keys and values of its
        own, in the places of ``positions``. ``embeds`` takes the place of those of some of ``following``; wanted: see
        `forward`

        Sources: multi-token prediction, DeepSeek-V3 (arXiv 2412.19437), section 2.2; EAGLE-3 (arXiv 2503.01840).
        """
        raise NotImplementedError("asked of models whose config has such a layer")

    def for_drafts(self, hidden: Tensor) -> Tensor:
        """What `draft` is to be given of all tokens that `forward` has just given these ``hidden`` states of; asked
        for once."""
        return hidden

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        """The likeliest token by each row of what `draft` made, and its score, as `TensorOps.greedy` has them; ``None``
        on other ranks than 0, which take part."""
        raise NotImplementedError("asked of models whose config has such a layer")

    @abstractmethod
    def scores(self, hidden: Tensor) -> Tensor | None:
        """Scores ``[rows, vocab_size]`` of hidden rows, on rank 0's device; ``None`` on other ranks, which take part.

        They are the logits before any cap, which leaves their order as it is.
        """

    def step_scores(self, hidden: Tensor) -> Tensor | None:
        """As `scores`, there until the next call: a step needs no new memory for them."""
        return self.scores(hidden)

    @abstractmethod
    def logits(self, hidden: Tensor) -> NDArray[np.float32] | None:
        """Logits ``[rows, vocab_size]`` of hidden rows, on rank 0's host; ``None`` on other ranks, which take part."""

    def capped(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits out of scores."""
        cap = np.float32(self.config.logit_softcap)
        return cap * np.tanh(scores / cap) if cap else scores
