from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker import sampler
from headwise.runtime.worker.last_sampled import NO_TOKEN
from headwise.runtime.worker.sampler import Draws, filtered, token_logprobs, uniform
from headwise.runtime.worker.sampler import draw as draw_token

VOCAB = 40
draw = np.random.default_rng(0)
PINNED = [
    (0, 0, 0.011546754286331562),
    (7, 123, 0.0025176964123404533),
    (9223372036854775807, 100000, 0.42906495952860124),
]


def sample(logits, params, seeds, positions):
    draws = Draws(params, np.array(seeds, np.uint64), np.array(positions, np.int64))
    return sampler.sample(np.asarray(logits, dtype=np.float32), draws)


@pytest.mark.parametrize(("seed", "position", "expected"), PINNED)
def test_a_seed_and_a_position_give_the_same_number_in_every_release(seed, position, expected) -> None:
    assert uniform(seed, position) == expected


def test_uniforms_are_spread_over_the_unit_interval_for_neighbouring_seeds_and_positions() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert counts.sum() == 10_000
    assert abs(counts - 500).max() < 110  # five standard deviations
    assert len(set(numbers.tolist())) == 10_000


def test_greedy_takes_the_best_token_and_the_first_of_equals() -> None:
    logits = np.zeros((2, VOCAB))
    logits[0, 7] = 1
    tokens = sample(logits, [SamplingParams(temperature=0)] * 2, [0, 0], [1, 1])
    assert tokens.tolist() == [7, 0]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)


@given(params_strategy, st.integers(0, 2**32))
def test_the_filters_keep_what_their_definitions_say(params: SamplingParams, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-6, 6, VOCAB).astype(np.float32)  # with many ties
    kept, weights = filtered(logits, params)
    scaled = logits.astype(np.float64) / params.temperature
    probability = np.exp(scaled - scaled.max())
    order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))
    assert kept.tolist() == sorted(order[: len(kept)])
    assert len(kept) >= 1
    assert len(kept) <= (params.top_k or VOCAB)
    assert (probability[kept] >= params.min_p * (1 - 1e-6)).all()
    passed = [i for i in order[: params.top_k or VOCAB] if probability[i] >= params.min_p * (1 - 1e-6)]
    mass = probability[passed].sum()
    assert probability[kept].sum() - probability[kept].min() < params.top_p * mass + 1e-5
    assert probability[kept].sum() >= params.top_p * mass - 1e-5
    np.testing.assert_allclose(weights, probability[kept], rtol=1e-6)


@settings(max_examples=30)
@given(st.permutations(range(6)))
def test_a_row_draws_the_same_token_in_any_batch(order) -> None:
    logits = np.random.default_rng(3).standard_normal((6, VOCAB))
    params = [SamplingParams(temperature=0.5 + i, top_k=3 * i, top_p=1 - i / 10) for i in range(6)]
    alone = [int(sample(logits[i : i + 1], [params[i]], [i], [i + 9])[0]) for i in range(6)]
    together = sample(logits[list(order)], [params[i] for i in order], list(order), [i + 9 for i in order])
    assert together.tolist() == [alone[i] for i in order]


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    count = 4000
    tokens = sample(np.tile(logits, (count, 1)), [SamplingParams()] * count, [11] * count, range(count))
    observed = np.bincount(tokens, minlength=4)
    expected = count * np.array([0.5, 0.3, 0.15, 0.05])
    assert ((observed - expected) ** 2 / expected).sum() < 25


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    logits = draw.standard_normal((50, VOCAB))
    tokens = sample(logits, [SamplingParams(temperature=temperature)] * 50, range(50), range(50))
    assert tokens.tolist() == logits.argmax(1).tolist()


@given(st.floats(0, 1, exclude_max=True), st.floats(0.01, 1))
def test_a_token_with_a_logit_of_minus_infinity_is_never_drawn(number: float, top_p: float) -> None:
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[[3, 17]] = 1.0, 2.0
    assert draw_token(logits, SamplingParams(top_p=top_p), number) in (3, 17)


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 1 - 2.0**-53])
@given(seed=st.integers(0, 2**32), params=params_strategy)
def test_the_ends_of_the_unit_interval_draw_a_token_that_passed_the_filters(number, seed, params) -> None:
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    logits[[0, -1]] = -np.inf  # the tokens that an index off by one would give
    kept, weights = filtered(logits, params)
    assert draw_token(logits, params, number) in kept[weights > 0]


@pytest.mark.parametrize("spread", [0, 0.01, 3, 300])
def test_the_nucleus_of_a_large_vocabulary_is_the_one_that_a_full_sort_finds(spread: float) -> None:
    logits = (draw.standard_normal(50_000) * spread).astype(np.float32)
    probability = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probability, kind="stable")
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999):
        reached = int(np.argmax(np.cumsum(probability[order]) >= top_p * probability.sum()))
        kept, _ = filtered(logits, SamplingParams(top_p=top_p))
        assert kept.tolist() == sorted(order[: reached + 1].tolist())


def test_logprobs_are_those_of_the_chosen_token_and_of_the_likeliest_ones() -> None:
    logits = draw.standard_normal(VOCAB).astype(np.float32)
    expected = np.log(np.exp(logits) / np.exp(logits).sum())
    told = token_logprobs(logits, 5, 3)
    assert told.chosen == pytest.approx(expected[5], abs=1e-5)
    best = np.argsort(-expected)[:3]
    assert [token for token, _ in told.top] == best.tolist()
    assert [value for _, value in told.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
    assert token_logprobs(logits, 5, 0).top == ()


@pytest.mark.parametrize("vocab", [1, 20, 127, 128, 129, 5000])
@pytest.mark.parametrize("levels", [3, 1 << 20], ids=["many ties", "few ties"])
def test_the_likeliest_tokens_are_in_order_and_of_equals_the_lowest_id_comes_first(vocab: int, levels: int) -> None:
    logits = draw.integers(0, levels, vocab).astype(np.float32)
    expected = np.argsort(-logits, kind="stable")[:20].tolist()
    assert [token for token, _ in token_logprobs(logits, 0, 20).top] == expected


def test_logprobs_keep_their_numbers_where_logits_are_large_or_forbidden() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 500]] = 3e38, 3e38
    told = token_logprobs(logits, 3, 3)
    assert told.chosen == pytest.approx(-np.log(2))
    assert [value for _, value in told.top] == pytest.approx([-np.log(2), -np.log(2), -np.inf])


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_a_row_without_usable_logits_has_no_token_and_the_others_have_theirs(value: float, params) -> None:
    logits = draw.standard_normal((3, VOCAB))
    expected = sample(logits, [params] * 3, [0, 1, 2], [5, 6, 7]).tolist()
    logits[1] = value
    assert sample(logits, [params] * 3, [0, 1, 2], [5, 6, 7]).tolist() == [expected[0], NO_TOKEN, expected[2]]
