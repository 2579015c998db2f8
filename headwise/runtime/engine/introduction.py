"""What a worker is told of a sequence when it gets a row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.batch import AskedPrompt, KnownTokens, NewSequence


def introduction(sequence: Sequence) -> NewSequence:
    """Of a sequence that was given a row, for the first time or again: no step in flight samples for it."""
    request = sequence.request
    known = _known_tokens(sequence) if request.sampling.edits_logits else None
    asked = AskedPrompt(request.prompt_token_ids, sequence.prompt_told) if sequence.is_prompt_asked else None
    seed = request.sampling.seed or 0
    return NewSequence(sequence.row, request.request_id, request.sampling, seed, known, asked, request.lora_id)


def _known_tokens(sequence: Sequence) -> KnownTokens:
    """Parts that the parameters do not ask for are left empty: a prompt may be long."""
    sampling, prompt = sequence.request.sampling, sequence.request.prompt_token_ids
    return KnownTokens(
        prompt=np.flatnonzero(np.bincount(prompt)).astype(np.int32) if sampling.repetition_penalty != 1 else _array(()),
        output=_array(sequence.output) if sampling.has_penalties or sampling.guided else _array(()),
        ends=_array(sorted(sequence.ends)) if sampling.min_tokens else _array(()),
        ends_from=sequence.num_prompt + sampling.min_tokens,
    )


def _array(tokens: Iterable[int]) -> NDArray[np.int32]:
    return np.array(list(tokens), dtype=np.int32)
