"""Whether a deployment takes images."""

from __future__ import annotations

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.models.model_config import ModelConfig


def without_images(config: EngineConfig, model: ModelConfig) -> str:
    """Why it takes none, for who sends one; empty: it does."""
    if model.missing_for_images:
        return f"this model takes no images: they need {model.missing_for_images}, which is not served"
    if not model.image_tokens[0]:
        return "this model takes no images: it has no vision tower that is served"
    if not config.image_encoders:
        return "images are not enabled here: start with image_encoders 1 (`headwise serve --image-encoders 1`)"
    return ""
