"""The parts of an engine, as its configuration, its model and its workers ask for them; None: there is none."""

from __future__ import annotations

from collections.abc import Callable

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.head_exchange import HeadExchange
from headwise.cache_controller.host_tier import HostConfig, HostTier
from headwise.cache_controller.storage_tier import StorageTier
from headwise.prompt_turns import PromptTurns
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.peers.base import Peers
from headwise.runtime.engine.peers.lending import Lending
from headwise.runtime.engine.peers.loads import PeerLoads
from headwise.runtime.engine.peers.taking import Taking
from headwise.runtime.engine.pipeline_shares import PipelineShares
from headwise.runtime.engine.prefetcher import Lookup, Prefetcher
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.protocol.executor import Executor
from headwise.transfer.connectors.base import ways_to_devices


def peer_loads_of(
    config: EngineConfig,
    cache: CacheManager,
    executor: Executor,
    peers: Peers | None,
    exchange: Callable[[int], HeadExchange],
) -> PeerLoads | None:
    host = cache.host
    if peers is None or not isinstance(host, HostTier):
        return None
    ways = ways_to_devices(executor.exports)
    return PeerLoads(cache, host.arrivals, peers, exchange, config.load_timeout_s, ways)


def lending_of(
    config: EngineConfig,
    cache: CacheManager,
    executor: Executor,
    peers: Peers | None,
    stands_still: Callable[[float], bool],
) -> Lending | None:
    host = cache.host
    if peers is None or not isinstance(host, HostTier):
        return None
    return Lending(
        host.leases,
        peers,
        executor.exports,
        timeout_s=config.load_timeout_s,
        num_groups=len(cache.policies),
        max_blocks=cache.max_blocks,
        stands_still=stands_still,
    )


def taking_of(config: EngineConfig, cache: CacheManager, loads: PeerLoads | None, peers: Peers | None) -> Taking | None:
    host = cache.host
    if peers is None or loads is None or not isinstance(host, HostTier):
        return None
    return Taking(cache, host.pool, loads, peers, config.load_timeout_s)


def host_config_of(config: EngineConfig, card: ModelCard) -> HostConfig | None:
    if not card.spec.num_host_blocks:
        return None
    timeout_s = config.storage_timeout_s if config.storage else None
    return HostConfig(card.spec.num_host_blocks, config.write_policy, config.write_through_threshold, timeout_s)


def prefetcher_of(config: EngineConfig, cache: CacheManager, lookup: Lookup | None) -> Prefetcher | None:
    storage = cache.host.storage
    if lookup is None or not isinstance(storage, StorageTier):
        return None
    return Prefetcher(cache, storage, lookup, config.prefetch, config.longest_prefetch_s)


def speculator_of(config: EngineConfig, card: ModelCard) -> Speculator | None:
    if not config.speculation:
        return None
    return Speculator(
        config.speculation,
        config.most_drafts,
        computes_again=card.has_states,
        by_model=card.config.draft_layers > 0,
    )


def turns_of(config: EngineConfig) -> PromptTurns | None:
    return PromptTurns() if config.fair_prompts else None


def pipeline_of(config: EngineConfig) -> PipelineShares:
    """What its steps take where workers are stages."""
    stages = config.pipeline_parallel_size
    return PipelineShares(stages, takes_known=stages > 1 and not config.returns_tokens)
