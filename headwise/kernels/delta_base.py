"""The contract of kernels of gated delta-nets. What `headwise.kernels.base` says of kernels holds.

Of each key head come, for a token, ``channels`` inputs ``[query | key | values]``. A causal convolution of each channel
over the last tokens, and SiLU, make of them a query and a key, which are divided by their length and the query by
``sqrt(key_dim)``, and a value for each of the ``share`` value heads. Each of these has a matrix ``S [key, value]`` and,
for a token, a decay ``g <= 0`` and a rate ``b`` (Gated DeltaNet, arXiv 2412.06464, equation 10):

    S = exp(g) * S;   S = S + k (b * (v - k S))^T;   out = q S

Token by token is the least to read for one token (one-step decode). A chunk of ``C`` tokens is computed at once. With
``G`` the sum of decays within the chunk, ``S0`` the matrix before it and ``D_ij = exp(G_i - G_j)``, corrections are the
solution of a triangular system, ``x_i = b_i * (v_i - exp(G_i) * k_i S0 - sum_{j < i} D_ij (k_i . k_j) x_j)``, and

    out_i = exp(G_i) * q_i S0 + sum_{j <= i} D_ij (q_i . k_j) x_j;   S = exp(G_C) * S0 + sum_j D_Cj k_j x_j^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable

NORM_EPS = 1e-6
"""Added to the squared length that queries and keys are divided by."""


@dataclass(frozen=True)
class DeltaInputs:
    """What a layer makes of a step's tokens, for one rank's key heads. All arrays are float32 and C-contiguous.

    mixed:   ``[tokens, key_heads, channels]``, before the convolution
    rate:    ``[tokens, key_heads, share]``
    decay:   ``[tokens, key_heads, share]``, at most 0
    weights: ``[key_heads, convolution, channels]``, of the convolution, for the oldest token first
    """

    mixed: Array
    rate: Array
    decay: Array
    weights: Array


@dataclass(frozen=True)
class DeltaWeights:
    """What a layer computes with between its projections, for one rank's key heads. All arrays are float32.

    convolution: as `DeltaInputs.weights`
    speed, bias: ``[key_heads, share]``: a decay is ``-speed * softplus(what is projected + bias)``
    norm, eps:   ``[value_dim]``, of what a value head sees
    """

    convolution: Array
    speed: Array
    bias: Array
    norm: Array
    eps: float


@dataclass(frozen=True)
class DeltaProjected:
    """What a layer projects of a step's tokens, ``numbers [tokens, width]``, and its weights.

    In a row are ``[query | key | values | gates]`` of each key head, and behind those of all ``[rates | decays]`` of
    each: numbers of which a rate is the sigmoid, and a decay what `DeltaWeights` says.
    """

    numbers: Array
    weights: DeltaWeights


class DeltaKernels(Protocol):
    """Gated delta-nets over states in the cache. A layer's members are its key heads."""

    name: str

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """Take the states of a step's sequences on by its tokens, into ``out [tokens, key_heads, share, value]``.

        Where states are read and written, `headwise.cache_controller.states` says: in a sequence that has ``start``
        tokens before the step and ``end`` after it, they are read in column ``(start - 1) // block_size``, or where
        that has no block in column ``(end - 1) // block_size``; before a sequence's first token they are 0. Each column
        from ``start // block_size`` on that has a block is written: the state behind its last token, or behind the
        sequence's last one. Columns are read of a head's own group. No state is read that stands for other tokens.
        """


@runtime_checkable
class ProjectedDeltaKernels(Protocol):
    """Kernels that do all that is between a layer's projections, see `headwise.kernels.delta_gates`."""

    name: str

    def attend_projected(
        self,
        projected: Array,
        weights: DeltaWeights,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """As `DeltaKernels.attend_delta`, from `DeltaProjected.numbers` to ``out [tokens, key_heads * share * value]``,
        of the same dtype: what is seen has been normed, and is multiplied by SiLU of the gates."""
