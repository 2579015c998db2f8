"""GGUF's Arcee, whose MLPs have no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import LLAMA_NAMES, Architecture, as_llama
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_rope import undo_neighbours, whole_rope


def _arcee(source: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
        "mlp_bias": "blk.0.ffn_up.bias" in source.tensors,
        **whole_rope(source, "arcee"),
    }


ARCEE: Mapping[str, Architecture] = {"arcee": Architecture(_arcee, LLAMA_NAMES, as_llama, undo=undo_neighbours)}
