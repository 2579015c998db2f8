"""What the router is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STATUS_TIMEOUT_S = 3.0
"""An engine that reports nothing for so long gets no requests."""

RESERVATION_S = 5.0
"""A request that no status has named for so long after it was routed is not on its way any more."""

TYPICAL_OUTPUT = 256
"""Tokens of an answer. What really comes is not known beforehand, and ``max_tokens`` often is no more than a cap."""

Matches = Mapping[str, tuple[int, int, int]]
"""By engine, the blocks of a prompt that its device, its device and host, and all tiers serve. Engines that serve none
are left out. What several engines have in storage together is told of each of them."""


@dataclass(frozen=True)
class RoutedRequest:
    """What routing needs to know of a request.

    hashes:     of the full blocks of what is to be computed: the prompt, and the output of an engine that was lost
    num_tokens: of the same, in all
    max_tokens: most tokens to be generated
    session:    requests of one session stay together while that costs little; empty: of none
    exclude:    endpoint of an engine that lost the request: taken only if no other can take it, and only once it has
                reported since; empty: none
    lost_at:    when the router was told of that
    """

    request_id: str
    hashes: Sequence[bytes]
    num_tokens: int
    max_tokens: int = TYPICAL_OUTPUT
    session: str = ""
    exclude: str = ""
    lost_at: float = 0.0


@dataclass(frozen=True)
class Choice:
    """Where a request goes, and what is expected of it there.

    cost:   what the policy minimised: seconds under ``cache_aware``
    reason: why this engine: ``session``, ``rerouted``, ``hit`` (none has more of the prefix), ``spread`` (one that has
            more is too busy), ``no_hit``; under other policies their name
    device, host, storage: tokens expected from each tier
    """

    engine: str
    endpoint: str
    cost: float
    reason: str
    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True)
class RouterOptions:
    """What stays the same while the router lives.

    policy:           ``cache_aware``, ``least_loaded`` or ``round_robin``
    block_size:       tokens of a block that is hashed
    blocks_per_token: blocks of an engine's pool that a token of a sequence takes, over all head groups
    engine_queue:     an engine where so many requests wait gets no more
    max_num_seqs:     sequences that an engine runs at once
    step_tokens:      tokens that an engine computes in a step
    engine_timeout_s: an engine that is silent for so long is to be replaced
    forget_s:         an engine that is silent for so long is not expected back
    """

    policy: str = "cache_aware"
    block_size: int = 64
    blocks_per_token: float = 1 / 64
    engine_queue: int = 64
    max_num_seqs: int = 64
    step_tokens: int = 512
    engine_timeout_s: float = 20.0
    forget_s: float = 600.0
