"""What tests of models share: plain attention over whole sequences, and ranks that run as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from support.delta_scene import dense_delta
from support.kda_scene import dense_kda
from support.ssm_scene import dense_ssm

from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import HeadPolicy
from headwise.kernels.delta_base import DeltaProjected
from headwise.kernels.delta_gates import gated_norm, inputs_of
from headwise.kernels.kda_base import KdaProjected
from headwise.kernels.ssm_base import SsmProjected
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import AttentionLayer, Model
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Communicator
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.drafts import turned


def visible(policy: HeadPolicy, count: int) -> np.ndarray:
    p, k = np.arange(count)[:, None], np.arange(count)[None]
    return (k <= p) & ((policy.window == 0) | (p - k < policy.window) | (k < policy.sink))


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


def softmax(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = np.where(mask, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


class DenseAttention:
    """Attention over the whole sequence at once, masked by each head's policy."""

    def __init__(self, config: ModelConfig, shard: Shard, ops) -> None:
        self._config, self._shard, self._ops = config, shard, ops
        self._kept: dict[int, list[np.ndarray]] = {}

    def __call__(self, layer: int, query, key, value, rotation, sink_logits=None, bias=None, wanted=None):
        assert wanted is None
        c, heads, kept = self._config, self._shard.kv_heads[layer], self._config.heads_of(layer).cache_layer
        assert (key is None) == (kept != layer)
        if bias is not None:
            given = query, key, value
            parts = np.split(bias, np.cumsum([each[0].size for each in given])[:-1])
            query, key, value = (each + part.reshape(each.shape[1:]) for each, part in zip(given, parts, strict=True))
        if key is not None:
            tensors = self._ops.rope(key, *rotation), value
            self._kept[layer] = [self._ops.kernel_array(t).astype(np.float64) for t in tensors]
        k, v = self._kept[kept]
        q = self._ops.kernel_array(self._ops.rope(query, *rotation)).astype(np.float64)
        share = q.shape[1] // len(heads)
        out = np.empty((*q.shape[:2], v.shape[2]))
        for local, head in enumerate(heads):
            mask = visible(c.policies[kept][head], len(q))
            if c.chunk and c.policies[kept][head].window:
                chunks = np.arange(len(q)) // c.chunk
                mask &= chunks[:, None] == chunks
            for index in range(local * share, (local + 1) * share):
                scores = q[:, index] @ k[:, local].T * c.attention_scale
                scores, seen = capped(scores, c.attention_softcap), mask
                if sink_logits is not None:  # a column more, whose value is 0
                    scores = np.column_stack([scores, np.full(len(q), sink_logits[index])])
                    seen = np.column_stack([mask, np.ones(len(q), bool)])
                out[:, index] = softmax(scores, seen)[:, : len(k)] @ v[:, local]
        return self._ops.from_kernel_array(out.astype(np.float32))


class DenseLatentAttention:
    """The same for latents: every head's own keys and values, made of them. An indexer may choose which it sees."""

    def __init__(self, config: ModelConfig, ops) -> None:
        self._config, self._ops = config, ops
        self._last: np.ndarray | None = None

    def __call__(self, layer: int, query, compressed, shared, up, rotation, choosing=None, wanted=None):
        assert wanted is None
        ops, mla, tokens = self._ops, self._config.mla, len(query)
        turned = ops.kernel_array(ops.rope(query[:, :, mla.plain :], *rotation)).astype(np.float64)
        rotated = ops.kernel_array(ops.rope(shared.reshape([tokens, 1, mla.rotated]), *rotation))[:, 0]
        plain, latents = (ops.kernel_array(t).astype(np.float64) for t in (query[:, :, : mla.plain], compressed))
        mask = visible(self._config.policies[layer][0], tokens)
        if choosing is not None:
            if choosing.asked is not None:
                self._last = self._chosen(*choosing.asked, rotation, mask)
            mask = self._last
        out = np.empty((tokens, query.shape[1], mla.value_dim))
        for head in range(query.shape[1]):
            scores = plain[:, head] @ (latents @ up.key[head].T).T + turned[:, head] @ rotated.T
            scores, seen = scores * self._config.attention_scale, mask
            if up.sink_logits is not None:  # a column more, whose value is 0
                scores = np.column_stack([scores, np.full(tokens, up.sink_logits[head])])
                seen = np.column_stack([mask, np.ones(tokens, bool)])
            out[:, head] = softmax(scores, seen)[:, :tokens] @ (latents @ up.value[head])
        return ops.from_kernel_array(out.astype(np.float32))

    def _chosen(self, index, keys, rotation, mask: np.ndarray) -> np.ndarray:
        rotated, dim = self._config.mla.rotated, index.query.shape[2]
        rows = keys.rows.astype(np.float64)
        key = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + keys.eps)
        key = (key * keys.weight + keys.bias).astype(np.float32)
        turn = [np.arctan2(*map(np.asarray, reversed(rotation)))]
        query, keys = (
            np.concatenate([rotate(x[:, :, :rotated], *turn), x[:, :, rotated:]], axis=2)
            for x in (index.query, key[:, None])
        )
        scores = np.maximum(np.einsum("thd,kd->thk", query, keys[:, 0]) * dim**-0.5, 0)
        scores = np.where(mask, np.einsum("th,thk->tk", index.weights, scores), -np.inf)
        kept = np.argsort(-scores, axis=1, kind="stable")[:, : index.top]
        found = np.zeros_like(mask)
        np.put_along_axis(found, kept, True, axis=1)
        return found & mask


