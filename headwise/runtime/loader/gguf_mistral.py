"""GGUF's ``mistral3``: Ministral 3, and Mistral Small 3.1 and later, which temper no queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.loader.gguf_architecture import LLAMA_NAMES, Architecture, as_llama
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import shortest
from headwise.runtime.loader.gguf_rope import undo_neighbours, whole_rope


def _mistral3(source: GgufFile) -> dict[str, Any]:
    rope = whole_rope(source, "mistral3")
    plain = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    temper = float(source.get("mistral3.attention.temperature_scale", 0.0))
    scaling = rope["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        multiplier = shortest(float(source.get("mistral3.rope.scaling.yarn_log_multiplier", 0.0)))
        scaling = {**scaling, "mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else scaling
    if not temper:
        return {**plain, "hidden_act": "silu", "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    return {
        **plain,
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            **(scaling or {}),
            "rope_theta": rope["rope_theta"],
            "llama_4_scaling_beta": shortest(temper),
        },
    }


MISTRAL3: Mapping[str, Architecture] = {
    "mistral3": Architecture(_mistral3, LLAMA_NAMES, as_llama, undo=undo_neighbours)
}
