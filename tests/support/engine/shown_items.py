"""Requests of the simulated engine whose prompts have items: its model takes an embedding for that of the token that it
begins with."""

from __future__ import annotations

import numpy as np
from support.engine.simulated_engine import request

from headwise.runtime.protocol.prompt_items import PromptItem, placed
from headwise.runtime.protocol.request import GenerateRequest

PLACEHOLDER = 2


def shown(name: str, prompt: list[int], *items: tuple[int, list[int]], tokens: int = 9) -> GenerateRequest:
    """A request whose prompt has items: where they begin, and the tokens that they are the embeddings of."""
    given = [PromptItem(at, len(seen), embeds=np.array(seen, np.float32)[:, None]) for at, seen in items]
    ids = np.array(prompt)
    for item in given:
        ids[item.offset : item.offset + item.length] = PLACEHOLDER
    of_items = placed(given, len(ids))
    plain = request(name, ids, tokens)
    return GenerateRequest(
        name, plain.prompt_token_ids, plain.sampling, extra_keys=of_items.extra_keys, embeds=of_items.embeds
    )
