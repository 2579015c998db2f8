"""Models some of whose layers have windows, by turns: which layers have, and where only these rotate their heads."""

from __future__ import annotations

from collections.abc import Callable

from headwise.runtime.models.hf_config import HfConfig, named_layer_types, rope
from headwise.runtime.models.position_config import RopeConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def full_every(config: HfConfig, count: int) -> Callable[[int], str]:
    """``layer_types`` for `decoder_config`: as they are named; or each ``count``-th layer sees all, others do not."""
    return named_layer_types(config, lambda layer: SLIDING if (layer + 1) % count else FULL)


def rotated_in_windows(config: HfConfig) -> Callable[[str], RopeConfig]:
    """``ropes`` for `decoder_config`: layers that see all rotate nothing."""

    def layer_rope(kind: str) -> RopeConfig:
        turning = rope(config)
        return turning if kind == SLIDING else RopeConfig(turning.theta, is_none=True)

    return layer_rope
