"""Engines that cannot read each other's blocks are refused before any of them starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tiny_checkpoints import checkpoint

from headwise.cache_controller.head_exchange import Arrangement
from headwise.errors import ConfigError
from headwise.runtime.config import peer_blocks
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, arrangement_with, read_model_card
from headwise.runtime.config.peer_blocks import check_exchanges

CONFIG = EngineConfig(model=str(checkpoint("qwen3")), decode_tp_size=2, host_cache="24MiB", max_replicas=2)


def card_of(config: EngineConfig) -> ModelCard:
    return read_model_card(config, checkpoint("qwen3"), identify=False)


def test_engines_of_all_tp_sizes_of_a_deployment_serve_together() -> None:
    check_exchanges(CONFIG, card_of(CONFIG))


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    config = replace(CONFIG, model=str(checkpoint("gemma4")))
    card = read_model_card(config, checkpoint("gemma4"), identify=False)
    with pytest.raises(ConfigError, match=r"tp_size 3 does not divide the model's 2 or 4 KV heads") as refused:
        check_exchanges(replace(config, decode_tp_size=3), card)
    assert "\n" not in str(refused.value)


def test_engines_that_keep_a_layer_in_other_ways_are_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_form(config: EngineConfig, card: ModelCard, tp_size: int) -> Arrangement:
        kept = arrangement_with(config, card, tp_size)
        return replace(kept, identities=("of another form", *kept.identities[1:])) if tp_size == 2 else kept

    monkeypatch.setattr(peer_blocks, "arrangement_with", of_another_form)
    message = "engines of tp_size 1 and 2 cannot serve together: blocks cannot be exchanged: layer 0 has .* here"
    with pytest.raises(ConfigError, match=message) as refused:
        check_exchanges(CONFIG, card_of(CONFIG))
    assert "\n" not in str(refused.value)
