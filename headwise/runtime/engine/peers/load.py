"""One lease of another engine's blocks, as its reader sees it: what it is to bring, and how far that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.arrivals import Arrival
from headwise.cache_controller.head_exchange import HeadExchange
from headwise.cache_controller.leases import MAX_LEASED
from headwise.runtime.protocol.lease_messages import AskLease, Leased
from headwise.runtime.protocol.prompt_items import PromptEmbeds

MAX_RANKS, MAX_EXPORTS, MAX_EXPORT_BYTES = 1024, 8, 4096
"""What an owner may have: ranks, addresses of each, bytes of an address."""

END_SHARE = 0.2
"""Share of the timeout that is left to have an owner say that what was copied was held."""

QUEUED = 2.0
"""Timeouts that copies have whose turn has not come: what is read before them has one of its own."""

Piece = tuple[int, int, int]
"""A group of the owner's, its block, and in which of the owner's memories that is."""


@dataclass(frozen=True, eq=False)
class OwnerGroups:
    """How blocks of an owner's groups make up ours.

    ranks: that it has
    needs: ``bool [our groups, its groups]``, whether a block of ours takes bytes of that group's
    most:  of our blocks, those that it may lease at once
    """

    ranks: int
    needs: NDArray[np.bool_]
    most: int

    @classmethod
    def of(cls, exchange: HeadExchange, host_blocks: int) -> OwnerGroups:
        """Of an owner whose ranks have as much host memory as ours, which is ``host_blocks`` of our blocks."""
        ours, theirs = exchange.needs.shape
        of_owner = MAX_LEASED * host_blocks * exchange.block_bytes / exchange.owner_block_bytes
        return cls(exchange.owner_ranks, exchange.needs, max(1, int(of_owner * ours / theirs)))

    def of_ours(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[n, its groups]``: which of its blocks make up those of ours that are ``wanted [n, our groups]``."""
        return np.asarray(wanted.astype(np.int64) @ self.needs.astype(np.int64) > 0)

    @cached_property
    def takers(self) -> dict[int, tuple[int, ...]]:
        """By its group, ours that take bytes of it."""
        return {theirs: tuple(np.flatnonzero(of).tolist()) for theirs, of in enumerate(self.needs.T)}

    @cached_property
    def num_pieces(self) -> tuple[int, ...]:
        """By our group, how many of its groups a block takes bytes of."""
        return tuple(self.needs.sum(axis=1).tolist())


@dataclass(eq=False)
class Load:
    """A lease, and what comes by it.

    ask:     the question, as often as it is asked
    embeds:  of the prompt that it asks to be computed
    told:    of these, the item and the row that the owner was last sent; None: none lately
    moved:   when it last got on: blocks were leased or copied, or its owner, which computes them, had ended a step
    limit:   until when it may last, however it gets on
    waits:   for the owner to lease all pieces of them, by column and group
    pieces:  what was leased of those, by the owner's group
    ordered: being copied
    on_device: those that are read on the owner's device, in part at least
    copied, failed: by all workers, or not by one of them
    grant:   of the lease; None: not heard yet
    heard:   blocks of the lease that the owner has told of
    is_part: it is to bring some of what a hit needs, and another load the rest
    is_cut:  only what was copied then is of use: its lease is being ended
    late:    being copied then
    is_over: nothing more is wanted of it, and what comes is missed
    """

    engine: str
    ask: AskLease
    owner: OwnerGroups
    moved: float
    limit: float
    say_at: float
    waits: dict[tuple[int, int], Arrival]
    is_part: bool = False
    embeds: tuple[PromptEmbeds, ...] = ()
    told: tuple[int, int] | None = None
    pieces: dict[Arrival, dict[int, Piece]] = field(default_factory=dict)
    ordered: set[Arrival] = field(default_factory=set)
    on_device: set[Arrival] = field(default_factory=set)
    copied: list[Arrival] = field(default_factory=list)
    failed: list[Arrival] = field(default_factory=list)
    grant: int | None = None
    heard: int = 0
    is_all: bool = False
    is_cut: bool = False
    late: set[Arrival] = field(default_factory=set)
    is_over: bool = False

    @property
    def name(self) -> bytes:
        return self.ask.lease

    @property
    def epoch(self) -> int:
        return self.ask.epoch

    @property
    def prefills(self) -> bool:
        """Whether the owner computes what it leases: that takes its time, as long as it gets on."""
        return self.ask.prompt is not None

    @property
    def is_copied(self) -> bool:
        """Whether all is there that will come, as far as the copies go."""
        return self.is_all and not self.ordered

    def until(self, timeout_s: float, is_queued: bool) -> float:
        """Until when it is waited for, if nothing more comes. is_queued: others' copies go before its own"""
        if self.is_over or self.is_cut:
            return self.limit
        patience = QUEUED if is_queued else 1 - END_SHARE if self.copied else 1
        return min(self.moved + patience * timeout_s, self.limit)

    def cut(self, now: float, timeout_s: float) -> None:
        """Want nothing more but what is copied, and not wait long for its owner to confirm that. Nobody may wait for
        blocks to be leased any more."""
        self.is_cut = self.is_all = True
        self.waits.clear()
        self.pieces.clear()
        self.late, self.ordered = self.ordered, set()
        self.limit = now + END_SHARE * timeout_s

    def arrivals(self) -> list[Arrival]:
        return [*self.waits.values(), *self.ordered, *self.late, *self.copied, *self.failed]

    def leased(self, blocks: Iterable[tuple[int, int, int, int]]) -> list[tuple[Arrival, list[Piece]]]:
        """Take in what the owner leases to us, (column, its group, its block, its memory) each; what is leased with all
        its pieces now, and so waits no more."""
        whole = []
        for column, theirs, block, memory in blocks:
            for group in self.owner.takers.get(theirs, ()):
                arrival = self.waits.get((column, group))
                if arrival is None:
                    continue
                pieces = self.pieces.setdefault(arrival, {})
                pieces.setdefault(theirs, (theirs, block, memory))
                if len(pieces) == self.owner.num_pieces[group]:
                    del self.waits[column, group]
                    whole.append((arrival, list(self.pieces.pop(arrival).values())))
        return whole


def is_sane(answer: Leased, ranks: int) -> bool:
    """Whether blocks and addresses are what they must be, of an owner with so many ranks. Whether they can be read,
    readers find out."""
    blocks = answer.blocks
    return (
        answer.first >= 0
        and blocks.ndim == 2
        and blocks.shape[1] == 4
        and len(answer.exports) <= MAX_RANKS
        and (len(answer.exports) == ranks or not len(blocks))
        and all(
            len(of_rank) <= MAX_EXPORTS and all(len(address) <= MAX_EXPORT_BYTES for address in of_rank)
            for of_rank in answer.exports
        )
    )
