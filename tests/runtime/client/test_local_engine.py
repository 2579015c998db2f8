"""What is given to an engine in this process is checked like what is given to a client."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.errors import InvalidRequestError
from headwise.runtime.client.local_engine import sampling_of_each
from headwise.runtime.protocol.request import SamplingParams

GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=2)


@pytest.mark.parametrize(
    ("given", "each"),
    [
        (None, [SamplingParams()] * 2),
        (GREEDY, [GREEDY] * 2),
        ({"temperature": 0}, [GREEDY] * 2),
        ([GREEDY, HOT], [GREEDY, HOT]),
        ([{"temperature": 0}, None], [GREEDY, SamplingParams()]),
    ],
)
def test_sampling_is_one_for_all_prompts_or_one_each(given: Any, each: list[SamplingParams]) -> None:
    assert sampling_of_each(given, 2) == each


@pytest.mark.parametrize(
    ("given", "why"), [("greedy", "got 'greedy'"), (0, "got 0"), ([GREEDY], "2 prompts came with 1 samplings")]
)
def test_sampling_that_is_none_is_told(given: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        sampling_of_each(given, 2)
