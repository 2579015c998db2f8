"""Multimodal items of a prompt (images, audio): where they stand, what names them, and their embeddings.

An item stands where the prompt has placeholder tokens. Its hash goes into the hashes of the blocks that it overlaps
(`headwise.cache_controller.block_hash`), so that the cache tells prompts with other items apart. Its embeddings, if the
caller gives them, are computed with in place of those of the placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.kernels.bfloat16 import to_float32
from headwise.runtime.protocol.values import as_integer, as_items, check_text

MAX_ITEMS = 1024
MAX_HASH_CHARACTERS = 128
MAX_EMBED_BYTES = 512 << 20
"""Of a prompt's embeddings: 17 images of 3,000 tokens at a hidden size of 5,120, in bfloat16."""
MAX_POSITION = 1 << 24
"""In time: float32, of which angles are made, has all numbers below."""
MAX_WIDTH = 1 << 20
"""Numbers of a token's embedding."""
_EXPONENT = np.uint16(0x7F80)
"""Of bfloat16: all of its bits are set in what is not finite."""
DIGEST = "embeds:"
"""What the hash of an item begins with that is named by the digest of its embeddings."""


@dataclass(frozen=True, eq=False)
class PromptItem:
    """An item that stands for the prompt's tokens ``[offset, offset + length)``.

    hash:    names its content: items of equal hashes are taken for equal. A string of 1 to 128 characters, or bytes;
             may be left out where there are embeddings, and is then their digest
    embeds:  ``float [length, hidden]``, as the model's layers take them: scaled, where the model scales its own; with
             what a few layers add behind them, where the model has that. None: the placeholder tokens' own are computed
             with
    columns: for models that give a token three positions: the item's tokens lie on a grid so wide, row by row. 0: they
             follow each other as text does
    later:   of an item on a grid that touches the one in front, and goes on with its grid, as those of a video do: how
             many positions later in time its tokens are; -1: it has a place of its own
    """

    offset: int
    length: int
    hash: str | bytes = ""
    embeds: Any = None
    columns: int = 0
    later: int = -1


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """Embeddings in place of those of a prompt's tokens ``[start, start + length)``.

    values: ``float32 [length, hidden]``, or ``uint16``: the bits of as many numbers in bfloat16
    """

    start: int
    values: NDArray[np.float32] | NDArray[np.uint16]

    @property
    def end(self) -> int:
        return self.start + len(self.values)


@dataclass(frozen=True)
class EmbedsPlace:
    """What embeddings of a prompt's tokens ``[start, start + length)`` are like.

    width:   numbers of a token
    is_half: whether they are in bfloat16, else in float32
    """

    start: int
    length: int
    width: int
    is_half: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_bytes(self) -> int:
        return self.length * self.width * (2 if self.is_half else 4)


@dataclass(frozen=True)
class PlacedItems:
    """A prompt's items, checked, in the order of their places: as requests have them."""

    extra_keys: tuple[ExtraKey, ...] = ()
    embeds: tuple[PromptEmbeds, ...] = ()


def placed(items: Any, num_tokens: int) -> PlacedItems:
    """The items of a prompt of so many tokens, each a `PromptItem` or a mapping of its fields.

    Raises `InvalidRequestError` for what is none, lies outside the prompt, overlaps another one, or is too large.
    """
    given = [_item(each) for each in as_items("items", items, "items", MAX_ITEMS)]
    extra_keys: list[ExtraKey] = []
    embeds: list[PromptEmbeds] = []
    num_bytes = 0
    for item in given:
        start = as_integer("an item's offset", item.offset, 0, 2**31 - 1)
        end = start + as_integer("an item's length", item.length, 1, 2**31 - 1)
        columns = as_integer("an item's columns", item.columns, 0, 2**31 - 1)
        later = as_integer("an item's later", item.later, -1, 2**31 - 1)
        _check_place(start, end, num_tokens)
        if item.embeds is not None:
            values = _as_array(item.embeds, end - start)
            num_bytes += 4 * values.size
            check_bytes(num_bytes)  # before a copy: a view that repeats its numbers may claim any size
            _check_width(values.shape[1])
            embeds.append(PromptEmbeds(start, _as_embeds(values, start, end)))
        extra_keys.append(ExtraKey(start, end, _hash(item, embeds), columns, later))
    extra_keys.sort()
    check_places(extra_keys, num_tokens)
    return PlacedItems(tuple(extra_keys), tuple(sorted(embeds, key=lambda each: each.start)))


def check_items(items: Any, prompt: Any) -> None:
    """Raise `InvalidRequestError` for items of a prompt that is not given as token ids."""
    has_items = bool(items) if isinstance(items, list | tuple) else items is not None
    if has_items and (prompt is None or isinstance(prompt, str)):
        raise InvalidRequestError("items stand at tokens: give their prompt as token ids, not as a text or chat")


