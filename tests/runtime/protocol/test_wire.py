"""The wire format: what crosses a process is what was sent, and what is not a message is said to be none."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.block_hash import ExtraKey
from headwise.cache_controller.tiers import NamedBlocks
from headwise.errors import InvalidRequestError
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.batch import BatchRequest, KnownTokens, NewSequence, StepEmbeds, StepResult
from headwise.runtime.protocol.copies import CopyReport, SwapIn, SwapOut
from headwise.runtime.protocol.messages import EmbedsPart, Route
from headwise.runtime.protocol.prompt_items import PromptEmbeds
from headwise.runtime.protocol.request import (
    FinishReason,
    GenerateRequest,
    OutputDelta,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)
from headwise.transfer.stats import TransferStats

KNOWN = KnownTokens(*(np.arange(length, dtype=np.int32) for length in (3, 0, 1)), ends_from=7)


def batch(rows: int) -> BatchRequest:
    return BatchRequest(
        step_id=7,
        rows=np.arange(rows, dtype=np.int32),
        starts=np.arange(rows, dtype=np.int32) * 64,
        query_lens=np.ones(rows, dtype=np.int32),
        token_ids=np.full(rows, -1, dtype=np.int32),
        sample=np.ones(rows, dtype=np.bool_),
        table_updates=np.arange(rows * 4, dtype=np.int32).reshape(rows, 4),
        new_sequences=(
            NewSequence(3, "r-1", SamplingParams(stop=("a", "β"), seed=2**63 - 1), 2**64 - 1),
            NewSequence(4, "r-2", SamplingParams(logit_bias={5: -1.5, 9: 2}), 1, KNOWN),
        ),
        cache_swap_metadata=SwapIn(np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)),
        cache_evict_metadata=SwapOut(
            puts=NamedBlocks(np.arange(rows * 2, dtype=np.int32).reshape(rows, 2), (b"h" * 16,) * rows),
            deletes=(b"d" * 16,) * rows,
        ),
        embeds=StepEmbeds(np.arange(rows, dtype=np.int32), np.ones((rows, 3), np.float32)) if rows else None,
    )


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    for f in dataclasses.fields(left):
        a, b = getattr(left, f.name), getattr(right, f.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert np.array_equal(a, b)
        elif dataclasses.is_dataclass(a):
            assert_same(a, b)
        elif isinstance(a, tuple) and a and dataclasses.is_dataclass(a[0]):
            for one, other in zip(a, b, strict=True):
                assert_same(one, other)
        else:
            assert a == b


ITEM = ExtraKey(1, 3, "%")
LATER = ITEM._replace(columns=1, later=2)


@pytest.mark.parametrize("rows", [0, 1, 256])
def test_a_batch_request_survives_byte_for_byte(rows: int) -> None:
    data = wire.encode(batch(rows))
    decoded = wire.decode(data, BatchRequest)
    assert_same(decoded, batch(rows))
    assert wire.encode(decoded) == data


@pytest.mark.parametrize(
    "message",
    [
        StepResult(3, 1, np.array([5, -1], np.int32), {1: TokenLogprobs(-0.5, ((4, -0.5), (9, -2.0)))}, error="rank 1"),
        StepResult(3, 1, np.array([5, -1], np.int32), broken={1: "no numbers"}),
        StepResult(3, 1, np.array([5, -1], np.int32), copies=CopyReport(np.array([4], np.int32))),
        StepResult(
            4, 0, np.empty(0, np.int32), copies=CopyReport(transfers={"load": TransferStats(3, 96, 0.5, 0.25, 1, 2)})
        ),
        GenerateRequest("r", np.arange(5, dtype=np.int32), SamplingParams(), 2, "salt", "", (ITEM,)),
        GenerateRequest(
            "r", np.arange(5, dtype=np.int32), SamplingParams(), embeds=(PromptEmbeds(1, np.ones((2, 3), np.float32)),)
        ),
        Route(1, None, np.arange(5, dtype=np.int32), None, {}, 0, "", extra_keys=(ITEM, LATER)),
        OutputDelta("r", (1, 2), "hé", (TokenLogprobs(-1.0, ()),), FinishReason.STOP, None, Usage(1, 0, 2), Timings(1)),
        OutputDelta("r"),
        OutputDelta("r", prompt_token_ids=(7, 8), prompt_logprobs=(None, TokenLogprobs(-1.0, ((8, -1.0),)))),
        StepResult(3, 0, np.array([-1], np.int32), prompt_logprobs={0: (TokenLogprobs(-1.0, ()),) * 2}),
    ],
)
def test_every_message_comes_back_as_it_was(message: object) -> None:
    assert_same(wire.decode(wire.encode(message)), message)


@pytest.mark.parametrize("columns", [slice(None), slice(None, None, 2)], ids=["whole", "with gaps"])
def test_large_arrays_cross_the_wire_as_small_ones_do(columns: slice) -> None:
    values = np.arange(300 * 512, dtype=np.float32).reshape(300, 512)[:, columns]
    for some in (values, values[:1], values[:0]):
        found = wire.decode(wire.encode(EmbedsPart("r", 1, 2, some)), EmbedsPart)
        np.testing.assert_array_equal(found.values, some)


def test_decoded_arrays_are_views_of_the_message() -> None:
    rows = wire.decode(wire.encode(batch(4))).rows
    assert not rows.flags.owndata
    assert not rows.flags.writeable


@given(st.binary(max_size=300))
def test_random_bytes_raise_one_error(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(data)


@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_batch_is_an_error_or_still_well_typed(cut: int, flip: int, value: int) -> None:
    data = bytearray(wire.encode(batch(3)))
    data[flip % len(data)] = value
    damaged = bytes(data[: len(data) - cut % 3])
    try:
        decoded = wire.decode(damaged, BatchRequest)
    except (wire.WireError, InvalidRequestError):
        return
    assert decoded.rows.dtype == np.int32
    assert decoded.sample.dtype == np.bool_
    assert isinstance(decoded.step_id, int)


def damaged(position: int, value: object) -> bytes:
    version, tag, values = msgpack.unpackb(wire.encode(OutputDelta("r")))
    values[position] = value
    return msgpack.packb([version, tag, values])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (damaged(0, 5), r"OutputDelta\.request_id: must be str, not int"),
        (damaged(1, "x"), r"OutputDelta\.token_ids: must be a list"),
        (damaged(1, [True]), r"OutputDelta\.token_ids: must be int, not bool"),
        (damaged(4, "won"), r"OutputDelta\.finish_reason: must be one of stop"),
        (msgpack.packb([99, "OutputDelta", []]), "protocol version 99"),
        (msgpack.packb([wire.VERSION, "Nothing", []]), "unexpected message 'Nothing'"),
        (msgpack.packb([wire.VERSION, "OutputDelta", []]), "must have 12 fields"),
        (b"", "0 bytes"),
    ],
)
def test_the_error_names_what_is_wrong(data: bytes, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        wire.decode(data)


ROWS = np.ones((2, 3), np.float32)


def forged(embeds: Any, key: str = "cat") -> bytes:
    """A request with one item, as no client of ours would send it."""
    request = GenerateRequest("r", np.arange(5, dtype=np.int32), SamplingParams(), extra_keys=(ITEM,))
    version, tag, values = msgpack.unpackb(wire.encode(request), ext_hook=msgpack.ExtType)
    names = list(GenerateRequest.__dataclass_fields__)
    values[names.index("embeds")], values[names.index("extra_keys")] = [[1, embeds]], [[1, 3, key, 0, -1]]
    return msgpack.packb([version, tag, values], unicode_errors="surrogatepass")


def array_bytes(dtype: str, shape: tuple[int, ...], data: bytes) -> msgpack.ExtType:
    header = struct.pack("<3sB4x", dtype.encode(), len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
    return msgpack.ExtType(1, header + data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (forged(array_bytes("<f4", (2, 3), ROWS.tobytes()), "cat\ud800"), "not a message"),
        (
            forged(array_bytes("<f8", (2, 3), ROWS.astype(np.float64).tobytes())),
            "array of float32 or uint16, not flo",
        ),
        (forged(array_bytes("<i4", (2, 3), ROWS.tobytes())), "must be an array of float32 or uint16, not int32"),
        (forged(array_bytes(">f4", (2, 3), ROWS.tobytes())), "arrays of dtype .* are not sent"),
        (forged(array_bytes("<f4", (2, 10**12), ROWS.tobytes())), "not a message"),
        (forged(array_bytes("<f4", (2**62, 2**62), ROWS.tobytes())), "not a message"),
        (forged(array_bytes("<f4", (0, 2**62), b"")), "not a message"),
        (forged(array_bytes("<f4", (-2, -3), ROWS.tobytes())), "negative"),
        (forged(ROWS.tolist()), "must be an array of float32 or uint16, not list"),
    ],
)
def test_forged_embeddings_and_hashes_are_no_message(data: bytes, says: str) -> None:
    """Nor can a few bytes claim to be many numbers: an array has as many as came."""
    assert wire.decode(forged(array_bytes("<f4", (2, 3), ROWS.tobytes()))).embeds[0].values.shape == (2, 3)
    with pytest.raises(wire.WireError, match=says):
        wire.decode(data)


def test_a_message_of_another_kind_is_refused_where_one_kind_is_expected() -> None:
    with pytest.raises(wire.WireError, match="expected BatchRequest"):
        wire.decode(wire.encode(OutputDelta("r")), BatchRequest)


def test_sampling_parameters_out_of_range_are_named_as_such() -> None:
    version, tag, values = msgpack.unpackb(wire.encode(SamplingParams()))
    values[0] = float("nan")
    with pytest.raises(InvalidRequestError, match="temperature"):
        wire.decode(msgpack.packb([version, tag, values]))


def test_values_that_have_no_wire_form_are_refused_by_the_sender() -> None:
    with pytest.raises(wire.WireError, match="complex"):
        wire.encode(StepResult(0, 0, np.zeros(1, dtype=np.complex64)))


def test_arrays_are_known_by_an_alias_too() -> None:
    """As NumPy's own NDArray is one from 2.5 on, for which Python 3.12 is needed."""
    extensions = pytest.importorskip("typing_extensions")
    number = TypeVar("number", bound=np.generic)
    alias = extensions.TypeAliasType("NDArray", np.ndarray[Any, np.dtype[number]], type_params=(number,))
    _, unpack = wire._converter(alias[np.int32])
    array = np.arange(3, dtype=np.int32)
    assert unpack(array) is array
    with pytest.raises(wire._Mismatch, match="must be an array of int32, not int64"):
        unpack(array.astype(np.int64))