class DenseCompressedAttention:
    """The same for a window and entries, which are made one by one."""

    def __init__(self, config: ModelConfig, ops) -> None:
        self._config, self._ops = config, ops

    def __call__(self, layer: int, query, key, rotation, back, sink_logits, asking=None, wanted=None):
        assert wanted is None
        ops, tokens = self._ops, query.shape[0]
        q, k = (
            ops.kernel_array(ops.rope(each.reshape([tokens, -1, query.shape[2]]), *rotation)).astype(np.float64)
            for each in (query, key)
        )
        keys, mask = k[:, 0], visible(HeadPolicy(window=self._config.compressed.window), tokens)
        if asking is not None:
            making, rows = asking.making, ops.kernel_array(asking.rows).astype(np.float64)
            made = [self._entries(making, index, rows) for index in range(len(making.makings))]
            seen = np.arange(len(made[0])) < ((np.arange(tokens) + 1) // making.rate)[:, None]
            if asking.index is not None:
                angles = np.arctan2(rotation[1], rotation[0])
                seen &= self._best(asking.index, angles, made[1], seen)
            keys, mask = np.concatenate([keys, made[0]]), np.concatenate([mask, seen], axis=1)
        out, nothing = np.empty_like(q), np.ones((tokens, 1), bool)
        for head in range(q.shape[1]):
            scores = q[:, head] @ keys.T * self._config.attention_scale
            scores = np.column_stack([scores, np.full(tokens, sink_logits[head])])
            out[:, head] = softmax(scores, np.concatenate([mask, nothing], axis=1))[:, :-1] @ keys
        return ops.rope(ops.from_kernel_array(out.astype(np.float32)), *back)

    def _entries(self, making, index: int, rows: np.ndarray) -> np.ndarray:
        one, first = making.makings[index], making.parts[index].start
        width = making.keys * one.size
        keys, gates = rows[:, first : first + width], rows[:, first + width : first + 2 * width]
        found = [np.empty((0, one.size))]
        for entry in range(len(rows) // making.rate):
            own = range(entry * making.rate, (entry + 1) * making.rate)
            parts = [(own, slice(width - one.size, width))]
            if making.overlaps and entry:
                parts.insert(0, (range(own.start - making.rate, own.start), slice(0, one.size)))
            logits = np.concatenate(
                [gates[where.start : where.stop, part] + one.bias[:, part] for where, part in parts]
            )
            values = np.concatenate([keys[where.start : where.stop, part] for where, part in parts])
            shares = np.exp(logits - logits.max(0))
            mixed = (shares / shares.sum(0) * values).sum(0)
            normed = mixed / np.sqrt((mixed**2).mean() + one.eps) * one.norm
            found.append(rotate(normed[None], own.start * one.inverse))
        return np.concatenate(found)

    def _best(self, index, angles: np.ndarray, keys: np.ndarray, seen: np.ndarray) -> np.ndarray:
        turning = np.zeros((*angles.shape[:2], index.query.shape[2] // 2))
        turning[..., : self._config.compressed.rotated // 2] = angles[..., : self._config.compressed.rotated // 2]
        query = rotate(index.query.astype(np.float64), turning)
        scores = np.maximum(np.einsum("thd,kd->thk", query, keys), 0)
        scores = np.where(seen, np.einsum("th,thk->tk", index.weights, scores), -np.inf)
        kept = np.argsort(-scores, axis=1, kind="stable")[:, : index.top]
        found = np.zeros_like(seen)
        np.put_along_axis(found, kept, True, axis=1)
        return found


class DenseMixedAttention:
    """Attention in some layers, recurrent states in the others."""

    def __init__(self, config: ModelConfig, ops, attention) -> None:
        self._config, self._ops, self._attention = config, ops, attention

    def __call__(self, layer: int, projected, *others, wanted=None):
        assert wanted is None
        if isinstance(projected, SsmProjected):
            seen = dense_ssm(projected.numbers, projected.weights, self._config.states.sizes)
            return self._ops.from_kernel_array(seen.astype(np.float32))
        if isinstance(projected, KdaProjected):
            rows = projected.numbers, projected.decays, projected.gates
            seen = dense_kda(*rows, projected.weights, self._config.states.sizes)
            return self._ops.from_kernel_array(seen.astype(np.float32))
        if not isinstance(projected, DeltaProjected):
            return self._attention(layer, projected, *others)
        inputs, gates = inputs_of(projected.numbers, projected.weights, self._config.states.sizes)
        seen = dense_delta(inputs, self._config.states.sizes).reshape(gates.shape).astype(np.float32)
        gated = gated_norm(seen, gates, projected.weights)
        return self._ops.from_kernel_array(gated.reshape(len(gated), -1))


class DictWeights:
    """Weights as `Checkpoint` gives them, out of a dictionary."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors, self.names = tensors, tuple(tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._tensors[name][start:stop]

    def columns(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._tensors[name][:, start:stop]

    def byte_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._tensors[name][start:stop]

    def kept_rows(self, name: str, start: int, stop: int) -> None:
        return None

    def kept_columns(self, name: str, start: int, stop: int) -> None:
        return None


def run_rank(
    config: ModelConfig,
    weights: Weights,
    comm: Communicator,
    ids: np.ndarray,
    ops_name: str = "numpy",
    ops: TensorOps | None = None,
) -> np.ndarray | None:
    """One rank's logits of every token, with dense attention in place of the cache. ops: of that name if None"""
    model, attention = dense_rank(config, weights, comm, ops or make_ops(ops_name))
    positions = turned(np.arange(len(ids), dtype=np.int32), config.axes)
    return model.logits(model.forward(ids, positions, attention))


def dense_rank(
    config: ModelConfig, weights: Weights, comm: Communicator, ops: TensorOps, **more: Any
) -> tuple[Model, AttentionLayer]:
    """One rank's model, and dense attention. more: for `build_model`"""
    plan = plan_head_groups(config.policies, comm.size, is_replicated=attention_of(config).is_replicated)
    shard = Shard.of(config, plan, comm.rank)
    model = build_model(config, weights, ops, comm, shard, **more)
    if config.compressed is not None:
        return model, DenseCompressedAttention(config, ops)
    attention: Any = DenseAttention(config, shard, ops) if config.mla is None else DenseLatentAttention(config, ops)
    return model, attention if config.states is None else DenseMixedAttention(config, ops, attention)


class ThreadComm:
    """Ranks as threads that meet at a barrier."""

    spans_nodes = False

    def __init__(self, rank: int, size: int, shared: list, barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier

    def _exchange(self, x: np.ndarray) -> list[np.ndarray]:
        self._shared[self.rank] = x.copy()
        self._barrier.wait(20)
        everyone = list(self._shared)
        self._barrier.wait(20)
        return everyone

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        return np.sum(self._exchange(x), axis=0)

    def add_rms_norm(self, *arguments: object) -> None:
        return None

    def gather(self, x: np.ndarray) -> np.ndarray | None:
        everyone = self._exchange(x)
        return np.concatenate(everyone, axis=-1) if self.rank == 0 else None

    def all_gather(self, x: np.ndarray, ranks: range) -> np.ndarray:
        return np.stack(self._exchange(x)[ranks.start : ranks.stop])

    def exchange(self, x: np.ndarray, ranks: range) -> np.ndarray:
        return self.all_gather(x, ranks)[:, ranks.index(self.rank)]

    def broadcast(self, x: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
        return self._exchange(np.empty(shape, np.int32) if x is None else x)[0]

    def close(self) -> None:
        pass


def run_ranks(
    config: ModelConfig,
    weights: Weights,
    size: int,
    ids: np.ndarray,
    make: Callable[[], TensorOps | None] = lambda: None,
) -> dict[int, np.ndarray | None]:
    """What each of ``size`` ranks, as threads, returns for the same tokens. make: a rank's operations"""
    return on_ranks(size, lambda comm: run_rank(config, weights, comm, ids, ops=make()))


def on_ranks(size: int, run: Callable[[Communicator], Any]) -> dict[int, Any]:
    """What each of ``size`` ranks, as threads, returns."""
    shared, barrier = [None] * size, threading.Barrier(size)
    results: dict[int, Any] = {}

    def rank_main(rank: int) -> None:
        results[rank] = run(ThreadComm(rank, size, shared, barrier))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results
