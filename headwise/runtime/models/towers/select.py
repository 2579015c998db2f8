"""Which models' images are served, and by which tower. A new tower is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.images import missing_for_images
from headwise.runtime.models.towers import (
    ernie_vision,
    gemma3_vision,
    gemma4_vision,
    glm4v_vision,
    glm_videos,
    llama4_vision,
    moonvit,
    pixtral,
    qwen_videos,
    qwen_vision,
)
from headwise.runtime.models.towers.base import BuildTower


@dataclass(frozen=True)
class TowerKind:
    """build:   makes the tower
    placeholder: the control token that stands for an image in a chat's text
    video:       and for a video; empty: the tower, which is a `VideoTower` else, takes none
    lacking:     of a ``config.json``, what its images need besides that is not served; empty: nothing
    """

    build: BuildTower
    placeholder: str
    lacking: Callable[[Mapping[str, Any]], str] = lambda config: ""
    video: str = ""


def _qwen(build: BuildTower) -> TowerKind:
    return TowerKind(build, "<|image_pad|>", video=qwen_videos.VIDEO_PLACE)


_GLM = TowerKind(glm4v_vision.build, "<|image|>", video=glm_videos.VIDEO_PLACE)
_ERNIE = TowerKind(ernie_vision.build, "<|IMAGE_PLACEHOLDER|>")
_TOWERS = {
    "Mistral3ForConditionalGeneration": TowerKind(pixtral.build, "[IMG]"),
    "Llama4ForConditionalGeneration": TowerKind(llama4_vision.build, "<|image|>"),
    "Gemma3ForConditionalGeneration": TowerKind(gemma3_vision.build, "<image_soft_token>"),
    "Gemma4ForConditionalGeneration": TowerKind(gemma4_vision.build, "<|image|>", gemma4_vision.lacking),
    "KimiK25ForConditionalGeneration": TowerKind(moonvit.build, "<|media_pad|>"),
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Qwen2VLForConditionalGeneration": _qwen(qwen_vision.build_qwen2_vl),
    "Qwen2_5_VLForConditionalGeneration": _qwen(qwen_vision.build_qwen2_5_vl),
    "Qwen3VLForConditionalGeneration": _qwen(qwen_vision.build_qwen3_vl),
    "Qwen3VLMoeForConditionalGeneration": _qwen(qwen_vision.build_qwen3_vl),
    "Qwen3_5ForConditionalGeneration": _qwen(qwen_vision.build_qwen3_5),
    "Qwen3_5MoeForConditionalGeneration": _qwen(qwen_vision.build_qwen3_5),
    "Ernie4_5_VLMoeForConditionalGeneration": _ERNIE,
    "Ernie4_5_VL_MoeForConditionalGeneration": _ERNIE,
}


def image_tokens(config: Mapping[str, Any]) -> tuple[str, str]:
    """The control tokens that stand for an image in a chat's text, and for a video; empty: they are not served of the
    model."""
    kind = _kind(config)
    return ("", "") if kind is None or kind.lacking(config) else (kind.placeholder, kind.video)


def tower_of(config: Mapping[str, Any]) -> TowerKind:
    """The kind of a model's tower, by its ``config.json``. Raises `ModelError` if its images are not served."""
    kind = _kind(config)
    lacking = missing_for_images(config) if kind is None else kind.lacking(config)
    if kind is not None and not lacking:
        return kind
    if "vision_config" not in config:
        why = "it has no vision tower"
    elif lacking:
        why = f"its images need {lacking}, which is not served"
    else:
        why = "its vision tower is not served"
    raise ModelError(f"this model takes no images: {why}; those of {', '.join(sorted(_TOWERS))} are")


def _kind(config: Mapping[str, Any]) -> TowerKind | None:
    names = config.get("architectures") or []
    kinds = [_TOWERS[name] for name in names if isinstance(name, str) and name in _TOWERS]
    return kinds[0] if kinds and config.get("vision_config") is not None else None
