"""What a request costs on each engine, in seconds: the time to its first token, and the time it takes from others.

    cost = wait + own + pace + admission + answer + WORK_WEIGHT * own

- wait: the engine's backlog: tokens of prompts not computed yet (its status, and reservations since), times its
  measured seconds per token, less the time that has passed since. Where prompts go in the fair order (`PromptTurns`),
  of each of those before it no more than it has to compute itself.
- own: the prompt's tokens that no tier serves, times seconds per token, and the loads. Device blocks are free. Another
  tier is used only where loading from it, at its measured throughput, is faster than computing. So is what another
  engine has on device or host (`peers`).
- pace: prompts are computed in steps of ``step_tokens``, and each step also decodes what runs: where anything runs,
  wait and own take longer by a decode step's measured seconds over those of ``step_tokens`` tokens of a prompt.
- admission: a request that does not fit into the pool, or has too many sequences beside it, waits until others have
  ended. All running requests end within about the decode steps of a typical answer. So the wait is the missing share
  of the capacity, times that: it grows with the shortage and has no jump.
- answer: a decode step with all sequences takes about twice as long as with one (assumed), and so does the answer. So
  this is the time of a typical answer, times the share of sequences that run or wait there. It spreads requests that
  have nothing to compute.
- `WORK_WEIGHT`: the same tokens computed on two engines keep other requests waiting, and push out other blocks. Those
  that are fetched from another engine do only the latter: `DUPLICATE_WEIGHT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.frontend.routing import peers
from headwise.runtime.frontend.routing.base import TYPICAL_OUTPUT, Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.engines import Column, EngineTable

WORK_WEIGHT = 1.0

DUPLICATE_WEIGHT = 0.5
"""Blocks that are fetched push out others, as computed ones do: that costs so much of computing them (assumed)."""

ASK_S = 0.01
"""Seconds that asking another engine for blocks takes, whatever it has: two round trips between engines that are busy.
"""

_NOTHING = (0, 0, 0)


@dataclass(frozen=True)
class Estimate:
    """Per engine the cost to minimise, and what its tiers could serve.

    served: ``float64 [engines, 3]``: tokens that the device, device and host, and all tiers could serve
    wait:   seconds of the backlog
    alone:  seconds of computing and loads, without what other engines have
    decoding: seconds of admission and answer
    lent:   tokens that the engine could serve to others; None: none could, or they do not ask each other
    by_others: the most that another engine could serve to it; likewise
    """

    cost: Column
    served: NDArray[np.float64]
    wait: Column
    alone: Column
    decoding: Column
    lent: Column | None = None
    by_others: Column | None = None


@dataclass(frozen=True)
class Sources:
    """How many tokens of a request's prefix come from where."""

    device: int = 0
    host: int = 0
    peer: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.peer + self.storage


def estimate(
    table: EngineTable, request: RoutedRequest, matches: Matches | None, options: RouterOptions, now: float
) -> Estimate:
    """The cost on every engine; see the module."""
    most = max(0, request.num_tokens - 1) // options.block_size  # the last token is always computed
    served, lent = _served(table, request.hashes, matches, most, options, now)
    prefill = table.prefill_token_s
    own = (request.num_tokens - served[:, 0]) * prefill
    if matches:
        with_host = own - (served[:, 1] - served[:, 0]) * table.host_gain_s
        with_all = with_host - (served[:, 2] - served[:, 1]) * table.storage_gain_s
        least = np.minimum(np.minimum(own, with_host), with_all)
    else:
        with_host = least = own
    own = work = least
    by_others = None if lent is None else peers.of_others(lent)
    if by_others is not None:
        fetched = np.maximum(by_others - served[:, 1], 0.0)
        with_peer = with_host - fetched * table.peer_gain_s + ASK_S
        with_rest = with_peer - np.maximum(served[:, 2] - served[:, 1] - fetched, 0.0) * table.storage_gain_s
        with_peer = np.minimum(with_peer, with_rest)
        own = np.minimum(least, with_peer)
        work = np.minimum(least, with_peer + DUPLICATE_WEIGHT * fetched * prefill)
    wait = backlog = table.backlog(now)
    if options.fair_prompts:
        wait = np.minimum(backlog, own * (table.waiting + table.reserved + 1.0))  # one more is being computed
    start = wait + own
    start += start * table.pace
    tokens = backlog / prefill + (request.num_tokens + min(request.max_tokens, TYPICAL_OUTPUT))
    decoding = _decoding(table, tokens, options)
    return Estimate(start + WORK_WEIGHT * work + decoding, served, wait, least, decoding, lent, by_others)


def sources(table: EngineTable, row: int, estimated: Estimate) -> Sources:
    """Where the engine of this row gets the prefix from: what makes its cost the least."""
    device, with_host, with_all = map(int, estimated.served[row])
    host, storage = with_host - device, with_all - with_host
    gains = float(table.host_gain_s[row]), float(table.storage_gain_s[row]), float(table.peer_gain_s[row])
    of_host, of_storage = host * gains[0], storage * gains[1]
    plans = [
        (0.0, Sources(device)),
        (of_host, Sources(device, host)),
        (of_host + of_storage, Sources(device, host, storage=storage)),
    ]
    reach = 0 if estimated.by_others is None else int(estimated.by_others[row])
    if reach > with_host:
        peer, rest = reach - with_host, max(0, with_all - reach)
        of_peer = of_host + peer * gains[2] - ASK_S
        plans += [
            (of_peer, Sources(device, host, peer)),
            (of_peer + rest * gains[1], Sources(device, host, peer, rest)),
        ]
    return max(plans, key=itemgetter(0))[1]


def _served(
    table: EngineTable,
    path: Sequence[bytes],
    matches: Matches | None,
    most: int,
    options: RouterOptions,
    now: float,
) -> tuple[NDArray[np.float64], Column | None]:
    """`Estimate.served` and `Estimate.lent` of at most ``most`` blocks: by the index, and by what is expected."""
    count = len(table)
    if matches:
        served = chain.from_iterable(map(matches.get, table.names, repeat(_NOTHING)))
        depths = np.fromiter(served, np.float64, 3 * count).reshape(count, 3)
    else:
        depths = np.zeros((count, 3))
    expected = table.expected_depths(path)
    lent = peers.lent(table, depths, expected, now) if options.peer_loads else None
    if expected is not None:
        np.maximum(depths, expected[:, None], out=depths)
    if len(path) > most:
        np.minimum(depths, most, out=depths)
        lent = None if lent is None else np.minimum(lent, most)
    return depths * options.block_size, None if lent is None else lent * options.block_size


def _decoding(table: EngineTable, tokens: Column, options: RouterOptions) -> Column:
    """The seconds of admission and answer, for a request of so many tokens."""
    sequences = (table.requests + table.reserved + 1.0) * (1.0 / options.max_num_seqs)
    needed = np.maximum(table.used + table.used_per_token * tokens, sequences)
    return (np.maximum(needed - 1.0, 0.0) + np.minimum(sequences, 1.0)) * table.turnover_s
