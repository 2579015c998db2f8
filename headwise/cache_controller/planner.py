"""Packs (layer, KV head) members into head groups of equal size, and deals KV heads to tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL, HeadPolicy

MAX_PADDING = 0.03
"""Largest share of slots that may stay empty for the sake of fewer groups."""

Policies = Sequence[Sequence[HeadPolicy]]
"""``[num_layers][num_kv_heads]``"""


class Member(NamedTuple):
    """One (layer, KV head) pair; ``kv_head`` counts over all ranks."""

    layer: int
    kv_head: int


@dataclass(frozen=True)
class HeadGroup:
    """Members that live and die together.

    policy:  the loosest of the members' policies: what the group's blocks must keep
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

    ``auto`` packs by policy, with the fewest groups whose padding is at most `MAX_PADDING`.
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

    A layer of one policy is dealt in contiguous runs, the usual sharding. Otherwise each head goes to the rank
    that has the fewest members of its policy and room left in this layer.
    """
    num_layers, num_kv_heads = len(policies), len(policies[0])
    room = num_kv_heads // tp_size
    dealt: list[list[list[int]]] = [[[] for _ in range(num_layers)] for _ in range(tp_size)]
    counts = [Counter[HeadPolicy]() for _ in range(tp_size)]
    for layer, row in enumerate(policies):
        for head in sorted(range(num_kv_heads), key=lambda h: (row[h], h)):
            open_ranks = [r for r in range(tp_size) if len(dealt[r][layer]) < room]
            rank = open_ranks[0] if len(set(row)) == 1 else min(open_ranks, key=lambda r: (counts[r][row[head]], r))
            dealt[rank][layer].append(head)
            counts[rank][row[head]] += 1
    for rank_heads in dealt:
        for heads in rank_heads:
            heads.sort()
    return dealt


def _group_by_policy(policies: Policies, dealt: list[list[list[int]]]) -> tuple[int, tuple[HeadGroup, ...]]:
    by_policy: dict[HeadPolicy, list[list[Member]]] = defaultdict(lambda: [[] for _ in dealt])
    for rank, layers in enumerate(dealt):
        for layer, heads in enumerate(layers):
            for head in heads:
                by_policy[policies[layer][head]][rank].append(Member(layer, head))
    sizes = [max(map(len, ranks)) for ranks in by_policy.values()]
    slots = _choose_slots(sizes, sum(len(heads) for heads in dealt[0]))
    groups = []
    for policy in sorted(by_policy):  # full first: its groups decide how far a prefix reaches
        ranks = by_policy[policy]
        for first in range(0, max(map(len, ranks)), slots):
            members = tuple(tuple(rank[first : first + slots]) for rank in ranks)
            groups.append(HeadGroup(policy, members))
    return slots, tuple(groups)


def _choose_slots(sizes: list[int], members: int) -> int:
    """Group size with the fewest groups within `MAX_PADDING`, else with the least padding."""

    def cost(slots: int) -> tuple[bool, float, int]:
        groups = sum(-(-size // slots) for size in sizes)
        padding = (groups * slots - members) / members
        too_much = padding > MAX_PADDING
        return (too_much, padding if too_much else groups, groups * slots)

    return min(range(1, max(sizes) + 1), key=cost)


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
