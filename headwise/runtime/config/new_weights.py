"""Weights that are to take the place of those of a model that is served: whether they fit, and who they are."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from headwise.errors import ConfigError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.loader.progress import Progress
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.resolve import resolve_weights


def with_adapters(config: EngineConfig, adapters: str | None) -> EngineConfig:
    """The configuration, with these in place of its adapters; None: with its own. Raises ConfigError."""
    return config if adapters is None else replace(config, adapters=adapters)


def check_places(config: EngineConfig, model: str, adapters: str | None) -> None:
    """Raise ConfigError unless clients may have a deployment load these, as every one of them may ask for it: they are
    in `weights_from`, or those that the deployment was started with."""
    for place in _others(config, model, adapters):
        if not config.weights_places:
            raise ConfigError(
                "this deployment takes no other weights: start it with weights_from, the directory that they will be in"
            )
        found = Path(place).expanduser().resolve()
        if not any(found.is_relative_to(each.resolve()) for each in config.weights_places):
            raise ConfigError(f"weights must be in {config.weights_from} (weights_from), and {place!r:.200} is not")


def directories_of(config: EngineConfig, model: str, adapters: str | None) -> list[Path]:
    """Those of these that the deployment was not started with."""
    return [Path(place).expanduser() for place in _others(config, model, adapters)]


def _others(config: EngineConfig, model: str, adapters: str | None) -> list[str]:
    known = {config.model, *map(str, config.adapter_paths.values())}
    asked = {model or config.model, *map(str, with_adapters(config, adapters).adapter_paths.values())}
    return sorted(asked - known)


def digests_of(card: ModelCard) -> tuple[str, ...]:
    """What tells a model's weights and adapters from others."""
    return card.weights, card.blocks, *(f"{name}={digest}" for name, digest in card.adapters)


def with_weights(
    card: ModelCard, config: EngineConfig, model: str, adapters: str | None = None, progress: Progress | None = None
) -> ModelCard:
    """The card of a model that is served, once its weights are those of ``model``, of the configuration if that is
    empty, and its adapters those of ``adapters``. Takes reading them, to tell them from others.

    Raises:
        ModelError: there are none, they cannot be read, or they are those of another model.
        ConfigError: they cannot be served as is configured.
    """
    directory = resolve_weights(model or config.model, config.cache_path, progress)
    read = read_model_card(with_adapters(config, adapters), directory, progress)
    if read.config != card.config:
        differ = [each.name for each in fields(card.config) if _differs(card, read, each.name)]
        raise ModelError(
            f"the weights in {directory} are of another model than {card.model}: their config.json differs in "
            f"{', '.join(differ)}; to serve another model, start another deployment"
        )
    if not open_weights(directory).num_elements:  # reads what all files say of themselves: none is cut off
        raise ModelError(f"the weights in {directory} are empty")
    return card.renewed(read)


def _differs(card: ModelCard, read: ModelCard, name: str) -> bool:
    return bool(getattr(card.config, name) != getattr(read.config, name))
