"""What clients, encoders and the global scheduler say to each other of images.

client -> scheduler   GetEncoders  -> Encoders | Failed
client -> encoder     Encode       -> WantsFile ... Encoded | Failed
client -> encoder     FilePart        what `WantsFile` asks for
client -> encoder     WantsRows    -> EncodedRows | Failed
client -> encoder     EndEncode       nobody waits for it any more
encoder -> scheduler  EncoderStatus -> KnownUsers   every `STATUS_INTERVAL_S`; answered if it lets others connect

Files and embeddings go in parts, each of which the other side asks for: neither is sent more than it has room for, and
no sign of life waits for long. What is not asked for, or does not come, for `STALLED_S` is let go of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.images import PromptImage
from headwise.runtime.protocol.wire import register

PART_BYTES = 4 << 20
"""Of a file, and of embeddings, or one row of them."""
STALLED_S = 30.0


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
    """What stands for an image, or a video?

    key:  the client's number of the question, repeated in all that is said of it
    data: the first bytes of the file, all of them if there are no more than `PART_BYTES`
    size: of the file
    is_video, fps: see `headwise.runtime.loader.chat_images.ImageFile`
    """

    key: int
    data: bytes
    size: int
    is_video: bool = False
    fps: float = 0.0


@register
@dataclass(frozen=True)
class WantsFile:
    """The bytes from the ``first`` one on are next."""

    key: int
    first: int


@register
@dataclass(frozen=True)
class FilePart:
    key: int
    first: int
    data: bytes


@register
@dataclass(frozen=True)
class EndEncode:
    key: int


@register
@dataclass(frozen=True)
class WantsRows:
    """Of what is encoded, the rows from the ``first`` one on are next."""

    key: int
    first: int


@register
@dataclass(frozen=True, eq=False)
class EncodedRows:
    key: int
    first: int
    values: NDArray[np.float32] | NDArray[np.uint16]


@register
@dataclass(frozen=True, eq=False)
class Encoded:
    """See `headwise.runtime.protocol.images.EncodedImage`. embeds: the first rows"""

    key: int
    image: PromptImage
    embeds: NDArray[np.float32] | NDArray[np.uint16]


@register
@dataclass(frozen=True)
class EncoderStatus:
    """An encoder of images is there and serves at ``endpoint``, as clients are told.

    secret:  of the deployment; a status with another one is ignored
    address: where it is reached within the deployment
    users:   version of those that it lets connect
    """

    secret: str
    name: str
    endpoint: str
    address: str
    stats: dict[str, Any]
    users: str = ""
