"""Files of images, decoded by Pillow. What they claim is looked at before they are decoded: users sent them.

Refused are other formats than those of `FORMATS`, more pixels than `MAX_PIXELS`, images that move, and JPEGs of more
scans than anybody needs, each of which costs as much time as the whole image.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from headwise.errors import ConfigError, InvalidRequestError, first_line
from headwise.runtime.protocol.images import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 50_000_000
"""150 MB of an image in RGB: those of cameras are smaller."""
MAX_EDGE = 32_768
MAX_SCANS = 64
"""Of a progressive JPEG; libjpeg writes ten."""
_SCAN = b"\xff\xda"


def check_pillow() -> None:
    """Raise `ConfigError` where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "image_encoders needs Pillow, which is not installed: pip install 'headwise[images]'"
        ) from None


def decode(data: bytes) -> Image:
    """An image of mode RGB, turned as its EXIF data says. Raises `InvalidRequestError` for what is none, or refused."""
    from PIL import ImageOps

    if not data:
        raise InvalidRequestError("the image is empty: it has no bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(f"the image has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are allowed")
    image = _opened(data)
    _check(image, data)
    try:
        image.load()
        turned: Any = ImageOps.exif_transpose(image)
        rgb: Image = turned if turned.mode == "RGB" else turned.convert("RGB")
        return rgb
    except Exception as error:  # decoders raise whatever the file leads them to
        raise InvalidRequestError(f"the image is broken, it cannot be decoded: {first_line(error):.200}") from None


def _opened(data: bytes) -> Image:
    """With its header read, and nothing decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images: `_check` refuses them
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequestError(
            f"{len(data)} bytes, which begin with {data[:8]!r}, are no image that is served: {', '.join(FORMATS)}"
        ) from None
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"the image has too many pixels; at most {MAX_PIXELS} are allowed") from None
    except Exception as error:
        raise InvalidRequestError(f"the image is broken: {first_line(error):.200}") from None


def _check(image: Image, data: bytes) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_EDGE:
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; at most {MAX_PIXELS} in all, and {MAX_EDGE} of an edge, are "
            "allowed"
        )
    try:
        # Of cameras' files of several pictures (MPO) the first one is the photo.
        is_animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception as error:  # the second frame was looked for
        raise InvalidRequestError(f"the image is broken: {first_line(error):.200}") from None
    if is_animated:
        raise InvalidRequestError(f"the {image.format} moves: send one frame of it as an image of its own")
    if image.format in ("JPEG", "MPO") and data.count(_SCAN) > MAX_SCANS:
        raise InvalidRequestError(f"the JPEG has {data.count(_SCAN)} scans; at most {MAX_SCANS} are allowed")
