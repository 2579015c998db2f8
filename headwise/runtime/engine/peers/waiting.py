"""Requests that wait for blocks of other engines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headwise.cache_controller.arrivals import Fetch
from headwise.runtime.engine.peers.load import Load, OwnerGroups
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.request import GenerateRequest, PeerHint, SamplingParams


@dataclass(eq=False)
class Waiting:
    """A sequence that is held back.

    owner: the groups of the engine that its hint names
    path:  what that engine may have of it
    limit: until when it waits at most, for all parts
    fetch: of the part that is under way
    loads: that bring what of it comes from other engines
    until: when the rest of it, which somebody else brings, should have come
    asked: blocks of this part and those before
    """

    sequence: Sequence
    hint: PeerHint
    owner: OwnerGroups
    path: tuple[bytes, ...]
    limit: float
    fetch: Fetch = field(default_factory=lambda: Fetch(0))
    loads: tuple[Load, ...] = ()
    until: float = 0.0
    asked: int = 0

    def is_over(self, now: float) -> bool:
        return not self.fetch.left or (now > self.until and all(load.is_over for load in self.loads))


def prompt_of(sequence: Sequence, tokens: int) -> GenerateRequest:
    """The first of a sequence's tokens, as a prompt: up to the end of an item that begins among them."""
    request = sequence.request
    extra_keys = tuple(key for key in request.extra_keys if key.start < tokens)
    return replace(
        request,
        prompt_token_ids=sequence.tokens(0, max([tokens, *(each.end for each in extra_keys)])),
        extra_keys=extra_keys,
        embeds=tuple(each for each in request.embeds if each.start < tokens),
        sampling=SamplingParams(),
        output_token_ids=(),
        prompt_told=0,
        peer=None,
    )