def check_places(extra_keys: Sequence[ExtraKey], num_tokens: int) -> None:
    """Raise `InvalidRequestError` unless items lie in a prompt of so many tokens, one behind the other, with hashes."""
    for start, end, key, columns, _ in extra_keys:
        _check_place(start, end, num_tokens)
        _check_grid(start, end, columns)
        if not 0 < len(key) <= MAX_HASH_CHARACTERS:
            raise InvalidRequestError(
                f"an item's hash must have 1 to {MAX_HASH_CHARACTERS} characters, got {len(key)}, {key[:80]!r:.80}, at "
                f"[{start}, {end})"
            )
        check_text(f"the hash of the item at [{start}, {end})", key)
    for before, after in pairwise(extra_keys):
        if after.start < before.end:
            raise InvalidRequestError(
                f"items must lie one behind the other: [{before.start}, {before.end}) overlaps [{after.start}, "
                f"{after.end})"
            )
    _check_times(extra_keys)


def check_embed_places(extra_keys: Sequence[ExtraKey], places: Sequence[EmbedsPlace], hidden_size: int) -> None:
    """Raise `InvalidRequestError` where a model cannot compute with such embeddings, or there are too many, or an item
    is named by the digest of none."""
    given = {(each.start, each.end) for each in places}
    if len(given) != len(places):
        raise InvalidRequestError("embeddings must be [length, hidden], each of another item")
    for each in places:
        if each.width != hidden_size:
            raise InvalidRequestError(
                f"the embeddings at [{each.start}, {each.end}) have {each.width} numbers a token, the model "
                f"{hidden_size}"
            )
    check_bytes(sum(each.num_bytes for each in places))
    for start, end, key, *_ in extra_keys:
        if key.startswith(DIGEST) and (start, end) not in given:
            raise named_by_others(start, end)
        given.discard((start, end))
    for start, end in given:
        raise InvalidRequestError(f"the embeddings at [{start}, {end}) are of no item of the prompt")


def check_embeds(extra_keys: Sequence[ExtraKey], embeds: Sequence[PromptEmbeds]) -> None:
    """Raise `InvalidRequestError` for embeddings that are not finite, or that others would be taken for: whoever may
    name items cannot name one by the digest of embeddings that are not its own."""
    digests = digests_of(extra_keys)
    for each in embeds:
        check_finite(each.values, each.start, each.end)
        if digests.get((each.start, each.end)) not in (None, digest(each.values)):
            raise named_by_others(each.start, each.end)


def digests_of(extra_keys: Sequence[ExtraKey]) -> dict[tuple[int, int], str]:
    """Of items that are named by the digests of their embeddings, by their places."""
    return {(start, end): key for start, end, key, *_ in extra_keys if key.startswith(DIGEST)}


def named_by_others(start: int, end: int) -> InvalidRequestError:
    return InvalidRequestError(f"the item at [{start}, {end}) is named by the digest of other embeddings")


def as_float32(values: NDArray[np.float32] | NDArray[np.uint16]) -> NDArray[np.float32]:
    """Numbers as `PromptEmbeds` has them."""
    if values.dtype == np.uint16:
        return to_float32(np.asarray(values, np.uint16))
    return values.astype(np.float32, copy=False)


def embed_bytes(embeds: Sequence[PromptEmbeds]) -> int:
    return sum(each.values.nbytes for each in embeds)


def embed_places(embeds: Sequence[PromptEmbeds]) -> tuple[EmbedsPlace, ...]:
    """What embeddings are like. Raises `InvalidRequestError` if they are no rows."""
    if any(each.values.ndim != 2 for each in embeds):
        raise InvalidRequestError("embeddings must be [length, hidden], each of another item")
    return tuple(
        EmbedsPlace(each.start, each.values.shape[0], each.values.shape[1], each.values.dtype == np.uint16)
        for each in embeds
    )


def digest(values: NDArray[np.float32] | NDArray[np.uint16]) -> str:
    """The hash of an item that is known by its embeddings alone: of their bytes, float32 or bfloat16, little-endian."""
    found = RowDigest(is_half=values.dtype == np.uint16)
    found.take(values)
    return found.digest


class RowDigest:
    """`digest` of embeddings whose rows come in parts."""

    def __init__(self, is_half: bool) -> None:
        self._of_bytes = sha256(b"bfloat16" if is_half else b"")

    def take(self, rows: NDArray[np.float32] | NDArray[np.uint16]) -> None:
        self._of_bytes.update(np.ascontiguousarray(rows, "<u2" if rows.dtype == np.uint16 else "<f4").data)

    @property
    def digest(self) -> str:
        return DIGEST + self._of_bytes.hexdigest()


