"""Kinds of memory that a config asks for and its architecture has none of: refused, where they would be passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.states_config import DeltaConfig, KdaConfig, SsmConfig
from headwise.runtime.models.values import shown


@dataclass(frozen=True)
class _Kind:
    """what: in words; fields: of ``config.json``, any of which asks for it; is_served: whether the model has it

    is_of_layers: these fields ask for nothing where ``layer_types`` names no layer that has it
    """

    what: str
    fields: tuple[str, ...]
    is_served: Callable[[ModelConfig], bool]
    is_of_layers: bool = False


_PASSED_OVER = {"MiMoV2FlashForCausalLM": ("attention_chunk_size",)}
"""Fields that published files of an architecture have and nothing is computed by."""

_KINDS = (
    _Kind(
        "an indexer",
        ("index_topk",),
        lambda model: model.compressed is not None or (model.mla is not None and model.mla.indexer is not None),
    ),
    _Kind("latents", ("kv_lora_rank",), lambda model: model.mla is not None),
    _Kind(
        "states of linear attention",
        ("linear_num_key_heads", "linear_attn_config"),
        lambda model: isinstance(model.states, DeltaConfig | KdaConfig),
    ),
    _Kind(
        "states of a state space model",
        ("mamba_d_state", "ssm_state_size", "mamba_num_heads"),
        lambda model: isinstance(model.states, SsmConfig),
        is_of_layers=True,
    ),
    _Kind("attention within chunks", ("attention_chunk_size",), lambda model: model.chunk > 0),
    _Kind(
        "entries of several tokens", ("compress_ratios", "compress_rates"), lambda model: model.compressed is not None
    ),
    _Kind("layers that share a cache", ("num_kv_shared_layers",), lambda model: bool(model.layer_heads)),
)


def _may_have_windows(model: ModelConfig) -> bool:
    """Whether its heads may: neither latents nor attention beside states are served with such."""
    return model.mla is None and model.states is None


_LAYER_TYPES: dict[str, tuple[str, Callable[[ModelConfig], bool]]] = {
    "sliding_attention": ("windows", _may_have_windows),
    "linear_attention": ("states of linear attention", lambda model: model.states is not None),
    "chunked_attention": ("attention within chunks", lambda model: model.chunk > 0),
}
"""What layers of that type keep, and whether the model has it."""


def check_kinds(config: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ModelError if what a ``config.json`` says of a model's memory is not what ``model`` keeps.

    A multimodal model's decoder may be described in ``text_config``.
    """
    text = config.get("text_config")
    every = {**config, **(text if isinstance(text, Mapping) else {})}
    types = every.get("layer_types")
    are_all_attention = isinstance(types, list) and all(kind in ("attention", "full_attention") for kind in types)
    for kind in _KINDS:
        if kind.is_of_layers and are_all_attention:
            continue
        passed_over = _PASSED_OVER.get(model.architecture, ())
        field = next((field for field in kind.fields if every.get(field) and field not in passed_over), "")
        if field and not kind.is_served(model):
            _refuse(model, f"{field!r} {shown(every[field])}, {kind.what}")
    named = {kind for kind in types if isinstance(kind, str)} if isinstance(types, list) else set()
    for name, (what, is_served) in _LAYER_TYPES.items():
        if name in named and not is_served(model):
            _refuse(model, f"'layer_types' with {name!r}, {what}")
    if every.get("sliding_window") and every.get("use_sliding_window", True) and not _may_have_windows(model):
        _refuse(model, f"'sliding_window' {shown(every['sliding_window'])}, windows")


def _refuse(model: ModelConfig, what: str) -> None:
    raise ModelError(
        f"config.json: {what}, which {model.architecture} is not served with; use a model without, or one whose "
        "architecture has them"
    )
