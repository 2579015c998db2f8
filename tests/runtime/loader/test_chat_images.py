"""Images are taken out of messages as files; texts never become paths, and nothing is fetched."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tiny_images import encoded, picture

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.chat import plain_chat
from headwise.runtime.loader.chat_images import ImageFile, ImageLimits, has_files, take_images, with_files

PNG = encoded(picture("odd"))
MP4 = b"a file of a video"
IMAGE = {"type": "image", "image": PNG}
LIMITS = ImageLimits(3, 1 << 20, 1 << 21)


def url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(data).decode()}"


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def part(given: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": given}


TEXT = {"type": "text", "text": "What is it?"}


@pytest.mark.parametrize(
    "given",
    [
        part({"url": url(PNG)}),
        part({"url": url(PNG), "detail": "high"}),
        part(url(PNG)),
        part({"url": url(PNG, "IMAGE/PNG;charset=utf-8")}),
        part({"url": url(PNG, "image/jpg")}),  # what it is, its bytes say
        {"type": "image", "image": PNG},
        {"type": "image", "image": bytearray(PNG)},
        {"type": "image", "image": url(PNG)},
    ],
)
def test_an_image_is_its_file_and_its_place(given: Any) -> None:
    messages, files = take_images(asked(TEXT, given, TEXT), LIMITS)
    assert files == (ImageFile(PNG),)
    assert plain_chat(messages)["messages"][0]["content"] == [TEXT, {"type": "image"}, TEXT]


def test_paths_and_images_of_pillow_are_taken_in_python(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    _, files = take_images(asked({"type": "image", "image": tmp_path / "a.png"}), LIMITS)
    assert files == (ImageFile(PNG),)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(io.BytesIO(encoded(picture("odd"), "JPEG", exif=exif)))
    for image in (picture("odd"), picture("odd").convert("CMYK"), turned):
        _, (file,) = take_images(asked({"type": "image", "image": image}), LIMITS)
        assert Image.open(io.BytesIO(file.data)).format == "PNG"
    assert Image.open(io.BytesIO(file.data)).size == picture("odd").size[::-1]
    _, (same,) = take_images(asked({"type": "image", "image": picture("odd")}), LIMITS)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(same.data))), np.asarray(picture("odd")))


@pytest.mark.parametrize(
    ("given", "fps"),
    [
        ({"type": "video_url", "video_url": {"url": url(MP4, "video/mp4")}}, 0.0),
        ({"type": "video_url", "video_url": url(MP4, "VIDEO/WEBM;codecs=vp9"), "fps": None}, 0.0),
        ({"type": "video_url", "video_url": {"url": url(MP4, "video/quicktime")}, "fps": 1}, 1.0),
        ({"type": "video", "video": MP4, "fps": 0.25}, 0.25),
        ({"type": "video", "video": url(MP4, "video/x-matroska")}, 0.0),
    ],
)
def test_a_video_is_its_file_and_its_place(given: Any, fps: float, tmp_path: Path) -> None:
    messages, files = take_images(asked(TEXT, given, IMAGE), LIMITS)
    assert files == (ImageFile(MP4, is_video=True, fps=fps), ImageFile(PNG))
    assert plain_chat(messages)["messages"][0]["content"] == [TEXT, {"type": "video"}, {"type": "image"}]
    once = with_files(asked(TEXT, given, IMAGE), LIMITS)
    assert take_images(once, LIMITS)[1] == files
    (tmp_path / "a.mp4").write_bytes(MP4)
    _, (file,) = take_images(asked({"type": "video", "video": tmp_path / "a.mp4"}), LIMITS)
    assert file == ImageFile(MP4, is_video=True)


def test_files_are_told_apart_by_how_they_are_taken() -> None:
    files = [ImageFile(b"x"), ImageFile(b"x", True), ImageFile(b"x", True, 1.0), ImageFile(b"y", True)]
    assert len({file.digest for file in files}) == 4
    assert ImageFile(b"x", True, 1.0).digest == files[2].digest


def test_messages_without_images_are_left_as_they_are() -> None:
    for chat in ("x", None, 5, [], asked(TEXT), [{"role": "user", "content": "x"}], {"messages": asked(TEXT)}, [[1]]):
        assert take_images(chat, LIMITS) == (chat, ())
        assert not isinstance(chat, list | dict) or not has_files(chat)


def test_the_rest_of_a_chat_is_kept_and_a_file_decoded_once_is_not_decoded_again() -> None:
    chat = {"messages": asked(part(url(PNG)), TEXT), "tools": [1]}
    assert has_files(chat)
    assert has_files(chat["messages"])
    once = with_files(chat, LIMITS)
    assert once["tools"] == [1]
    assert once["messages"][0]["content"] == [{"type": "image", "image": ImageFile(PNG)}, TEXT]
    (first,), (again,) = (take_images(once, LIMITS)[1] for _ in range(2))
    assert first is again


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            part({"url": "http://a.org/b.png"}),
            "must have a data: URL .*: other URLs are not fetched; got 'http://a.org",
        ),
        (part({"url": "https://a.org/b.png"}), "not fetched"),
        (part({"url": "file:///etc/passwd"}), "not fetched"),
        ({"type": "image", "image": "/etc/passwd"}, "not fetched"),
        (part({"url": ""}), "must have a data: URL"),
        (part({"url": "data:"}), "must have a data: URL"),
        (part({"url": "data:image/png;base64," + "!" * 8}), "Base64 is broken"),
        (part({"url": "data:image/png;base64,iVBOR"}), "Base64 is broken"),
        (part({"url": "data:image/png;base64,"}), "is empty: it has no bytes"),
        (part({"url": "data:image/png,abc"}), "is not in Base64: write data:image/png;base64,"),
        (
            part({"url": url(PNG, "image/svg+xml")}),
            r"type 'image/svg\+xml'; image/png, image/jpeg, image/webp",
        ),
        (part({"url": url(PNG, "text/html")}), "type 'text/html'"),
        (part({"url": url(PNG, "")}), "type ''"),
        (part({"url": url(bytes(2 << 20))}), r"has an image of 20971\d\d bytes; at most 1048576"),
        ({"type": "image", "image": bytes(2 << 20)}, "more than 1048576 bytes"),
        ({"type": "image", "image": b""}, "is empty"),
        ({"type": "image", "image": Path("/nowhere/a.png")}, "cannot be read: /nowhere/a.png: No such file"),
        ({"type": "image", "image": Path("/")}, "cannot be read"),
        ({"type": "image"}, "must have an image: a data: URL"),
        ({"type": "image", "image": 5}, "must have an image"),
        (part({"url": 5}), "must have an image"),
        (part(None), "must have an image"),
        (part([url(PNG)]), "must have an image"),
        ({"type": "video", "video": picture("odd")}, "must have a video: a data: URL, and in Python bytes or"),
        ({"type": "video", "video": "/etc/passwd"}, "must have a data: URL such as data:video/mp4;base64"),
        ({"type": "video_url", "video_url": {"url": url(PNG)}}, "a video of type 'image/png'; video/mp4, video/quick"),
        (part({"url": url(MP4, "video/mp4")}), "an image of type 'video/mp4'; image/png"),
        ({"type": "video", "video": bytes((2 << 20) + 1)}, "a video of more than 2097152 bytes"),
        ({"type": "video", "video": b""}, "a video that is empty"),
        ({"type": "video", "video": Path("/nowhere/a.mp4")}, "a video that cannot be read"),
        ({"type": "video", "video": MP4, "fps": 0}, "has fps 0: it must be frames of a second"),
        ({"type": "video", "video": MP4, "fps": 101}, "has fps 101: it must be .* up to 100"),
        ({"type": "video", "video": MP4, "fps": "2"}, "has fps '2'"),
        ({"type": "video", "video": MP4, "fps": True}, "has fps True"),
        ({"type": "video", "video": MP4, "fps": float("nan")}, "has fps nan"),
    ],
)
def test_what_has_no_image_is_named(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\['content'\]\[1\] .*{says}"):
        take_images(asked(TEXT, given), LIMITS)


def test_a_chat_has_so_many_images_and_no_more() -> None:
    assert len(take_images(asked(*[part(url(PNG))] * 3), LIMITS)[1]) == 3
    with pytest.raises(InvalidRequestError, match="more than 3 images were given; at most 3 are allowed"):
        take_images([*asked(part(url(PNG))) * 4], LIMITS)


def test_a_path_of_endless_bytes_is_not_read_to_its_end() -> None:
    with pytest.raises(InvalidRequestError, match="more than 1048576 bytes"):
        take_images(asked({"type": "image", "image": Path("/dev/zero")}), LIMITS)
