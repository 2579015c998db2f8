"""GGUF's SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import LLAMA_NAMES, Architecture, as_llama
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_rope import undo_neighbours, whole_rope


def _smollm3(source: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_act": "silu",
        "no_rope_layer_interval": 4,  # as published; GGUF does not say which layers rotate nothing
        "use_sliding_window": False,
        **whole_rope(source, "smollm3"),
    }


SMOLLM3: Mapping[str, Architecture] = {"smollm3": Architecture(_smollm3, LLAMA_NAMES, as_llama, undo=undo_neighbours)}
