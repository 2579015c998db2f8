"""Files of images, as strangers send them: what is none, or would take too much, is refused before it is decoded."""

from __future__ import annotations

import io
import itertools
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tiny_images import encoded, picture

from headwise.errors import InvalidRequestError
from headwise.runtime.encoder import images
from headwise.runtime.encoder.images import MAX_PIXELS, decode
from headwise.runtime.protocol.images import MAX_IMAGE_BYTES


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header has this size, and that has the data of a much smaller one."""
    data = encoded(picture("odd"))
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def moving(form: str) -> bytes:
    frames = [picture("odd", seed) for seed in range(3)]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *itertools.product(("PNG", "WEBP", "GIF"), ("RGB", "L", "P", "RGBA", "LA", "1", "I;16")),
        *itertools.product(("JPEG",), ("RGB", "L", "CMYK", "1")),
        ("WEBP", "CMYK"),
    ],
)
def test_images_of_all_modes_become_rgb(form: str, mode: str) -> None:
    given = picture("odd").convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        given = Image.fromarray(np.asarray(given, np.uint16) * 257)
    data = encoded(given, form, **({"lossless": True} if form == "WEBP" else {}))
    found = decode(data)
    assert (found.mode, found.size) == ("RGB", picture("odd").size)
    with Image.open(io.BytesIO(data)) as opened:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(opened.convert("RGB")))


def test_an_image_is_turned_as_its_exif_data_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    found = decode(encoded(picture("odd"), "PNG", exif=exif))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(picture("odd").transpose(Image.Transpose.ROTATE_270)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"\x00" * 100, "are no image that is served: PNG, JPEG, WEBP, GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", r"b'<svg xml', are no image"),
        (b"%PDF-1.7 ...", "are no image"),
        (b"GIF89a", "broken|no image"),
        (encoded(picture("odd"), "BMP"), "are no image that is served"),
        (encoded(picture("odd"), "TIFF"), "are no image that is served"),
        (encoded(picture("odd"), "ICO"), "are no image that is served"),
        (encoded(picture("odd"))[:100], "is broken"),
        (encoded(picture("large"), "JPEG")[:300], "is broken"),
        (encoded(picture("large"), "WEBP")[:100], "broken|no image"),
        (claiming(100_000, 100_000), "too many pixels|100000 x 100000"),
        (claiming(10_000, 10_000), "has 10000 x 10000 pixels; at most 50000000 in all"),
        (claiming(40_000, 1), "has 40000 x 1 pixels; .*, and 32768 of an edge"),
        (moving("GIF"), "the GIF moves: send one frame"),
        (moving("WEBP"), "the WEBP moves"),
        (moving("PNG"), "the PNG moves"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 64, "broken|no image"),
        (bytes(MAX_IMAGE_BYTES + 1), f"has {MAX_IMAGE_BYTES + 1} bytes; at most {MAX_IMAGE_BYTES}"),
    ],
)
def test_what_is_no_image_or_too_much_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        decode(data)


@pytest.mark.parametrize("size", [(100_000, 100_000), (30_000, 30_000), (8_000, 8_000)])
def test_nothing_is_decoded_of_an_image_that_claims_to_be_large(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("it was decoded"))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="pixels"):
            decode(claiming(*size))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_jpeg_of_a_thousand_scans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture("large"), "JPEG", progressive=True)
    assert decode(data).size == picture("large").size
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidRequestError, match=r"the JPEG has 1\d\d\d scans; at most 64"):
        decode(data[:-2] + 1000 * scan + data[-2:])


def test_of_a_camera_s_file_of_several_pictures_the_first_one_is_taken() -> None:
    found = decode(encoded(picture("odd"), "MPO", save_all=True, append_images=[picture("tall")], quality=95))
    assert found.size == picture("odd").size
    assert found.mode == "RGB"


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_refused_or_decoded_and_nothing_else(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        data = np.frombuffer(encoded(picture("large"), form), np.uint8).copy()
        at = draw.integers(8, len(data), 12)
        data[at] = draw.integers(0, 256, 12)
        try:
            found: Any = decode(data.tobytes())
        except InvalidRequestError:
            continue
        assert found.mode == "RGB"
        assert found.width * found.height <= MAX_PIXELS


def test_pillow_that_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.errors import ConfigError

    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"needs Pillow, which is not installed: pip install 'headwise\[images\]'"):
        images.check_pillow()
