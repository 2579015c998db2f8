from __future__ import annotations

import math

import numpy as np
import pytest

from headwise.errors import InvalidRequestError
from headwise.runtime.request import SamplingParams, as_token_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a number in \[0, 100\], got -0.1"),
        ({"temperature": math.nan}, "temperature must be .* got nan"),
        ({"temperature": "hot"}, "temperature must be .* got 'hot'"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0.0"),
        ({"top_p": math.inf}, "top_p must be"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"top_k": -1}, "top_k must be an integer"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"stop": ("",)}, "a stop string must be a non-empty string"),
        ({"stop": "x" * 10_000_000}, "a stop string has 10000000 characters; at most 1024 are allowed"),
        ({"stop": ["a"] * 17}, "17 stop strings were given; at most 16"),
        ({"stop_token_ids": (-3,)}, "stop_token_ids must be an integer"),
        ({"temprature": 1}, "unknown sampling parameter temprature; known are"),
    ],
)
def test_bad_sampling_values_are_refused_by_name(values, message) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams.from_wire(values)


def test_sampling_parameters_survive_the_wire() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), seed=7, stop_token_ids=(3,))
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [[1], [2]], [-1], [2**31], [None], 7])
def test_token_ids_must_be_a_flat_list_of_integers(tokens) -> None:
    with pytest.raises(InvalidRequestError, match="one flat list of integers"):
        as_token_ids(tokens)


def test_token_ids_become_int32() -> None:
    assert as_token_ids(np.array([1, 2], dtype=np.int64)).dtype == np.int32
    assert len(as_token_ids([])) == 0
