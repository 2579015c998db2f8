"""Models with adapters that are drawn, and their steps over a paged cache, of which sequences go by these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from support.lora import modules_of
from support.paged_steps import PagedSequences, Step, only_shard
from support.random_models import random_weights
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.models.base import Model
from headwise.runtime.models.low_rank import AdaptedRows
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model
from headwise.runtime.models.states_config import KdaConfig
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops


@dataclass(frozen=True)
class DrawnAdapter:
    """An `Adapter` of matrices of these shapes, ``outputs, inputs`` by module; factor: of what it adds."""

    name: str
    shapes: Mapping[str, tuple[int, int]]
    rank: int
    factor: float = 0.4

    @property
    def modules(self) -> set[str]:
        return {*self.shapes}

    def down(self, module: str) -> np.ndarray:
        return self._drawn[module][0]

    def up(self, module: str) -> np.ndarray:
        return self._drawn[module][1]

    @cached_property
    def _drawn(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        draw, found = np.random.default_rng(len(self.name) + self.rank), {}
        for module, (outputs, inputs) in self.shapes.items():
            down = draw.standard_normal((self.rank, inputs), np.float32) / np.float32(inputs**0.5)
            up = draw.standard_normal((outputs, self.rank), np.float32) * np.float32(self.factor / self.rank**0.5)
            found[module] = down, up
        return found


def modules_served(config: ModelConfig, weights: Weights) -> dict[str, tuple[int, int]]:
    """Shapes of a model's projections that adapters may change, by an adapter's names of them."""
    experts = set() if config.moe is None else {f"layers.{layer}.mlp" for layer in config.moe.layers}
    names = [name for name in weights.names if name.endswith(".weight") and ".layers." in name]
    if not config.mlp_gate:
        names = [name for name in names if "gate_proj" not in name]
    if config.mla is not None:
        names = [name for name in names if "q_proj" not in name]
    if isinstance(config.states, KdaConfig):
        with_states = tuple(f"layers.{layer}.self_attn." for layer in config.states.layers)
        names = [name for name in names if not any(at in name for at in with_states)]
    found = {}
    for name, (outputs, inputs) in modules_of({name: weights.tensor(name).shape for name in names}).items():
        module = name[name.index("layers.") :]
        if module.rpartition(".")[0] not in experts:
            found[module] = outputs, inputs
    return found


def weights_of(config: ModelConfig, name: str) -> Weights:
    return Checkpoint(checkpoint(name)) if name in TINY_CONFIGS else random_weights(config)


def adapted_model(
    config: ModelConfig,
    name: str = "",
    adapters: Sequence[DrawnAdapter] | None = None,
    *,
    weights: Weights | None = None,
    weights_dtype: str = "float32",
    threads: int = 2,
) -> Model:
    """name: of a tiny model, if it is one. adapters: some of several ranks, if none are given"""
    given = weights_of(config, name) if weights is None else weights
    ops = make_ops("numba", threads, "float32" if weights_dtype == "float32" else "bfloat16", weights_dtype)
    if adapters is None:
        adapters = several(modules_served(config, given))
    return build_model(config, given, ops, SingleRank(), only_shard(config), adapters=adapters)


def several(shapes: Mapping[str, tuple[int, int]]) -> list[DrawnAdapter]:
    """One of everything, two of parts, and one of a larger rank."""
    queries = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "qkv_proj", "o_proj"))}
    others = {name: shape for name, shape in shapes.items() if name not in queries and "layers.1." not in name}
    return [
        DrawnAdapter("whole", shapes, 16),
        DrawnAdapter("queries", queries, 1),
        DrawnAdapter("others", others or shapes, 5),
        DrawnAdapter("large", shapes, 64),
    ]


def run_adapted(
    model: Model,
    attention: Callable[..., object],
    steps: Sequence[Step],
    whose: Mapping[int, int],
    kv_dtype: str = "float32",
    wanted: Sequence[np.ndarray | None] | None = None,
) -> list[np.ndarray]:
    """Hidden states of all sequences of all steps, or of each step's ``wanted`` rows. whose: the adapter that a
    sequence goes by, by its place from 1 on; others go by none"""
    sequences, found = PagedSequences(model, kv_dtype), []
    for index, step in enumerate(steps):
        members, counts = zip(*step, strict=True)
        rows = np.repeat(np.array([whose.get(member, 0) for member in members], np.int16), counts)
        model.adapted = AdaptedRows(rows) if rows.any() else None
        try:
            if wanted is None:
                found += sequences.forward(model, step, attention)
            else:
                found.append(sequences.rows(model, step, attention, wanted[index]))
        finally:
            model.adapted = None
    return found
