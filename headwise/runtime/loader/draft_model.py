"""A head that drafts beside a model: read from a directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader.checkpoint import Checkpoint, read_json
from headwise.runtime.loader.resolve import resolve_draft_model
from headwise.runtime.loader.safetensors_file import CODES, FLAGS
from headwise.runtime.models.eagle_config import eagle_config
from headwise.runtime.models.model_config import EagleConfig, ModelConfig


class DraftModel:
    """The head called ``name``, see `resolve_draft_model`.

    weights: False if only its config is needed

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, name: str, cache_dir: Path, *, weights: bool = True) -> None:
        self._name = name
        try:
            self.directory = resolve_draft_model(name, cache_dir, weights=weights)
        except ModelError as error:
            raise self._wrong(error) from None

    def config(self, target: ModelConfig) -> EagleConfig:
        """Its geometry. Raises `ConfigError` if it cannot be served beside this model."""
        try:
            return eagle_config(read_json(self.directory / "config.json"), target)
        except ModelError as error:
            raise self._wrong(error) from None

    def weights(self, keeps: np.dtype[Any] | None = None) -> Checkpoint:
        """keeps: see `Checkpoint`"""
        return Checkpoint(self.directory, keeps=keeps, also={**CODES, **FLAGS})

    def _wrong(self, error: ModelError) -> ConfigError:
        return ConfigError(f"draft_model {self._name}: {error}")
