"""Requests of random token ids to a deployment, or an engine, and how fast they were answered."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np

from headwise import Client, LocalEngine, SamplingParams
from headwise.runtime.protocol.request import GenerationResult

VOCABULARY = 4096
"""Of the models that these scripts write."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Asked = Client | LocalEngine


def ids(draw: np.random.Generator, count: int) -> list[int]:
    drawn: list[int] = draw.integers(1, VOCABULARY, count).tolist()
    return drawn


def ask(client: Asked, prompts: list[list[int]], answer: int) -> list[list[int]]:
    """What was said, at once, of ``answer`` tokens each."""
    return [result.token_ids for result in _generate(client, prompts, answer)]


def prefill(client: Asked, prompt: list[int], said: list[list[int]]) -> float:
    """Tokens a second of one prompt up to its first token, which goes to ``said``."""
    began = time.perf_counter()
    said += ask(client, [prompt], 1)
    return len(prompt) / (time.perf_counter() - began)


def decode(client: Asked, prompts: list[list[int]], answer: int, said: list[list[int]]) -> float:
    """Tokens a second of all requests behind their first tokens; all tokens go to ``said``."""
    ask(client, prompts, 1)  # from now on they are cached: all begin to decode at once
    results = _generate(client, prompts, answer)
    said += [result.token_ids for result in results]
    return len(prompts) / statistics.mean(result.timings.tpot_s for result in results)


def _generate(client: Asked, prompts: list[list[int]], answer: int) -> list[GenerationResult]:
    results = client.generate(prompts, replace(GREEDY, max_tokens=answer))
    assert isinstance(results, list), "of several prompts"
    return results
