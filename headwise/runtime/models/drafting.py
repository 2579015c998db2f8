"""The layer behind a decoder's last that predicts the token behind the next one: multi-token prediction.

And what stands in its place where that is no part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import AttentionLayer, Embeds
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.base import KernelArray, Tensor


@dataclass(frozen=True)
class DraftingNames:
    """Names of the weights of a layer that drafts, ``{layer}`` for its number, by which checkpoints know it.

    is_nested: whether they come behind the prefix of the decoder's
    layer:     of those that a decoder's layer has, too, all but the last part
    join:      of the projection of ``[embedding | hidden state]``; ..._norm: of what goes into it, and of what comes
               out of the layer
    has_hidden_first: that projection is of ``[hidden state | embedding]``
    has_window: the layer is as the decoder's last one with windows, but has a dense MLP; else it is as the last one
                that attends to all tokens
    """

    is_nested: bool
    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    has_hidden_first: bool = False
    has_window: bool = False

    def of(self, name: str, prefix: str, layer: int) -> str:
        """One of these names, of the layer with that number, in a decoder whose weights have that prefix."""
        return (prefix if self.is_nested else "") + name.format(layer=layer)


BEHIND_THE_LAST = DraftingNames(
    is_nested=True,
    layer="layers.{layer}.",
    embedding_norm="layers.{layer}.enorm",
    hidden_norm="layers.{layer}.hnorm",
    join="layers.{layer}.eh_proj",
    final_norm="layers.{layer}.shared_head.norm",
)
"""As DeepSeek-V3 and most others have it."""

APART = DraftingNames(
    is_nested=False,
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    join="mtp.fc",
    final_norm="mtp.norm",
)
"""As Qwen3-Next has it."""


@dataclass(frozen=True)
class DraftingLayer:
    """What predicts the token behind the next one.

    of_embedding, of_hidden: their sum is what `layer` is given, whole on every rank
    """

    embedding_norm: Tensor
    hidden_norm: Tensor
    of_embedding: Linear
    of_hidden: Linear
    layer: Layer
    final_norm: Tensor


class DraftHead(Protocol):
    """What drafts beside a decoder, of the residual stream between its layers."""

    @property
    def taken(self) -> Sequence[int]:
        """Layers before each of which `take` is called in a step, ascending."""

    def take(self, layer: int, x: Tensor) -> None:
        """``x [T, hidden]`` as it goes into one of those layers; it is the caller's."""

    def given(self) -> Tensor:
        """See `Model.for_drafts`."""

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """See `Model.draft`."""

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        """See `Model.drafted`."""


def with_draft_layer(config: ModelConfig, names: DraftingNames | None, weights: Sequence[str]) -> ModelConfig:
    """``config`` with that layer, if there is one among the checkpoint's ``weights``, which are told by name.

    Of several, the first is served: it was trained to predict the nearest token, and what it makes goes into it again
    for further ones. Where layers share indexers, one without an indexer of its own is not served: whose choice it
    sees is not told.
    """
    if names is None:
        return config

    def has(name: str) -> bool:
        return any(each == name or each.endswith(f".{name}") for each in weights)

    if not has(names.of(names.join, "", config.num_layers) + ".weight"):
        return config
    shares = config.mla is not None and config.mla.indexer is not None and config.mla.indexer.shared
    if shares and not has(names.of(names.layer, "", config.num_layers) + "self_attn.indexer.wq_b.weight"):
        return config
    return config.with_draft_layer(has_window=names.has_window)
