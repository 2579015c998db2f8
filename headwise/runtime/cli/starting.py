"""What answers a command's requests, started for it, with what is wrong told as soon as it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwise.actors.deployment import Deployment
    from headwise.runtime.client.client import Client
    from headwise.runtime.client.local_engine import LocalEngine
    from headwise.runtime.config.engine_config import EngineConfig


def client_of(deployment: Deployment) -> Client:
    from headwise.runtime.client.client import Client

    return Client(deployment.client_address, keys=deployment.client_keys)


def local_engine(config: EngineConfig) -> LocalEngine:
    from headwise.runtime.cli.terminal import progress
    from headwise.runtime.client.local_engine import LocalEngine
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.loader.resolve import resolve_model

    with progress() as bars:
        directory = resolve_model(config.model, config.cache_path, bars)
        read_model_card(config, directory, bars)  # what is wrong is told before weights are loaded
        bars.stage("loading the weights")
        return LocalEngine(config)


def start_deployment(config: EngineConfig, address: str | None) -> Deployment:
    from headwise.actors.deployment import Deployment
    from headwise.runtime.cli.terminal import progress
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.loader.resolve import resolve_model

    with progress() as bars:
        directory = resolve_model(config.model, config.cache_path, bars)
        read_model_card(config, directory, identify=False)  # what is wrong is told at once
        return Deployment.start(config, address, progress=bars)
