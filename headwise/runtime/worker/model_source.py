"""What a rank loads its model from, and what takes its place while it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from headwise.errors import HeadwiseError, ModelError, first_line
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.config.new_weights import digests_of, with_adapters
from headwise.runtime.protocol.weights import WeightsToLoad

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class ModelSource:
    """A configuration, with the adapters that there are; a directory of weights; and the card with these."""

    config: EngineConfig
    directory: Path
    card: ModelCard

    def has_weights_of(self, other: ModelSource) -> bool:
        """Whether the model's weights are the same, whatever the adapters are."""
        return (self.card.weights, self.card.blocks) == (other.card.weights, other.card.blocks)


def source_of(
    weights: WeightsToLoad,
    config: EngineConfig,
    card: ModelCard,
    find: Callable[[str, Path], Path],
    read: Callable[[EngineConfig, Path], ModelCard],
) -> ModelSource:
    """Where weights are.

    config: that the rank was started with
    card:   its own, now

    Raises:
        ModelError: there are none, or other ones than the engine has read.
        ConfigError: they cannot be served as is configured.
    """
    asked = with_adapters(config, weights.adapters)
    directory = find(weights.model or asked.model, asked.cache_path)
    found = read(asked, directory)
    if digests_of(found) != weights.digests:
        raise ModelError(
            f"the weights in {directory}, or the adapters, are other ones on this node, or now, than the engine has "
            "read: they must stay as they are until the next ones are served"
        )
    renewed = replace(card.renewed(found), identity=card.identity)  # whose storage it is stays
    return ModelSource(replace(asked, packed_cache=False), directory, renewed)  # nobody starts with them again


def tried(part: Callable[[], _Found]) -> tuple[_Found | None, str]:
    """What it gives, or why it fails: of which the log has all, where it is no error of ours."""
    try:
        return part(), ""
    except HeadwiseError as error:
        return None, str(error)
    except Exception as error:  # a file that breaks our code must not end the worker: it goes on with what it had
        log.exception("weights cannot be had")
        return None, f"{type(error).__name__}: {first_line(error)}"
