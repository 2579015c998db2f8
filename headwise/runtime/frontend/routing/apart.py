"""Prefill and decode apart: which engine decodes a request, and which one computes its prompt for it.

The engine that decodes fetches the prompt's blocks while the other one computes them, and computes the last tokens
itself. So the first token comes when the prompt is computed, or when all is fetched if that takes longer:

    cost = max(start there, fetching here) + what decoding costs here + WORK_WEIGHT * own there

The engine for the prompt is the one where a whole request would cost least, as `costs` says; it asks no other one for
blocks. A prompt stays where it is
decoded if there is little to compute (`RouterOptions.local_tokens`), if no engine for prompts can take it, or if
fetching is slower than computing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.frontend.routing.base import RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.costs import WORK_WEIGHT, Estimate, sources
from headwise.runtime.frontend.routing.engines import Column, EngineTable

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Apart:
    """The engine that computes the prompt, and for those that decode what the request costs there.

    row:      of the engine that computes
    computed: tokens that it computes
    tokens:   that it can serve then: all full blocks but those of the last token
    cost:     of engines that only decode; of all others that of whole requests
    """

    row: int
    computed: int
    tokens: int
    cost: Column


def rows_that_decode(table: EngineTable, rows: Rows) -> Rows:
    """Of these engines those that are not for prompts alone; if there are none, all: better served there than not."""
    decoding = rows[table.prefills[rows] == 0.0]
    return decoding if len(decoding) else rows


def plan(
    table: EngineTable, request: RoutedRequest, estimated: Estimate, rows: Rows, options: RouterOptions
) -> Apart | None:
    """Who computes the prompt if an engine that only decodes gets the request; None: that engine itself.

    rows: engines that can take the request
    """
    computing, decoding = rows[table.prefills[rows] > 0.0], rows[table.decodes[rows] > 0.0]
    if not len(computing) or not len(decoding):
        return None
    nearest = int(decoding[np.argmin(estimated.cost[decoding])])
    if request.num_tokens - sources(table, nearest, estimated).total <= options.local_tokens:
        return None
    fetch_s = np.maximum(table.prefill_token_s - table.peer_gain_s, 0.0)
    if fetch_s[nearest] >= table.prefill_token_s[nearest]:
        return None
    alone = estimated.alone[computing]
    start = (estimated.wait[computing] + alone) * (1.0 + table.pace[computing])
    best = int(np.argmin(start + WORK_WEIGHT * alone + estimated.decoding[computing]))
    row = int(computing[best])
    tokens = max(0, request.num_tokens - 1) // options.block_size * options.block_size
    fetched_s = np.maximum(tokens - estimated.served[:, 1], 0.0) * fetch_s
    cost = np.maximum(start[best], fetched_s) + estimated.decoding + WORK_WEIGHT * alone[best]
    computed = request.num_tokens - sources(table, row, replace(estimated, by_others=None)).total
    return Apart(row, computed, tokens, np.where(table.decodes > 0.0, cost, estimated.cost))
