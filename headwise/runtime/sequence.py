"""One request inside an engine: its tokens, and how far they are scheduled, computed and hashed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import extend_hashes
from headwise.runtime.batch import LAST_SAMPLED
from headwise.runtime.request import GenerateRequest


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    """Out of the batch, but a step in flight may still touch its blocks."""


@dataclass(eq=False)
class Sequence:
    """Tokens of a request, known and to come.

        | prompt | output, known | sampled in flight |
                                 ^ num_tokens        ^ length
        | scheduled into steps ..........| next step |
                                         ^ scheduled

    row:       the engine's and the workers' row, while the sequence runs
    scheduled: tokens whose KV is computed by steps done or in flight
    in_flight: steps that hold this sequence and have not come back
    pending:   tokens that steps in flight will sample
    """

    request: GenerateRequest
    hash_seed: bytes
    order: tuple[int, int]
    max_length: int
    arrived: float
    phase: Phase = Phase.WAITING
    finished: bool = False
    row: int = -1
    scheduled: int = 0
    in_flight: int = 0
    pending: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        prompt = self.request.prompt_token_ids
        self.num_prompt = len(prompt)
        self.num_tokens = len(prompt)
        self._tokens: NDArray[np.int32] = np.empty(min(self.max_length, len(prompt) + 256), dtype=np.int32)
        self._tokens[: len(prompt)] = prompt

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The known tokens, ``int32 [num_tokens]``."""
        return self._tokens[: self.num_tokens]

    @property
    def length(self) -> int:
        """Tokens known or being sampled."""
        return self.num_tokens + self.pending

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to schedule is the token sampled last."""
        return self.length - self.scheduled == 1 and self.length > self.num_prompt

    @property
    def is_complete(self) -> bool:
        """Whether the steps in flight sample its last token: nothing is left to schedule."""
        return self.length >= self.max_length

    def take_inputs(self, count: int, out: NDArray[np.int32]) -> None:
        """Write the next ``count`` input tokens to ``out``; the one not known yet is the worker's last sample."""
        known = min(count, self.num_tokens - self.scheduled)
        out[:known] = self._tokens[self.scheduled : self.scheduled + known]
        out[known:] = LAST_SAMPLED

    def schedule(self, count: int) -> bool:
        """Note that a step takes the next ``count`` tokens; whether it samples: nothing is left behind them."""
        self.scheduled += count
        self.in_flight += 1
        samples = self.scheduled == self.length
        self.pending += samples
        return samples

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            grown = np.empty(min(self.max_length, 2 * self.num_tokens), dtype=np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def block_hashes(self, tokens: int, block_size: int) -> list[bytes]:
        """Hashes of the full blocks of the first ``tokens`` known tokens; computed once each."""
        wanted = tokens // block_size
        if len(self.hashes) < wanted:
            known = self.tokens[: wanted * block_size]
            extend_hashes(self.hashes, self.hash_seed, known, block_size, self.request.extra_keys)
        return self.hashes[:wanted]
