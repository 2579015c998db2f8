"""Decoders whose MLPs and experts have no gate: ``down(relu(up(x)) ** 2)``, with shared experts of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank, run_ranks
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.paged_steps import only_shard
from support.random_ernie import DENSE, MOE
from support.random_models import random_weights

from headwise.errors import ModelError
from headwise.kernels.experts import route
from headwise.runtime.config.decode_reads import layer_elements
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops

IDS = np.random.default_rng(2).integers(0, 40, 30).astype(np.int32)
SIZES = (24, 30, 8)
"""Of a shared expert beside experts of 12: as large as two of them, and as no number of them."""


@pytest.fixture(autouse=True)
def without_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "activation", "relu2")


def dense(**changes: Any) -> ModelConfig:
    return replace(model_config({**DENSE, **changes}), mlp_gate=False)


def mixed(shared: int) -> ModelConfig:
    config = model_config(MOE)
    assert config.moe is not None
    moe = replace(config.moe, num_shared_experts=1, shared_expert_size=shared)
    return replace(config, mlp_gate=False, moe=moe)


def squared(x: np.ndarray, weights: DictWeights, at: str, has_bias: bool = False) -> np.ndarray:
    """From the definition."""
    for part in ("up_proj", "down_proj"):
        x = np.maximum(x, 0) ** 2 if part == "down_proj" else x
        x = x @ weights.tensor(f"{at}{part}.weight").T.astype(np.float64)
        x = x + weights.tensor(f"{at}{part}.bias") if has_bias else x
    return x


@pytest.mark.parametrize("ops_name", ["numpy", "numba", "paddle"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_squares_what_is_above_zero_between_two_projections(ops_name: str, has_bias: bool) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    config, ops = replace(dense(), mlp_bias=has_bias), make_ops(ops_name)
    weights = random_weights(config)
    model = build_model(config, weights, ops, SingleRank(), only_shard(config))
    x = np.random.default_rng(1).standard_normal((7, config.hidden_size), dtype=np.float32)
    found = ops.numpy(model.feed_forward(model._layers[1].mlp, ops.tensor(x)))
    expected = squared(x, weights, "model.layers.1.mlp.", has_bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shared", SIZES)
@pytest.mark.parametrize("ops_name", ["numpy", "numba", "emulated"])
def test_experts_do_so_and_so_does_a_shared_one_of_any_size(ops_name: str, shared: int) -> None:
    config = mixed(shared)
    ops = EmulatedOps("float32", ShimPrograms()) if ops_name == "emulated" else make_ops(ops_name)
    weights = random_weights(config)
    model: Any = build_model(config, weights, ops, SingleRank(), only_shard(config))
    x = np.random.default_rng(1).standard_normal((7, config.hidden_size), dtype=np.float32)
    model._tokens = None
    found = ops.numpy(model.feed_forward(model._layers[1].mlp, ops.tensor(x)))
    at, moe = "model.layers.1.mlp.", config.moe
    assert moe is not None
    correction = weights.tensor(f"{at}moe_statics.e_score_correction_bias")[0]
    chosen, shares = route(x @ weights.tensor(f"{at}gate.weight").T, correction, moe.routing)
    expected = squared(x, weights, f"{at}shared_experts.")
    for token, (experts, own) in enumerate(zip(chosen, shares, strict=True)):
        for expert, share in zip(experts, own, strict=True):
            expected[token] += share * squared(x[token], weights, f"{at}experts.{expert}.")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shared", SIZES)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_ranks_have_parts_of_experts_and_of_a_shared_one_of_any_size(on_gpu: bool, ranks: int, shared: int) -> None:
    config, programs = mixed(shared), ShimPrograms()
    weights = random_weights(config)
    expected = run_rank(config, weights, SingleRank(), IDS)
    found = run_ranks(config, weights, ranks, IDS, lambda: EmulatedOps("float32", programs) if on_gpu else None)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_ranks_are_no_more_than_a_shared_expert_has_columns() -> None:
    assert valid_tp_sizes(mixed(3)) == [1, 2]
    with pytest.raises(ModelError, match="tp_size 5 is too much for the model's MLP size, 3"):
        build_model(mixed(3), random_weights(mixed(3)), make_ops("numpy"), SingleRank(), replace(
            only_shard(mixed(3)), size=5
        ))  # fmt: skip


def test_what_is_read_for_a_token_has_no_gates() -> None:
    gated, config = model_config(MOE), mixed(30)
    assert gated.moe is not None
    columns = 48 + 2 * (3 * 12 + 24)  # of one dense layer, and of two with three experts and a shared one
    assert layer_elements(gated) - layer_elements(replace(gated, mlp_gate=False)) == 64 * columns
    fewer = layer_elements(replace(gated, mlp_gate=False)) - 2 * 2 * 64 * 24
    assert layer_elements(config) == fewer + 2 * 2 * 64 * 30
