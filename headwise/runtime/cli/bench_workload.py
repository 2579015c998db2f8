"""Synthetic load: what a benchmark sends, and when. Equal arguments give equal workloads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError

Lengths = Literal["fixed", "uniform", "sharegpt"]

SHAREGPT_SIGMA = {"input": 1.4, "output": 1.0}
"""Sigma of the log-normal lengths called ``sharegpt``: chosen for a tail like that of chat logs, not fitted to any.

The mean is the one asked for. With a mean of 200 tokens, half of the inputs are shorter than 75 tokens and one in
a hundred is longer than 1950.
"""

_FIRST_TOKEN = 256
"""Lower token ids are often special ones, which end or structure a conversation."""


@dataclass(frozen=True)
class Workload:
    """What to send.

    input_tokens:  mean tokens of a request's own part, behind the shared prefix
    output_tokens: mean tokens to generate; the end token is ignored
    lengths:       ``fixed``: the means themselves; ``uniform``: from half to one and a half times the mean;
                   ``sharegpt``: log-normal, see `SHAREGPT_SIGMA`
    prefix_tokens: tokens of the shared prefix; 0 for none
    num_prefixes:  distinct prefixes; each request takes one at random
    max_tokens:    longest sequence; longer draws are cut
    vocab_size:    token ids are drawn below it
    """

    num_requests: int = 100
    input_tokens: int = 200
    output_tokens: int = 64
    lengths: Lengths = "uniform"
    prefix_tokens: int = 0
    num_prefixes: int = 1
    max_tokens: int = 2048
    vocab_size: int = 32000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_tokens", "output_tokens", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens must not be negative, got {self.prefix_tokens}")
        if self.max_tokens < self.prefix_tokens + 2:
            raise ConfigError(
                f"max_tokens {self.max_tokens} leaves no room for input and output behind {self.prefix_tokens} prefix "
                "tokens; raise the one or lower the other"
            )
        if self.vocab_size <= _FIRST_TOKEN:
            raise ConfigError(f"vocab_size must be more than {_FIRST_TOKEN}, got {self.vocab_size}")


@dataclass(frozen=True)
class BenchRequest:
    """One request: ``prompt`` is ``int32 [n]``."""

    prompt: NDArray[np.int32]
    output_tokens: int


def make_requests(workload: Workload) -> list[BenchRequest]:
    """The workload's requests, in the order they are sent."""
    rng = np.random.default_rng(workload.seed)
    prefixes = _tokens(rng, workload, (workload.num_prefixes, workload.prefix_tokens))
    chosen = rng.integers(workload.num_prefixes, size=workload.num_requests)
    room = workload.max_tokens - workload.prefix_tokens
    inputs = np.minimum(_lengths(rng, workload, "input"), room - 1)
    outputs = np.minimum(_lengths(rng, workload, "output"), room - inputs)
    return [
        BenchRequest(np.concatenate([prefixes[prefix], _tokens(rng, workload, (int(n),))]), int(output))
        for prefix, n, output in zip(chosen, inputs, outputs, strict=True)
    ]


def arrival_times(count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Seconds from the start at which ``count`` requests arrive: a Poisson process of ``rate`` a second."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"rate must be a positive number of requests per second, got {rate}")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def _lengths(rng: np.random.Generator, workload: Workload, part: Literal["input", "output"]) -> NDArray[np.int64]:
    mean = workload.input_tokens if part == "input" else workload.output_tokens
    if workload.lengths == "fixed":
        return np.full(workload.num_requests, mean)
    if workload.lengths == "uniform":
        return rng.integers(max(1, mean // 2), mean + mean // 2, size=workload.num_requests, endpoint=True)
    sigma = SHAREGPT_SIGMA[part]
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, workload.num_requests)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _tokens(rng: np.random.Generator, workload: Workload, shape: tuple[int, ...]) -> NDArray[np.int32]:
    return rng.integers(_FIRST_TOKEN, workload.vocab_size, size=shape, dtype=np.int32)
