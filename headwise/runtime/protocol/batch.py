"""What the engine sends to its workers for one step, and what they send back.

Both are columns of plain arrays: a step of 256 sequences costs a handful of buffers, not 256 objects, and
survives a process boundary byte for byte (msgpack, see `wire`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.copies import NO_REPORT, NOTHING_IN, NOTHING_OUT, CopyReport, SwapIn, SwapOut
from headwise.runtime.protocol.request import SamplingParams, TokenLogprobs
from headwise.runtime.protocol.weights import WeightsToLoad

LAST_SAMPLED = -1
"""A token id in a batch that stands for "the token the worker sampled last for this row"."""

SLEEP, WAKE, RESET_STORAGE, CHANGE_WEIGHTS = "sleep", "wake", "reset_storage", "change_weights"
"""Commands to workers: give up weights and arena, load and allocate them again, forget every block in storage, have
others take the weights' place."""

NO_DRAFTS: NDArray[np.int32] = np.empty(0, np.int32)
"""Of a step in which no sequence has any."""

NO_PLACES: NDArray[np.int32] = np.empty((0, 0), np.int32)
"""Of a step whose tokens are where they are in their sequences."""

UP_TO_THEMSELVES: NDArray[np.int32] = np.empty(0, np.int32)
"""What tokens see in a step in which none sees any behind itself."""

NOTHING_SHARED: NDArray[np.int32] = np.empty(0, np.int32)
"""Of a step in which no sequences share blocks, or none that are worth knowing of."""

NOTHING_PROPOSED: NDArray[np.int32] = np.empty((0, 0), np.int32)


