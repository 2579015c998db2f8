"""Mixtures of experts that `gpu_checks.py` compiles and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.experts import ExpertShape
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.experts import Mixture, Routing
from headwise.kernels.fused import Activation, is_gated
from headwise.runtime.models.layers import DenseMlp, Linear
from headwise.runtime.ops.base import Experts, TensorOps
from headwise.runtime.ops.quantised import Matrix


def expert_shape(config: Mapping[str, Any]) -> ExpertShape:
    """Of the model that the section moe serves."""
    return ExpertShape(
        Routing(config["moe_num_experts"], config["moe_k"], norm_min=None),
        shared=config["moe_num_shared_experts"],
        hidden=config["hidden_size"],
        inner=config["moe_intermediate_size"],
        activation="silu",
        dtype="bfloat16",
    )


def compile_experts(shape: ExpertShape, target: Target, directory: Path) -> int:
    """The number of kernels."""
    return len(list(precompile([], [target], directory, [shape])))


def experts_of(
    ops: TensorOps, up: Sequence[Matrix], down: Sequence[Matrix], activation: Activation = "silu"
) -> Experts:
    """Of ``up [2 * inner, hidden]`` (without gates ``[inner, hidden]``) and ``down [hidden, inner]`` each: the last is
    shared, two are chosen, by logits that lack a bias."""
    prepare = ops.gated_weight if is_gated(activation) else ops.linear_weight
    every = [
        DenseMlp(Linear(prepare(one)), Linear(ops.linear_weight(other))) for one, other in zip(up, down, strict=True)
    ]
    bias = np.linspace(1, -1, len(up) - 1, dtype=np.float32)
    return ops.experts(Mixture(Routing(len(bias), 2, 1e-12), activation, logit_bias=bias), every[:-1], every[-1])
