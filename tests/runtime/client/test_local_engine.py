"""What is given to an engine in this process is checked like what is given to a client."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_checkpoints import checkpoint

from headwise.errors import ConfigError, InvalidRequestError
from headwise.runtime.client.local_engine import LocalEngine, sampling_of_each
from headwise.runtime.config.engine_config import EngineConfig
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


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pipeline_parallel_size": 2}])
def test_an_engine_of_several_ranks_is_refused_here(ranks: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"are 2 ranks, and this worker is alone, .*: leave them out, or serve by"):
        LocalEngine(EngineConfig(model=str(checkpoint("qwen3")), dtype="float32", kv_cache="1MiB", **ranks))


def test_prompts_that_begin_alike_are_computed_one_after_the_other_wherever_they_stand() -> None:
    """The cache has room for one of the documents."""
    documents = [[2 + number, 3, 4, 5] * 16 for number in range(4)]
    prompts = [[*documents[number % 4], 10 + number, 11] for number in range(12)]
    sizes = {"block_size": 16, "max_model_len": 80, "kv_cache": "288KiB", "host_cache": "0", "max_num_seqs": 1}
    with LocalEngine(EngineConfig(model=str(checkpoint("qwen3")), dtype="float32", **sizes)) as engine:
        results = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
        alone = [engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2))[0] for prompt in prompts]

    assert sum(result.usage.cached_tokens for result in results) == 64 * 8
    assert sum(result.usage.cached_tokens for result in alone) == 0
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
