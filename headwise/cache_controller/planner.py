"""Packs members into head groups whose blocks have equal bytes, and deals them to tensor-parallel ranks.

A member is what one layer keeps of a sequence: keys and values of one KV head, the latent of a layer, or the state of
one head. Where members differ in size, groups differ in how many of them a block holds; where all live and die together
in spite of it, they are one group, those of each size one behind the other. States and what is kept for every token
never share a group.

Where there are more ranks than KV heads in a layer, each rank keeps one of these, and those that keep the same one
share its query heads, as equally as these divide:

    8 query heads, 2 KV heads, 4 ranks    rank 0: KV head 0, query heads 0 1    rank 2: KV head 1, query heads 4 5
                                          rank 1: KV head 0, query heads 2 3    rank 3: KV head 1, query heads 6 7
    8 query heads, 2 KV heads, 3 ranks    rank 0: KV head 0, query heads 0 1    rank 2: KV head 1, query heads 4 5 6 7
                                          rank 1: KV head 0, query heads 2 3

In a pipeline each stage has some of the layers, and as many ranks as any other, to which these are dealt likewise.
Ranks of all stages have the same groups: where one has fewer members than another, its blocks have empty slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_groups import HeadGroup, HeadGroupPlan, Member, Run
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy

MAX_PADDING = 0.03
"""Largest share of a block that may stay empty for the sake of fewer groups."""

MAX_ROUNDED_UP = 0.03
"""Largest share of members, by size, kept in a group looser than they need, unless uneven ranks force more.

Always safe: a kernel masks by the member's own policy. Ranks share block tables, so each loosest policy that does
not divide evenly over the ranks forces up to one such member on every rank but one.
"""

MAX_FULL_WASTE = 0.03
"""Most of full groups, over what full members fill, that others fill or nobody, unless uneven ranks force more.

Of a long sequence full groups are nearly all: what is wasted in them is not small beside windows that end somewhere.
"""

MUCH_WASTE = 0.25
"""Of full groups, over what full members fill: more is not taken to have windows waste less, where no block of little
waste is found."""

MAX_STATE_PADDING = 0.05
"""Most that is wasted of full groups, and of groups of states, where a model has states beside attention.

Both must fit whole into blocks of the same bytes: more groups of each would rarely waste less. Where no block of at
most so much waste is found, the larger share of the two is made as small as it can be: of a long sequence full groups
are nearly all, of a short one states are.
"""

_NOBODY = 1 << 30
"""In place of a member's policy, where a rank has fewer members than another one: tighter than any."""

Policies = Sequence[Sequence[HeadPolicy]]
"""``[num_layers][members of the layer]``; none of a layer that uses another one's"""


def plan_head_groups(
    policies: Policies,
    tp_size: int = 1,
    grouping: Literal["auto", "per_head_index"] = "auto",
    *,
    sizes: Sequence[int] | None = None,
    is_replicated: bool = False,
    stages: Sequence[range] = (),
    layer_of: Sequence[int] = (),
) -> HeadGroupPlan:
    """Pack the members of a model into groups.

    ``auto`` packs by policy and size, with the fewest groups that stay within `MAX_PADDING`, `MAX_ROUNDED_UP`
    and `MAX_FULL_WASTE`; members of one policy are one group, whatever their sizes.
    ``per_head_index`` makes one group per KV head index of a rank, over all layers.

    sizes:         ``[num_layers]``, bytes of a slot of each layer's members; None: all are equal
    is_replicated: every rank keeps all members but states, as of MLA, whose one latent serves all query heads; else
                   each rank has equally many of every layer's, or one, where there are more ranks. States are not
                   shared: each rank has equally many
    stages:        layers of each stage of a pipeline, in order; none: one has all
    layer_of:      ``[num_layers]``, of each the one whose stage has it: its own number, but of caches beside layers'
                   own, which have numbers behind them; none: all are layers

    Raises ValueError if the members of a layer cannot be so dealt to ``tp_size`` ranks, the policies or sizes are not
    a full table, or ``per_head_index`` is asked of layers that differ.
    """
    _check_table(policies, sizes)
    sizes = tuple(sizes or [1] * len(policies))
    to_deal = [row if _are_states(row) else () for row in policies] if is_replicated else policies
    _check_deals(to_deal, tp_size)
    stages, dealt = tuple(stages) or (range(len(policies)),), []
    for stage in stages:
        its = [layer in stage for layer in layer_of or range(len(policies))]
        of_stage = _deal(_of_layers(to_deal, its), tp_size)
        if is_replicated:
            whole = [[] if _are_states(row) else list(range(len(row))) for row in _of_layers(policies, its)]
            of_stage = [[own or every for own, every in zip(layers, whole, strict=True)] for layers in of_stage]
        dealt += of_stage
    if grouping == "per_head_index":
        block_bytes, groups = _group_by_head_index(policies, sizes, dealt)
    else:
        block_bytes, groups = _group_by_policy(policies, sizes, dealt)
    return HeadGroupPlan(sizes, block_bytes, tp_size, groups, stages)


