"""Prefill in pieces: what is padded, what is recorded, and what attention is asked between the pieces."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu.emulated_gpu import FixedUpload

from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.runtime.worker.padding import all_sizes
from headwise.runtime.worker.prefill_graphs import (
    ENQUEUED_S,
    SHARE,
    UNKNOWN_TOKENS,
    PrefillGraphs,
    StepGraphs,
    padded_tokens,
    worthwhile_tokens,
)


@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 16), (17, 24), (33, 48), (129, 192), (256, 256), (257, 320), (513, 640), (1000, 1024)]
)
def test_steps_are_padded_to_few_sizes(tokens: int, size: int) -> None:
    assert padded_tokens(tokens) == size


def test_sizes_are_few_and_padding_of_large_steps_is_a_quarter_at_most() -> None:
    assert len(all_sizes(padded_tokens, 1024)) == 17
    assert max(padded_tokens(tokens) / tokens for tokens in range(257, 8193)) < 1.25


H100 = 989e12 / 2
"""Products a second."""
MATRICES = {"Qwen3-0.6B": (28, 15.7e6), "Llama-3.2-1B": (16, 60.8e6), "Llama-3.1-8B": (32, 218.1e6)}
"""Layers, and numbers of a layer's matrices."""


@pytest.mark.parametrize(("name", "most"), [("Qwen3-0.6B", 4096), ("Llama-3.2-1B", 1024), ("Llama-3.1-8B", 320)])
def test_steps_are_graphs_for_as_long_as_the_host_is_the_slower_one(name: str, most: int) -> None:
    layers, each = MATRICES[name]
    assert worthwhile_tokens(layers * each, layers, H100) == most
    of_layer = [each * tokens / (SHARE * H100) for tokens in (most, padded_tokens(most + 1))]
    assert of_layer[0] <= ENQUEUED_S < of_layer[1]


def test_a_faster_card_or_a_rank_with_less_to_do_has_larger_graphs_and_no_card_fewer_than_small_steps() -> None:
    layers, each = MATRICES["Llama-3.1-8B"]
    chosen = [worthwhile_tokens(layers * each / ranks, layers, H100) for ranks in (1, 2, 4, 8)]
    assert chosen == [320, 640, 1280, 2560]
    assert worthwhile_tokens(layers * each, layers, H100 / 100) == 256
    assert worthwhile_tokens(layers * each, layers, 0.0) == UNKNOWN_TOKENS


@dataclass(frozen=True)
class Projected:
    """As variants project it: arrays and numbers, within a tuple."""

    numbers: np.ndarray
    eps: float


class Attention:
    """As much of `CachedAttention` as recording needs."""

    def result_of(self, *projected: Any) -> np.ndarray:
        return np.full_like(projected[0], -1)


class Model:
    """Adds up, over three layers, its input and what attention says. The last one keeps nothing."""

    config = SimpleNamespace(decoder_layers=3, draft_layers=0)

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, attention: Any, wanted: Any = None, stream: Any = None
    ) -> np.ndarray:
        assert stream is None
        x = tokens * 1000 + positions
        x = x + attention(0, x, (Projected(x, 0.5),), None)
        seen = attention(1, x, (Projected(x, 0.5),), None, wanted=wanted)
        if wanted is not None:
            x, attention = x[wanted], attention.ending_at(wanted)
        x = x + seen
        x = x + attention(2, x, (Projected(x, 0.5),), None)
        return np.append(x, attention.tokens())


class Ops:
    """Records by noting what there is. One for all, fails from a size on, if at all."""

    def __init__(self, fails_below: int = 0) -> None:
        self.fails_below, self.borrows, self.rows, self.uploads = fails_below, 0, [], 0

    def step_upload(self, capacity: int) -> FixedUpload:
        self.uploads += 1
        return FixedUpload(capacity)

    def kernel_array(self, array: np.ndarray) -> np.ndarray:
        return array

    from_kernel_array = upload = kernel_array

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def empty_like(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, -1, array.dtype)

    def borrowed(self, array: np.ndarray) -> np.ndarray:
        self.borrows += 1
        return array

    def capture_pieces(self, work: Any) -> Any:
        self.rows.append(len(work(lambda: None)[0]) - 1)
        if self.rows[-1] < self.fails_below:
            raise RuntimeError("out of memory")

        def replay(between: Any) -> Any:
            numbers = iter(range(3))

            def cut() -> None:
                if not between(next(numbers)):
                    raise StopIteration

            try:
                return work(cut)
            except StopIteration:
                return ()

        return replay


def recorded(ops: Ops, most: int = 48, sequences: int = 33, **more: Any) -> PrefillGraphs:
    graphs = PrefillGraphs(ops, most, sequences, layers=3, **more)
    graphs.record(Model(), Attention())
    return graphs


