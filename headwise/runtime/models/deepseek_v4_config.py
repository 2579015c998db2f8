"""Reads the ``config.json`` of a DeepSeek-V4, as it was published and as transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import ModelError
from headwise.kernels.fused import SILU_LIMIT
from headwise.runtime.models.compressed_config import CompressedConfig
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig
from headwise.runtime.models.hf_config import (
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    HfConfig,
    check_served,
    decoder_config,
    integer,
    mapping,
    number,
    positive,
    rope,
)
from headwise.runtime.models.hyper import HyperConfig, HyperModelConfig
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import scaling_kind
from headwise.runtime.models.values import finite_number, shown

ARCHITECTURE = "DeepseekV4ForCausalLM"

WINDOW, INDEXED, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {INDEXED: 4, HEAVY: 128}
_HASHED, _ROUTED = "hash_moe", "moe"
_MOST_RATE, _MOST_STREAMS, _MOST_RANK = 1 << 16, 64, 1 << 16
_OWN_FIELDS = ("layer_types", "rope_parameters", "rope_scaling", "partial_rotary_factor", "head_dim")

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "scoring_func": (None, "sqrtsoftplus"),
    "topk_method": (None, "noaux_tc"),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "norm_topk_prob": (None, True),
    "swiglu_limit": (None, SILU_LIMIT),
    "tie_word_embeddings": (None, False),
}


@dataclass(frozen=True)
class V4MoeConfig(GroupedMoeConfig):
    """hashed: layers whose experts are looked up by token"""

    hashed: frozenset[int]


@dataclass(frozen=True)
class V4Config(HyperModelConfig):
    """window_rope: of layers with a window alone"""

    window_rope: RopeConfig | None = None

    def with_draft_layer(self, *, has_window: bool = False) -> ModelConfig:
        """It has a window alone, and experts that are routed."""
        compressed, moe, rope = self.compressed, self.moe, self.window_rope
        assert compressed is not None, "parsed so"
        assert moe is not None, "parsed so"
        assert rope is not None, "parsed so"
        compressed = replace(compressed, rates=(*compressed.rates, 0))
        return replace(
            self,
            num_layers=self.num_layers + 1,
            draft_layers=1,
            compressed=compressed,
            policies=compressed.policies,
            ropes=(*self.ropes, rope),
            moe=replace(moe, layers=(*moe.layers, self.num_layers)),
        )

    def stages(self, count: int) -> tuple[range, ...]:
        """See `ModelConfig.stages`. Layers whose experts are looked up by token are in the first, which alone knows
        tokens before they are sampled."""
        found = super().stages(count)
        assert isinstance(self.moe, V4MoeConfig), "parsed so"
        behind = sorted(layer for layer in self.moe.hashed if layer not in found[0])
        if behind:
            raise ValueError(
                f"pipeline_parallel_size {count}: layer {behind[0]} looks its experts up by token, and only the first "
                f"stage, which has {len(found[0])} layers then, is given these: choose fewer stages"
            )
        return found

    def in_stages(self, count: int) -> ModelConfig:
        """See `ModelConfig.in_stages`."""
        compressed = self.compressed
        assert compressed is not None, "parsed so"
        cuts = tuple(stage.start for stage in self.stages(count)[1:])
        compressed = replace(compressed, cuts=cuts, pieces=1 << (count - 1).bit_length())
        return replace(self, compressed=compressed, policies=compressed.policies)


def parse(config: HfConfig) -> ModelConfig:
    check_served(config, _SERVED_VALUES)
    layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    head_dim = positive(config, "head_dim", default=512, most=MOST_HEAD_DIM)
    rotated, types, rates = _rotated(config, head_dim), _layer_types(config, layers), _rates(config)
    compressed = _compressed(config, types, rates, head_dim, rotated)
    plain = {key: value for key, value in config.items() if key not in _OWN_FIELDS}
    expert_size = positive(config, "moe_intermediate_size", default=2048)
    decoder = decoder_config(
        {**plain, "head_dim": rotated, "num_key_value_heads": 1, "intermediate_size": expert_size}, ARCHITECTURE
    )
    if decoder.num_heads % compressed.out_groups:
        raise ModelError(
            f"config.json: 'o_groups' {compressed.out_groups} does not divide 'num_attention_heads' {decoder.num_heads}"
        )
    main, compress = (_rope(config, which, rotated / head_dim) for which in ("main", "compress"))
    fields = {
        **vars(decoder),
        "head_dim": head_dim,
        "policies": compressed.policies,
        "ropes": tuple(compress if rate else main for rate in compressed.rates),
        "attention_scale": head_dim**-0.5,
        "sink_logits": True,
        "compressed": compressed,
        "moe": _moe(config, layers, expert_size),
    }
    return V4Config(**fields, hyper=_hyper(config, decoder.rms_norm_eps), window_rope=main)


def _rotated(config: HfConfig, head_dim: int) -> int:
    """Elements of a head that are rotated, the last ones."""
    given = config.get("partial_rotary_factor")
    if given is None:
        found = positive(config, "qk_rope_head_dim", default=64, most=head_dim)
    else:
        share = finite_number(given)
        if share is None or not 0 < share <= 1:
            raise ModelError(f"config.json: 'partial_rotary_factor' must be above 0 and up to 1, got {shown(given)}")
        found = int(head_dim * share)
    if found % 2 or (head_dim - found) % 2 or not found:
        raise ModelError(f"config.json: {found} of a head's {head_dim} elements are rotated: both must be even")
    return found


def _layer_types(config: HfConfig, layers: int) -> list[str]:
    """The kind of each layer: as named, by its rate (``compress_ratios``, 0 for none), or as in DeepSeek-V4-Pro."""
    ratios, named = config.get("compress_ratios"), config.get("layer_types")
    if named is None and ratios is not None:
        kinds = {0: WINDOW, **{rate: kind for kind, rate in _RATES.items()}}
        are_known = isinstance(ratios, list) and all(type(ratio) is int and ratio in kinds for ratio in ratios)
        if not are_known or len(ratios) < layers:
            raise ModelError(
                f"config.json: 'compress_ratios' must have one of {sorted(kinds)} for each of {layers} layers, got "
                f"{shown(ratios)}"
            )
        return [kinds[ratio] for ratio in ratios[:layers]]
    if named is None:
        return [INDEXED if layer >= 2 and layer % 2 else HEAVY for layer in range(layers)]
    known = (WINDOW, INDEXED, HEAVY)
    if not isinstance(named, list) or len(named) != layers or not set(map(str, named)) <= set(known):
        raise ModelError(
            f"config.json: 'layer_types' must name {layers} layers, each one of {', '.join(known)}, got {shown(named)}"
        )
    return list(map(str, named))


def _rates(config: HfConfig) -> dict[str, int]:
    """Tokens that an entry of each kind of layer stands for."""
    given, short = mapping(config, "compress_rates"), {INDEXED: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    found = {
        kind: positive(
            config, short[kind], default=positive(given, kind, default=rate, most=_MOST_RATE), most=_MOST_RATE
        )
        for kind, rate in _RATES.items()
    }
    if found[INDEXED] == found[HEAVY] or min(found.values()) < 2:
        raise ModelError(f"config.json: 'compress_rates' must be two different numbers from 2 on, got {shown(found)}")
    return {WINDOW: 0, **found}


def _compressed(
    config: HfConfig, types: list[str], rates: Mapping[str, int], head_dim: int, rotated: int
) -> CompressedConfig:
    index_dim = positive(config, "index_head_dim", default=128, most=_MOST_RANK)
    if index_dim < rotated or index_dim % 2:
        raise ModelError(
            f"config.json: 'index_head_dim' {index_dim} must be even, and no less than the {rotated} elements of a "
            "head that are rotated"
        )
    return CompressedConfig(
        rates=tuple(rates[kind] for kind in types),
        indexed=rates[INDEXED] if INDEXED in types else 0,
        index_heads=positive(config, "index_n_heads", default=64, most=_MOST_RANK),
        index_dim=index_dim,
        index_top=positive(config, "index_topk", default=512),
        head_dim=head_dim,
        rotated=rotated,
        q_rank=positive(config, "q_lora_rank", default=1024, most=_MOST_RANK),
        out_groups=positive(config, "o_groups", default=8, most=_MOST_RANK),
        out_rank=positive(config, "o_lora_rank", default=1024, most=_MOST_RANK),
        window=positive(config, "sliding_window", default=128),
    )


def _rope(config: HfConfig, which: str, share: float) -> RopeConfig:
    """Of layers with a window alone (``main``), or of those with entries, too (``compress``): only these are scaled."""
    parameters, nested = mapping(config, "rope_parameters"), mapping(mapping(config, "rope_parameters"), which)
    theta = number(config, *(("rope_theta", 10000.0) if which == "main" else ("compress_rope_theta", 160000.0)))
    scaling = nested or ({} if which == "main" else {**(parameters or mapping(config, "rope_scaling"))})
    scaling = {key: value for key, value in scaling.items() if key not in ("partial_rotary_factor", "main", "compress")}
    theta = number(nested, "rope_theta", theta)
    found = rope({**config, "rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling})
    lengthened = found.scaling
    if lengthened and scaling_kind(lengthened) == "yarn" and lengthened.get("attention_factor") is None:
        lengthened = {**lengthened, "attention_factor": 1.0}  # cosines and sines are not scaled
    return replace(found, scaling=lengthened, share=share)


def _moe(config: HfConfig, layers: int, expert_size: int) -> V4MoeConfig:
    experts = positive(config, "n_routed_experts", default=256, most=MOST_EXPERTS)
    chosen = positive(config, "num_experts_per_tok", default=6)
    if chosen > experts:
        raise ModelError(f"config.json: 'num_experts_per_tok' {chosen} is more than 'n_routed_experts' {experts}")
    return V4MoeConfig(
        layers=tuple(range(layers)),
        num_experts=experts,
        experts_per_token=chosen,
        expert_size=expert_size,
        num_shared_experts=integer(config, "n_shared_experts", default=1),
        norm_min=None,
        scored_by="sqrtsoftplus",
        has_correction=True,
        groups=1,
        groups_per_token=1,
        best_of_group=1,
        is_normed=True,
        scale=number(config, "routed_scaling_factor", 1.5),
        hashed=_hashed(config, layers),
    )


def _hashed(config: HfConfig, layers: int) -> frozenset[int]:
    named = config.get("mlp_layer_types")
    if named is None:
        return frozenset(range(min(layers, integer(config, "num_hash_layers", default=3))))
    if not isinstance(named, list) or len(named) != layers or not {*map(str, named)} <= {_HASHED, _ROUTED}:
        raise ModelError(
            f"config.json: 'mlp_layer_types' must name {layers} layers {_HASHED!r} or {_ROUTED!r}, got {shown(named)}"
        )
    return frozenset(layer for layer, kind in enumerate(named) if kind == _HASHED)


def _hyper(config: HfConfig, norm_eps: float) -> HyperConfig:
    return HyperConfig(
        streams=positive(config, "hc_mult", default=4, most=_MOST_STREAMS),
        iterations=positive(config, "hc_sinkhorn_iters", default=20, most=1 << 10),
        eps=number(config, "hc_eps", 1e-6),
        norm_eps=norm_eps,
    )
