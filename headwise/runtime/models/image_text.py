"""What stands for an image in a chat's text, where that is more than the token which the chat template writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ImageText:
    """written: by the chat template; read: what the model's processor makes of it, before anything is tokenised: what
    stands around it becomes other tokens then"""

    written: str
    read: str


_BY_NAME = {
    "Gemma4ForConditionalGeneration": ImageText("<|image|>", "<|image><|image|><image|>"),
    "Gemma3ForConditionalGeneration": ImageText(
        "<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    ),
}


def image_text(config: Mapping[str, Any]) -> ImageText | None:
    """Of a ``config.json``; None: the token that the template writes is all."""
    names = config.get("architectures")
    found = (_BY_NAME[name] for name in names if name in _BY_NAME) if isinstance(names, list) else ()
    return next(iter(found), None)
