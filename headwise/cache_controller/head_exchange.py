"""Which bytes of another engine's blocks fill ours: the same where both have the same ranks, else member by member.

    owner, 2 ranks    rank 0: group 0 | a b |  group 1 | c |      rank 1: group 0 | e f |  group 1 | g |
    ours, 1 rank      rank 0: group 0 | a b e f |  group 1 | c g |

A slot has the same bytes for its member whichever rank has it. So a block of ours is filled from some groups' blocks of
the owner, for the same tokens, on some of its ranks; what pads a block is not copied, but where whole blocks are. A
member that several of its ranks keep is read from one of them, so that reads are spread over these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_groups import HeadGroup, HeadGroupPlan, Member
from headwise.cache_controller.layout import BlockLayout

Pieces = NDArray[np.int64]
"""``int64 [n, 6]``: (our group, the owner's group, its rank, first byte in its block, first byte in ours, bytes)"""


@dataclass(frozen=True)
class Arrangement:
    """How an engine has its members in blocks.

    slot_bytes:  ``[num_layers]``
    block_bytes: of every group's blocks
    identities:  ``[num_layers]``, of what lies in a slot: roles, dtypes, tokens
    """

    plan: HeadGroupPlan
    slot_bytes: tuple[int, ...]
    block_bytes: int
    identities: tuple[str, ...]

    @classmethod
    def of(cls, plan: HeadGroupPlan, layouts: Sequence[BlockLayout]) -> Arrangement:
        """``layouts``: ``[num_layers]``"""
        slots = tuple(layout.slot_bytes for layout in layouts)
        return cls(plan, slots, layouts[0].block_bytes, tuple(layout.slot_identity for layout in layouts))

    def first_byte(self, member: Member, slot: int) -> int:
        """Of a member in blocks where it has this slot."""
        size = self.slot_bytes[member.layer]
        return self.plan.run_of(size).begin + slot * size


class HeadExchange:
    """From the blocks of an ``owner`` to ours.

    Raises:
        ValueError: their members are not the same, or not kept in the same way.
    """

    def __init__(self, ours: Arrangement, owner: Arrangement) -> None:
        self._ours, self._owner = ours, owner
        self._is_alike = ours == owner
        self._places = _places(owner.plan)
        if not self._is_alike:
            _check(ours, owner, self._places)

    @property
    def owner_ranks(self) -> int:
        return self._owner.plan.ranks

    @property
    def owner_block_bytes(self) -> int:
        return self._owner.block_bytes

    @property
    def block_bytes(self) -> int:
        return self._ours.block_bytes

    @cached_property
    def needs(self) -> NDArray[np.bool_]:
        """``[our groups, the owner's groups]``: whether a block of ours takes bytes of that group's, on any rank."""
        found = np.zeros((len(self._ours.plan.groups), len(self._owner.plan.groups)), dtype=np.bool_)
        for rank in range(self._ours.plan.ranks):
            pieces = self.pieces(rank)
            found[pieces[:, 0], pieces[:, 1]] = True
        return found

    def pieces(self, rank: int) -> Pieces:
        """What our ``rank`` copies for one block of each of its groups, in our blocks' order."""
        if self._is_alike:
            groups = np.arange(len(self._ours.plan.groups), dtype=np.int64)
            zeros = np.zeros_like(groups)
            return np.column_stack([groups, groups, zeros + rank, zeros, zeros, zeros + self._ours.block_bytes])
        pieces: list[list[int]] = []
        own_places = self._ours.plan.places[rank]
        for index, group in enumerate(self._ours.plan.groups):
            in_order = sorted((self._ours.first_byte(each, own_places[each][1]), each) for each in group.members[rank])
            for first_byte, member in in_order:
                places = self._places[member]
                # Kept by several: each rank of ours asks another one, and each of its groups asks in turn.
                owner_rank, owner_group, owner_slot = places[(rank + index) % len(places)]
                theirs, size = self._owner.first_byte(member, owner_slot), self._ours.slot_bytes[member.layer]
                piece = [index, owner_group, owner_rank, theirs, first_byte, size]
                if pieces and _goes_on(pieces[-1], piece):
                    pieces[-1][5] += size
                else:
                    pieces.append(piece)
        return np.array(pieces, dtype=np.int64).reshape(-1, 6)


def _goes_on(piece: list[int], then: list[int]) -> bool:
    size = piece[5]
    return piece[:3] == then[:3] and piece[3] + size == then[3] and piece[4] + size == then[4]


def _places(plan: HeadGroupPlan) -> dict[Member, list[tuple[int, int, int]]]:
    """(rank, group, slot) of each member, on every rank that has it."""
    places: dict[Member, list[tuple[int, int, int]]] = {}
    for rank, found in enumerate(plan.places):
        for member, place in found.items():
            places.setdefault(member, []).append((rank, *place))
    return {member: sorted(of_member) for member, of_member in places.items()}


def _check(ours: Arrangement, owner: Arrangement, places: dict[Member, list[tuple[int, int, int]]]) -> None:
    for layer, (own, theirs) in enumerate(zip(ours.identities, owner.identities, strict=False)):
        if own != theirs:
            raise ValueError(f"blocks cannot be exchanged: layer {layer} has {own} here and {theirs} there")
    members = _places(ours.plan)
    if len(ours.identities) != len(owner.identities) or members.keys() != places.keys():
        raise ValueError(
            f"blocks cannot be exchanged: {len(members)} members of {len(ours.identities)} layers here and "
            f"{len(places)} of {len(owner.identities)} there are not the same ones"
        )
    for member, found in members.items():
        own_group, their_group = _group(ours, found), _group(owner, places[member])
        if own_group.policy.is_state != their_group.policy.is_state:
            raise ValueError(f"blocks cannot be exchanged: {member} is a state on one side only")


def _group(arrangement: Arrangement, places: list[tuple[int, int, int]]) -> HeadGroup:
    return arrangement.plan.groups[places[0][1]]
