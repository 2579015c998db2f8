"""A model's members in head groups, whose blocks have equal bytes: what the planner makes.

A member is what one layer keeps of a sequence: keys and values of one KV head, the latent of a layer, or the state of
one head. Where there are more ranks than KV heads in a layer, ranks have copies of them: see `planner`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy


class Member(NamedTuple):
    """What a layer keeps for one of its KV heads; ``kv_head`` counts over all ranks."""

    layer: int
    kv_head: int


class Sharing(NamedTuple):
    """What a rank has of the query heads of its KV heads of a layer: one of parts that differ by a head at most.

    part:  which, from 0 on
    ranks: that keep the same KV heads, and have a part each; 1: nobody else keeps them
    """

    part: int
    ranks: int

    def of(self, count: int) -> range:
        """Which of ``count`` query heads, over one KV head, are this part."""
        return range(self.part * count // self.ranks, (self.part + 1) * count // self.ranks)


class Run(NamedTuple):
    """A part of a block: slots of members of one size, and where they begin, in the unit of that."""

    size: int
    begin: int
    slots: int


@dataclass(frozen=True)
class HeadGroup:
    """Members that live and die together.

    policy:  the loosest of the members' policies: what the group's blocks must keep. Some members may need less
    members: ``[ranks][<= slots]``, ordered by layer, so that a layer is one byte range of a block
    slots:   members that a block has room for
    runs:    of each size that members have; empty: all have one, and their slots begin where the block does
    """

    policy: HeadPolicy
    members: tuple[tuple[Member, ...], ...]
    slots: int
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class HeadGroupPlan:
    """The groups of a model. Every rank has the same groups, hence the same block tables.

    sizes:       ``[num_layers]``, bytes of a slot of each layer's members; 1 each where all are equal and nobody asked
    block_bytes: of every group's blocks, in the unit of ``sizes``
    tp_size:     ranks of each stage
    stages:      layers of each; ranks are numbered stage by stage
    """

    sizes: tuple[int, ...]
    block_bytes: int
    tp_size: int
    groups: tuple[HeadGroup, ...]
    stages: tuple[range, ...]

    @property
    def num_layers(self) -> int:
        return len(self.sizes)

    @property
    def ranks(self) -> int:
        """Of all stages."""
        return self.tp_size * len(self.stages)

    @property
    def policies(self) -> tuple[HeadPolicy, ...]:
        return tuple(group.policy for group in self.groups)

    @property
    def slots(self) -> int:
        """Members in a block, where all have one size; raises ValueError where they have not."""
        found = {group.slots for group in self.groups}
        if len(found) > 1:
            raise ValueError(f"blocks of this model's groups hold {sorted(found)} members: ask the group")
        return found.pop()

    @property
    def slots_text(self) -> str:
        """Members in a block, of each size that they have, in words."""
        return " or ".join(str(slots) for slots in sorted({group.slots for group in self.groups}))

    @property
    def padding(self) -> float:
        """What stays empty of blocks, over what does not."""
        return self._padding(self.groups)

    def padding_of(self, *, states: bool) -> float:
        """The same of the blocks of states, or of those of tokens alone; 0 where there are none."""
        return self._padding([group for group in self.groups if group.policy.is_state is states])

    def _padding(self, groups: Sequence[HeadGroup]) -> float:
        filled = sum(self.sizes[member.layer] for group in groups for rank in group.members for member in rank)
        return (self.block_bytes * len(groups) * self.ranks - filled) / filled if groups else 0.0

    @property
    def copies(self) -> float:
        """Bytes of a token on all ranks, over those of every member once: more than 1 where ranks share KV heads."""
        return self.copies_beside([1] * self.num_layers)

    def copies_beside(self, parts: Sequence[int]) -> float:
        """The same where each rank has one of so many parts of a layer's members, ``[num_layers]``."""
        groups = [group for group in self.groups if not group.policy.is_state]
        every = [member for group in groups for rank in group.members for member in rank]
        once = sum(self.sizes[member.layer] * parts[member.layer] for member in {*every})
        return sum(self.sizes[member.layer] for member in every) / once if once else 1.0

    @cached_property
    def places(self) -> list[dict[Member, tuple[int, int]]]:
        """Of each rank, the group and the slot of its members; where these differ in size, among those of one."""
        places: list[dict[Member, tuple[int, int]]] = [{} for _ in range(self.ranks)]
        for index, group in enumerate(self.groups):
            for rank, members in enumerate(group.members):
                taken: Counter[int] = Counter()
                for member in members:
                    size = self.sizes[member.layer] if group.runs else 0
                    places[rank][member] = (index, taken[size])
                    taken[size] += 1
        return places

    def run_of(self, size: int) -> Run:
        """Where slots of members of this size lie in blocks of the groups that have some."""
        return self._runs.get(size) or Run(size, 0, self.block_bytes // size)

    def in_blocks(self, layout: BlockLayout) -> BlockLayout:
        """Of the plan's blocks, the layout of which one member's is ``layout``."""
        size, lead, slots = self.run_of(layout.slot_bytes)
        return replace(layout, slots=slots, lead_bytes=lead, tail_bytes=self.block_bytes - lead - slots * size)

    @cached_property
    def _runs(self) -> dict[int, Run]:
        return {run.size: run for group in self.groups for run in group.runs}

    def kv_heads(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """``[num_layers]`` global KV heads dealt to ``rank``, ascending; none of other stages' layers."""
        heads: list[list[int]] = [[] for _ in range(self.num_layers)]
        for layer, kv_head in sorted(self.places[rank]):
            heads[layer].append(kv_head)
        return tuple(map(tuple, heads))

    def sharing(self, rank: int) -> tuple[Sharing, ...]:
        """``[num_layers]``, of ``rank``; parts are in the order of ranks."""
        found = []
        for layer, heads in enumerate(self.kv_heads(rank)):
            ranks = [r for r, places in enumerate(self.places) if heads and Member(layer, heads[0]) in places]
            found.append(Sharing(ranks.index(rank), len(ranks)) if ranks else Sharing(0, 1))
        return tuple(found)

    def placement(self, rank: int, layer: int) -> NDArray[np.int32]:
        """``int32 [local KV heads, 2]``: group and slot of each of the rank's heads of a layer."""
        places = self.places[rank]
        heads = self.kv_heads(rank)[layer]
        return np.array([places[Member(layer, head)] for head in heads], dtype=np.int32).reshape(-1, 2)
