"""What runtimes are asked to serve, and the rates that follow from when their tokens came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from prompts import tokens

from runtimes.process import Served

Prompts = list[list[int]]


@dataclass(frozen=True)
class Scenario:
    """Requests that are sent at once.

    key:    in the report
    rate:   tokens a second, of what was served and the tokens of a prompt
    repeat: all rounds have the same prompts, whose keys and values are cached before the clock starts. Else each
            round has new ones, of which nothing is cached.
    shared: tokens that the prompts of a round begin with in common
    """

    key: str
    what: str
    requests: int
    input_tokens: int
    output_tokens: int
    rate: Callable[[Sequence[Served], int], float]
    repeat: bool = False
    shared: int = 0

    def prompts(self, round_: int) -> Prompts:
        """Random, and the same in each runtime."""
        seed = [len(self.key), self.requests, self.input_tokens, 0 if self.repeat else 1 + round_]
        rng = np.random.default_rng(seed)
        shared = tokens(rng, self.shared)
        return [shared + tokens(rng, self.input_tokens - self.shared) for _ in range(self.requests)]


def prefill_rate(served: Sequence[Served], input_tokens: int) -> float:
    """Prompt tokens over the time until every request has its first token."""
    return len(served) * input_tokens / max(one.marks[0][0] for one in served)


def output_rate(served: Sequence[Served], input_tokens: int) -> float:
    """Output tokens over the time until all have come."""
    return sum(one.count for one in served) / max(one.marks[-1][0] for one in served)


def decode_rate(served: Sequence[Served], input_tokens: int) -> float:
    """Output tokens while all requests decode, over that time: from the last first token to the first last one.

    A request's tokens are counted in proportion where a step's tokens do not come at the same instant.
    """
    begin, end = max(one.marks[0][0] for one in served), min(one.marks[-1][0] for one in served)
    if end <= begin:
        raise SystemExit("a request ended before another one began: the scenario needs more output tokens")
    tokens = 0.0
    for one in served:
        seconds, counts = zip(*one.marks, strict=True)
        tokens += np.interp(end, seconds, counts) - np.interp(begin, seconds, counts)
    return float(tokens) / (end - begin)


def scenarios(quick: bool = False, smoke: bool = False) -> list[Scenario]:
    """The four that all runtimes serve: with shorter outputs if ``quick``, tiny if ``smoke``."""
    few, many, share = (2, 4, 16) if smoke else (8, 16, 1)
    decode, batch, long = (8, 4, 8) if smoke else (48, 64, 24) if quick else (128, 64, 64)
    prompt, short, context = 1800 // share, 256 // share, 1500 // share
    return [
        Scenario("decode1", "decode, batch 1", 1, 32, decode, decode_rate),
        Scenario("prefill", f"prefill of {prompt:,} tokens", 1, prompt, 1, prefill_rate),
        Scenario("batch16", f"{many} requests of {short} in, {batch} out: output", many, short, batch, output_rate),
        Scenario(
            "long_decode", f"decode, {few} requests at {context:,} tokens", few, context, long, decode_rate, repeat=True
        ),
    ]


def long_scenarios(tokens: int, output_tokens: int) -> list[Scenario]:
    """One long sequence."""
    return [
        Scenario("prefill", f"prefill of {tokens:,} tokens", 1, tokens, 1, prefill_rate),
        Scenario("decode", f"decode at {tokens:,} tokens", 1, tokens, output_tokens, decode_rate, repeat=True),
    ]
