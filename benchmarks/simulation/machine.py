"""What simulated engines have, and how long their steps take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulation.gpu import BYTES, Gpu, weights_of

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.models.model_config import ModelConfig

BLOCK = 512
"""Tokens that one block of the trace stands for."""

SERVING = EngineConfig(max_batched_tokens=2048, max_num_seqs=128)


@dataclass(frozen=True)
class Hardware:
    """What an engine has. Sizes are in blocks, speeds in seconds per token.

    device, host: blocks of an engine; storage: of all engines together
    host_token_s, storage_token_s, peer_token_s: from host to device, from storage to host, from host to host
    serving: an engine's configuration, as far as it decides what is computed in which step
    """

    gpu: Gpu
    model: ModelConfig
    device: int
    host: int
    storage: int
    host_token_s: float
    storage_token_s: float
    peer_token_s: float = 0.0
    serving: EngineConfig = SERVING

    @property
    def step_tokens(self) -> int:
        return self.serving.most_batched_tokens

    @property
    def max_num_seqs(self) -> int:
        return self.serving.most_seqs


class StepTime:
    """`simulation.gpu.SimulatedGpu.step_seconds` of a model whose heads all see everything, in plain arithmetic."""

    def __init__(self, gpu: Gpu, model: ModelConfig) -> None:
        weights = weights_of(model)
        heads = model.num_layers * model.num_kv_heads
        self._flops = gpu.flops * gpu.compute_efficiency
        self._bandwidth = gpu.bandwidth * gpu.memory_efficiency
        self._overhead_s = gpu.overhead_s
        self._per_token = 2 * weights.per_token
        self._head = 2 * weights.head
        self._pair = 4 * model.head_dim * (model.num_heads // model.num_kv_heads) * heads
        self._weight_bytes = weights.read(1) * BYTES
        self.kv_bytes = 2 * model.head_dim * BYTES * heads
        """Of a token's cache."""

    def seconds(self, chunks: Iterable[tuple[int, int]], decoding: int, context: int, samples: int) -> float:
        """A step with ``chunks`` of prompts (tokens before, tokens), and ``decoding`` sequences with ``context`` tokens
        of cache between them."""
        tokens, keys = decoding, context + decoding
        pairs = keys
        for start, count in chunks:
            tokens += count
            keys += start + count
            pairs += count * start + count * (count + 1) // 2
        flops = self._per_token * tokens + self._head * samples + self._pair * pairs
        size = self._weight_bytes + self.kv_bytes * (keys + tokens)
        return max(flops / self._flops, size / self._bandwidth) + self._overhead_s
