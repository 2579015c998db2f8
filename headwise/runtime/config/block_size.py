"""How many tokens a block has where nobody says so: by the model and the dtype of its cache, and by nothing else.

Engines of a deployment with other numbers of ranks exchange blocks, and the index counts them, so that all must have
the same number. Therefore it is one that suits all numbers of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headwise.cache_controller.planner import MAX_STATE_PADDING, Policies, plan_head_groups
from headwise.runtime.config.engine_config import FEWEST_TOKENS, EngineConfig
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import ModelConfig, valid_tp_sizes

MORE_TOKENS = 2 * FEWEST_TOKENS
"""The other choice; yet more would make prefixes coarse."""

MOST_RANKS = 8
"""Numbers of ranks that are looked at."""

MUCH_LESS = 2 / 3
"""Of what is padded in blocks of `FEWEST_TOKENS`, at most so much must be in longer ones that are chosen for it."""


@dataclass(frozen=True)
class BlockSize:
    """What ``auto`` is for a model, and why.

    tokens:  of a block
    fewest:  the largest share of tokens or states that any number of ranks pads in blocks of `FEWEST_TOKENS`
    more:    the same in blocks of `MORE_TOKENS`; None: they were not looked at, since the fewest pad little
    """

    tokens: int
    fewest: float
    more: float | None = None

    @property
    def reason(self) -> str:
        """In one short phrase."""
        ranks = f"on 1 to {MOST_RANKS} ranks"
        if self.more is None:
            return f"auto chose {self.tokens}: it pads at most {self.fewest:.1%} {ranks}"
        padded = f"{FEWEST_TOKENS} pads up to {self.fewest:.1%}, {MORE_TOKENS} up to {self.more:.1%}"
        return f"auto chose {self.tokens}: {ranks} {padded}"


def resolve_block_size(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of a block: those that are configured, or what ``auto`` is."""
    return choose_block_size(model, config.kv_dtype_name).tokens if config.block_size == "auto" else config.block_size


def choose_block_size(model: ModelConfig, kv_dtype: str) -> BlockSize:
    """`MORE_TOKENS` where blocks of `FEWEST_TOKENS` pad more than `MAX_STATE_PADDING`, and those not or much less.

    Only states make a difference: what is kept for every token takes as many times more bytes as a block has tokens.
    """
    if not any(policy.is_state for row in model.policies for policy in row):
        return BlockSize(FEWEST_TOKENS, 0.0)
    fewest = _most_padding(model, kv_dtype, FEWEST_TOKENS)
    if fewest <= MAX_STATE_PADDING:
        return BlockSize(FEWEST_TOKENS, fewest)
    more = _most_padding(model, kv_dtype, MORE_TOKENS)
    is_better = more <= max(MAX_STATE_PADDING, MUCH_LESS * fewest)
    return BlockSize(MORE_TOKENS if is_better else FEWEST_TOKENS, fewest, more)


def _most_padding(model: ModelConfig, kv_dtype: str, block_size: int) -> float:
    """The largest share of tokens or of states, on any number of ranks."""
    attention, layers = attention_of(model), range(model.num_layers)
    sizes = tuple(attention.layout(block_size, 1, kv_dtype, layer).slot_bytes for layer in layers)
    policies = tuple(map(tuple, model.policies))
    ranks = tuple(size for size in valid_tp_sizes(model) if size <= MOST_RANKS)
    return _padding(policies, sizes, ranks, attention.is_replicated)


@lru_cache(maxsize=16)  # a process reads the card of its model more than once
def _padding(policies: Policies, sizes: tuple[int, ...], ranks: tuple[int, ...], is_replicated: bool) -> float:
    plans = [plan_head_groups(policies, size, sizes=sizes, is_replicated=is_replicated) for size in ranks]
    return max(plan.padding_of(states=states) for plan in plans for states in (False, True))
