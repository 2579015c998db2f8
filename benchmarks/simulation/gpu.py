"""How long a GPU takes for a step: a roofline over the weights, the cache and the arithmetic that the step touches.

    step = max(flops / (peak flops x efficiency), bytes / (peak bandwidth x efficiency)) + overhead

What it leaves out: activations, communication, sampling, the control plane (asynchronous scheduling hides it), and that
no kernel is at its best at every shape. It tells how two cache policies compare, not what a GPU will do to the percent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.windows import UNBOUNDED
from headwise.runtime.models.model_config import ModelConfig

BYTES = 2
"""Of a weight, a key's or a value's element: bfloat16."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet, and the share of it that kernels reach.

    flops:      bfloat16, dense, per second
    bandwidth:  bytes per second
    memory:     bytes
    compute_efficiency: assumed. FlashAttention-2 reports 0.5 to 0.73 of an A100's peak (arXiv 2307.08691, section 4)
    memory_efficiency:  assumed. STREAM-like kernels reach 0.85 to 0.9; decoding has many smaller ones
    overhead_s: assumed: launches of a step that is captured as a graph, and sampling
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    compute_efficiency: float = 0.55
    memory_efficiency: float = 0.75
    overhead_s: float = 1.5e-3


A800 = Gpu("A800-80GB", flops=312e12, bandwidth=2.0e12, memory=80e9)
"""An A100-80GB with a slower NVLink: NVIDIA's A100 data sheet, 312 TFLOPS and 1.9 (PCIe) to 2.0 TB/s (SXM)."""

H200 = Gpu("H200", flops=989e12, bandwidth=4.8e12, memory=141e9)
"""NVIDIA's H200 SXM data sheet; 1,979 TFLOPS with sparsity."""


@dataclass(frozen=True)
class Weights:
    """Parameters by how often a step reads them.

    dense:    per layer and token, whatever is routed where: attention, dense MLPs, shared experts, routers
    head:     the output matrix, also the embedding's where they are tied
    embedding: an embedding of its own; a step reads a few rows of it
    expert:   one routed expert of one layer
    """

    dense: int
    head: int
    embedding: int
    expert: int
    moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.head + self.embedding + self.expert * self.num_experts * self.moe_layers

    @property
    def per_token(self) -> int:
        """Parameters that a token is multiplied with, the output matrix aside."""
        return self.dense + self.expert * self.experts_per_token * self.moe_layers

    def read(self, tokens: int) -> float:
        """Parameters that a step of ``tokens`` tokens reads, if routers spread tokens evenly and independently."""
        if not self.num_experts:
            return self.dense + self.head
        untouched = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.dense + self.head + self.expert * self.moe_layers * self.num_experts * (1 - untouched)


def weights_of(config: ModelConfig) -> Weights:
    """The matrices of a decoder with gated MLPs; norms and biases are left out."""
    hidden, moe = config.hidden_size, config.moe
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * hidden * config.intermediate_size
    head = config.vocab_size * hidden
    embedding = 0 if config.tie_embeddings else head
    if moe is None:
        return Weights((attention + mlp) * config.num_layers, head, embedding, expert=0)
    expert, moe_layers = 3 * hidden * moe.expert_size, len(moe.layers)
    return Weights(
        dense=attention * config.num_layers
        + mlp * (config.num_layers - moe_layers)
        + (3 * hidden * moe.shared_size + hidden * moe.num_experts) * moe_layers,
        head=head,
        embedding=embedding,
        expert=expert,
        moe_layers=moe_layers,
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
    )


def seen_pairs(policy: HeadPolicy, starts: Tokens, counts: Tokens) -> Tokens:
    """(query, key) pairs of a head for the queries at ``starts`` to ``starts + counts - 1`` of each sequence."""
    return _pairs_before(policy, starts + counts) - _pairs_before(policy, starts)


def keys_read(policy: HeadPolicy, starts: Tokens, counts: Tokens) -> Tokens:
    """Keys of a head that those queries see between them, each counted once."""
    read: Tokens = np.minimum(starts + counts, _span(policy) + counts - 1)
    return read


def _pairs_before(policy: HeadPolicy, tokens: Tokens) -> Tokens:
    rising: Tokens = np.minimum(tokens, _span(policy))
    return rising * (rising + 1) // 2 + (tokens - rising) * rising


def _span(policy: HeadPolicy) -> int:
    """Most keys that a query sees."""
    return UNBOUNDED if policy.is_full else policy.sink + policy.window


class SimulatedGpu:
    """The time of steps of one model on one GPU. Kernels read what a head sees, whatever the cache keeps of it."""

    def __init__(self, gpu: Gpu, config: ModelConfig) -> None:
        self.gpu = gpu
        self.weights = weights_of(config)
        self._heads = Counter(policy for layer in config.policies for policy in layer)
        self._flops_per_pair = 4 * config.head_dim * (config.num_heads // config.num_kv_heads)
        self._kv_bytes = 2 * config.head_dim * BYTES
        self._num_heads = sum(self._heads.values())

    @property
    def free_memory(self) -> float:
        """Bytes that the weights leave."""
        return self.gpu.memory - self.weights.total * BYTES

    def step_seconds(self, starts: Tokens, counts: Tokens, samples: int) -> float:
        """Time of a step with ``counts`` new tokens behind ``starts`` cached ones, ``[n]`` each, and ``samples`` of
        them sampled from."""
        flops, size = self.work(starts, counts, samples)
        gpu = self.gpu
        compute_s = flops / (gpu.flops * gpu.compute_efficiency)
        memory_s = size / (gpu.bandwidth * gpu.memory_efficiency)
        return max(compute_s, memory_s) + gpu.overhead_s

    def work(self, starts: Tokens, counts: Tokens, samples: int) -> tuple[float, float]:
        """(floating-point operations, bytes read and written) of a step."""
        tokens = int(counts.sum())
        pairs = keys = 0
        for policy, heads in self._heads.items():
            pairs += heads * int(seen_pairs(policy, starts, counts).sum())
            keys += heads * int(keys_read(policy, starts, counts).sum())
        flops = 2 * (self.weights.per_token * tokens + self.weights.head * samples) + self._flops_per_pair * pairs
        written = tokens * self._num_heads
        return flops, self.weights.read(tokens) * BYTES + self._kv_bytes * (keys + written)
