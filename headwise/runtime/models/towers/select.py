"""Which models' images are served, and by which tower. A new tower is a new file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import positive
from headwise.runtime.models.images import missing_for_images
from headwise.runtime.models.towers import pixtral
from headwise.runtime.models.towers.base import BuildTower


@dataclass(frozen=True)
class TowerKind:
    """build:       makes the tower
    placeholder: the fields of ``config.json`` that may have the id of the token which chat templates write for an image
    default:     that id where the config has none of them
    """

    build: BuildTower
    placeholder: tuple[str, ...]
    default: int

    def placeholder_of(self, config: Mapping[str, Any]) -> int:
        found = next((name for name in self.placeholder if config.get(name) is not None), self.placeholder[0])
        return positive(config, found, default=self.default)


_TOWERS = {
    "Mistral3ForConditionalGeneration": TowerKind(pixtral.build, ("image_token_id", "image_token_index"), 10),
}


def image_token(config: Mapping[str, Any]) -> int | None:
    """The id of the token that a model's chat template writes for an image; None: its images are not served."""
    kind = _kind(config)
    return None if kind is None else kind.placeholder_of(config)


def tower_of(config: Mapping[str, Any]) -> TowerKind:
    """The kind of a model's tower, by its ``config.json``. Raises `ModelError` if its images are not served."""
    kind = _kind(config)
    if kind is not None:
        return kind
    if lacking := missing_for_images(config):
        why = f"its images need {lacking}, which is not served"
    elif "vision_config" in config:
        why = "its vision tower is not served"
    else:
        why = "it has no vision tower"
    raise ModelError(f"this model takes no images: {why}; those of {', '.join(sorted(_TOWERS))} are")


def _kind(config: Mapping[str, Any]) -> TowerKind | None:
    names = config.get("architectures") or []
    kinds = [_TOWERS[name] for name in names if isinstance(name, str) and name in _TOWERS]
    return kinds[0] if kinds and config.get("vision_config") is not None else None
