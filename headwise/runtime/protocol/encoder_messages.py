"""What clients, encoders and the global scheduler say to each other of images.

client -> scheduler   GetEncoders  -> Encoders | Failed
client -> encoder     Encode       -> Encoded | Failed
encoder -> scheduler  EncoderStatus   every `STATUS_INTERVAL_S`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.images import PromptImage
from headwise.runtime.protocol.wire import register


@register
@dataclass(frozen=True)
class GetEncoders:
    """Ask who encodes images."""

    key: int


@register
@dataclass(frozen=True)
class Encoders:
    """The endpoints of all that do."""

    key: int
    endpoints: tuple[str, ...]


@register
@dataclass(frozen=True)
class Encode:
    """image: a file's bytes"""

    key: int
    image: bytes


@register
@dataclass(frozen=True, eq=False)
class Encoded:
    """See `headwise.runtime.protocol.images.EncodedImage`."""

    key: int
    image: PromptImage
    embeds: NDArray[np.float32] | NDArray[np.uint16]


@register
@dataclass(frozen=True)
class EncoderStatus:
    """An encoder of images is there and serves at ``endpoint``, as clients are told.

    secret:  of the deployment; a status with another one is ignored
    address: where it is reached within the deployment
    """

    secret: str
    name: str
    endpoint: str
    address: str
    stats: dict[str, Any]