def _of_layers(policies: Policies, its: Sequence[bool]) -> Policies:
    """The same, of no layer that is not ``its``."""
    return [row if is_its else () for row, is_its in zip(policies, its, strict=True)]


def agreed_policies(policies: Policies, plans: Callable[[Policies], Sequence[HeadGroupPlan]]) -> Policies:
    """The tightest policies with which each member is kept alike in all plans that are made of them.

    Ranks deal members out in their own way, so the same head may ride in a looser group on some engines, or on some of
    the ranks that keep it. Its blocks would be kept there, and be asked for from others, that have let go of them: then
    it is as loose everywhere.

    plans: those of engines with different ranks
    """
    while True:
        found = plans(policies)
        kept = [_kept(plan) for plan in found]
        agreed = tuple(
            tuple(
                loosest([policy, *(each for members in kept for each in members[Member(layer, head)])])
                for head, policy in enumerate(row)
            )
            for layer, row in enumerate(policies)
        )
        if all(each == {agreed[member.layer][member.kv_head]} for members in kept for member, each in members.items()):
            return agreed
        policies = agreed


def _kept(plan: HeadGroupPlan) -> dict[Member, set[HeadPolicy]]:
    """What the groups of each member keep, on all ranks that have it."""
    kept: dict[Member, set[HeadPolicy]] = {}
    for group in plan.groups:
        for member in (member for rank in group.members for member in rank):
            kept.setdefault(member, set()).add(group.policy)
    return kept


def _check_table(policies: Policies, sizes: Sequence[int] | None) -> None:
    if not policies:
        raise ValueError("a model needs at least one layer")
    if not any(policies):
        raise ValueError("no layer has head policies: give one for each KV head of at least one of them")
    if sizes is not None and (len(sizes) != len(policies) or min(sizes) < 1):
        raise ValueError(f"sizes {list(sizes)} must be one positive number for each of {len(policies)} layers")


def can_be_dealt(heads: int, tp_size: int, *, is_state: bool = False) -> bool:
    """Whether ranks can have equally many of a layer's ``heads`` each: a part of them, or one that others keep, too.

    A state is of all value heads of its key head: those would have to be split, not shared.
    """
    return not heads % tp_size or (not is_state and tp_size > heads)


def _are_states(row: Sequence[HeadPolicy]) -> bool:
    """Whether a layer's members are."""
    return bool(row) and row[0].is_state


def _check_deals(policies: Policies, tp_size: int) -> None:
    kinds = sorted({(len(row), row[0].is_state) for row in policies if row})
    if all(can_be_dealt(count, tp_size, is_state=is_state) for count, is_state in kinds):
        return
    counts = sorted({count for count, _ in kinds})
    sizes = range(1, counts[-1] + 1)
    fits = [size for size in sizes if all(can_be_dealt(count, size, is_state=state) for count, state in kinds)]
    more = "" if any(is_state for _, is_state in kinds) else f", and more than {counts[-1]}"
    heads = " or ".join(map(str, counts))
    raise ValueError(f"tp_size {tp_size} does not divide the model's {heads} KV heads; sizes that fit: {fits}{more}")


