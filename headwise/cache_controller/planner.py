"""Packs (layer, KV head) members into head groups of equal size, and deals KV heads to tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL, HeadPolicy

MAX_PADDING = 0.03
"""Largest share of slots that may stay empty for the sake of fewer groups."""

MAX_ROUNDED_UP = 0.03
"""Largest share of members kept in a group looser than they need, unless uneven ranks force more.

Always safe: a kernel masks by the member's own policy. Ranks share block tables, so each loosest policy that does
not divide evenly over the ranks forces up to one such member on every rank but one.
"""

Policies = Sequence[Sequence[HeadPolicy]]
"""``[num_layers][num_kv_heads]``"""


class Member(NamedTuple):
    """One (layer, KV head) pair; ``kv_head`` counts over all ranks."""

    layer: int
    kv_head: int


@dataclass(frozen=True)
class HeadGroup:
    """Members that live and die together.

    policy:  the loosest of the members' policies: what the group's blocks must keep. Some members may need less
    members: ``[tp_size][<= slots]``, ordered by layer, so that a layer is one byte range of a block
    """

    policy: HeadPolicy
    members: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True)
class HeadGroupPlan:
    """The groups of a model. Every rank has the same groups, hence the same block tables."""

    num_layers: int
    num_kv_heads: int
    tp_size: int
    slots: int
    groups: tuple[HeadGroup, ...]

    @property
    def policies(self) -> tuple[HeadPolicy, ...]:
        return tuple(group.policy for group in self.groups)

    @property
    def padding(self) -> float:
        """Empty slots over members."""
        members = self.num_layers * self.num_kv_heads
        return (self.slots * len(self.groups) * self.tp_size - members) / members

    @cached_property
    def _places(self) -> list[dict[Member, tuple[int, int]]]:
        places: list[dict[Member, tuple[int, int]]] = [{} for _ in range(self.tp_size)]
        for index, group in enumerate(self.groups):
            for rank, members in enumerate(group.members):
                for slot, member in enumerate(members):
                    places[rank][member] = (index, slot)
        return places

    def kv_heads(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """``[num_layers]`` global KV heads dealt to ``rank``, ascending."""
        heads: list[list[int]] = [[] for _ in range(self.num_layers)]
        for layer, kv_head in sorted(self._places[rank]):
            heads[layer].append(kv_head)
        return tuple(map(tuple, heads))

    def placement(self, rank: int, layer: int) -> NDArray[np.int32]:
        """``int32 [local KV heads, 2]``: group and slot of each of the rank's heads of a layer."""
        places = self._places[rank]
        heads = self.kv_heads(rank)[layer]
        return np.array([places[Member(layer, head)] for head in heads], dtype=np.int32)


def plan_head_groups(
    policies: Policies, tp_size: int = 1, grouping: Literal["auto", "per_head_index"] = "auto"
) -> HeadGroupPlan:
    """Pack the members of a model into groups.

    ``auto`` packs by policy, with the fewest groups that stay within `MAX_PADDING` and `MAX_ROUNDED_UP`.
    ``per_head_index`` makes one group per KV head index of a rank, over all layers.

    Raises ValueError if ``tp_size`` does not divide the KV heads, or the policies are not a full table.
    """
    num_layers, num_kv_heads = _shape(policies)
    if num_kv_heads % tp_size:
        fits = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
        raise ValueError(
            f"tp_size {tp_size} does not divide the model's {num_kv_heads} KV heads; sizes that fit: {fits}"
        )
    dealt = _deal(policies, tp_size)
    if grouping == "per_head_index":
        slots, groups = num_layers, _group_by_head_index(policies, dealt)
    else:
        slots, groups = _group_by_policy(policies, dealt)
    return HeadGroupPlan(num_layers, num_kv_heads, tp_size, slots, groups)


def _shape(policies: Policies) -> tuple[int, int]:
    if not policies or not policies[0]:
        raise ValueError("a model needs at least one layer and one KV head")
    num_kv_heads = len(policies[0])
    for layer, row in enumerate(policies):
        if len(row) != num_kv_heads:
            raise ValueError(f"layer {layer} has {len(row)} head policies, layer 0 has {num_kv_heads}")
    return len(policies), num_kv_heads