def test_attention_fills_what_the_next_piece_reads_and_padding_begins_behind_the_last_sequence() -> None:
    ops, found = Ops(), []
    every = recorded(ops)
    assert (ops.rows, every.sizes, every.captured, ops.uploads) == ([48, 32, 24, 16], [16, 24, 32, 48], 16, 1)

    def attend(batch: str, layer: int, projected: Any, out: np.ndarray, wanted: Any = None) -> None:
        found.append((batch, layer, projected[1][0].eps, projected[2], len(out)))
        assert wanted is None
        out[:20] = projected[1][0].numbers[:20]

    for first in (5, 6):
        graphs = every.of(20)
        assert not graphs.wanted, "as many sequences as there may be would take as many rows"
        told = uploaded(graphs, first, np.array([12, 19]))
        assert [array.tolist() for array in told[2:]] == [[0, 13, 20], [13, 9], [2, 0]]
        assert graphs.forward(attend, "step", 20).tolist() == [8 * (1001 * first + 1)] * 20
        assert len(graphs.forward(attend, "step", 20, np.array([12, 19]))) == 2
        assert graphs._replay(lambda number: True)[0][20:].tolist() == [-3] * 4 + [20]
    assert found == [("step", layer, 0.5, None, 24) for layer in (0, 1, 2)] * 4
    assert ops.borrows > 0


def uploaded(graphs: StepGraphs, first: int, wanted: np.ndarray | None) -> tuple[np.ndarray, ...]:
    begins, tokens = np.array([0, 13, 20], np.int32), np.full(20, first, np.int32)
    lens, rows = np.array([13, 9], np.int32), np.array([2, 0], np.int32)
    return graphs.upload(tokens, tokens + 1, begins, lens, rows, wanted=wanted)


def test_steps_may_say_which_sequences_follow_others_and_then_there_is_room_for_more() -> None:
    ops = Ops()
    graphs = recorded(ops, sequences=1, followers=2).of(20)
    tokens, ends = np.arange(3, dtype=np.int32), np.arange(1, 4, dtype=np.int32)
    given, follows = (tokens, tokens, np.arange(4, dtype=np.int32), ends, tokens), np.array([0, 1, 2], np.int32)
    assert [array.tolist() for array in graphs.upload(*given, follows)[2:]] == [
        [0, 1, 2, 3],
        [1, 2, 3],
        [0, 1, 2],
        [0, 1, 2],
    ]
    assert len(graphs.upload(*given)) == 5
    assert graphs.wanted == 16, "of the others none is"


def test_behind_the_last_layer_that_keeps_anything_pieces_are_of_the_rows_that_may_be_wanted() -> None:
    ops = Ops()
    every = recorded(ops, sequences=3)
    assert ops.rows == [16] * 4
    assert [graphs.wanted for graphs in every._recorded] == [0, 16, 16, 16]
    graphs = every.of(20)

    def attend(batch: Any, layer: int, projected: Any, out: Any = None, wanted: Any = None) -> Any:
        found.append((layer, batch.max_query_len, len(projected[0]), None if out is None else len(out)))
        if wanted is not None:
            return np.full(len(wanted), 7)
        out[:2] = 7
        return out

    lengths = HostLengths(np.array([0, 13, 20], np.int32), np.array([13, 9], np.int32))
    step = AttentionBatch(lengths.cu_seqlens_q, lengths.seq_lens, np.zeros((2, 1), np.int32), 1, 13, lengths)
    for wanted in ([12, 19], [19], []):
        found: list[tuple[int, int, int, int | None]] = []
        rows = np.array(wanted, np.int64)
        tokens = uploaded(graphs, 5, rows)[0]
        tokens += np.arange(20, dtype=np.int32)
        hidden = graphs.forward(attend, step, 20, rows)
        assert found[:2] == [(0, 13, 24, 24), (1, 13, 24, None)]
        if not wanted:
            assert hidden is None, "pieces behind do not run"
            assert len(found) == 2
            continue
        assert found[2:] == [(2, 1, 16, 16)], "each is a sequence's one query"
        first_seen = [7 if row < 2 else -1 for row in wanted]
        assert hidden.tolist() == [
            5000 + 1000 * row + 6 + seen + 14 for row, seen in zip(wanted, first_seen, strict=True)
        ]
        assert graphs._replay(lambda number: True)[0][-1] == len(wanted), "padding begins behind them"


@pytest.mark.parametrize("other", [False, True])
def test_what_cannot_be_recorded_on_every_rank_runs_without(caplog: pytest.LogCaptureFixture, other: bool) -> None:
    votes: list[bool] = []

    def all_ranks(is_so: bool) -> bool:
        votes.append(is_so)
        return is_so and not (other and len(votes) == 3)

    with caplog.at_level(logging.WARNING):
        every = recorded(Ops(0 if other else 32), all_ranks=all_ranks)
    assert every.sizes == [32, 48]
    assert votes == [True, True, other]
    assert every.of(24) is None, "the next size would be mostly padding"
    assert every.of(49) is None
    assert every.of(25) is not None
    why = "they cannot be recorded on another rank" if other else "out of memory"
    assert caplog.messages == [f"prefill of 24 tokens and less runs without CUDA graphs: {why}"]
