"""What a model's images need that is not served: their embeddings would be computed with as if they were text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PLACES = "three positions of each token (M-RoPE)"
_BY_NAME = {
    "Qwen2VLForConditionalGeneration": _PLACES,
    "Qwen2_5_VLForConditionalGeneration": _PLACES,
    "Qwen3VLForConditionalGeneration": _PLACES,
    "Qwen3VLMoeForConditionalGeneration": _PLACES,
    "Qwen3_5ForConditionalGeneration": _PLACES,
    "Qwen3_5MoeForConditionalGeneration": _PLACES,
}
"""Of architectures, whether or not their configs say it."""


def missing_for_images(config: Mapping[str, Any]) -> str:
    """Of a ``config.json``, in words; empty: images are computed with as they were trained, or there are none."""
    names, text = config.get("architectures"), config.get("text_config")
    found = (_BY_NAME[name] for name in names if name in _BY_NAME) if isinstance(names, list) else ()
    known = next(iter(found), "")
    if known:
        return known
    for each in (config, text if isinstance(text, Mapping) else {}):
        if any("mrope_section" in rope for rope in _ropes(each)):
            return _PLACES
    return ""


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a config says of rotary embeddings, of all layers or of some."""
    for field in ("rope_scaling", "rope_parameters"):
        said = config.get(field)
        if isinstance(said, Mapping):
            yield said
            yield from (each for each in said.values() if isinstance(each, Mapping))
