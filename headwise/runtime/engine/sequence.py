"""One request inside an engine: its tokens and their hashes. How far they are computed, `SequenceTable` knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import extend_hashes
from headwise.prompt_turns import Beside
from headwise.runtime.protocol.request import GenerateRequest

NOTHING_COMPUTED = 1 << 62
"""A place that no token has."""


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    """Out of the batch, but a step in flight may still touch its blocks."""


@dataclass(eq=False)
class Sequence:
    """A request's known tokens: the prompt's, and those sampled so far.

    arrival:       its priority, of which lower ones are served first, and a number: who came first
    turn:          whose is lower is served first within a priority, see `PromptTurns`; of equal ones, who came first
    since:         `PromptTurns.now` when it came
    beside:        prompts of its tenant that were there when it was queued first; None: it was not yet
    lacking:       of its tokens, those that the cache lacked when it was given its turn
    row:           the engine's and the workers' row, while the sequence runs
    cached_tokens: tokens that the cache had when the sequence ran for the first time
    computed_from: the first token that it has computed itself, in any of its runs
    output:        sampled tokens, first those that the request came with
    hashes:        of the full blocks of the known tokens, as far as they were asked for
    ends:          tokens that end it
    prompt_told:   tokens of its prompt of which log-probabilities were told, where they are asked for
    lacks:         embeddings of its first tokens, up to here, were left out: the cache had these tokens, and must have
    weights:       version of those by which its last token was sampled, as was told
    """

    request: GenerateRequest
    hash_seed: bytes
    arrival: tuple[int, int]
    max_length: int
    arrived: float
    phase: Phase = Phase.WAITING
    finished: bool = False
    row: int = -1
    cached_tokens: int = 0
    computed_from: int = NOTHING_COMPUTED
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    output: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    prompt_told: int = 0
    lacks: int = 0
    weights: str = ""
    turn: float = 0.0
    since: float = 0.0
    beside: Beside | None = None
    lacking: int = 0

    @property
    def order(self) -> tuple[int, float, int]:
        """What is lower is served first; no two are equal."""
        return self.arrival[0], self.turn, self.arrival[1]

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        """Whose requests have one part of the engine's time together; empty: nobody's."""
        return self.request.owner

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def kept_tokens(self) -> int:
        """Of its prompt, what the cache is to keep when it has ended; 0: as it comes."""
        retention = self.request.retention
        return 0 if retention is None else min(retention.tokens or self.num_prompt, self.num_prompt)

    @property
    def kept_s(self) -> float:
        """Seconds for which that is kept."""
        return 0.0 if self.request.retention is None else self.request.retention.seconds

    @property
    def num_sampled_here(self) -> int:
        return len(self.output) - len(self.request.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output)

    @property
    def is_prompt_asked(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        return self.request.sampling.prompt_logprobs is not None and self.prompt_told < self.num_prompt

    @property
    def may_have_drafts(self) -> bool:
        """Whether several tokens may be sampled of it at once: nothing is told of each, or changed by those before."""
        sampling = self.request.sampling
        return not sampling.edits_logits and sampling.logprobs is None

    @property
    def servable(self) -> int:
        """How many of its tokens the cache may serve. The last one must be computed, for the next is sampled behind it;
        so must those be behind which the log-probability of a prompt's token is still to be told."""
        return max(0, self.prompt_told - 1) if self.is_prompt_asked else self.num_tokens - 1

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """The known tokens ``[start, stop)``, ``int32``."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        output = self.output[max(0, start - len(prompt)) : stop - len(prompt)]
        return np.concatenate([prompt[start:], np.array(output, dtype=np.int32)])

    def reseed(self, seed: bytes) -> None:
        """Nothing is computed of it any more, and its blocks' hashes start from another seed."""
        self.hash_seed, self.hashes, self.computed_from = seed, [], NOTHING_COMPUTED

    def block_hashes(self, tokens: int, block_size: int) -> list[bytes]:
        """Hashes of the full blocks of the first ``tokens`` known tokens; computed once each."""
        wanted = tokens // block_size
        if len(self.hashes) < wanted:
            new = self.tokens(len(self.hashes) * block_size, wanted * block_size)
            extend_hashes(self.hashes, self.hash_seed, new, block_size, self.request.extra_keys)
        return self.hashes if len(self.hashes) == wanted else self.hashes[:wanted]
