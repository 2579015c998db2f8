"""What matchers and penalties know of an output goes on where the request goes on."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest
from support.reference import sure_answers
from support.small_engine import SMALL

from headwise import Client, SamplingParams
from headwise.actors.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.soak]

CONFIG = replace(SMALL, replicas=2, weights_dtype="float32")
"""Tokens are drawn: where rows are rounded before a product, one in hundreds differs once it is computed anew."""
BEFORE_THE_LOSS = 4
"""Tokens that every stream has by then."""


def test_forms_and_counts_are_kept_across_the_loss_of_an_engine() -> None:
    form, prompt = "[0-9a-f]{40}", sure_answers(20)[0].prompt_ids
    params = [
        SamplingParams(seed=seed, max_tokens=60, guided={"regex": form}, repetition_penalty=1.1, frequency_penalty=0.2)
        for seed in range(4)
    ]
    with (
        Deployment.start(CONFIG) as deployment,
        Client(deployment.client_address, keys=deployment.client_keys) as client,
    ):
        expected = [client.generate(prompt, each).text for each in params]
        streams = [client.stream(prompt, each) for each in params]
        for stream in streams:
            for _ in range(BEFORE_THE_LOSS):
                next(stream)
        assert all(stream.result.finish_reason is None for stream in streams)
        engines = client.stats()["engines"]
        busiest = max(engines, key=lambda name: int(engines[name]["requests"]["running"]))
        os.kill(deployment.actor_pids()[busiest], signal.SIGKILL)
        found = [stream.read().text for stream in streams]
        assert client.stats()["scheduler"]["rerouted"] > 0
    assert found == expected
    assert all(re.fullmatch(form, text) for text in found)
