"""Whether this machine has the memory that a deployment is configured to take of it."""

from __future__ import annotations

from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.worker.kv_offload import check_host_cache
from headwise.transfer.host_memory import check_host_memory


def check_memory(config: EngineConfig, card: ModelCard, ranks: int | None = None) -> None:
    """Raises `ConfigError` if this machine has not the memory for the host caches, and on a CPU the block pools, of so
    many ranks of an engine; None: of all.

    To be called before the first rank starts: ranks that check alone would count the same memory.
    """
    ranks = config.ranks if ranks is None else ranks
    check_host_cache(config, card, ranks)
    if config.on_gpu:
        return
    blocks = card.spec.num_blocks + card.spec.num_host_blocks
    what = "block pool and host cache" if card.spec.num_host_blocks else "block pool"
    try:
        check_host_memory(ranks * blocks * card.layout.block_bytes, what=what)
    except ValueError as error:
        raise ConfigError(f"kv_cache {config.kv_cache} for each of {ranks} workers: {error}") from None
