"""The input and output of the router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.runtime.protocol.request import PeerHint

STATUS_TIMEOUT_S = 3.0
"""An engine that sends no report for so long gets no requests."""

RESERVATION_S = 5.0
"""A reservation ends when no status of the engine has named the request for so long."""

TYPICAL_OUTPUT = 256
"""Assumed tokens of an answer: the real number is not known beforehand, and ``max_tokens`` is often only a cap."""

EngineRole = Literal["mixed", "prefill", "decode"]
"""What an engine is for: whole requests; prompts that others decode; or requests whose prompts others compute, if they
are long. Nothing but routing depends on it."""

Matches = Mapping[str, tuple[int, int, int]]
"""By engine, the blocks of a prompt that its device, its device and host, and all tiers serve. Engines that serve none
are left out. Blocks in shared storage count for every engine that shares it."""


@dataclass(frozen=True)
class RoutedRequest:
    """What routing needs to know of a request.

    hashes:     of the full blocks to compute: of the prompt, and of the output of an engine that was lost
    num_tokens: tokens of the prompt and that output
    max_tokens: most tokens to generate
    session:    requests of one session stay on one engine while that costs little; empty: no session
    exclude:    endpoint of an engine that lost the request. It is chosen only if no other engine can take the request,
                and only if it has reported since; empty: none
    lost_at:    when the router was told of that loss
    priority, owner: of `GenerateRequest`
    lacking:    of its tokens, those that no engine has, as far as that is known
    share:      parts that its owner's prompts have together
    """

    request_id: str
    hashes: Sequence[bytes]
    num_tokens: int
    max_tokens: int = TYPICAL_OUTPUT
    session: str = ""
    exclude: str = ""
    lost_at: float = 0.0
    priority: int = 0
    owner: str = ""
    lacking: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Choice:
    """The engine chosen for a request, and what is expected there.

    cost:   the cost that the policy minimised: seconds for ``cache_aware``
    reason: why this engine: ``session``, ``rerouted``, ``hit`` (none has more of the prefix), ``spread`` (one that has
            more is too busy), ``no_hit``, ``apart`` (another engine computes the prompt); under other policies their
            name
    device, host, peer, storage: tokens expected from each tier, and from another engine
    prefilled: of ``peer``, what that engine is to compute
    hint:   that engine; None: what it has is not worth asking for
    """

    engine: str
    endpoint: str
    cost: float
    reason: str
    device: int = 0
    host: int = 0
    peer: int = 0
    storage: int = 0
    prefilled: int = 0
    hint: PeerHint | None = None


@dataclass(frozen=True)
class RouterOptions:
    """The router's settings.

    policy:           ``cache_aware``, ``least_loaded`` or ``round_robin``
    block_size:       tokens of a block that is hashed
    blocks_per_token: blocks of an engine's pool that each token of a sequence takes, over all head groups
    engine_queue:     an engine with so many waiting requests gets no more, but for those of `places_ahead`
    max_num_seqs:     sequences that an engine runs at once
    step_tokens:      tokens that an engine computes in a step
    engine_timeout_s: an engine that is silent for so long is replaced
    forget_s:         an engine that is silent for so long is not expected back
    peer_loads:       engines fetch from each other what they lack of a prefix
    fair_prompts:     engines compute prompts in the order of `prompt_order` fair
    local_tokens:     an engine that is to decode computes so many tokens of a prompt itself
    """

    policy: str = "cache_aware"
    block_size: int = 64
    blocks_per_token: float = 1 / 64
    engine_queue: int = 64
    max_num_seqs: int = 64
    step_tokens: int = 512
    engine_timeout_s: float = 20.0
    forget_s: float = 600.0
    peer_loads: bool = False
    fair_prompts: bool = False
    local_tokens: int = 256

    @property
    def places_ahead(self) -> int:
        """Places at an engine that has no room left, for requests that would go before most of what waits there: else
        a few words, a tenant's first prompt, or what is urgent would wait here until the next of those begins."""
        return max(1, self.engine_queue // 4)
