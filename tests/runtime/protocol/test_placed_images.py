"""A chat's images stand where its template wrote a place for each, and in 16 bits they are half as large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.embed_parts import parts_of
from headwise.runtime.protocol.encoder_messages import Encode, Encoded
from headwise.runtime.protocol.images import (
    MAX_IMAGES,
    EncodedImage,
    ImagePlaces,
    PromptImage,
    embeds_of,
    named,
    with_images,
)
from headwise.runtime.protocol.messages import EmbedsPart, Route
from headwise.runtime.protocol.prompt_items import (
    PromptEmbeds,
    as_float32,
    check_embed_places,
    check_embeds,
    digest,
    embed_places,
    placed,
)
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

PLACE = 7


def ids(*given: int) -> np.ndarray:
    return np.array(given, np.int32)


def image(name: str, *tokens: int, is_video: bool = False) -> PromptImage:
    return PromptImage(ids(*tokens), (ExtraKey(0, max(1, len(tokens)), name),), is_video=is_video)


PLACES = ImagePlaces(PLACE, 8)


def test_each_place_becomes_an_image_s_tokens() -> None:
    images = [image("a", 7, 7, 8), image("b", 9), image("a", 7, 7, 8)]
    tokens, items = with_images(ids(1, 7, 2, 7, 7), images, PLACES, 10)
    assert tokens.tolist() == [1, 7, 7, 8, 2, 9, 7, 7, 8]
    assert [(item.offset, item.length, item.hash) for item in items] == [(1, 3, "a"), (5, 1, "b"), (6, 3, "a")]
    assert placed(items, len(tokens)).extra_keys == (ExtraKey(1, 4, "a"), ExtraKey(5, 6, "b"), ExtraKey(6, 9, "a"))


FRAMED = named(
    PromptImage(ids(5, 7, 7, 7, 7, 6), (ExtraKey(0, 1, ""), ExtraKey(1, 5, "", 2), ExtraKey(5, 6, "")), (5, 6)),
    np.arange(12, dtype=np.float32).reshape(6, 2),
)
"""An image of two rows, between two tokens that the template writes beside its place."""


def test_what_stands_around_an_image_is_an_item_before_it_and_one_behind() -> None:
    tokens, items = with_images(ids(1, 5, 7, 6, 5, 7, 6), [FRAMED.image] * 2, PLACES, 10)
    assert tokens.tolist() == [1, *[5, 7, 7, 7, 7, 6] * 2]
    before, own, behind = (digest(part) for part in (FRAMED.embeds[:1], FRAMED.embeds[1:5], FRAMED.embeds[5:]))
    known = (ExtraKey(1, 2, before), ExtraKey(2, 6, own, 2), ExtraKey(6, 7, behind))
    request = GenerateRequest("r", tokens, SamplingParams(), extra_keys=placed(items, len(tokens)).extra_keys)
    assert request.extra_keys[:3] == known
    embeds = embeds_of(request, [FRAMED, FRAMED])
    assert [each.start for each in embeds] == [1, 2, 6, 7, 8, 12]
    check_embed_places(request.extra_keys, embed_places(embeds), 2)
    check_embeds(request.extra_keys, embeds)
    found = wire.decode(wire.encode(Encoded(5, FRAMED.image, FRAMED.embeds)), Encoded)
    assert found.image.items == FRAMED.image.items
    assert [each.content for each in found.image.items] == [before, own, behind]


@pytest.mark.parametrize("tokens", [(7,), (5, 7), (7, 6), (6, 7, 5), (1, 7, 6), (5, 7, 6, 7, 6)])
def test_a_template_that_does_not_write_what_stands_around_an_image_is_told(tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="must write token 5 before an image's place and 6 behind it"):
        with_images(ids(*tokens), [FRAMED.image] * tokens.count(7), PLACES, 10)


@pytest.mark.parametrize("around", [(5,), (5, 6, 7)])
def test_an_image_between_other_than_two_tokens_is_refused(around: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=f"stands between two tokens, or none, got {len(around)}"):
        with_images(ids(5, 7, 6), [replace(FRAMED.image, around=around)], PLACES, 10)


def test_a_video_stands_where_the_template_has_its_place_and_text_is_between_its_parts() -> None:
    """In place of what the template writes around it, too."""
    parts = (ExtraKey(2, 4, "", 1), ExtraKey(6, 8, "", 1))
    nameless = PromptImage(ids(1, 5, 8, 8, 6, 5, 8, 8, 6), parts, (5, 6), is_video=True)
    video = named(nameless, np.eye(4, dtype=np.float32))
    tokens, items = with_images(ids(2, 5, 8, 6, 7, 3), [video.image, image("a", 7, 7)], PLACES, 10)
    assert tokens.tolist() == [2, 1, 5, 8, 8, 6, 5, 8, 8, 6, 7, 7, 3]
    keys = placed(items, len(tokens)).extra_keys
    own = [digest(each) for each in video.parts]
    assert keys == (ExtraKey(3, 5, own[0], 1), ExtraKey(7, 9, own[1], 1), ExtraKey(10, 12, "a"))
    request = GenerateRequest("r", tokens, SamplingParams(), extra_keys=keys)
    assert [(each.start, each.values.argmax(axis=1).tolist()) for each in embeds_of(request, [video])] == [
        (3, [0, 1]),
        (7, [2, 3]),
    ]


@pytest.mark.parametrize(
    ("places", "says"), [(ImagePlaces(7), "takes no videos"), (ImagePlaces(None, 8), "takes no images")]
)
def test_a_model_without_a_place_for_it_takes_no_video(places: ImagePlaces, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        with_images(ids(8), [image("a", 8, is_video=True)], places, 10)


@pytest.mark.parametrize(
    ("tokens", "images", "says"),
    [
        (ids(1, 2), [image("a", 7)], "has a place for 0 of the chat's 1 images"),
        (ids(7, 7), [image("a", 7)], "has a place for 2 of the chat's 1 images"),
        (
            ids(8, 7),
            [image("a", 7), image("b", 8, is_video=True)],
            "for an image where the chat has a video",
        ),
        (ids(7), [image("a", 10)], "ids below 10"),
        (ids(7), [image("a", -1)], "ids below 10"),
        (ids(7), [image("a")], "must be one row"),
        (ids(7), [replace(image("a", 7), tokens=ids(1, 2).reshape(1, 2))], "must be one row"),
        (ids(7), [replace(image("a", 7), items=(ExtraKey(0, 2, "a"),))], "items must lie in its 1 tokens"),
        (ids(*[7] * 65), [image("a", 7)] * (MAX_IMAGES + 1), "65 images were given; at most 64"),
    ],
)
def test_images_without_places_and_places_without_images_are_told(
    tokens: np.ndarray, images: list[PromptImage], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        with_images(tokens, images, PLACES, 10)


def test_sixteen_bits_round_to_the_nearest_even_and_back() -> None:
    given = np.array([[1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, 1e-40, 0.0, 3.14159265]], np.float32)
    back = as_float32(to_bits(given))
    assert back[0, :4].tolist() == [1.0, -2.5, 1.0, 1 + 2**-6]
    np.testing.assert_allclose(back, given, rtol=2**-8, atol=1e-40)
    np.testing.assert_array_equal(as_float32(to_bits(back)), back)


def test_embeddings_in_sixteen_bits_are_checked_and_named_like_others() -> None:
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    half = to_bits(values)
    assert digest(half) != digest(as_float32(half))
    assert digest(half) != digest(half.reshape(2, 12).copy().view(np.float32))
    key = (ExtraKey(2, 6, digest(half)),)
    check_embed_places(key, embed_places([PromptEmbeds(2, half)]), 6)
    check_embeds(key, [PromptEmbeds(2, half)])
    with pytest.raises(InvalidRequestError, match="named by the digest of other embeddings"):
        check_embeds(key, [PromptEmbeds(2, half ^ np.uint16(1))])
    for wrong in (np.inf, -np.inf, np.nan):
        spoilt = half.copy()
        spoilt[3, 5] = np.float32(wrong).view(np.uint32) >> 16
        with pytest.raises(InvalidRequestError, match=r"are not all finite numbers \(of bfloat16"):
            check_embeds((ExtraKey(2, 6, digest(spoilt)),), [PromptEmbeds(2, spoilt)])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_images_cross_the_wire(dtype: type) -> None:
    embeds = np.arange(12, dtype=dtype).reshape(3, 4)
    encoded = wire.decode(wire.encode(Encoded(5, image("a", 1, 2), embeds)), Encoded)
    assert (encoded.key, encoded.image.items, encoded.image.tokens.tolist()) == (5, (ExtraKey(0, 2, "a"),), [1, 2])
    assert encoded.embeds.dtype == dtype
    np.testing.assert_array_equal(encoded.embeds, embeds)
    assert wire.decode(wire.encode(Encode(1, b"\xff\x00", 2)), Encode).data == b"\xff\x00"
    route = wire.decode(wire.encode(Route(1, "x", None, None, {}, 0, "", images=(image("a", 1),))), Route)
    assert [each.items[0].content for each in route.images] == ["a"]
    request = GenerateRequest("r", ids(1, 7, 2), SamplingParams(), extra_keys=(ExtraKey(1, 2, "a"),))
    (part,) = parts_of("r", embeds_of(request, [EncodedImage(image("a", 7), embeds[:1])]))
    found = wire.decode(wire.encode(part), EmbedsPart)
    assert (found.start, found.first, found.values.dtype) == (1, 0, dtype)


def test_numbers_of_another_kind_are_no_embeddings() -> None:
    wrong = Encoded(1, image("a", 1), np.zeros((1, 2), np.float64))  # type: ignore[arg-type]
    with pytest.raises(wire.WireError, match="must be an array of float32 or uint16, not float64"):
        wire.decode(wire.encode(wrong))
