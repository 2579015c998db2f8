"""Which attention variant a model has."""

from __future__ import annotations

from headwise.runtime.models.attention.base import AttentionVariant
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.states_config import DeltaConfig, KdaConfig, SsmConfig


def attention_of(config: ModelConfig) -> AttentionVariant:
    """The variant of a model, whose module and kernels are imported now: nobody has all of them. Another one is a field
    of `ModelConfig` with its geometry, and two lines here.
    """
    if isinstance(config.states, DeltaConfig):
        from headwise.runtime.models.attention.delta import DeltaNetAttention

        return DeltaNetAttention(config, config.states)
    if isinstance(config.states, KdaConfig):
        from headwise.runtime.models.attention.kda import KimiDeltaAttention

        return KimiDeltaAttention(config, config.states)
    if isinstance(config.states, SsmConfig):
        from headwise.runtime.models.attention.ssm import StateSpaceAttention

        return StateSpaceAttention(config, config.states)
    if config.compressed is not None:
        from headwise.runtime.models.attention.compressed import CompressedAttention

        return CompressedAttention(config, config.compressed)
    if config.mla is not None and config.mla.indexer is not None:
        from headwise.runtime.models.attention.dsa import IndexedLatentAttention

        return IndexedLatentAttention(config, config.mla, config.mla.indexer)
    if config.mla is not None:
        from headwise.runtime.models.attention.mla import LatentAttention

        return LatentAttention(config, config.mla)
    if config.chunk:
        from headwise.runtime.models.attention.chunked import ChunkedAttention

        return ChunkedAttention(config)
    from headwise.runtime.models.attention.gqa import GroupedQueryAttention

    return GroupedQueryAttention(config)
