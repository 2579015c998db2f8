"""What is wanted of a row is known from when its sequence comes until another one gets the row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.protocol.batch import BatchRequest, NewSequence
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker.decode_graphs import Scored
from headwise.runtime.worker.last_sampled import HostLastSampled
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.next_tokens import NextTokens

GREEDY = SamplingParams(temperature=0.0)
LIKELIEST, OTHER = 4, 2
"""By the scores, and by those that are found beside them."""


def test_a_row_is_greedy_again_once_a_greedy_sequence_has_it() -> None:
    ops = NumpyOps(np.dtype(np.float32))
    comm, last = SingleRank(), HostLastSampled(2)
    tokens = NextTokens(ops, comm, comm, last, None, LogitEditor(5, None))
    scores = np.eye(5, dtype=np.float32)[[LIKELIEST, LIKELIEST]]
    found = Scored(scores, (np.full(2, OTHER, np.int32), np.ones(2, np.float32)))
    model: Any = SimpleNamespace(config=SimpleNamespace(logit_softcap=0.0), capped=lambda logits: logits)
    rows = np.arange(2, dtype=np.int32)
    batch = BatchRequest(1, rows, rows, rows * 0 + 1, rows, rows >= 0, np.empty((0, 4), np.int32))

    def chosen(*sequences: NewSequence) -> list[int]:
        tokens.open(sequences)
        found_tokens: list[int] = tokens.choose(batch, model, found).tokens.get().tolist()
        return found_tokens

    assert chosen(*(NewSequence(row, f"r{row}", GREEDY, 0) for row in range(2))) == [OTHER, OTHER], "from the graph"
    sampled = SamplingParams(temperature=1e-3)
    assert chosen(NewSequence(1, "drawn", sampled, 0)) == [LIKELIEST, LIKELIEST], "by the scores, for one is drawn"
    assert chosen(NewSequence(1, "greedy", GREEDY, 0)) == [OTHER, OTHER]
    told = SamplingParams(temperature=0.0, logprobs=0)
    assert chosen(NewSequence(0, "told", told, 0)) == [LIKELIEST, LIKELIEST], "log-probabilities are of the scores"
    assert chosen(NewSequence(0, "greedy", GREEDY, 0)) == [OTHER, OTHER]