@dataclass(frozen=True)
class KnownTokens:
    """What choosing a sequence's tokens needs to know besides logits; each part only where its parameters ask for it.

    prompt:    ``[p]`` the distinct tokens of its prompt, ascending
    output:    ``[m]`` the tokens sampled so far, in order
    ends:      ``[e]`` the tokens that end its output
    ends_from: the position from which on these may be sampled
    """

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    ends: NDArray[np.int32]
    ends_from: int


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt of which log-probabilities are asked for.

    tokens: ``[p]``
    begin:  the first token whose one is wanted, at least 1; those before it were told
    """

    tokens: NDArray[np.int32]
    begin: int


@dataclass(frozen=True)
class NewSequence:
    """A request's first appearance on a row: what the worker must know until the row is given anew.

    known: where its parameters change logits; a worker itself adds to it the tokens that it samples
    asked: where log-probabilities of its prompt are still to be told
    adapter: name of the one that it is computed with; empty: none
    """

    row: int
    request_id: str
    sampling: SamplingParams
    seed: int
    known: KnownTokens | None = None
    asked: AskedPrompt | None = None
    adapter: str = ""


@dataclass(frozen=True)
class SharedRows:
    """Rows of numbers in the engine's memory, that workers on its machine map.

    pid, fd, name: of the buffer, as `headwise.transfer.host_memory.SharedArena` has them
    start:   the first byte
    is_half: whether numbers are in bfloat16, else in float32
    """

    pid: int
    fd: int
    name: str
    start: int
    rows: int
    width: int
    is_half: bool

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * (2 if self.is_half else 4)


@dataclass(frozen=True, eq=False)
class StepEmbeds:
    """Embeddings that a step computes with in place of those of its tokens.

    rows:   ``[k]`` which of the step's tokens
    values: ``[k, hidden]``, in float32, or the bits of as many numbers in bfloat16; none where they are ``shared``
    shared: where they lie instead, one behind the other; workers get them as values: see `shared_rows`
    """

    rows: NDArray[np.int32]
    values: NDArray[np.float32] | NDArray[np.uint16]
    shared: tuple[SharedRows, ...] = ()


@dataclass(frozen=True)
class BatchRequest:
    """One step of one engine, the same for every tensor-parallel rank.

    rows:          ``[n]`` worker row of each sequence; its block table persists between steps
    starts:        ``[n]`` tokens of the sequence already in the cache: position of its first token here
    query_lens:    ``[n]`` tokens of the sequence in this step
    token_ids:     ``[sum(query_lens)]``, or `LAST_SAMPLED`
    sample:        ``bool [n]``; whether to sample after the sequence's last token here, or its last one but drafts
    table_updates: ``[k, 4]`` (row, group, block index, block id), applied before the step in order
    new_sequences: rows that change hands with this step; their tables are cleared first
    cache_swap_metadata:  loads and fetches that start with the step
    cache_evict_metadata: stores and puts that start with it
    command:              what to do in place of computing, in a batch without rows; else empty
    embeds:               where tokens of the step have embeddings that came with their request
    drafts:               ``[n]`` how many of the sequence's last tokens here are guesses of what is sampled, all behind
                          one that is not; or `NO_DRAFTS`
    following:            ``[n]`` the token that comes behind the sequence's last one here, where none is sampled; or
                          empty, where the model has no layer that drafts
    proposals:            ``[n]`` how many tokens, at most, that layer is to draft behind the sampled one: the cache has
                          room for all but the last of them. Or `NO_DRAFTS`
    places:               ``[sum(query_lens), 3]``: the tokens' positions, of a model that gives a token three, where
                          these are not all its place in the sequence; or `NO_PLACES`
    sees:                 ``[sum(query_lens)]`` how many of its sequence's tokens, the first ones, each token may see,
                          where items are seen in both directions; or `UP_TO_THEMSELVES`
    shared:               ``[n]`` of a sequence that has one token here, and its drafts, how many of its first tokens
                          are in the same blocks as those of the one before it: see `AttentionBatch.shared`; or
                          `NOTHING_SHARED`
    weights:              those that `CHANGE_WEIGHTS` is about
    """

    step_id: int
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    sample: NDArray[np.bool_]
    table_updates: NDArray[np.int32]
    new_sequences: tuple[NewSequence, ...] = ()
    cache_swap_metadata: SwapIn = NOTHING_IN
    cache_evict_metadata: SwapOut = NOTHING_OUT
    command: str = ""
    embeds: StepEmbeds | None = None
    drafts: NDArray[np.int32] = field(default_factory=lambda: NO_DRAFTS)
    following: NDArray[np.int32] = field(default_factory=lambda: NO_DRAFTS)
    proposals: NDArray[np.int32] = field(default_factory=lambda: NO_DRAFTS)
    places: NDArray[np.int32] = field(default_factory=lambda: NO_PLACES)
    sees: NDArray[np.int32] = field(default_factory=lambda: UP_TO_THEMSELVES)
    shared: NDArray[np.int32] = field(default_factory=lambda: NOTHING_SHARED)
    weights: WeightsToLoad | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def is_token_each(self) -> bool:
        """Whether every sequence has one token in the step: as decodes do."""
        return len(self.token_ids) == len(self.rows)

    @property
    def samples_behind_each(self) -> bool:
        """Whether a token is sampled behind each one of the step: decodes, with their drafts, and nothing else."""
        sampled = len(self.rows) + (int(self.drafts.sum()) if len(self.drafts) else 0)
        return len(self.token_ids) == sampled and bool(self.sample.all())

    @property
    def token_rows(self) -> NDArray[np.int32]:
        """``[sum(query_lens)]`` the row of each token."""
        return self.rows if self.is_token_each else np.repeat(self.rows, self.query_lens)


@dataclass(frozen=True)
class StepResult:
    """What a worker says of a step.

    token_ids: ``[n]`` the sampled token of each sequence of the batch, -1 where none was asked for.
               Ranks other than 0 send an empty array. Of a sequence with drafts, the one behind those accepted.
    logprobs:  by index of the sequence in the batch, where asked for
    broken:    why a sequence of the batch failed, by its index. Such a sequence has no token and ends; others go on
    copies:    what has come of copies, of this step's and of earlier ones'
    forgotten: blocks that the command `RESET_STORAGE` has forgotten
    compute_s: seconds the worker spent on the step
    error:     why the step failed: nothing of it may be committed, but ``copies`` hold
    prompt_logprobs: by index of the sequence, those of the tokens of its prompt that follow the ones in the step, where
                     they are asked for and were not told before
    accepted:  ``[n]`` how many of each sequence's drafts, the first ones, are what was sampled; or `NO_DRAFTS`
    proposed:  ``[n, most]`` what the model drafts behind each sequence's sampled token, -1 behind the last of them; or
               `NOTHING_PROPOSED`
    """

    step_id: int
    rank: int
    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    copies: CopyReport = NO_REPORT
    forgotten: int = 0
    compute_s: float = 0.0
    error: str | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    accepted: NDArray[np.int32] = field(default_factory=lambda: NO_DRAFTS)
    proposed: NDArray[np.int32] = field(default_factory=lambda: NOTHING_PROPOSED)
