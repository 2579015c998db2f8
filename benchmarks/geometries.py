"""Published models as caches see them: what each layer keeps, from the ``config.json`` of each.

They are read by the modules of the models, but for states beside attention (Qwen3-Next, Qwen3.5): these are counted as
if they lay one behind the other, as in pages of layers, and not by key heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.planner import Policies, plan_head_groups
from headwise.cache_controller.policy import FULL
from headwise.cache_controller.unified_pages import UnifiedPages, planned_bytes, unified_pages
from headwise.kernels.mla_quantised import FLOAT8
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.models.states_config import KdaConfig, SsmConfig, StatesConfig

PUBLISHED = Path(__file__).resolve().parents[1] / "tests" / "support" / "published"
BLOCK_SIZE, DTYPE, BYTES = 64, "bfloat16", 2
STATE_BYTES = 4
"""Of a number of a recurrent state: float32, as the models' configurations ask for (``mamba_ssm_dtype``)."""

MOST_RANKS = 8

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Geometry:
    """What a model keeps of a sequence.

    policies:      ``[layers][members]``, of layers with attention; none of one that uses another one's cache
    token_bytes:   ``[layers]``, of one member and token
    states:        bytes of each layer's state, over all ranks
    tp_sizes:      that its heads can be dealt to, of at most `MOST_RANKS`; of models with states those that divide the
                   KV heads: the planner makes blocks fit states, and here they are cut to attention's blocks
    is_replicated: every rank keeps all members
    """

    policies: Policies
    token_bytes: tuple[int, ...]
    tp_sizes: tuple[int, ...]
    states: tuple[int, ...] = ()
    is_replicated: bool = False


@dataclass(frozen=True)
class Planned:
    """A geometry as it is planned for some ranks; all bytes are one rank's."""

    geometry: Geometry
    plan: HeadGroupPlan

    @property
    def states(self) -> tuple[int, ...]:
        return tuple(size // self.plan.tp_size for size in self.geometry.states)

    @property
    def state_blocks(self) -> int:
        """Blocks that a sequence's states take, which lie in them one behind the other."""
        return -(-sum(self.states) // self.plan.block_bytes)

    @property
    def padding(self) -> float:
        """The largest share that stays empty, over what does not: of the groups' blocks, and of those of states."""
        if not self.states:
            return self.plan.padding
        of_states = self.state_blocks * self.plan.block_bytes / sum(self.states) - 1
        return max(self.plan.padding, of_states)

    def sequence_bytes(self, tokens: int, in_flight: int) -> int:
        """Of a sequence of so many tokens, with one copy of its states."""
        blocks = planned_bytes(self.plan, self.plan.policies, tokens, BLOCK_SIZE, in_flight)
        return blocks + self.state_blocks * self.plan.block_bytes

    def unified(self, in_flight: int) -> UnifiedPages:
        """The same memory in pages of layers."""
        return unified_pages(self.plan, self.geometry.policies, BLOCK_SIZE, in_flight, self.states)


def planned(geometry: Geometry, tp_size: int = 1) -> Planned:
    sizes = [BLOCK_SIZE * size for size in geometry.token_bytes]
    plan = plan_head_groups(geometry.policies, tp_size, sizes=sizes, is_replicated=geometry.is_replicated)
    return Planned(geometry, plan)


IN_CODES = {"deepseek-v4-flash": FLOAT8}
"""Models that are published with a cache of another dtype, which are there in that, too."""


def published() -> dict[str, Geometry]:
    """Geometries by the names of their files."""
    paths = sorted(PUBLISHED.glob("*.json"), key=lambda path: path.stem)
    found = {path.stem: geometry(json.loads(path.read_text())) for path in paths}
    in_codes = {
        f"{name}, {dtype}": _served(json.loads((PUBLISHED / f"{name}.json").read_text()), dtype)
        for name, dtype in IN_CODES.items()
    }
    return dict(sorted((found | in_codes).items()))


def geometry(config: Config) -> Geometry:
    """That of a ``config.json``."""
    text = {**config, **config.get("text_config", {})}
    if "linear_num_value_heads" in text:
        return _states_and_attention(text)
    model = model_config(config)
    if model.states is None:
        return _served(config)
    if isinstance(model.states, KdaConfig):
        return _kda_and_latents(model, model.states)
    return _ssm_and_attention(model, model.states)


def _served(config: Config, kv_dtype: str = DTYPE) -> Geometry:
    model = model_config(config)
    attention = attention_of(model)
    layers = range(model.cache_layers)
    return Geometry(
        model.policies,
        tuple(attention.layout(BLOCK_SIZE, 1, kv_dtype, layer).slot_bytes // BLOCK_SIZE for layer in layers),
        tuple(size for size in valid_tp_sizes(model) if size <= MOST_RANKS),
        is_replicated=attention.is_replicated,
    )


def _states_and_attention(text: Config) -> Geometry:
    """Every n-th layer has attention, the others a gated delta-net: the last inputs of its convolution, and its state.

    Gated DeltaNet (arXiv 2412.06464): a matrix of key by value dimensions for each value head.
    """
    layers, every = text["num_hidden_layers"], text["full_attention_interval"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    inputs = (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1) * BYTES
    state = inputs + values * text["linear_key_head_dim"] * STATE_BYTES
    heads, attended = text["num_key_value_heads"], layers // every
    return Geometry(
        ((FULL,) * heads,) * attended,
        (2 * text["head_dim"] * BYTES,) * attended,
        _divisors(heads),
        states=(state,) * (layers - attended),
    )


def _ssm_and_attention(model: ModelConfig, ssm: StatesConfig) -> Geometry:
    """The same of state space models (Mamba-2), whose groups share keys and queries."""
    assert isinstance(ssm, SsmConfig), "no other has such fields"
    values, key_dim = ssm.members * ssm.sizes.share * ssm.sizes.value_dim, ssm.sizes.key_dim
    inputs = (values + 2 * ssm.groups * key_dim) * (ssm.sizes.convolution - 1) * BYTES
    attended = model.num_layers - len(ssm.layers)
    return Geometry(
        ((FULL,) * model.num_kv_heads,) * attended,
        (2 * model.head_dim * BYTES,) * attended,
        _divisors(model.num_kv_heads),
        states=(inputs + values * key_dim * STATE_BYTES,) * len(ssm.layers),
    )


def _kda_and_latents(model: ModelConfig, kda: KdaConfig) -> Geometry:
    """The same of Kimi Delta Attention (arXiv 2510.26692), each of whose heads has a matrix, beside latents."""
    assert model.mla is not None, "parsed so"
    sizes, attended = kda.sizes, model.num_layers - len(kda.layers)
    state = sizes.channels * (sizes.convolution - 1) * BYTES + sizes.key_dim * sizes.value_dim * STATE_BYTES
    return Geometry(
        ((FULL,),) * attended,
        (model.mla.width * BYTES,) * attended,
        _divisors(kda.members),
        states=(kda.members * state,) * len(kda.layers),
        is_replicated=True,
    )


def _divisors(*counts: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, MOST_RANKS + 1) if not any(count % n for count in counts))
