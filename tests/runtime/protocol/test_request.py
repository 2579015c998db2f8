from __future__ import annotations

import math
from types import NoneType

import numpy as np
import pytest

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams, as_token_ids


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
        ({"stop": ["ok", "\ud800"]}, "a stop string is no valid Unicode: character 0 is half of a surrogate pair"),
        ({"stop": ("",)}, "a stop string must be a non-empty string"),
        ({"stop": "x" * 10_000_000}, "a stop string has 10000000 characters; at most 1024 are allowed"),
        ({"stop": ["a"] * 17}, "17 stop strings were given; at most 16"),
        ({"stop_token_ids": (-3,)}, "stop_token_ids must be an integer"),
        ({"stop_token_ids": [1] * 1025}, "1025 stop token ids were given; at most 1024"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"ignore_eos": None}, "ignore_eos must be True or False, got None"),
        ({"temperature": np.array([1.0])}, "temperature must be a number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"max_tokens": np.bool_(True)}, "max_tokens must be an integer"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be a number in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be a number in \[0.01, 100\], got 0"),
        ({"logit_bias": [(1, 2)]}, "logit_bias must be a mapping of token ids to numbers"),
        ({"logit_bias": {1: 101}}, r"logit_bias of token 1 must be a number in \[-100, 100\], got 101"),
        ({"logit_bias": {"one": 1}}, "a token id in logit_bias must be an integer .* got 'one'"),
        ({"logit_bias": {-1: 1}}, "a token id in logit_bias must be an integer"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias names 1025 tokens; at most 1024 are allowed"),
        ({"min_tokens": -1}, "min_tokens must be an integer from 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4"),
        ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
        ({"guided": "json"}, "guided must be a mapping with one of json_schema, json_object, regex, choice, grammar"),
        ({"guided": {"jsn": 1}}, "guided must be a mapping with one of"),
        ({"guided": {}}, "guided must have one of .*; it has none"),
        ({"guided": {"regex": "a", "choice": ["b"]}}, "it has regex and choice"),
        ({"guided": {"regex": ""}}, "regex must be a non-empty string, got ''"),
        ({"guided": {"regex": "a" * 70_000}}, "regex has 70000 bytes; at most 65536 are allowed"),
        ({"guided": {"regex": "\ud800"}}, "regex is no valid Unicode"),
        ({"guided": {"choice": "yes"}}, "choice must be a list, got 'yes'"),
        ({"guided": {"choice": [1]}}, "a choice must be a non-empty string, got 1"),
        ({"guided": {"choice": ["a"] * 1025}}, "1025 choices were given; at most 1024"),
        ({"guided": {"json_schema": {"a": {1, 2}}}}, "json_schema is no plain JSON"),
        ({"guided": {"json_schema": {"minimum": math.nan}}}, "json_schema is no plain JSON"),
        ({"guided": {"json_object": True}, "ignore_eos": True}, "guided output ends where its form does"),
        ({"fit_max_tokens": 2}, "fit_max_tokens must be"),
        ({"shown_tokens": [""]}, "a shown token must be a string of 1 to 1024 characters"),
        ({"shown_tokens": ["a"] * 33}, "33 tokens were given; at most 32"),
        ({5: 1, "temprature": 1}, "unknown sampling parameter 5, temprature"),
        ({"temprature": 1}, "unknown sampling parameter temprature; known are"),
    ],
)
def test_bad_sampling_values_are_refused_by_name(values, message) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams.from_wire(values)


def test_sampling_parameters_survive_the_wire() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), seed=7, stop_token_ids=(3,), shown_tokens=("<a>",))
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_numpys_numbers_become_plain_ones() -> None:
    params = SamplingParams(
        logit_bias={np.int64(7): np.float32(0.5), "3": 1}, min_tokens=np.int32(2), presence_penalty=np.float64(1)
    )
    assert params.logit_bias == {3: 1.0, 7: 0.5}
    assert [type(value) for pair in params.logit_bias.items() for value in pair] == [int, float] * 2
    assert list(params.logit_bias) == [3, 7], "equal parameters have equal bytes"
    assert hash(params) == hash(SamplingParams.from_wire(params.to_wire()))


def test_several_samples_have_seeds_of_their_own_the_same_in_every_release() -> None:
    samples = SamplingParams(n=3, seed=7).samples()
    assert [sample.seed for sample in samples] == [7, 3400587460537411945, 6627976899651290509]
    assert [sample.n for sample in samples] == [1, 1, 1]
    assert [sample.seed for sample in SamplingParams(n=2).samples()] == [None, None]


@pytest.mark.parametrize(
    ("values", "is_greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0, "logprobs": 3, "stop": "x"}, True),
        ({"temperature": 0.1}, False),
        ({"temperature": 0, "presence_penalty": 0.1}, False),
        ({"temperature": 0, "logit_bias": {1: 1}}, False),
        ({"temperature": 0, "min_tokens": 1}, False),
    ],
)
def test_greedy_is_what_takes_the_models_own_likeliest_token(values, is_greedy) -> None:
    assert SamplingParams(**values).greedy is is_greedy


def test_a_form_survives_the_wire() -> None:
    for form in ({"json_schema": {"type": "integer"}}, {"choice": ["a", "b"]}, {"json_object": np.bool_(True)}):
        params = SamplingParams(guided=form)
        assert SamplingParams.from_wire(params.to_wire()) == params
        request = GenerateRequest("r", as_token_ids([1]), params)
        assert wire.decode(wire.encode(request)).sampling == params
    assert SamplingParams(guided={"json_schema": '{"type":"integer"}'}) == SamplingParams(
        guided={"json_schema": {"type": "integer"}}
    )


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [[1], [2]], [-1], [2**31], [None], 7])
def test_token_ids_must_be_a_flat_list_of_integers(tokens) -> None:
    with pytest.raises(InvalidRequestError, match="one flat list of integers"):
        as_token_ids(tokens)


def test_token_ids_become_int32() -> None:
    assert as_token_ids(np.array([1, 2], dtype=np.int64)).dtype == np.int32
    assert len(as_token_ids([])) == 0


def test_numpy_s_numbers_are_numbers_and_cross_the_wire_as_python_s() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5), seed=np.uint64(7), logprobs=np.int8(1),
        max_tokens=np.int32(9), stop=[np.str_("end")], stop_token_ids=np.array([1, 2]), ignore_eos=np.bool_(True),
    )  # fmt: skip
    request = GenerateRequest("r", as_token_ids([1]), params)
    assert wire.decode(wire.encode(request)).sampling == params
    assert params == SamplingParams(0.5, 3, 0.5, 0.0, 7, 9, ("end",), (1, 2), 1, True)
    assert {type(value) for value in params.to_wire().values()} == {float, int, bool, tuple, dict, NoneType}
    assert {type(value) for value in (*params.stop, *params.stop_token_ids)} == {str, int}


@pytest.mark.parametrize("sampling", ["greedy", 0.5, ["temperature", 0.0], SamplingParams])
def test_sampling_that_is_neither_parameters_nor_a_mapping_is_refused(sampling: object) -> None:
    with pytest.raises(InvalidRequestError, match="sampling must be SamplingParams or a mapping such as"):
        SamplingParams.of(sampling)


def test_keywords_come_before_the_sampling_they_are_given_with() -> None:
    assert SamplingParams.of(SamplingParams(0.5, top_k=3), {"top_k": 4}) == SamplingParams(0.5, top_k=4)
    assert SamplingParams.of(None) == SamplingParams()
