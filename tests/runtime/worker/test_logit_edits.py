"""Biases, penalties and forbidden tokens, against a plain reading of their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.engine.introduction import introduction
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.batch import NewSequence
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.sampler import Draws, sample

VOCAB = 40
END = 9
NO_GUIDES = Guides(lambda: pytest.fail("no output has a form here"))

tokens_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params_strategy = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    min_tokens=st.integers(0, 8),
)


def introduced(row: int, prompt: list[int], output: list[int], params: SamplingParams) -> NewSequence:
    """As the engine tells of it when it gives it a row."""
    request = GenerateRequest(f"r{row}", np.array(prompt, np.int32), params)
    sequence = Sequence(request, b"", (0, row), 100, 0.0, row=row, output=list(output), ends=frozenset({END}))
    return introduction(sequence)


def expected(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """Token by token, as the definitions say."""
    edited = logits.astype(np.float64)
    for token in range(VOCAB):
        edited[token] += params.logit_bias.get(token, 0.0)
        if token == END and len(output) < params.min_tokens:
            edited[token] = -np.inf
        if token in prompt or token in output:
            by = params.repetition_penalty
            edited[token] = edited[token] / by if edited[token] > 0 else edited[token] * by
        edited[token] -= params.frequency_penalty * output.count(token)
        edited[token] -= params.presence_penalty if token in output else 0
    return edited


def edited(editor: LogitEditor, logits: np.ndarray, lengths: list[int]) -> np.ndarray:
    """The logits of rows 0, 1, ... whose sequences have so many tokens."""
    logits = logits.copy()
    edits = editor.edits(np.arange(len(logits), dtype=np.int32), np.array(lengths))
    if edits is not None:
        edits.apply(logits)
    return logits


@settings(max_examples=60)
@given(st.lists(st.tuples(tokens_strategy, tokens_strategy, params_strategy), min_size=1, max_size=4), st.randoms())
def test_logits_are_what_the_definitions_say_whatever_was_sampled_here_and_what_elsewhere(sequences, random) -> None:
    logits = np.random.default_rng(random.randrange(99)).standard_normal((len(sequences), VOCAB)).astype(np.float32) * 3
    editor = LogitEditor(VOCAB, NO_GUIDES)
    for row, (prompt, output, params) in enumerate(sequences):
        known = random.randint(0, len(output))  # what it had when it got its row; the rest is sampled on it
        editor.open([introduced(row, [1, *prompt], output[:known], params)])
        for token in output[known:]:
            editor.sampled(np.array([row], np.int32), np.array([token], np.int32))
    found = edited(editor, logits, [1 + len(prompt) + len(output) for prompt, output, _ in sequences])
    for row, (prompt, output, params) in enumerate(sequences):
        np.testing.assert_allclose(
            found[row], expected(logits[row], [1, *prompt], output, params), rtol=1e-5, atol=1e-5
        )


def test_a_row_that_changes_hands_forgets_what_was_sampled_on_it() -> None:
    logits = np.ones((1, VOCAB), np.float32)
    params = SamplingParams(presence_penalty=1.0)
    editor = LogitEditor(VOCAB, NO_GUIDES)
    editor.open([introduced(0, [1], [], params)])
    editor.sampled(np.array([0], np.int32), np.array([5], np.int32))
    assert edited(editor, logits, [2])[0, 5] == 0
    editor.open([introduced(0, [1], [], params)])
    assert edited(editor, logits, [1])[0, 5] == 1
    editor.open([introduced(0, [1], [], SamplingParams())])
    assert editor.edits(np.array([0], np.int32), np.array([1])) is None


def test_many_sampled_tokens_are_all_counted() -> None:
    editor = LogitEditor(5000, NO_GUIDES)
    editor.open([introduced(0, [1], [], SamplingParams(frequency_penalty=1.0))])
    for token in [*range(1000), *range(500)]:
        editor.sampled(np.array([0], np.int32), np.array([token], np.int32))
    edits = editor.edits(np.array([0], np.int32), np.array([1501]))
    assert edits is not None
    logits = np.zeros((1, 5000), np.float32)
    edits.apply(logits)
    assert logits[0].tolist() == [-2.0] * 500 + [-1.0] * 500 + [0.0] * 4000


def test_a_token_that_no_row_has_is_not_counted() -> None:
    editor = LogitEditor(VOCAB, NO_GUIDES)
    editor.open([introduced(0, [1], [], SamplingParams(frequency_penalty=1.0))])
    editor.sampled(np.array([0], np.int32), np.array([-1], np.int32))
    assert edited(editor, np.zeros((1, VOCAB), np.float32), [1]).tolist() == [[0.0] * VOCAB]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.6},
        {"repetition_penalty": 1.4},
        {"logit_bias": {2: 1.5, 3: -2.0}},
        {"min_tokens": 9},
        {"min_p": 0.2},
        {"presence_penalty": -1, "frequency_penalty": 0.3, "repetition_penalty": 0.8, "logit_bias": {4: 1}, "top_k": 7},
        {"frequency_penalty": 0.4, "temperature": 0.7, "top_p": 0.8},
    ],
)
def test_frequencies_follow_the_distribution_that_the_definitions_give(params: dict[str, Any]) -> None:
    """Of 4,000 draws, by chi square over the tokens that can be drawn."""
    vocab, count, prompt, output = 12, 4000, [1, 2, 2, 5], [3, 3, 3, 4, 5]
    sampling = SamplingParams(**params)
    logits = np.random.default_rng(4).standard_normal(VOCAB).astype(np.float32)
    logits[vocab:] = -np.inf
    editor = LogitEditor(VOCAB, NO_GUIDES)
    editor.open([introduced(0, prompt, output, sampling)])
    rows = np.zeros(count, np.int32)  # one sequence drawn many times, at other positions
    draws = Draws([sampling] * count, np.full(count, 11, np.uint64), np.arange(count))
    edits = editor.edits(rows, np.full(count, len(prompt) + len(output)))
    tokens = sample(np.tile(logits, (count, 1)), draws, edits)
    probability = filtered_probability(expected(logits, prompt, output, sampling), sampling)
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[probability == 0].sum() == 0
    likely = probability > 0
    wanted = count * probability[likely]
    assert ((observed[likely] - wanted) ** 2 / wanted).sum() < 40  # 11 degrees of freedom: 1 in 30,000


def filtered_probability(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, min-p and top-p by a full sort."""
    probability = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-probability, kind="stable")
    if params.top_k:
        probability[order[params.top_k :]] = 0
    probability[probability < params.min_p] = 0
    before = np.cumsum(probability[order]) - probability[order]
    probability[order[before >= params.top_p * probability.sum()]] = 0
    return probability / probability.sum()
