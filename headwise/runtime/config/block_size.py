"""How many tokens a block has where nobody says so: by the model and the dtype of its cache, and by nothing else.

Engines of a deployment with other numbers of ranks exchange blocks, and the index counts them, so that all must have
the same number. Therefore it is one that suits all numbers of ranks; where ranks keep tokens together, engines have
equally many of them, and it is one that suits these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from headwise.cache_controller.planner import MAX_STATE_PADDING, Policies, plan_head_groups
from headwise.runtime.config.engine_config import EngineConfig, fewest_tokens
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import valid_tp_sizes

MORE = 2
"""The other choice has so many times the fewest tokens; yet more would make prefixes coarse."""

MOST_RANKS = 8
"""Numbers of ranks that are looked at."""

MUCH_LESS = 2 / 3
"""Of what is padded in blocks of the fewest tokens, at most so much must be in longer ones that are chosen for it."""


MANY_GROUPS = 256
"""More rows of a sequence's block tables than longer blocks are spared for, if these pad no more."""


@dataclass(frozen=True)
class BlockSize:
    """What ``auto`` is for a model, and why.

    tokens:  of a block
    shortest: the fewest tokens that were looked at
    fewest:  the largest share of tokens or states that any number of ranks pads in blocks of the fewest tokens
    more:    the same in blocks of `MORE` times as many; None: they were not looked at, since the fewest pad little
    groups:  head groups that there would be with the fewest tokens, on the fewest ranks, where those decided it; else 0
    ranks:   that were looked at, in words
    """

    tokens: int
    shortest: int
    fewest: float
    more: float | None = None
    groups: int = 0
    ranks: str = f"1 to {MOST_RANKS}"

    @property
    def reason(self) -> str:
        """In one short phrase."""
        ranks = f"on {self.ranks} ranks"
        if self.more is None:
            return f"auto chose {self.tokens}: it pads at most {self.fewest:.1%} {ranks}"
        padded = f"{self.shortest} pads up to {self.fewest:.1%}, {MORE * self.shortest} up to {self.more:.1%}"
        counted = f", and {self.shortest} would have {self.groups} groups" if self.groups else ""
        return f"auto chose {self.tokens}: {ranks} {padded}{counted}"


def resolve_block_size(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of a block: those that are configured, or what ``auto`` is."""
    if config.block_size != "auto":
        return config.block_size
    return choose_block_size(model, config.kv_dtype_name, config.context_parallel_size, config.tp_size).tokens


def choose_block_size(model: ModelConfig, kv_dtype: str, parts: int = 1, tp_size: int = 1) -> BlockSize:
    """`MORE` tokens where blocks of the fewest pad more than `MAX_STATE_PADDING`, and those not or much less, or no
    more and there would be more than `MANY_GROUPS`.

    Only states make a difference: what is kept for every token takes as many times more bytes as a block has tokens.

    parts: that each block is kept in, one by a rank, on engines of ``tp_size`` ranks; 1: of any number
    """
    shortest = fewest_tokens(parts)
    if parts > 1:
        ranks, told = [tp_size], str(tp_size)
    else:
        ranks, told = [size for size in valid_tp_sizes(model) if size <= MOST_RANKS], BlockSize.ranks
    if not any(policy.is_state for row in model.policies for policy in row):
        return BlockSize(shortest, shortest, 0.0, ranks=told)
    fewest, groups = _looked_at(model, kv_dtype, shortest, parts, ranks)
    if fewest <= MAX_STATE_PADDING:
        return BlockSize(shortest, shortest, fewest, ranks=told)
    more, _ = _looked_at(model, kv_dtype, MORE * shortest, parts, ranks)
    is_better = more <= max(MAX_STATE_PADDING, MUCH_LESS * fewest)
    if not is_better and more <= fewest and groups > MANY_GROUPS:
        return BlockSize(MORE * shortest, shortest, fewest, more, groups, told)
    return BlockSize(MORE * shortest if is_better else shortest, shortest, fewest, more, ranks=told)


def _looked_at(
    model: ModelConfig, kv_dtype: str, block_size: int, parts: int, ranks: Sequence[int]
) -> tuple[float, int]:
    """The largest share of tokens or of states that any number of ranks pads, and the head groups on the fewest."""
    attention, layers = attention_of(model), range(model.cache_layers)
    of_one = [attention.layout(block_size, 1, kv_dtype, layer) for layer in layers]
    policies = tuple(map(tuple, model.policies))
    sizes = tuple(
        tuple(
            replace(layout, parts=attention.token_parts(layer, size, parts)).slot_bytes
            for layer, layout in enumerate(of_one)
        )
        for size in ranks
    )
    return _padding_and_groups(policies, sizes, tuple(ranks), attention.is_replicated)


@lru_cache(maxsize=16)  # a process reads the card of its model more than once
def _padding_and_groups(
    policies: Policies, sizes: tuple[tuple[int, ...], ...], ranks: tuple[int, ...], is_replicated: bool
) -> tuple[float, int]:
    plans = [
        plan_head_groups(policies, size, sizes=of_layers, is_replicated=is_replicated)
        for size, of_layers in zip(ranks, sizes, strict=True)
    ]
    return max(plan.padding_of(states=states) for plan in plans for states in (False, True)), len(plans[0].groups)