def _deal(policies: Policies, tp_size: int) -> list[list[list[int]]]:
    """``[rank][layer]`` KV heads, an equal number each, with each policy spread over the ranks.

    A layer of one policy is dealt in contiguous runs, the usual sharding. Any other is dealt loosest head first, in
    rounds that give each rank one; in a round, the rank that has the fewest heads so loose chooses first. Where a layer
    has fewer heads than there are ranks, each head is dealt to as many of them as any other, or to one more.
    """
    order = _loosest_first(policies)
    dealt: list[list[list[int]]] = [[[] for _ in policies] for _ in range(tp_size)]
    # counts[rank, p]: heads of the rank that are as loose as policy p or looser
    counts: NDArray[np.int64] = np.zeros((tp_size, len(order)), dtype=np.int64)
    for layer, row in enumerate(policies):
        if not row:
            continue
        heads, room = sorted(range(len(row)), key=lambda head: (order[row[head]], head)), max(1, len(row) // tp_size)
        each = heads if len(row) >= tp_size else [heads[rank * len(row) // tp_size] for rank in range(tp_size)]
        for place, head in enumerate(each):
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
    ordered = sorted(found, key=lambda policy: (not policy.is_full, policy.is_state, -policy.window, -policy.sink))
    return {policy: index for index, policy in enumerate(ordered)}


@dataclass(frozen=True)
class _Line:
    """The members of one size, states or others, of each rank loosest first: to be cut into groups.

    members: ``[ranks][members]``
    kinds:   ``int64 [ranks, most members]``, their policies, as positions from loosest to tightest; `_NOBODY` behind a
             rank's last member
    full:    ``bool [ranks, most members]``, whether they see everything
    """

    size: int
    members: list[list[Member]]
    kinds: NDArray[np.int64]
    full: NDArray[np.bool_]
    is_state: bool

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all of the members have one policy."""
        return bool((self.kinds[self.kinds != _NOBODY] == self.kinds.min()).all())

    @cached_property
    def filled(self) -> int:
        """Bytes of all members."""
        return self.size * int(np.count_nonzero(self.kinds != _NOBODY))

    @property
    def missing(self) -> int:
        """Bytes that ranks lack of as many members as others have, which stay empty whatever a block's size."""
        return self.size * len(self.members) * max(map(len, self.members)) - self.filled

    def slots(self, block_bytes: int) -> int:
        return block_bytes // self.size

    def groups(self, block_bytes: int) -> int:
        return -(-max(map(len, self.members)) // self.slots(block_bytes))

    def full_waste(self, block_bytes: int) -> int:
        """Bytes of full groups, over all ranks, that full members do not fill."""
        if self.is_uniform:
            return self.empty(block_bytes) if self.full.any() else 0
        groups = int(np.count_nonzero(self.full[:, :: self.slots(block_bytes)].any(axis=0)))
        return groups * block_bytes * len(self.members) - self.size * int(self.full.sum())

    def empty(self, block_bytes: int) -> int:
        """Bytes of groups, over all ranks, that nobody fills."""
        return self.groups(block_bytes) * block_bytes * len(self.members) - self.filled

    def rounded_up(self, block_bytes: int) -> int:
        """Bytes of members in a group that keeps more than they need."""
        if self.is_uniform:
            return 0
        slots = self.slots(block_bytes)
        loosest = self.kinds[:, ::slots].min(axis=0)  # lines are in order: the first of each cut is the loosest
        is_looser = self.kinds > np.repeat(loosest, slots)[: self.kinds.shape[1]]
        return self.size * int(np.count_nonzero(is_looser & (self.kinds != _NOBODY)))


def _group_by_policy(
    policies: Policies, sizes: Sequence[int], dealt: list[list[list[int]]]
) -> tuple[int, tuple[HeadGroup, ...]]:
    """Line up each rank's members of a size loosest first, and cut the line into groups.

    Where a cut does not fall between two policies, tighter heads ride in the looser group: the slots would be empty
    otherwise. Full groups come first: they decide how far a prefix reaches. States come last.
    """
    lines = _lines(policies, sizes, dealt)
    if len(lines) > 1 and _live_together(policies):
        every = (tuple(sorted(chain(*of_rank))) for of_rank in zip(*(line.members for line in lines), strict=True))
        block_bytes, group = _together(policies, sizes, tuple(every))
        return block_bytes, (group,)
    block_bytes = _choose_block_bytes(lines)
    groups = []
    for line in lines:
        slots = line.slots(block_bytes)
        for first in range(0, line.kinds.shape[1], slots):
            members = tuple(tuple(sorted(rank[first : first + slots])) for rank in line.members)
            groups.append(_group(policies, members, slots))
    return block_bytes, tuple(sorted(groups, key=lambda group: (not group.policy.is_full, group.policy.is_state)))


def _together(
    policies: Policies, sizes: Sequence[int], members: tuple[tuple[Member, ...], ...]
) -> tuple[int, HeadGroup]:
    """These members as one group, those of each size one behind the other, and the bytes of its blocks."""
    counts = [Counter(sizes[member.layer] for member in of_rank) for of_rank in members]
    runs, at = [], 0
    for size in dict.fromkeys(chain(*counts)):
        runs.append(Run(size, at, max(count[size] for count in counts)))
        at += size * runs[-1].slots
    group = _group(policies, members, sum(run.slots for run in runs))
    return at, replace(group, runs=tuple(runs) if len(runs) > 1 else ())


def _live_together(policies: Policies) -> bool:
    """Whether all members do, whatever their sizes: they have one policy, and are no states."""
    found = {*chain(*policies)}
    return len(found) == 1 and not found.pop().is_state


def _lines(policies: Policies, sizes: Sequence[int], dealt: list[list[list[int]]]) -> list[_Line]:
    order = _loosest_first(policies)

    def kind(member: Member) -> int:
        return order[policies[member.layer][member.kv_head]]

    def line_of(member: Member) -> tuple[int, bool]:
        return sizes[member.layer], policies[member.layer][member.kv_head].is_state

    every = [[Member(layer, head) for layer, heads in enumerate(layers) for head in heads] for layers in dealt]
    lines = []
    for size, is_state in sorted({line_of(member) for rank in every for member in rank}, reverse=True):
        members = [
            sorted(
                (member for member in rank if line_of(member) == (size, is_state)),
                key=lambda member: (kind(member), member),
            )
            for rank in every
        ]
        kinds = np.full((len(members), max(map(len, members))), _NOBODY, dtype=np.int64)
        full = np.zeros(kinds.shape, dtype=np.bool_)
        for rank, own in enumerate(members):
            kinds[rank, : len(own)] = [kind(member) for member in own]
            full[rank, : len(own)] = [policies[m.layer][m.kv_head].is_full for m in own]
        lines.append(_Line(size, members, kinds, full, is_state))
    return lines


def _choose_block_bytes(lines: Sequence[_Line]) -> int:
    """Bytes of a block with the fewest groups that wastes little.

    See `MAX_PADDING`, `MAX_ROUNDED_UP`, `MAX_FULL_WASTE` and `MAX_STATE_PADDING`. Tried are those that a
    whole number of some size's members fill.
    """
    filled = sum(line.filled for line in lines)
    full = sum(line.size * int(line.full.sum()) for line in lines)
    unavoidable = sum(line.rounded_up(line.size) for line in lines)  # uneven ranks share tables
    full_unavoidable = sum(line.full_waste(line.size) for line in lines)
    states = [line for line in lines if line.is_state]
    of_states = sum(line.filled for line in states)
    missing, states_missing = sum(line.missing for line in lines), sum(line.missing for line in states)
    most_padding, most_waste = (MAX_STATE_PADDING,) * 2 if states else (MAX_PADDING, MAX_FULL_WASTE)

    def cost(block_bytes: int) -> tuple[bool, float, int, int]:
        groups = sum(line.groups(block_bytes) for line in lines)
        empty = sum(line.empty(block_bytes) for line in lines)
        rounded = sum(line.rounded_up(block_bytes) for line in lines)
        allowed = max(MAX_ROUNDED_UP * filled, unavoidable)
        in_full = sum(line.full_waste(block_bytes) for line in lines)
        in_states = sum(line.empty(block_bytes) for line in states)
        too_much = (
            empty - missing > most_padding * filled
            or rounded > allowed
            or in_full > max(most_waste * full, full_unavoidable)
            or in_states - states_missing > most_padding * of_states
        )
        wasted = empty + rounded
        if not too_much:
            return too_much, 0, groups, wasted
        worst = max(in_states / of_states, in_full / full) if of_states and full else float(in_full > MUCH_WASTE * full)
        return too_much, worst, wasted, groups

    largest = max(line.size for line in lines)
    fillings = {line.size * slots for line in lines for slots in range(1, line.kinds.shape[1] + 1)}
    return min(sorted(size for size in fillings if size >= largest), key=cost)


def _group_by_head_index(
    policies: Policies, sizes: Sequence[int], dealt: list[list[list[int]]]
) -> tuple[int, tuple[HeadGroup, ...]]:
    if len({len(row) for row in policies}) > 1 or (len(set(sizes)) > 1 and not _live_together(policies)):
        raise ValueError("head_grouping per_head_index takes layers of equally many heads of one size: choose auto")
    made = []
    for index in range(max(map(len, dealt[0]))):
        members = tuple(
            tuple(Member(layer, heads[index]) for layer, heads in enumerate(layers) if heads) for layers in dealt
        )
        made.append(_together(policies, sizes, members))
    return made[0][0], tuple(group for _, group in made)


def _group(policies: Policies, members: tuple[tuple[Member, ...], ...], slots: int) -> HeadGroup:
    return HeadGroup(loosest([policies[m.layer][m.kv_head] for rank in members for m in rank]), members, slots)


def loosest(policies: Sequence[HeadPolicy]) -> HeadPolicy:
    """The policy under which nothing is dropped that one of ``policies`` still sees."""
    if any(policy.is_full for policy in policies):
        return FULL
    if any(policy.is_state for policy in policies):
        return STATE
    return HeadPolicy(max(p.window for p in policies), max(p.sink for p in policies))
