"""Of videos, models get the frames that transformers takes, and their towers make the same of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.tiny_images import FILMING, image_model
from support.tiny_videos import FILMS, FORMS, frames, video_references
from support.tower_parts import assert_spread, parts

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.models.towers import glm4v_vision, qwen_vision
from headwise.runtime.models.towers.base import FRAMES, TowerParts, VideoForm, VideoPlan
from headwise.runtime.models.towers.glm4v_vision import Glm4vVision
from headwise.runtime.models.towers.pixels import normalised
from headwise.runtime.models.towers.qwen_vision import QwenVision
from headwise.runtime.ops.select import make_ops

BUILDS: dict[str, Any] = {
    "qwen2-vl": qwen_vision.build_qwen2_vl,
    "qwen2.5-vl": qwen_vision.build_qwen2_5_vl,
    "qwen3-vl": qwen_vision.build_qwen3_vl,
    "qwen3.5": qwen_vision.build_qwen3_5,
    "glm4v": glm4v_vision.build,
    "glm4v-moe": glm4v_vision.build,
}
"""The last two choose frames, and write seconds, in two ways."""


def tower(name: str, given: TowerParts | None = None) -> QwenVision | Glm4vVision:
    build: Callable[[TowerParts], QwenVision | Glm4vVision] = BUILDS[name]
    return build(given or parts(image_model(name)))


def width_of(name: str) -> int:
    """Numbers of a token."""
    of = tower(name)
    return of.config.text_hidden * (1 + len(of.config.levels) if isinstance(of, QwenVision) else 1)


def form(name: str) -> VideoForm:
    return VideoForm(**asdict(FORMS[name]))


def made(of: QwenVision | Glm4vVision, name: str) -> tuple[VideoPlan, np.ndarray]:
    plan = of.plan(form(name), 0.0)
    images = frames(name)
    groups = [plan.frames[at : at + FRAMES] for at in range(0, len(plan.frames), FRAMES)]
    return plan, np.concatenate([of.encode_part([images[at] for at in group], plan) for group in groups])


@pytest.mark.parametrize("name", FILMING)
def test_frames_and_their_sizes_are_those_that_transformers_takes(name: str) -> None:
    of = tower(name)
    for video, known in video_references(name)["plans"].items():
        plan = of.plan(form(video), 0.0)
        expected = known["frames"] + known["frames"][-1:] * (len(known["frames"]) % FRAMES)
        assert list(plan.frames) == expected, video
        (width, height), (time, rows, columns) = plan.size, known["grid"]
        assert (len(plan.items), height // 4, width // 4) == (time, rows, columns), video
        assert all(each.end - each.start == rows * columns // 4 for each in plan.items)
        assert all(each.columns == columns // 2 for each in plan.items)


@pytest.mark.parametrize("name", FILMING)
def test_pixels_are_those_that_transformers_makes_of_frames(name: str) -> None:
    of = tower(name)
    for video in FILMS:
        plan, images = of.plan(form(video), 0.0), frames(video)
        assert of._videos is not None
        pixels = np.stack([normalised(images[at], plan.size, of._videos.pixels) for at in plan.frames])
        _, _, height, width = pixels.shape
        squares = pixels.reshape(-1, FRAMES, 3, height // 8, 2, 4, width // 8, 2, 4).transpose(
            0, 3, 6, 4, 7, 2, 1, 5, 8
        )
        assert_spread(squares.reshape(-1, 3 * FRAMES * 16), video_references(name)["films"][video]["pixels"], 2e-6)


@pytest.mark.parametrize("ops", ["numpy", "numba"])
@pytest.mark.parametrize("name", FILMING)
def test_towers_make_of_videos_what_transformers_does(name: str, ops: str) -> None:
    of = tower(name, parts(image_model(name), make_ops(ops, 1, "float32", "float32")))
    for video in FILMS:
        plan, found = made(of, video)
        assert len(found) == sum(each.end - each.start for each in plan.items)
        assert_spread(found, video_references(name)["films"][video]["features"], 5e-5)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "glm4v"])
def test_a_gpu_s_operations_make_the_same(name: str) -> None:
    _, found = made(tower(name, parts(image_model(name), EmulatedOps("float32", ShimPrograms()))), "exact")
    known = video_references(name)["films"]["exact"]["features"]
    np.testing.assert_allclose(found.reshape(-1)[known["at"]], known["values"], atol=5e-5)


def test_equal_frames_are_as_an_image() -> None:
    of, image = tower("qwen2-vl"), frames("exact")[3]
    plan = of.plan(form("exact"), 0.0)
    still = of.encode(image)
    assert (image.width // 8, plan.size) == (still.columns, image.size)
    np.testing.assert_allclose(of.encode_part([image, image], plan), still.embeds, atol=1e-5)


# ---- what stands in the prompt ----


def test_of_qwen3_vl_the_second_of_each_part_is_written_in_front_of_it() -> None:
    given = parts(image_model("qwen3-vl"))
    plan = tower("qwen3-vl", given).plan(form("exact"), 0.0)  # 6 frames of 4 a second, two for a part
    ids = {name: given.token_id(f"<|{name}|>") for name in ("vision_start", "vision_end", "video_pad")}
    assert list(plan.frames) == [0, 2, 4, 7, 9, 11]
    expected: list[Any] = []
    for at, each in zip(("0.2", "1.4", "2.5"), plan.items, strict=True):
        expected += [*given.text_ids(f"<{at} seconds>"), ids["vision_start"]]
        assert each.start == len(expected)
        expected += [ids["video_pad"]] * 12
        assert (each.end, each.columns, each.later) == (len(expected), 4, -1)
        expected.append(ids["vision_end"])
    assert plan.tokens.tolist() == expected
    assert plan.around == (ids["vision_start"], ids["vision_end"])


@pytest.mark.parametrize(
    ("name", "video", "fps", "later"),
    [
        ("qwen2-vl", "exact", 0.0, [-1, 1, 1]),
        ("qwen2.5-vl", "exact", 0.0, [-1, 1, 1]),  # of one second each, and one position a second
        ("qwen2.5-vl", "exact", 4.0, [-1, 0, 1, 0, 1, 0]),
        ("qwen2.5-vl", "slow", 0.5, [-1, 5]),  # four frames of ten seconds
        ("qwen2.5-vl", "two", 1.0, [-1]),
    ],
)
def test_of_the_older_ones_parts_follow_each_other_at_their_times(
    name: str, video: str, fps: float, later: list[int]
) -> None:
    plan = tower(name).plan(form(video), fps)
    assert [each.later for each in plan.items] == later
    assert [each.start for each in plan.items[1:]] == [each.end for each in plan.items[:-1]]
    assert (plan.tokens == FILMING[name].id_of("<|video_pad|>")).all()
    assert (len(plan.tokens), plan.around) == (plan.items[-1].end, ())


def test_of_glm_4_1v_the_second_of_each_part_is_written_behind_it_and_of_4_6v_with_its_tenth() -> None:
    for name, seconds in (("glm4v", ("0", "1", "2")), ("glm4v-moe", [f"{at / 2:.1f} seconds" for at in range(6)])):
        given = parts(image_model(name))
        plan = tower(name, given).plan(form("exact"), 0.0)
        ids = {each: given.token_id(f"<|{each}|>") for each in ("begin_of_image", "end_of_image", "image")}
        expected: list[Any] = []
        for second, each in zip(seconds, plan.items, strict=True):
            expected.append(ids["begin_of_image"])
            assert each.start == len(expected)
            expected += [ids["image"]] * 12
            assert (each.end, each.columns, each.later) == (len(expected), 4, -1)
            expected += [ids["end_of_image"], *given.text_ids(second)]
        assert plan.tokens.tolist() == expected
        assert plan.around == ()


@pytest.mark.parametrize("name", FILMING)
def test_so_many_frames_of_a_second_are_taken(name: str) -> None:
    taken = [len(tower(name).plan(form("long"), fps).frames) for fps in (0.1, 1.0, 4.0, 100.0)]
    if name.startswith("qwen"):
        assert taken == [10, 100, 400, 768]
        assert len(tower(name).plan(form("long"), 0.001).frames) == 4
    else:  # of longer ones than a minute, here, as many as of a minute
        assert taken == [6, 60, 240, 768]
        assert len(tower(name).plan(form("long"), 0.001).frames) == 2


# ---- sizes ----


@pytest.mark.parametrize("name", FILMING)
def test_a_video_has_as_many_numbers_as_fit_at_most(name: str) -> None:
    whole = tower(name).plan(form("large"), 0.0)
    width = width_of(name)
    half = len(whole.items) * (whole.items[0].end - whole.items[0].start) * width // 2
    few = tower(name, parts(image_model(name), most=half)).plan(form("large"), 0.0)
    assert few.frames == whole.frames
    numbers = sum(each.end - each.start for each in few.items) * width
    assert half // 2 < numbers <= half


@pytest.mark.parametrize(("name", "video"), [("qwen2.5-vl", "long"), ("qwen3-vl", "large")])
def test_pixels_are_limited_unless_a_checkpoint_says_otherwise(name: str, video: str) -> None:
    """Of many frames, or of each of few ones."""
    given = parts(image_model(name))
    free = tower(name, replace(given, videos={**given.videos, "cap_pixels_per_frame": False}))
    limited, whole = (len(each.plan(form(video), 0.0).tokens) for each in (tower(name), free))
    assert limited < 0.75 * whole


@pytest.mark.parametrize("name", FILMING)
def test_a_video_that_is_as_good_as_a_line_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="more than 200 times its shorter one"):
        tower(name).plan(VideoForm(10, 2.0, 2010, 10), 0.0)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("qwen2-vl", {"fps": 0}, "fps 0 and 4 to 768 frames"),
        ("qwen3-vl", {"fps": -1.0}, "fps -1"),
        ("qwen3-vl", {"min_frames": 10, "max_frames": 8}, "10 to 8 frames"),
        ("qwen2-vl", {"max_frames": 0}, "max_frames"),
        ("qwen2-vl", {"patch_size": 14}, "patch_size 14, its tower takes 4"),
        ("qwen2-vl", {"temporal_patch_size": 1}, "temporal_patch_size 1, its tower takes 2"),
        ("qwen3-vl", {"size": {"shortest_edge": 9, "longest_edge": 8}}, "at least 9 and at most 8"),
        ("qwen3-vl", {"image_mean": [0.5]}, "image_mean"),
        ("qwen3-vl", {"do_resize": False}, "do_resize"),
        ("glm4v", {"fps": "2"}, "fps '2'"),
        ("glm4v", {"max_duration": 0}, "max_duration"),
        ("glm4v-moe", {"merge_size": 4}, "merge_size 4, its tower takes 2"),
        ("glm4v-moe", {"size": {"shortest_edge": 9, "longest_edge": 8}}, "at least 9 and at most 8"),
    ],
)
def test_what_a_checkpoint_says_of_videos_that_is_not_served_is_named(
    name: str, changes: dict[str, Any], says: str
) -> None:
    given = parts(image_model(name))
    with pytest.raises(ModelError, match=says):
        tower(name, replace(given, videos={**given.videos, **changes}))


def test_a_checkpoint_that_says_nothing_of_videos_takes_them_as_its_family_does() -> None:
    """Of images, what its frames' colours are."""
    for name in FILMING:
        given = parts(image_model(name))
        of = tower(name, replace(given, videos={}))
        assert of._videos is not None
        assert of._videos.pixels == of.config.pixels
        assert len(of.plan(form("long"), 0.0).frames) == 200  # two a second


@pytest.mark.parametrize(("name", "place"), [("qwen3-vl", "<|video_pad|>"), ("glm4v", "<|video|>")])
def test_without_a_token_for_videos_images_are_served_alone(name: str, place: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(image_model(name), directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (added,) = (each for each in tokenizer["added_tokens"] if each["content"] == place)
    added["content"] = "<|other|>"
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    of = tower(name, parts(directory))
    assert len(of.encode(frames("exact")[0]).tokens) == 12
    with pytest.raises(InvalidRequestError, match=rf"takes no videos: its tokenizer has no {re.escape(place)}"):
        of.plan(form("exact"), 0.0)


def test_parts_hold_numbers_of_all_levels() -> None:
    _, found = made(tower("qwen3-vl"), "odd")
    assert found.shape[1] == width_of("qwen3-vl") == 3 * 64
