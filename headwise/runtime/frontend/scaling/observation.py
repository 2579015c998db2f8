"""What the router's table of engines says, as the controller takes it."""

from __future__ import annotations

import numpy as np

from headwise.runtime.frontend.routing.base import RouterOptions
from headwise.runtime.frontend.routing.engines import EngineTable
from headwise.runtime.frontend.scaling.base import EngineReport, Observation
from headwise.runtime.frontend.scaling.demand import FULL
from headwise.runtime.protocol.messages import EngineLoad


def observe(table: EngineTable, options: RouterOptions, now: float, held: int = 0, held_tokens: int = 0) -> Observation:
    """held, held_tokens: requests that no engine could take yet, and the tokens of their prompts"""
    backlog = table.backlog(now)
    fullness = np.maximum(table.used, (table.requests + table.reserved) / options.max_num_seqs)
    is_measured = any(engine.status.work.prefill_token_s > 0 for engine in table.engines)
    token_s = float(np.median(table.prefill_token_s)) if is_measured else 0.0
    return Observation(
        tuple(
            EngineReport(
                name,
                silent_s=now - float(table.heard[row]),
                requests=int(table.requests[row] + table.reserved[row]),
                backlog_s=float(backlog[row]),
                turnover_s=float(table.turnover_s[row]),
                fullness=float(fullness[row]),
                pool=float(table.used[row]),
                sequences=table.engines[row].status.work.running / options.max_num_seqs,
                crowding=_crowding(table.engines[row].status.work, float(table.used[row]), options.max_num_seqs),
            )
            for row, name in enumerate(table.names)
        ),
        table.arrivals,
        held,
        held_tokens * token_s,
        token_s,
        options.block_size,
        table.prompts,
    )


def _crowding(work: EngineLoad, pool: float, max_num_seqs: int) -> float:
    """See `EngineReport`. Where there is room, what waits does so for its prompt's turn."""
    is_full = max(pool, work.running / max_num_seqs) >= FULL
    return 1.0 + max(0, work.waiting - work.held_back) / max(1, work.running) if is_full else 1.0