def _deal(policies: Policies, tp_size: int) -> list[list[list[int]]]:
    """``[rank][layer]`` KV heads, an equal number each, with each policy spread over the ranks.

    A layer of one policy is dealt in contiguous runs, the usual sharding. Any other is dealt loosest head first, in
    rounds that give each rank one; in a round, the rank that has the fewest heads so loose chooses first.
    """
    num_layers, num_kv_heads = len(policies), len(policies[0])
    room = num_kv_heads // tp_size
    order = _loosest_first(policies)
    dealt: list[list[list[int]]] = [[[] for _ in range(num_layers)] for _ in range(tp_size)]
    # counts[rank, p]: heads of the rank that are as loose as policy p or looser
    counts: NDArray[np.int64] = np.zeros((tp_size, len(order)), dtype=np.int64)
    for layer, row in enumerate(policies):
        heads = sorted(range(num_kv_heads), key=lambda head: (order[row[head]], head))
        for place, head in enumerate(heads):
            if order[row[heads[0]]] == order[row[heads[-1]]]:
                rank = place // room
            else:
                rank = _next_rank([len(dealt[r][layer]) for r in range(tp_size)], counts[:, order[row[head]] :])
            dealt[rank][layer].append(head)
            counts[rank, order[row[head]] :] += 1
    return [[sorted(heads) for heads in layers] for layers in dealt]


def _next_rank(in_layer: list[int], counts: NDArray[np.int64]) -> int:
    """The rank that takes the next head: of those with the fewest in this layer, the one with the lowest counts."""
    return min(range(len(in_layer)), key=lambda rank: (in_layer[rank], counts[rank].tolist(), rank))


def _loosest_first(policies: Policies) -> dict[HeadPolicy, int]:
    """Position of each policy in the order from loosest to tightest."""
    found = {policy for row in policies for policy in row}
    ordered = sorted(found, key=lambda policy: (not policy.is_full, -policy.window, -policy.sink))
    return {policy: index for index, policy in enumerate(ordered)}


def _group_by_policy(policies: Policies, dealt: list[list[list[int]]]) -> tuple[int, tuple[HeadGroup, ...]]:
    """Line up each rank's members loosest first, and cut the line into groups.

    Where a cut does not fall between two policies, tighter heads ride in the looser group: the slots would be empty
    otherwise. Full groups come first: they decide how far a prefix reaches.
    """
    order = _loosest_first(policies)
    lines = [
        sorted(
            (Member(layer, head) for layer, heads in enumerate(layers) for head in heads),
            key=lambda member: (order[policies[member.layer][member.kv_head]], member),
        )
        for layers in dealt
    ]
    kinds = np.array([[order[policies[m.layer][m.kv_head]] for m in line] for line in lines])
    slots = _choose_slots(kinds)
    groups = []
    for first in range(0, len(lines[0]), slots):
        members = tuple(tuple(sorted(line[first : first + slots])) for line in lines)
        groups.append(HeadGroup(_loosest([policies[m.layer][m.kv_head] for rank in members for m in rank]), members))
    return slots, tuple(groups)


def _choose_slots(kinds: NDArray[np.int64]) -> int:
    """Group size with the fewest groups that wastes little; see `MAX_PADDING` and `MAX_ROUNDED_UP`.

    ``kinds [ranks, members]`` are the policies of each rank's line, as their positions from loosest to tightest.
    """
    ranks, members = kinds.shape
    unavoidable = _rounded_up(kinds, 1)  # uneven ranks share tables

    def cost(slots: int) -> tuple[bool, int, int]:
        groups = -(-members // slots)
        empty, rounded = (groups * slots - members) * ranks, _rounded_up(kinds, slots)
        allowed = max(MAX_ROUNDED_UP * kinds.size, unavoidable)
        too_much = empty > MAX_PADDING * kinds.size or rounded > allowed
        return (too_much, empty + rounded if too_much else groups, empty + rounded)

    return min(range(1, members + 1), key=cost)


def _rounded_up(kinds: NDArray[np.int64], slots: int) -> int:
    """Members in a group that keeps more than they need, with groups of ``slots``."""
    loosest = kinds[:, ::slots].min(axis=0)  # lines are in order: the first of each cut is the loosest
    return int(np.count_nonzero(kinds > np.repeat(loosest, slots)[: kinds.shape[1]]))


def _group_by_head_index(policies: Policies, dealt: list[list[list[int]]]) -> tuple[HeadGroup, ...]:
    groups = []
    for index in range(len(dealt[0][0])):
        members = tuple(tuple(Member(layer, heads[index]) for layer, heads in enumerate(layers)) for layers in dealt)
        groups.append(HeadGroup(_loosest([policies[m.layer][m.kv_head] for rank in members for m in rank]), members))
    return tuple(groups)


def _loosest(policies: Sequence[HeadPolicy]) -> HeadPolicy:
    """The policy under which nothing is dropped that one of ``policies`` still sees."""
    if any(policy.is_full for policy in policies):
        return FULL
    return HeadPolicy(max(p.window for p in policies), max(p.sink for p in policies))
