"""What a request costs on each engine, in seconds: until its first token, and what it takes from others.

    cost = wait + own + pace + admission + answer + WORK_WEIGHT * own

- wait: the engine's backlog: tokens of prompts not computed yet (its status, and reservations since), times its
  measured seconds per token, less the time that has passed since.
- own: what is left of the prompt after the best use of the tiers, times seconds per token, and the loads. Device
  blocks are free; another tier is used only where loading from it, at its measured speed, beats computing.
- pace: prompts are computed in steps of ``step_tokens``, and each step also decodes what runs: a decode step's
  measured seconds for each step up to the first token, where anything runs.
- admission: a request that does not fit beside what is held and queued (blocks of the pool, sequences) waits until
  enough of it has ended. All that runs has ended once after the decode steps of a typical answer; so it waits for the
  share of the capacity that is missing, times that: this grows with the shortage and has no cliff.
- answer: with all sequences that may run a decode step takes about twice as long as with one (assumed), and so does
  the answer: the time of a typical answer, times the share of sequences that run or wait there. This spreads requests
  that have nothing to compute.
- `WORK_WEIGHT`: tokens computed twice keep others waiting, and their blocks push others' out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.routing.base import TYPICAL_OUTPUT, Matches, RoutedRequest, RouterOptions
from headwise.runtime.routing.engines import Column, EngineTable
from headwise.storage.base import ANYONE

WORK_WEIGHT = 1.0

_NOTHING = (0, 0, 0)


@dataclass(frozen=True)
class Estimate:
    """Per engine: the cost that is minimised, and the tokens that each tier then serves and that are computed."""

    cost: Column
    device: Column
    host: Column
    storage: Column
    computed: Column


def estimate(
    table: EngineTable, request: RoutedRequest, matches: Matches | None, options: RouterOptions, now: float
) -> Estimate:
    """The cost on every engine; see the module."""
    most = max(0, request.num_tokens - 1) // options.block_size  # the last token is computed always
    depths = _depths(table, request.hashes, matches, most)
    prefill = table.prefill_token_s
    device = depths[:, 0] * options.block_size
    computed = request.num_tokens - device
    if matches:
        host, storage = _loaded(table, depths, options.block_size)
        computed -= host + storage
        own = computed * prefill + (host + storage) * table.host_token_s + storage * table.storage_token_s
    else:
        host = storage = np.zeros(len(table))
        own = computed * prefill
    wait = table.backlog(now)
    queued = wait / prefill
    cost = wait + (1.0 + WORK_WEIGHT) * own
    cost += (queued + computed) * table.pace_s
    cost += _decoding(table, queued + (request.num_tokens + min(request.max_tokens, TYPICAL_OUTPUT)), options)
    return Estimate(cost, device, host, storage, computed)


def _depths(table: EngineTable, path: Sequence[bytes], matches: Matches | None, most: int) -> NDArray[np.float64]:
    """``float64 [engines, 3]``: blocks that the device, device and host, and all tiers serve, as the index says and as
    is expected besides; at most ``most``."""
    count = len(table)
    if matches:
        of_anyone = matches.get(ANYONE, _NOTHING)
        served = chain.from_iterable([matches.get(name, of_anyone) for name in table.names])
        depths = np.fromiter(served, np.float64, 3 * count).reshape(count, 3)
    else:
        depths = np.zeros((count, 3))
    expected = table.expected_depths(path)
    if expected is not None:
        np.maximum(depths, expected[:, None], out=depths)
    return np.minimum(depths, most, out=depths)


def _loaded(table: EngineTable, depths: NDArray[np.float64], block_size: int) -> tuple[Column, Column]:
    """Tokens that are loaded from the host, and from storage by way of it, where that is faster than computing."""
    more = (depths[:, 1:] - depths[:, :-1]) * block_size
    load_s = table.host_token_s
    gain_of_host = more[:, 0] * (table.prefill_token_s - load_s)
    gain_of_both = gain_of_host + more[:, 1] * (table.prefill_token_s - load_s - table.storage_token_s)
    uses_storage = (gain_of_both > gain_of_host) & (gain_of_both > 0)
    uses_host = uses_storage | (gain_of_host > 0)
    return more[:, 0] * uses_host, more[:, 1] * uses_storage


def _decoding(table: EngineTable, tokens: Column, options: RouterOptions) -> Column:
    """Seconds of admission, for so many tokens and one more sequence, and of the answer."""
    sequences = (table.requests + table.reserved + 1.0) * (1.0 / options.max_num_seqs)
    needed = np.maximum(table.used + table.used_per_token * tokens, sequences)
    return (np.maximum(needed - 1.0, 0.0) + np.minimum(sequences, 1.0)) * table.turnover_s
