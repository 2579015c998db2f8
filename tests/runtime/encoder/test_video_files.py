"""Files of videos are decoded to the frames that they have, and what is none, or too much, is refused before."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.tiny_images import encoded, image_model, picture
from support.tiny_videos import FILMS, film, frames, video_references, written

from headwise import EngineConfig
from headwise.errors import InvalidRequestError
from headwise.runtime.encoder import videos
from headwise.runtime.encoder.image_encoder import ImageEncoder
from headwise.runtime.encoder.videos import VideoFile
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.models.towers.base import VideoForm


def same(found: list[Image.Image], expected: list[Image.Image], tolerance: int = 0) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        difference = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16))
        assert difference.max() <= tolerance if not tolerance else difference.mean() <= tolerance


def chosen_of(video: VideoFile, numbers: Iterable[int]) -> list[Image.Image]:
    return [image for image in video.images(numbers) if image is not None]


@pytest.mark.parametrize("name", FILMS)
def test_frames_are_those_that_were_written(name: str) -> None:
    video, form = VideoFile(film(name)), FILMS[name]
    assert (video.form.frames, video.form.width, video.form.height) == (form.frames, form.width, form.height)
    if form.frames > 1:
        assert video.form.fps == form.fps
    same(chosen_of(video, range(form.frames)), frames(name))


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "libx264"),
        ("mp4", "libx265"),
        ("mp4", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("mp4", "libsvtav1"),
    ],
)
def test_files_of_all_formats_and_codecs_are_decoded(container: str, codec: str) -> None:
    """Some frames, one of them twice; of some files frames come out of order, of others some are hidden."""
    images = [image.resize((96, 64)) for image in frames("exact")]
    data = written(images, 12.0, container=container, codec=codec, pixels="yuv420p")
    video = VideoFile(data)
    assert video.form == VideoForm(12, pytest.approx(12.0, rel=0.01), 96, 64)
    chosen = [0, 3, 4, 9, 11, 11]
    same(chosen_of(video, chosen), [images[at] for at in chosen], tolerance=40)


LONG = [Image.fromarray(np.full((64, 96, 3), (at % 16 * 16, at // 16 * 16, 90), np.uint8)) for at in range(200)]
"""Frames that say their numbers."""


def number_in(image: Image.Image) -> int:
    red, green, _ = np.asarray(image).reshape(-1, 3).mean(axis=0)
    return round(red / 16) + 16 * round(green / 16)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", {"g": "40", "qp": "0"}),
        ("mp4", "libx264", {"g": "40", "bf": "3", "x264-params": "open-gop=1"}),
        ("mp4", "libx265", {"x265-params": "keyint=40:open-gop=1:bframes=4:log-level=error"}),
        ("webm", "libvpx-vp9", {"g": "40", "lag-in-frames": "16"}),
        ("matroska", "libx264", {"g": "200", "bf": "3", "sc_threshold": "0"}),
        ("mp4", "mpeg4", {"g": "30", "qmin": "1", "qmax": "1"}),
    ],
)
def test_what_lies_between_is_passed_over_and_nothing_else_is_taken_for_it(
    container: str, codec: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    video = VideoFile(written(LONG, 20.0, container=container, codec=codec, pixels="yuv420p", **options))
    draw = np.random.default_rng(1)
    for numbers in ([0, 70, 71, 79, 80, 81, 199], [199], [3, 120, 190], sorted(draw.choice(200, 12).tolist())):
        assert [number_in(image) for image in chosen_of(video, numbers)] == numbers
    decoded = list[float]()
    seconds = videos._seconds
    monkeypatch.setattr(videos, "_seconds", lambda frame: decoded.append(seconds(frame)) or seconds(frame))
    list(video.images([0, 198]))
    assert (len(set(decoded)) < 60) is (options.get("g") != "200")


def test_an_index_that_leads_elsewhere_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(LONG, 20.0, codec="libx264", pixels="yuv420p", g="40", qp="0")
    video = VideoFile(data)
    ends = [videos._Key(key.seconds, video._keys[-1].at) for key in video._keys]
    monkeypatch.setattr(video, "_keys", ends)
    assert [number_in(image) for image in chosen_of(video, [0, 90, 130, 180])] == [0, 90, 130, 180]


def test_while_many_frames_are_decoded_others_have_their_turn() -> None:
    video = VideoFile(written(LONG, 20.0, codec="libx264", pixels="yuv420p", g="200", sc_threshold="0"))
    found = list(video.images([0, 199]))
    assert [image is None for image in found] == [False, *[True] * 6, False]


def test_of_unequal_times_the_frame_is_taken_that_is_seen_then() -> None:
    data = written(frames("exact")[:4], 10.0, times=[0, 1, 8, 9])
    video = VideoFile(data)
    assert (video.form.frames, round(video.form.fps, 3)) == (4, round(3 / 0.9, 3))
    # In the middle of quarters of 1.2 s: at 0.15, 0.45, 0.75 and 1.05 s.
    same(chosen_of(video, range(4)), [frames("exact")[at] for at in (1, 1, 1, 3)])


def test_a_video_that_a_phone_has_turned_is_seen_upright() -> None:
    video = VideoFile(turned(film("exact")))
    assert (video.form.width, video.form.height) == (24, 32)
    same(chosen_of(video, [0, 11]), [frames("exact")[at].rotate(-90, expand=True) for at in (0, 11)])


def turned(data: bytes) -> bytes:
    """An MP4 whose track says that it is seen a quarter of a turn clockwise."""
    at = data.index(b"tkhd") + 4
    assert data[at] == 0  # the version: its matrix is behind 40 bytes
    one, minus = (0x10000).to_bytes(4, "big"), (-0x10000 & 0xFFFFFFFF).to_bytes(4, "big")
    none, unit = bytes(4), (0x40000000).to_bytes(4, "big")
    width = (24 << 16).to_bytes(4, "big")
    matrix = none + one + none + minus + none + none + width + none + unit
    return data[: at + 40] + matrix + data[at + 76 :]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"nonsense", "8 bytes, which begin with b'nonsense', are no video that is served: MP4, QuickTime"),
        (encoded(picture("odd")), "are no video that is served"),
        (b"#EXTM3U\nfile:///etc/passwd", "are no video that is served"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "are no video that is served"),
        (film("exact")[:200], "cannot be decoded: Invalid data found when processing input$"),
        (film("exact")[:40] + bytes(len(film("exact")) - 40), "the video is broken|has no frames|has no video"),
        (bytes(4) + b"ftyp" + bytes(100), "the video is broken|has no video"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "the video is broken|has no video"),
        (written(frames("exact"), 4.0, codec="mjpeg", pixels="yuvj420p", container="mov"), "is coded as mjpeg; served"),
    ],
)
def test_what_is_no_video_is_told(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        chosen_of(VideoFile(data), [0])


def test_a_file_that_ends_too_early_says_so_or_gives_the_frames_that_it_has() -> None:
    """Where the index is at its end, and so is lost, or at its beginning."""
    data = film("odd")
    for cut in range(100, len(data), len(data) // 40):
        try:
            found = chosen_of(VideoFile(data[:cut]), [0, 8])
        except InvalidRequestError:
            continue
        assert len(found) == 2


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("MAX_PIXELS", 32 * 24 - 1, "has frames of 32 x 24 pixels; at most 767 are allowed"),
        ("MAX_DECODED", 32 * 24 * 11, "has 12 frames of 32 x 24 pixels; at most 11 of this size are allowed"),
        ("MAX_FRAMES", 11, "has more than 11 frames"),
    ],
)
def test_more_than_is_decoded_is_refused_before(
    limit: str, value: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    film("exact")
    monkeypatch.setattr(videos, limit, value)
    with pytest.raises(InvalidRequestError, match=says):
        VideoFile(film("exact"))


# ---- with a tower ----


def opened(name: str = "qwen3-vl") -> ImageEncoder:
    config = EngineConfig(model=str(image_model(name)), dtype="float32", tensor_ops="numpy")
    return ImageEncoder.open(config, Path(config.model))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_a_file_s_parts_are_encoded_step_by_step_and_named_by_their_embeddings(name: str) -> None:
    encoder = opened(name)
    steps = list(encoder.encode(ImageFile(film("exact"), is_video=True)))
    assert steps[:-1] == [None] * 3
    made = steps[-1]
    assert made is not None
    known = video_references(name)["films"]["exact"]["features"]
    np.testing.assert_allclose(made.embeds.reshape(-1)[known["at"]], known["values"], atol=5e-5)
    assert len({each.content for each in made.image.items}) == 3
    assert made.image.is_video
    again = list(encoder.encode(ImageFile(film("exact"), is_video=True)))
    assert again == [made]
    other = encoder.whole(ImageFile(film("exact"), is_video=True, fps=4.0))
    assert len(other.image.items) == 6
    shared = {each.content for each in other.image.items} & {each.content for each in made.image.items}
    assert not shared  # each of its parts has other frames


def test_parts_with_equal_frames_have_equal_names() -> None:
    """So a video that is gone on with shares the prefix of what was seen already, of models to whom it is all the same
    how long it is."""
    images = frames("exact")
    short, long = (written(images[:count], 4.0) for count in (8, 12))
    encoder = opened("qwen2-vl")
    first, second = (encoder.whole(ImageFile(data, is_video=True, fps=4.0)) for data in (short, long))
    assert second.image.items[:4] == first.image.items


def test_a_model_without_videos_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="takes no videos"):
        opened("mistral3").whole(ImageFile(film("exact"), is_video=True))


def test_numbers_that_are_not_finite_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = opened()
    monkeypatch.setattr(
        encoder._tower, "encode_part", lambda images, plan: np.full((12, 192), np.inf, np.float32), raising=False
    )
    with pytest.raises(InvalidRequestError, match="not finite"):
        encoder.whole(ImageFile(film("exact"), is_video=True))
