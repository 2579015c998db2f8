"""Which attention variant a model has."""

from __future__ import annotations

from headwise.runtime.models.attention.base import AttentionVariant
from headwise.runtime.models.attention.chunked import ChunkedAttention
from headwise.runtime.models.attention.compressed import CompressedAttention
from headwise.runtime.models.attention.delta import DeltaNetAttention
from headwise.runtime.models.attention.dsa import IndexedLatentAttention
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.attention.kda import KimiDeltaAttention
from headwise.runtime.models.attention.mla import LatentAttention
from headwise.runtime.models.attention.ssm import StateSpaceAttention
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.states_config import DeltaConfig, KdaConfig, SsmConfig


def attention_of(config: ModelConfig) -> AttentionVariant:
    """The variant of a model. Another one is a field of `ModelConfig` with its geometry, and a line here."""
    if isinstance(config.states, DeltaConfig):
        return DeltaNetAttention(config, config.states)
    if isinstance(config.states, KdaConfig):
        return KimiDeltaAttention(config, config.states)
    if isinstance(config.states, SsmConfig):
        return StateSpaceAttention(config, config.states)
    if config.compressed is not None:
        return CompressedAttention(config, config.compressed)
    if config.mla is not None and config.mla.indexer is not None:
        return IndexedLatentAttention(config, config.mla, config.mla.indexer)
    if config.mla is not None:
        return LatentAttention(config, config.mla)
    if config.chunk:
        return ChunkedAttention(config)
    return GroupedQueryAttention(config)
