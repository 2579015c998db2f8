"""What a step tells the layer of a model that drafts: fields of its `BatchRequest`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.speculation.speculator import Speculator
from headwise.runtime.protocol.batch import NO_DRAFTS


def asked_of_model(
    speculator: Speculator | None,
    sequences: SequenceOf[Sequence],
    ends: NDArray[np.int64],
    samples: NDArray[np.bool_],
    room: NDArray[np.int64],
) -> dict[str, NDArray[np.int32]]:
    """Of a step after which these ``sequences`` have ``ends [n]`` tokens computed; nothing of a model without one.

    samples: ``[n]`` whether a token is sampled behind these
    room:    ``[n]`` tokens for which a sequence's blocks have room
    """
    if speculator is None or not speculator.by_model:
        return {}
    following, proposals = np.zeros(len(sequences), np.int32), np.zeros(len(sequences), np.int64)
    for index in np.flatnonzero(~samples).tolist():
        following[index] = sequences[index].tokens(ends[index], ends[index] + 1)[0]
    sampled = np.flatnonzero(samples)
    proposals[sampled] = speculator.proposals([sequences[index] for index in sampled.tolist()])
    proposals = np.minimum(proposals, 1 + room - ends)  # the last one needs none
    return {
        "following": following,
        "proposals": proposals.astype(np.int32) if proposals.any() else NO_DRAFTS,
    }
