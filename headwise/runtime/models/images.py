"""What a model's images need that is not served: their embeddings would be computed with as if they were text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.runtime.models.position_config import AXES

_BOTH_WAYS = "attention in both directions among an image's tokens"
_PLACES = "three positions of each token (M-RoPE)"
_BY_NAME = {"Gemma3ForConditionalGeneration": _BOTH_WAYS}
"""Of architectures, whether or not their configs say it."""


def missing_for_images(config: Mapping[str, Any], axes: int = 1) -> str:
    """Of a ``config.json``, in words; empty: images are computed with as they were trained, or there are none.

    axes: positions of a token with which the model is served
    """
    names, text = config.get("architectures"), config.get("text_config")
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for name in known:
        if name in _BY_NAME:
            return _BY_NAME[name]
    for each in (config, text if isinstance(text, Mapping) else {}):
        if axes < AXES and any("mrope_section" in rope for rope in _ropes(each)):
            return _PLACES
        if each.get("use_bidirectional_attention") == "vision":
            return _BOTH_WAYS
    return ""


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a config says of rotary embeddings, of all layers or of some."""
    for field in ("rope_scaling", "rope_parameters"):
        said = config.get(field)
        if isinstance(said, Mapping):
            yield said
            yield from (each for each in said.values() if isinstance(each, Mapping))
