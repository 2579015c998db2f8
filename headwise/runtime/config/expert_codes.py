"""Whether a GPU computes from a mixture's experts as codes: known from the model's sizes, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from headwise.errors import ConfigError
from headwise.kernels.cuda.packed import bits_taken, check_groups
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.quantisation import scheme_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import split
from headwise.runtime.ops.quantised import INT8_GROUP


def check_expert_codes(config: EngineConfig, model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Whether groups of codes divide experts, and each rank's part of them.

    found: the model's ``config.json``

    Raises:
        ConfigError: they do not; says which sizes are at fault.
    """
    if not (config.on_gpu and config.has_packed_weights and model.moe):
        return
    group, bits = _group_and_bits(config, found)
    for ranks in config.tp_sizes:
        sizes = {model.moe.expert_size, model.moe.image_expert_size} - {0}
        parts = (split(size, rank, ranks) for size in sizes for rank in range(ranks))
        for depth in (model.hidden_size, *sorted({stop - start for start, stop in parts})):
            size = gcd(group, depth) if config.weights_dtype == "fp8" else group or depth
            if depth % size:
                raise ConfigError(
                    f"weights_dtype {config.weights_dtype}: an expert of {config.model} has rows of {depth} numbers on "
                    f"each of {ranks} ranks, which are no whole groups of {size}: choose another tp_size, or "
                    "weights_dtype auto"
                )
            check_groups(depth, size, bits_taken(bits, depth, size))


def _group_and_bits(config: EngineConfig, found: Mapping[str, Any]) -> tuple[int, int]:
    """Of the codes that experts are to be kept in. 0: a whole row is a group"""
    scheme = scheme_of(found)
    if scheme is None or scheme.is_fp8 != (config.weights_dtype == "fp8"):
        return INT8_GROUP, 8
    return scheme.group, 4 if scheme.is_int4 else 8
