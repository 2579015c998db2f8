"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: blocks of state space models, attention, MLPs or experts, in any order.

Each block adds what it makes to the residual stream. A layer here is a block that mixes tokens, and the MLP or experts
of the block behind it, if that has some. Nothing is rotated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headwise.errors import ModelError
from headwise.kernels.fused import Activation
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig, ungrouped_moe
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import MOST_LAYERS, HfConfig, check_served, decoder_config, number, positive
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.state_space import FieldNames, StateSpaceDecoder, ssm_config, with_states
from headwise.runtime.models.values import shown
from headwise.runtime.models.weight_view import ExpertWeights, RenamedWeights
from headwise.runtime.models.weights import Weights

ARCHITECTURE = "NemotronHForCausalLM"

_STATES, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _STATES, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_OLDER = {"mamba": _STATES, "attention": _ATTENTION}
"""Of ``hybrid_override_pattern``, and of lists of older files."""

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "mlp_hidden_act": (None, "relu2"),
    "sliding_window": (None,),
}
_FIELDS = FieldNames(
    heads=("mamba_num_heads", 128),
    head_dim=("mamba_head_dim", 64),
    groups=("n_groups", 8),
    state=("ssm_state_size", 128),
    convolution=("conv_kernel", 4),
)
_DEFAULTS = {"head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
"""Those of Hugging Face's ``NemotronHConfig``."""


@dataclass(frozen=True)
class NemotronConfig(ModelConfig):
    """blocks: of each layer, which of the checkpoint's mixes tokens, and which has its MLP or experts; None: it has
    none"""

    blocks: tuple[tuple[int, int | None], ...] = ()

    def mlp_size(self, layer: int) -> int:
        """See `ModelConfig.mlp_size`."""
        return 0 if self.blocks[layer][1] is None else self.intermediate_size


def parse(config: HfConfig) -> NemotronConfig:
    check_served(config, _SERVED_VALUES)
    kinds = _kinds(config)
    blocks = _layers(kinds)
    own = {**_DEFAULTS, **config, "num_hidden_layers": len(blocks), "hidden_act": "relu2"}
    decoder = decoder_config(
        {key: value for key, value in own.items() if key != "layer_types"},
        ARCHITECTURE,
        ropes=lambda kind: RopeConfig(10000.0, is_none=True),
        activation="relu2",
        rms_norm_eps=number(config, "layer_norm_epsilon", 1e-5),
    )
    with_ssm = [layer for layer, (mixer, _) in enumerate(blocks) if kinds[mixer] == _STATES]
    if with_ssm:
        ssm = ssm_config(config, _FIELDS, with_ssm, has_group_norms=True, eps=decoder.rms_norm_eps)
        decoder = with_states(decoder, ssm)
    with_experts = [layer for layer, (_, mlp) in enumerate(blocks) if mlp is not None and kinds[mlp] == _EXPERTS]
    moe = _experts(own, tuple(with_experts), len(blocks)) if with_experts else None
    return NemotronConfig(**{**vars(decoder), "moe": moe}, blocks=blocks)


def _experts(config: HfConfig, layers: tuple[int, ...], num_layers: int) -> GroupedMoeConfig:
    moe = ungrouped_moe({**config, "first_k_dense_replace": 0, "mlp_layer_types": None}, num_layers)
    size = positive(config, "moe_shared_expert_intermediate_size", default=moe.expert_size)
    latent = positive(config, "moe_latent_size") if config.get("moe_latent_size") is not None else 0
    return replace(moe, layers=layers, shared_expert_size=size, latent_size=latent)


def _kinds(config: HfConfig) -> Sequence[str]:
    """What each block is."""
    pattern = config.get("hybrid_override_pattern")
    named = config.get("layers_block_type", config.get("layer_types"))
    if named is None and isinstance(pattern, str):
        named = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(named, list) or not 0 < len(named) <= MOST_LAYERS:
        raise ModelError(
            "config.json: 'hybrid_override_pattern' or 'layers_block_type' must name 1 to "
            f"{MOST_LAYERS} blocks, got {shown(named if pattern is None else pattern)}"
        )
    kinds = [_OLDER.get(kind, kind) for kind in map(str, named)]
    unknown = sorted({*kinds} - {_STATES, _ATTENTION, _MLP, _EXPERTS})
    if unknown:
        raise ModelError(f"config.json: blocks {shown(unknown)} are not supported; known are {', '.join(_LETTERS)}")
    given = positive(config, "num_hidden_layers", default=len(kinds))
    if given != len(kinds):
        raise ModelError(f"config.json: 'num_hidden_layers' is {given}, and {len(kinds)} blocks are named")
    return kinds


def _layers(kinds: Sequence[str]) -> tuple[tuple[int, int | None], ...]:
    """See `NemotronConfig.blocks`."""
    found: list[tuple[int, int | None]] = []
    for block, kind in enumerate(kinds):
        if kind in (_STATES, _ATTENTION):
            found.append((block, None))
            continue
        if not found or found[-1][1] is not None:
            raise ModelError(
                f"config.json: block {block} is an MLP or experts, and no attention or states come right before it, "
                "which cannot be served"
            )
        found[-1] = (found[-1][0], block)
    return tuple(found)


class NemotronH(StateSpaceDecoder, GroupedMoeDecoder):
    """The shared decoder with MLPs that nothing gates, or experts, in some layers."""

    config: NemotronConfig
    activation: Activation = "relu2"
    mixer_name: ClassVar[str] = "self_attn"

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(_Blocks(weights, self.config.blocks))

    def _find_prefix(self, weights: Weights) -> str:
        for name in weights.names:
            if name.endswith(_EMBEDDING):
                return name.removesuffix(_EMBEDDING)
        raise ModelError(f"the weights have no {_EMBEDDING!r}: this is not a {ARCHITECTURE}'s checkpoint")

    def norms_of(self, layer: int) -> Mapping[str, str]:
        norms = super().norms_of(layer)
        if self.config.blocks[layer][1] is not None:
            return norms
        return {norm: name for norm, name in norms.items() if norm != "before_mlp"}

    def load_mlp(self, layer: int, at: str) -> Any:
        return None if self.config.blocks[layer][1] is None else super().load_mlp(layer, at)


_EMBEDDING = "embeddings.weight"


class _Blocks(RenamedWeights):
    """A checkpoint's blocks by the names that layers have elsewhere."""

    _LAYER = re.compile(r"(?P<at>.*\.layers\.)(?P<layer>\d+)\.(?P<part>[a-z_]+)\.(?P<rest>.+)")

    def __init__(self, source: Weights, blocks: Sequence[tuple[int, int | None]]) -> None:
        self._blocks = blocks
        super().__init__(source, {name: self._name_here(name) for name in source.names})

    def _name_here(self, name: str) -> str:
        for theirs, ours in ((_EMBEDDING, "embed_tokens.weight"), ("norm_f.weight", "norm.weight")):
            if name.endswith(theirs):
                return name.removesuffix(theirs) + ours
        match = self._LAYER.fullmatch(name)
        place = None if match is None else self._place(int(match["layer"]))
        if match is None or place is None:
            return name
        layer, is_mlp = place
        at = f"{match['at']}{layer}."
        if match["part"] == "norm":
            return f"{at}{'post_attention_layernorm' if is_mlp else 'input_layernorm'}.{match['rest']}"
        return f"{at}{'mlp' if is_mlp else 'self_attn'}.{match['rest']}"

    def _place(self, block: int) -> tuple[int, bool] | None:
        """The layer that a block is of, and whether it is its MLP."""
        for layer, (mixer, mlp) in enumerate(self._blocks):
            if block in (mixer, mlp):
                return layer, block == mlp
        return None
