"""What a request costs on each engine, in seconds: the time to its first token, and the time it takes from others.

    cost = wait + own + pace + admission + answer + WORK_WEIGHT * own

- wait: the engine's backlog: tokens of prompts not computed yet (its status, and reservations since), times its
  measured seconds per token, less the time that has passed since.
- own: the prompt's tokens that no tier serves, times seconds per token, and the loads. Device blocks are free. Another
  tier is used only where loading from it, at its measured throughput, is faster than computing.
- pace: prompts are computed in steps of ``step_tokens``, and each step also decodes what runs: where anything runs,
  wait and own take longer by a decode step's measured seconds over those of ``step_tokens`` tokens of a prompt.
- admission: a request that does not fit into the pool, or has too many sequences beside it, waits until others have
  ended. All running requests end within about the decode steps of a typical answer. So the wait is the missing share
  of the capacity, times that: it grows with the shortage and has no jump.
- answer: a decode step with all sequences takes about twice as long as with one (assumed), and so does the answer. So
  this is the time of a typical answer, times the share of sequences that run or wait there. It spreads requests that
  have nothing to compute.
- `WORK_WEIGHT`: the same tokens computed on two engines keep other requests waiting, and push out other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.frontend.routing.base import TYPICAL_OUTPUT, Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.engines import Column, EngineTable

WORK_WEIGHT = 1.0

_NOTHING = (0, 0, 0)


@dataclass(frozen=True)
class Estimate:
    """Per engine the cost to minimise, and what its tiers could serve.

    served: ``float64 [engines, 3]``: tokens that the device, device and host, and all tiers could serve
    """

    cost: Column
    served: NDArray[np.float64]


def estimate(
    table: EngineTable, request: RoutedRequest, matches: Matches | None, options: RouterOptions, now: float
) -> Estimate:
    """The cost on every engine; see the module."""
    most = max(0, request.num_tokens - 1) // options.block_size  # the last token is always computed
    served = _depths(table, request.hashes, matches, most) * options.block_size
    prefill = table.prefill_token_s
    own = (request.num_tokens - served[:, 0]) * prefill
    if matches:
        with_host = own - (served[:, 1] - served[:, 0]) * table.host_gain_s
        with_all = with_host - (served[:, 2] - served[:, 1]) * table.storage_gain_s
        own = np.minimum(np.minimum(own, with_host), with_all)
    wait = table.backlog(now)
    cost = wait + own
    cost += cost * table.pace
    cost += WORK_WEIGHT * own
    cost += _decoding(table, wait / prefill + (request.num_tokens + min(request.max_tokens, TYPICAL_OUTPUT)), options)
    return Estimate(cost, served)


def tiers_used(table: EngineTable, row: int, served: NDArray[np.float64]) -> tuple[int, int, int]:
    """Tokens that one engine's device serves, that are loaded from its host, and that are loaded from storage.

    served: the engine's of `Estimate.served`
    """
    device, with_host, with_all = served.tolist()
    host, storage = with_host - device, with_all - with_host
    gain_of_host = host * float(table.host_gain_s[row])
    gain_of_both = gain_of_host + storage * float(table.storage_gain_s[row])
    if gain_of_both > max(gain_of_host, 0.0):
        return int(device), int(host), int(storage)
    return int(device), int(host) if gain_of_host > 0.0 else 0, 0


def _depths(table: EngineTable, path: Sequence[bytes], matches: Matches | None, most: int) -> NDArray[np.float64]:
    """``float64 [engines, 3]``: blocks that the device, device and host, and all tiers serve, by the index and by
    what is expected besides; at most ``most``."""
    count = len(table)
    if matches:
        served = chain.from_iterable(map(matches.get, table.names, repeat(_NOTHING)))
        depths = np.fromiter(served, np.float64, 3 * count).reshape(count, 3)
    else:
        depths = np.zeros((count, 3))
    expected = table.expected_depths(path)
    if expected is not None:
        np.maximum(depths, expected[:, None], out=depths)
    return depths if len(path) <= most else np.minimum(depths, most, out=depths)


def _decoding(table: EngineTable, tokens: Column, options: RouterOptions) -> Column:
    """The seconds of admission and answer, for a request of so many tokens."""
    sequences = (table.requests + table.reserved + 1.0) * (1.0 / options.max_num_seqs)
    needed = np.maximum(table.used + table.used_per_token * tokens, sequences)
    return (np.maximum(needed - 1.0, 0.0) + np.minimum(sequences, 1.0)) * table.turnover_s
