"""An engine without a model, for tests of what is around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from support.waiting import eventually

from headwise.errors import ConfigError, OverloadedError
from headwise.prompt_turns import ShareOf
from headwise.runtime.engine.arriving_embeds import ArrivingEmbeds
from headwise.runtime.engine.operations import Operation
from headwise.runtime.engine.peers.base import Takers
from headwise.runtime.protocol.messages import EngineLoad
from headwise.runtime.protocol.prompt_items import EmbedsPlace
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta, Usage


class ScriptedCore:
    """Says "0 1 2 ...", one token per step to each request; `gate` holds the steps back, `pace_s` slows them down.

    shuts_after:      steps after which the gate shuts by itself; None: it does not
    waiting:          requests that it does not begin
    handed_over:      what it was told to put into storage; None: not told
    is_handing_over:  whether it is at it
    fails:            why all its requests end with an error at the next step; empty: they do not
    most_embed_bytes: that it takes of requests whose embeddings are on their way
    cached:           tokens of each prompt that it has cached
    lacks:            of each request that came
    lacking:          requests that it cannot go on with for want of embeddings
    weights:          from which of its tokens on it says that these are by weights of which version
    """

    def __init__(self, max_requests: int = 100) -> None:
        self.live: dict[str, tuple[GenerateRequest, int]] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.max_requests = max_requests
        self.gate = threading.Event()
        self.gate.set()
        self.shuts_after: int | None = None
        self.pace_s = 0.0
        self.dies: Exception | None = None
        self.operations: list[Operation] = []
        self.waiting: set[str] = set()
        self.handed_over: list[bytes] | None = None
        self.is_handing_over = False
        self.fails = ""
        self.most_embed_bytes = 1 << 30
        self.arriving = ArrivingEmbeds()
        self.cached = 0
        self.lacks: list[int] = []
        self.lacking: list[str] = []
        self.weights: dict[int, str] = {}

    def operate(self, action: str, tier: str) -> Operation:
        if tier == "storage":
            raise ConfigError("this deployment has no storage")
        self.operations.append(Operation(action, tier))
        return self.operations[-1]

    def finish(self, blocks: int = 0) -> None:
        """End the operation that was asked for."""
        eventually(lambda: bool(self.operations))
        operation = self.operations.pop(0)
        operation.blocks, operation.is_done = blocks, True

    def check(self, request: GenerateRequest, embeds: Sequence[EmbedsPlace], lacks: int = 0) -> None:
        if self.arriving.num_bytes + sum(each.num_bytes for each in embeds) > self.most_embed_bytes:
            raise OverloadedError(f"embeddings of {self.arriving.num_bytes} bytes are on their way already")

    def cached_tokens(self, request: GenerateRequest) -> int:
        return self.cached

    def take_lacking(self) -> list[str]:
        lacking, self.lacking = self.lacking, []
        return lacking

    def add(self, request: GenerateRequest, *, knows_embeds: bool = False, lacks: int = 0) -> None:
        assert knows_embeds == bool(request.embeds)
        self.lacks.append(lacks)
        if len(self.live) >= self.max_requests:
            raise OverloadedError(f"{self.max_requests} requests are waiting already")
        self.live[request.request_id] = (request, len(request.output_token_ids))

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None):
            self.aborted.append(request_id)

    def not_begun(self) -> list[str]:
        return [request_id for request_id in self.live if request_id.partition("~")[0] in self.waiting]

    def asked(self, reader: bytes, message: object) -> None:
        pass

    def refuse(self, reader: bytes, message: object) -> None:
        pass

    def serve_peers(self) -> None:
        pass

    def hand_over(self, hashes: list[bytes] | None, takers: Takers | None = None, storable: int | None = None) -> None:
        self.takers, self.storable = takers, storable
        self.handed_over = hashes  # last: who has seen it finds the others

    def has_work(self) -> bool:
        return bool(self.live or self.dies)

    def step(self, timeout_s: float | None) -> list[OutputDelta]:
        if self.dies is not None:
            raise self.dies
        if not self.gate.is_set():
            return []
        self.steps += 1
        if self.steps == self.shuts_after:
            self.gate.clear()
        time.sleep(self.pace_s)
        if self.fails:
            why, self.fails = self.fails, ""
            return self.fail_all(why)
        waiting = self.not_begun()
        return [self._next(request_id) for request_id in list(self.live) if request_id not in waiting]

    def _next(self, request_id: str) -> OutputDelta:
        request, count = self.live[request_id]
        self.live[request_id] = (request, count + 1)
        more: dict[str, Any] = {"weights": self.weights.get(count, "")}
        if count + 1 < (request.sampling.max_tokens or 1):
            return OutputDelta(request_id, (count,), f"{count} ", **more)
        del self.live[request_id]
        usage = Usage(len(request.prompt_token_ids), 0, count + 1)
        more |= {"finish_reason": FinishReason.LENGTH, "usage": usage}
        return OutputDelta(request_id, (count,), f"{count} ", **more)

    def stats(self) -> dict[str, Any]:
        return {"live": len(self.live)}

    def share_by(self, share_of: ShareOf) -> None:
        self.share_of = share_of

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.live))

    def drain_index_updates(self) -> list[Any]:
        return []

    def fail_all(self, error: str) -> list[OutputDelta]:
        failed, self.live = list(self.live), {}
        return [OutputDelta(request_id, finish_reason=FinishReason.ERROR, error=error) for request_id in failed]
