"""The contract of kernels of state space models (Mamba-2). What `headwise.kernels.base` says of kernels holds.

A layer's heads are in groups, which share keys and queries. A member is some heads of one group, ``share`` of them, and
for a token has ``channels`` inputs ``[query | key | values]``, of which those of the group's other members are like the
first two. A causal convolution of each channel over the last tokens, with a bias, and SiLU, make of them a query, a
key, and a value for each head. Each of these has a matrix ``S [key, value]`` and, for a token, a step ``d``, which is
the softplus of what is projected and a bias (Mamba-2, arXiv 2405.21060, where queries are C, keys B, and values X):

    S = exp(-speed * d) * S + k (d * v)^T;   out = (q S + skip * v) * silu(gate)

Token by token is the least to read for one token (one-step decode). A chunk of ``C`` tokens is computed at once: with
``G`` the sum of the decays ``-speed * d`` within the chunk, and ``S0`` the matrix before it,

    q_i S_i = exp(G_i) * q_i S0 + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) d_j v_j
    S       = exp(G_C) * S0 + sum_j exp(G_C - G_j) k_j (d_j v_j)^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import Array, AttentionBatch, HeadTable


def heads_of_member(heads: int, groups: int) -> int:
    """How many of a layer's heads, in equal groups, are a member.

    A power of two, as blocks of tokens are, that mostly leaves each of four ranks equally many members. More of them
    would need larger blocks where ranks have few KV heads; fewer have their group's inputs more often.
    """
    counts = [count for count in (1, 2, 4) if not heads // groups % count]
    return max(counts, key=lambda count: (not heads // count % 4, count))


@dataclass(frozen=True)
class SsmWeights:
    """What a layer computes with between its projections, for one rank's members. Arrays are C-contiguous and float32.

    convolution:       ``[members, convolution, channels]``, for the oldest token first
    convolution_bias:  ``[members, channels]``
    speed, bias, skip: ``[members, share]``
    group:             int32 ``[members]``: which of the rank's groups each is of
    groups:            how many the rank has
    """

    convolution: Array
    convolution_bias: Array
    speed: Array
    bias: Array
    skip: Array
    group: Array
    groups: int


@dataclass(frozen=True)
class SsmProjected:
    """What a layer projects of a step's tokens, ``numbers [tokens, width]``, and its weights.

    In a row are ``[query | key]`` of each group, then ``[values | gates]`` of each member, and behind those, of each
    head, what its step is made of. ``values`` are the numbers that come of a token.
    """

    numbers: Array
    weights: SsmWeights
    values: int


class SsmKernels(Protocol):
    """State space models over states in the cache. What a layer keeps has the members that the layer has."""

    name: str

    def attend_ssm(
        self,
        projected: Array,
        weights: SsmWeights,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: Array,
    ) -> None:
        """Take the states of a step's sequences on by its tokens, from `SsmProjected.numbers` to ``out [tokens, members
        * share * value]``, of the same dtype.

        Where states are read and written, `headwise.kernels.delta_base.DeltaKernels.attend_delta` says.
        """
