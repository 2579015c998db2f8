"""Which attention variant a model has."""

from __future__ import annotations

from headwise.runtime.models.attention.base import AttentionVariant
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.attention.mla import LatentAttention
from headwise.runtime.models.base import ModelConfig


def attention_of(config: ModelConfig) -> AttentionVariant:
    """The variant of a model. Another one is a field of `ModelConfig` with its geometry, and a line here."""
    return GroupedQueryAttention(config) if config.mla is None else LatentAttention(config, config.mla)
