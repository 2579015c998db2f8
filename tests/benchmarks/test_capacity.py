"""The arithmetic of the capacity benchmark: what the modelled GPU counts, and that the simulation loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from capacity import ERNIE, ERNIE_WINDOWS, LLAMA, all_full, footprint
from simulation.gpu import A800, BYTES, SimulatedGpu, keys_read, seen_pairs, weights_of
from simulation.serving import SimulatedEngine, random_load, trace_load

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.models.registry import model_config

WINDOWED = model_config({**ERNIE, **ERNIE_WINDOWS})


def sees(policy: HeadPolicy, query: int, key: int) -> bool:
    return key <= query and (policy.is_full or key < policy.sink or query - key < policy.window)


@pytest.mark.parametrize("policy", [FULL, HeadPolicy(5), HeadPolicy(5, 3)])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 20), (4, 3), (6, 9), (30, 1), (30, 7)])
def test_pairs_are_those_of_the_mask_and_every_key_is_read_once(policy: HeadPolicy, start: int, count: int) -> None:
    mask = np.array([[sees(policy, query, key) for key in range(40)] for query in range(start, start + count)])
    starts, counts = np.array([start]), np.array([count])
    assert seen_pairs(policy, starts, counts).tolist() == [mask.sum()]
    assert keys_read(policy, starts, counts).tolist() == [mask.any(axis=0).sum()]


def test_weights_are_those_of_the_published_models() -> None:
    assert weights_of(model_config(LLAMA)).total == pytest.approx(8.03e9, rel=0.001)
    ernie = weights_of(WINDOWED)
    assert ernie.total == pytest.approx(21.8e9, rel=0.01)
    assert ernie.per_token + ernie.head == pytest.approx(3.35e9, rel=0.01)


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    weights = weights_of(WINDOWED)
    assert weights.read(1) == pytest.approx(weights.per_token + weights.head)
    assert weights.read(1) < weights.read(8) < weights.read(64) < weights.read(100_000)
    assert weights.read(100_000) == pytest.approx(weights.total)


def test_a_decode_step_is_bound_by_memory_and_a_long_prompt_by_arithmetic() -> None:
    gpu = SimulatedGpu(A800, WINDOWED)
    flops, size = gpu.work(np.array([10_000]), np.array([1]), 1)
    full, windowed = 28, 28 * 3
    kv_bytes = 2 * 128 * BYTES
    assert size == pytest.approx(
        gpu.weights.read(1) * BYTES + kv_bytes * (full * 10_001 + windowed * 4096 + full + windowed)
    )
    assert gpu.step_seconds(np.array([10_000]), np.array([1]), 1) == pytest.approx(
        size / (A800.bandwidth * A800.memory_efficiency) + A800.overhead_s
    )
    flops, _ = gpu.work(np.array([0]), np.array([8192]), 0)
    assert gpu.step_seconds(np.array([0]), np.array([8192]), 0) == pytest.approx(
        flops / (A800.flops * A800.compute_efficiency) + A800.overhead_s
    )


def test_windowed_heads_hold_a_constant_and_full_ones_grow() -> None:
    lengths = (65_536, 131_072)
    full, windowed = footprint(all_full(WINDOWED), lengths), footprint(WINDOWED, lengths)
    bytes_per_token = 2 * 128 * BYTES * 28 * 4
    assert full.sequence_bytes == {n: n * bytes_per_token for n in lengths}
    grown = windowed.sequence_bytes[131_072] - windowed.sequence_bytes[65_536]
    assert grown == 65_536 * bytes_per_token // 4
    assert windowed.groups == 4


def test_equal_ids_of_a_trace_are_equal_tokens() -> None:
    records = [
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    ]
    load = trace_load(records, stretch=2.0)
    first, second = (request.prompt for request in load.requests)
    assert load.arrivals.tolist() == [0.0, 1.0]
    assert (len(first), len(second)) == (1300, 1100)
    assert (first[:1024] == second[:1024]).all()
    assert not np.isin(second[1024:], first).any()
    assert [request.output_tokens for request in load.requests] == [5, 7]


@pytest.mark.parametrize("recycling", [False, True])
def test_every_request_is_served_in_full_and_the_pool_is_whole_again(recycling: bool) -> None:
    config = model_config({**ERNIE, "window_size": 128, "head_wise_swa_ratio": 0.75})
    load = random_load(12, input_tokens=400, output_tokens=60, rate=100.0)
    engine = SimulatedEngine(
        config,
        SimulatedGpu(A800, config),
        EngineConfig(max_num_seqs=16, max_batched_tokens=512, recycling=recycling),
        kv_bytes=1200 * 2 * 128 * BYTES * 28 * 4,
        longest=load.longest,
    )
    outcome = engine.serve(load)
    assert outcome.prompt_tokens == sum(len(request.prompt) for request in load.requests)
    assert (outcome.ttft_s > 0).all()
    assert len(outcome.ttft_s) == 12
    assert 1 < outcome.peak_running < 12
    assert outcome.output_rate * outcome.seconds == pytest.approx(load.output_tokens)
    assert outcome.computed_tokens >= outcome.prompt_tokens - outcome.cached_tokens + load.output_tokens - 12
    assert engine.cache.stats().held_blocks == 0
    engine.cache.check_integrity()


def test_recycling_lets_more_requests_run_at_once() -> None:
    config = model_config({**ERNIE, "window_size": 128, "head_wise_swa_ratio": 0.75})
    load = random_load(12, input_tokens=2000, output_tokens=20, rate=100.0)

    def peak(recycling: bool) -> int:
        options = EngineConfig(max_num_seqs=16, max_batched_tokens=256, recycling=recycling)
        kv_bytes = 6000 * 2 * 128 * BYTES * 28 * 4
        return (
            SimulatedEngine(config, SimulatedGpu(A800, config), options, kv_bytes, load.longest)
            .serve(load)
            .peak_running
        )

    assert peak(recycling=True) > peak(recycling=False)
