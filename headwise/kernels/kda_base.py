"""The contract of kernels of Kimi Delta Attention (KDA). What `headwise.kernels.base` says of kernels holds.

It is the rule of gated delta-nets (`headwise.kernels.delta_base`) with a decay of each channel of a key in place of one
for all of them (Kimi Linear, arXiv 2510.26692, equation 1). A member is one head: its query, its key and its value.
Of each head come, for a token, ``channels`` inputs ``[query | key | value]``. A causal convolution of each channel over
the last tokens, and SiLU, make of them a query and a key, which are divided by their length and the query by
``sqrt(key_dim)``, and a value. A head has a matrix ``S [key, value]`` and, for a token, decays ``g [key] <= 0`` and a
rate ``b``:

    S = diag(exp(g)) S;   S = S + k (b * (v - k S))^T;   out = q S

What a head sees is normed, and multiplied by the sigmoid of its gates.

Token by token is the least to read for one token (one-step decode). A chunk of ``C`` tokens is computed at once. With
``G [key]`` the sums of decays within the chunk and ``S0`` the matrix before it, corrections are the solution of a
triangular system, ``x_i = b_i * (v_i - (exp(G_i) * k_i) S0 - sum_{j < i} A_ij x_j)``, and

    A_ij  = sum_d k_i[d] k_j[d] exp(G_i[d] - G_j[d])   (j < i),   and Q_ij with q_i for k_i (j <= i)
    out_i = (exp(G_i) * q_i) S0 + sum_{j <= i} Q_ij x_j
    S     = diag(exp(G_C)) S0 + sum_j (exp(G_C - G_j) * k_j) x_j^T

**Numerics.** ``A`` and ``Q`` are no product of two matrices, as the ratio ``exp(G_i - G_j)`` hangs on the channel, too.
Written as the product of ``exp(G_i) k_i`` and ``exp(-G_j) k_j`` they would be one, but the second factor overflows:
decays have no bound. No kernel here has a factor above 1. Ratios are made either of both tokens at once, or over a
token ``r`` between them, ``j < r <= i``: ``exp(G_i - G_r) exp(G_r - G_j)``, of which neither is above 1, so that one
which underflows is of a product that is smaller yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable


@dataclass(frozen=True)
class KdaWeights:
    """What a layer computes with between its projections, for one rank's heads. Arrays are C-contiguous and float32.

    convolution: ``[heads, convolution, channels]``, for the oldest token first
    speed, bias: ``[heads]`` and ``[heads, key_dim]``: a decay is ``-speed * softplus(what is projected + bias)``
    norm, eps:   ``[value_dim]``, of what a head sees
    """

    convolution: Array
    speed: Array
    bias: Array
    norm: Array
    eps: float


@dataclass(frozen=True)
class KdaProjected:
    """What a layer projects of a step's tokens, and its weights. All rows of ``numbers`` are of one length.

    numbers: ``[tokens, width]``: in a row are ``[queries | keys | values | rates]`` of all heads, of which a rate is
             the sigmoid of its number, and behind those what decays and gates were made of, which is not asked for any
             more
    decays:  ``[tokens, heads * key_dim]``, of which decays are what `KdaWeights` says
    gates:   ``[tokens, heads * value_dim]``
    """

    numbers: Array
    decays: Array
    gates: Array
    weights: KdaWeights


class KdaKernels(Protocol):
    """Kimi Delta Attention over states in the cache. What a layer keeps has its heads for members."""

    name: str

    def attend_kda(
        self,
        projected: KdaProjected,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """Take the states of a step's sequences on by its tokens, into ``out [tokens, heads * value_dim]``, of the
        dtype of what is projected.

        Where states are read and written, `headwise.kernels.delta_base.DeltaKernels.attend_delta` says.
        """
