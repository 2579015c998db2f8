"""The contract of an architecture that GGUF files have models of, and the names that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_part import Part
from headwise.runtime.models.model_config import ModelConfig

Config = Mapping[str, Any]
"""What is going to be ``config.json``."""


def undo_nothing(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """Of converters that change no tensor."""
    return values


def nothing_made(source: GgufFile, config: Config) -> Iterable[Part]:
    """Of architectures whose tensors become one of Hugging Face's each."""
    return ()


def no_columns(name: str, config: Config) -> int:
    """Of architectures of which no columns move."""
    return 0


@dataclass(frozen=True)
class Architecture:
    """How a model of one GGUF architecture becomes a Hugging Face model.

    config:       the keys of ``config.json`` that are the architecture's own
    layer_names:  GGUF name within a layer -> Hugging Face name within a layer; both with their suffix, or without it
                  where that stays
    needed:       GGUF names that a layer must have, by its number there; of what no other check would find missing
    experts:      GGUF name of what all experts of a layer have together -> Hugging Face names of an expert's, which has
                  an equal share of the rows for each; ``{}`` stands for its number. GGUF's with their suffix, or
                  without it where any may be
    global_names: the same as ``layer_names``, outside of layers, where it differs from `GLOBAL_NAMES`
    undo:         ``(GGUF name, values, config) -> values``: takes back what the GGUF converter did to a tensor. In a
                  matrix it only reorders rows, or columns, so that it serves for its codes, scales and minima, too
    columns:      ``(GGUF name, config)`` -> how many neighbouring columns stay together where ``undo`` reorders
                  columns; 0: it reorders none
    made:         Hugging Face tensors that take more than one GGUF tensor, or another shape
    in_config:    GGUF names of tensors that become part of the config
    layers_at:    what names of a layer's tensors begin with in Hugging Face, before its number
    """

    config: Callable[[GgufFile], dict[str, Any]]
    layer_names: Mapping[str, str]
    needed: Callable[[ModelConfig, int], Iterable[str]]
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    global_names: Mapping[str, str] = field(default_factory=dict)
    undo: Callable[[str, NDArray[Any], Config], NDArray[Any]] = undo_nothing
    columns: Callable[[str, Config], int] = no_columns
    made: Callable[[GgufFile, Config], Iterable[Part]] = nothing_made
    in_config: frozenset[str] = frozenset()
    layers_at: str = "model.layers"


GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
DENSE = ("ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_JOINED = "ffn_gate_up_exps"
_GATES = ("ffn_gate", "ffn_gate_exps", "ffn_gate_shexp")
"""Which MLPs lack whose activation is of one product alone."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NAMES = {**LAYER_NAMES, "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SHARED_EXPERT = {f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}


def experts_at(
    at: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[str, ...]]:
    """`Architecture.experts` of those whose names begin with ``at`` in a layer. parts: their gate, up and down."""
    gate, up, down = (f"{at}.{{}}.{part}" for part in parts)
    return {"ffn_gate_exps": (gate,), "ffn_up_exps": (up,), "ffn_down_exps": (down,), _JOINED: (gate, up)}


def feed_forward(config: ModelConfig, layer: int, shared: Iterable[str] = ()) -> tuple[str, ...]:
    """What a layer needs for its MLP, or its experts. shared: besides, where there are experts"""
    has_experts = config.moe is not None and layer in config.moe.layers
    needed = ("ffn_gate_inp", *EXPERTS, *shared) if has_experts else DENSE
    return needed if config.mlp_gate else tuple(name for name in needed if name not in _GATES)


def as_llama(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """`Architecture.needed` of Llama and what is like it."""
    return (*ATTENTION, "ffn_norm", *feed_forward(config, layer))
