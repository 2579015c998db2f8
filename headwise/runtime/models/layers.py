"""One rank's weights of a decoder layer, and what goes from one part of it to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from headwise.kernels.fused import LayerNorms
from headwise.runtime.models.low_rank import Added
from headwise.runtime.ops.base import KernelArray, Tensor, Weight


@dataclass(frozen=True)
class Linear:
    """A projection.

    bias:  which comes with the product
    added: a bias of what goes into the residual stream, which is added there, once for all ranks, all of which have it
    adapters: what the model's adapters add to it; None: nothing
    """

    weight: Weight
    bias: Tensor | None = None
    added: Tensor | None = None
    adapters: Added | None = None


@dataclass(frozen=True)
class DenseMlp:
    """One rank's part of ``down(act(gate x) * up x)``, or of ``down(act(up x))``.

    into: ``gate | up``, or up alone, as `headwise.kernels.fused.is_gated` says of the activation
    """

    into: Linear
    down: Linear


@dataclass(frozen=True)
class QkvProjections:
    """One rank's part of grouped-query attention.

    sink_logits: of its query heads, float32; None: it has none
    bias:        of queries, keys and values, which `qkv` lacks, for attention to add; None: there is nothing to add
    """

    qkv: Linear
    out: Linear
    sink_logits: KernelArray | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """One rank's weights of a decoder layer.

    attention: what `Decoder.load_attention` made and `Decoder.attend` computes
    mlp:       what `Decoder.load_mlp` made and `Decoder.feed_forward` computes; None: there is none
    """

    attention: Any
    mlp: Any
    norms: LayerNorms


class Residual(NamedTuple):
    """The residual stream between two parts of the decoder, and its norm, which is the next part's input."""

    x: Tensor
    normed: Tensor