def _item(given: Any) -> PromptItem:
    if isinstance(given, PromptItem):
        return given
    if not isinstance(given, Mapping) or not {"offset", "length"} <= given.keys() <= {*PromptItem.__dataclass_fields__}:
        raise InvalidRequestError(
            "an item must be a PromptItem, or a mapping with offset, length, and hash or embeds, maybe columns and "
            f"later, got {given!r:.80}"
        )
    return PromptItem(**given)


def _check_place(start: int, end: int, num_tokens: int) -> None:
    if not 0 <= start < end <= num_tokens:
        raise InvalidRequestError(f"the item at [{start}, {end}) does not lie in the prompt's {num_tokens} tokens")


def _check_grid(start: int, end: int, columns: int) -> None:
    if columns < 0 or (columns and (end - start) % columns):
        raise InvalidRequestError(
            f"the item at [{start}, {end}) has {end - start} tokens, which make no whole rows of {columns} columns"
        )


def _check_times(extra_keys: Sequence[ExtraKey]) -> None:
    """Raise `InvalidRequestError` for items that go on with no grid, or are later than positions can be."""
    time = first = 0  # of the item, and of the first one of its video, as tokens are counted
    for before, item in zip((None, *extra_keys), extra_keys, strict=False):
        if item.later < 0:
            time = first = item.start
            continue
        if not item.columns or before is None or not before.columns or before.end != item.start:
            raise InvalidRequestError(
                f"the item at [{item.start}, {item.end}) is to go on with the grid of one in front of it, but touches "
                "none that lies on a grid, or lies on none itself"
            )
        time += item.later
        if time >= MAX_POSITION:
            raise InvalidRequestError(
                f"the item at [{item.start}, {item.end}) is {time - first} positions later than the first one of its "
                f"grid: positions are below {MAX_POSITION}"
            )


def check_bytes(num_bytes: int) -> None:
    """Raise `InvalidRequestError` where a prompt's embeddings have too many."""
    if num_bytes > MAX_EMBED_BYTES:
        raise InvalidRequestError(
            f"the embeddings of a prompt have {num_bytes} bytes; at most {MAX_EMBED_BYTES} can be sent with one"
        )


def _check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise InvalidRequestError(f"embeddings have {width} numbers a token; at most {MAX_WIDTH} can be sent")


def check_finite(values: NDArray[np.float32] | NDArray[np.uint16], start: int, end: int) -> None:
    """Raise `InvalidRequestError` if one of the numbers, of the item at ``[start, end)``, is not."""
    is_half = values.dtype == np.uint16
    exponents = np.bitwise_and(values.view(np.uint16), _EXPONENT) if is_half else None
    is_finite = np.isfinite(values).all() if exponents is None else (exponents != _EXPONENT).all()
    if not is_finite:
        raise InvalidRequestError(
            f"the embeddings at [{start}, {end}) are not all finite numbers (of {'bfloat16' if is_half else 'float32'})"
        )


def _hash(item: PromptItem, embeds: Sequence[PromptEmbeds]) -> str:
    """embeds: those of the item are the last ones"""
    if isinstance(item.hash, bytes) and 2 * len(item.hash) > MAX_HASH_CHARACTERS:
        raise InvalidRequestError(
            f"an item's hash must have 1 to {MAX_HASH_CHARACTERS} characters, 2 for a byte, got {len(item.hash)} bytes"
        )
    key = item.hash.hex() if isinstance(item.hash, bytes) else item.hash
    if not isinstance(key, str) or not (key or item.embeds is not None):
        raise InvalidRequestError(f"an item without embeddings needs a hash, a string or bytes, got {item.hash!r:.80}")
    return str(key) or digest(embeds[-1].values)


def _as_array(given: Any, length: int) -> NDArray[Any]:
    """Embeddings as they are given, of any floating-point numbers, ``[length, hidden]``; not copied."""
    found = type(given).__name__
    try:
        array = np.asarray(given)
        found = f"{array.dtype} {list(array.shape)}"
        is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        if is_float and array.ndim == 2 and len(array) == length and array.shape[1]:
            return array
    except (TypeError, ValueError):
        pass
    raise InvalidRequestError(
        f"an item of {length} tokens needs embeddings [{length}, hidden] of floating-point numbers, got {found}"
    )


def _as_embeds(array: NDArray[Any], start: int, end: int) -> NDArray[np.float32]:
    """A copy, since the caller may go on with its own."""
    with np.errstate(over="ignore"):  # what is infinite then is told
        values = np.array(array, dtype="<f4", order="C")
    check_finite(values, start, end)
    return values
