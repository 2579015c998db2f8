"""What several towers read alike of a ``vision_config``, and of what says how images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import HfConfig, mapping, positive, text_of
from headwise.runtime.models.values import shown

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of channels, where the checkpoint has no others."""

_LARGEST = 1 << 26
"""Most pixels that a checkpoint may ask for: published ones ask for 2^24."""


def check_served(vision: HfConfig, served: Mapping[str, Any]) -> None:
    """Raises ModelError naming a field that is there with another value than this one."""
    for name, value in served.items():
        if vision.get(name, value) != value:
            raise ModelError(f"config.json: {name!r} of 'vision_config' must be {value}, got {shown(vision[name])}")


def head_count(vision: HfConfig, size: str, hidden: int, default: int) -> int:
    """Heads of attention, each of which is rotated by rows and by columns. size: the field that says ``hidden``"""
    heads = positive(vision, "num_heads", default=default, most=256)
    if hidden % heads or hidden // heads % 4:
        raise ModelError(
            f"config.json: {size!r} {hidden} of 'vision_config' must be a multiple of four times its 'num_heads' "
            f"{heads}: heads are rotated by rows and by columns"
        )
    return heads


def text_size(config: HfConfig, output: str) -> int:
    """The text's hidden size, which is what the tower makes, by its field ``output``."""
    vision, found = mapping(config, "vision_config"), positive(text_of(config), "hidden_size", most=1 << 20)
    if positive(vision, output, default=found) != found:
        raise ModelError(
            f"config.json: {output!r} of 'vision_config' must be the text's 'hidden_size' {found}, got "
            f"{shown(vision[output])}"
        )
    return found


def check_processor(processor: HfConfig, **sizes: int) -> None:
    """Raises ModelError where images are prepared for a tower with other ones of these sizes."""
    for name, size in sizes.items():
        if positive(processor, name, default=size) != size:
            raise ModelError(
                f"the checkpoint's image processor has {name} {shown(processor[name])}, its tower takes {size}"
            )


def pixel_bounds(size: HfConfig, least: int | None, most: int | None) -> tuple[int, int]:
    """Least and most pixels of an image, of a ``size`` that names edges and means these.

    least, most: where it does not say; None: it must
    """
    least = positive(size, "shortest_edge", least, _LARGEST)
    most = positive(size, "longest_edge", most, _LARGEST)
    if least > most:
        raise ModelError(f"the checkpoint's image processor has images of at least {least} and at most {most} pixels")
    return least, most


def processor_bounds(processor: HfConfig, least: int, most: int) -> tuple[int, int]:
    """The same of fields of their own, or else of a ``size``, which must say both then."""
    size = mapping(processor, "size")
    own = {"shortest_edge": processor.get("min_pixels"), "longest_edge": processor.get("max_pixels")}
    given = {**size, **{name: value for name, value in own.items() if value is not None}}
    return pixel_bounds(given, None if size else least, None if size else most)
