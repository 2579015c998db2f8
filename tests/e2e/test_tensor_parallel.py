"""SmolLM2 on three tensor-parallel workers says what it says on one."""

from __future__ import annotations

import pytest
from reference import answers, assert_same

from headwise.runtime.bootstrap import Deployment
from headwise.runtime.client import Client
from headwise.runtime.config import EngineConfig
from headwise.runtime.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.model]


def test_three_ranks_give_the_reference_tokens() -> None:
    wanted = [answer for answer in answers("smollm2-135m") if len(answer.prompt_ids) <= 800]
    config = EngineConfig(port=0, tp_size=3, kv_cache="64MiB", max_model_len=2048, max_batched_tokens=256)
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with Deployment.start(config) as deployment, Client(deployment.client_address) as client:
        results = client.generate([answer.prompt_ids for answer in wanted], greedy)
    for answer, result in zip(wanted, results, strict=True):
        assert_same(answer, result.token_ids)
