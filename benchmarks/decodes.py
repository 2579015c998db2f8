"""How fast an engine of this process decodes, while all of some requests do."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headwise import LocalEngine, SamplingParams


def decode_rate(
    engine: LocalEngine, asked: Sequence[str | list[int]], tokens: int, adapters: Sequence[str] = ()
) -> float:
    """Tokens a second: from when the last request has its first token, until the first one is through. Greedily.

    asked:    what a user says, of each request; or a prompt's tokens
    adapters: of each, by its name; empty: none has one
    """
    core, sampling = engine.core, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    counts = dict[str, int]()
    for said, adapter in zip(asked, adapters or [""] * len(asked), strict=True):
        given = {"messages": [{"role": "user", "content": said}]} if isinstance(said, str) else {"prompt": said}
        request = engine.preprocessor.prepare(**given, sampling=sampling, adapter=adapter)
        counts[request.request_id] = 0
        core.add(request)
    began, before = 0.0, 0
    while max(counts.values()) < tokens:
        for delta in core.step(None):
            counts[delta.request_id] += len(delta.token_ids)
        if not began and all(counts.values()):
            began, before = time.perf_counter(), sum(counts.values())
    seconds = time.perf_counter() - began
    for request_id in counts:
        core.abort(request_id)
    while core.has_work():
        core.step(None)
    return (sum(counts.values()) - before) / seconds
