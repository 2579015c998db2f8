"""What a model's images need that is not served: their embeddings would be computed with as if they were text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.runtime.models.position_config import AXES

_PLACES = "three positions of each token (M-RoPE)"


def missing_for_images(config: Mapping[str, Any], axes: int = 1) -> str:
    """Of a ``config.json``, in words; empty: images are computed with as they were trained, or there are none.

    axes: positions of a token with which the model is served
    """
    text = config.get("text_config")
    for each in (config, text if isinstance(text, Mapping) else {}):
        if axes < AXES and any("mrope_section" in rope for rope in _ropes(each)):
            return _PLACES
    return ""


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a config says of rotary embeddings, of all layers or of some."""
    for field in ("rope_scaling", "rope_parameters"):
        said = config.get(field)
        if isinstance(said, Mapping):
            yield said
            yield from (each for each in said.values() if isinstance(each, Mapping))
