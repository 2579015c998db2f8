"""How the blocks of a deployment's engines fit those of others, whatever ranks each has."""

from __future__ import annotations

from headwise.cache_controller.head_exchange import Arrangement, HeadExchange
from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, arrangement_with


def exchange_with(config: EngineConfig, card: ModelCard, tp_size: int) -> HeadExchange:
    """How blocks of this deployment's engines that have ``tp_size`` ranks fill ours.

    Raises `ConfigError` or ValueError if there are no such engines.
    """
    own = Arrangement.of(card.plan, card.layouts)
    return HeadExchange(own, own if tp_size == card.plan.tp_size else arrangement_with(config, card, tp_size))


def exchange_with_ranks(config: EngineConfig, card: ModelCard, ranks: int) -> HeadExchange:
    """The same with those that have so many ``ranks`` in all of their stages, which are as many as ours."""
    tp_size, others = divmod(ranks, len(card.plan.stages))
    if others:
        raise ValueError(f"{ranks} ranks are not those of {len(card.plan.stages)} stages")
    return exchange_with(config, card, tp_size)


def check_exchanges(config: EngineConfig, card: ModelCard) -> None:
    """Raise `ConfigError` unless engines of all TP sizes of the deployment can fill their blocks from each other's."""
    kept = {size: arrangement_with(config, card, size) for size in config.tp_sizes}
    for ours in config.tp_sizes:
        for theirs in config.tp_sizes:
            try:
                HeadExchange(kept[ours], kept[theirs])
            except ValueError as error:
                raise ConfigError(f"engines of tp_size {ours} and {theirs} cannot serve together: {error}") from None


def identity_of_blocks(config: EngineConfig, card: ModelCard) -> bytes:
    """Equal for engines whose blocks have the same members' keys and values, in the same form, grouped alike, in as
    many stages."""
    slots = dict.fromkeys(layout.slot_identity for layout in card.layouts)
    return "/".join([card.identity, config.head_grouping, str(len(card.plan.stages)), *slots]).encode()
