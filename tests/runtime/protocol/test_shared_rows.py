"""Embeddings of steps are read where the engine has them, whatever parts of them a step needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.batch import BatchRequest, StepEmbeds
from headwise.runtime.protocol.prompt_items import PromptEmbeds, as_float32
from headwise.runtime.protocol.shared_rows import NO_VALUES, MemoryProbe, SharedRowReader, can_map, located, moved
from headwise.transfer.shared_buffers import SharedBuffers

NONE = np.zeros(0, np.int32)
EMPTY = BatchRequest(1, NONE, NONE, NONE, NONE, NONE.astype(bool), np.zeros((0, 4), np.int32))


def values(rows: int, width: int, is_half: bool = False, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng([rows, width, seed]).standard_normal((rows, width)).astype(np.float32)
    return to_bits(found) if is_half else found


def read(shared: Any, rows: int) -> np.ndarray:
    """As a worker gets them, behind the wire."""
    batch = replace(EMPTY, embeds=StepEmbeds(np.arange(rows, dtype=np.int32), NO_VALUES, shared))
    found = SharedRowReader().resolved(wire.decode(wire.encode(batch), BatchRequest)).embeds
    assert found is not None
    assert not found.shared
    assert found.rows.tolist() == list(range(rows))
    return found.values


def test_items_that_touch_are_one_run_that_is_not_copied() -> None:
    buffers = SharedBuffers()
    given_ = [PromptEmbeds(3 * at, values(3, 4, is_half=True, seed=at)) for at in range(4)]
    kept = moved(buffers, given_)
    assert [each.start for each in kept] == [0, 3, 6, 9]
    assert len(buffers) == 1
    shared = located(buffers, [each.values for each in kept])
    assert shared is not None
    assert [(each.rows, each.start) for each in shared] == [(12, 0)]
    np.testing.assert_array_equal(read(shared, 12), np.concatenate([each.values for each in given_]))
    assert moved(buffers, kept) == kept  # they are there already


def test_others_are_runs_of_their_own_and_of_two_kinds_float32() -> None:
    buffers = SharedBuffers()
    half, whole = values(3, 5, is_half=True), values(2, 5)
    kept = moved(buffers, [PromptEmbeds(0, half), PromptEmbeds(9, whole)])
    (other,) = moved(buffers, [PromptEmbeds(0, values(4, 5, seed=1))])
    parts = [kept[0].values[1:], kept[1].values, other.values[2:]]
    shared = located(buffers, parts)
    assert shared is not None
    assert [each.rows for each in shared] == [2, 2, 2]
    expected = np.concatenate([as_float32(part) for part in parts])
    np.testing.assert_array_equal(read(shared, 6), expected)


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6), st.data())
def test_any_rows_of_any_items_are_read_as_they_are(forms: list[tuple[int, bool]], data: st.DataObject) -> None:
    buffers = SharedBuffers()
    items = [PromptEmbeds(at, values(rows, 3, is_half, at)) for at, (rows, is_half) in enumerate(forms)]
    kept = moved(buffers, items)
    parts, expected = [], []
    for before, each in zip(items, kept, strict=True):
        first = data.draw(st.integers(0, len(each.values)))
        last = data.draw(st.integers(first, len(each.values)))
        if first < last:
            parts.append(each.values[first:last])
            expected.append(before.values[first:last])
    if not parts:
        return
    shared = located(buffers, parts)
    assert shared is not None
    are_half = all(part.dtype == np.uint16 for part in expected)
    whole = np.concatenate(expected if are_half else [as_float32(part) for part in expected])
    np.testing.assert_array_equal(read(shared, len(whole)), whole)


def test_what_lies_in_no_buffer_is_not_located_and_steps_without_embeddings_stay_as_they_are() -> None:
    buffers = SharedBuffers()
    (kept,) = moved(buffers, [PromptEmbeds(0, values(2, 3))])
    assert located(buffers, [kept.values, values(2, 3)]) is None
    assert moved(buffers, ()) == ()
    sent = replace(EMPTY, embeds=StepEmbeds(np.arange(2, dtype=np.int32), values(2, 3)))
    for batch in (EMPTY, sent):
        assert SharedRowReader().resolved(batch) is batch


def test_a_worker_lets_go_of_what_the_engine_has_let_go_of() -> None:
    buffers, reader = SharedBuffers(), SharedRowReader()
    kept = moved(buffers, [PromptEmbeds(0, values(2, 3))])
    shared = located(buffers, [kept[0].values])
    assert shared is not None
    step = replace(EMPTY, embeds=StepEmbeds(np.arange(2, dtype=np.int32), NO_VALUES, shared))
    found = reader.resolved(step).embeds
    assert len(reader._mapped) == 1
    del kept
    assert len(buffers) == 0
    reader.sweep()
    assert len(reader._mapped) == 0
    assert found is not None
    np.testing.assert_array_equal(found.values, values(2, 3))
    with pytest.raises(OSError, match=r"No such|another one"):
        reader.resolved(step)


def test_a_worker_finds_out_whether_it_can_map(tmp_path: Path) -> None:
    socket = tmp_path / "steps"
    assert not can_map(socket)
    probe = MemoryProbe(socket)
    assert can_map(socket)
    file = tmp_path / "steps.memory"
    for data in (b"", b"\x93\x01", b"\x93\x01\x02\xa1x", b"\xc0", b"\x91\x01"):
        file.write_bytes(data)
        assert not can_map(socket)
    probe.close()
    assert not file.exists()
    probe.close()
