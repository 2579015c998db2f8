"""Tiny random models with the layer that drafts, as their checkpoints are published with it.

What torch makes of them is in `tests/references/drafts.json`. All other weights, so all tokens, are those of
`tiny_checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from support.tiny_checkpoints import draw_weights, reference, write_checkpoint

BEHIND = {
    "layer": "model.layers.{layer}.",
    "embedding_norm": "model.layers.{layer}.enorm",
    "hidden_norm": "model.layers.{layer}.hnorm",
    "join": "model.layers.{layer}.eh_proj",
    "final_norm": "model.layers.{layer}.shared_head.norm",
}
APART = {
    "layer": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "join": "mtp.fc",
    "final_norm": "mtp.norm",
}
OF_STREAMS = {
    "layer": "mtp.0.",
    "embedding_norm": "mtp.0.enorm",
    "hidden_norm": "mtp.0.hnorm",
    "join": "mtp.0.e_proj",
    "final_norm": "mtp.0.norm",
}
DRAFTING: Mapping[str, Mapping[str, str]] = {
    "deepseek-v3": BEHIND,
    "deepseek-v3-bias": BEHIND,
    "deepseek-v3.2": BEHIND,
    "deepseek-v4": OF_STREAMS,
    "glm4-moe": BEHIND,
    "glm4-moe-lite": BEHIND,
    "glm5": BEHIND,
    "glm5-shared": BEHIND,
    "hunyuan3": {**BEHIND, "final_norm": "model.layers.{layer}.final_layernorm"},
    "mimo": {
        "layer": "model.mtp_layers.0.",
        "embedding_norm": "model.mtp_layers.0.token_layernorm",
        "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "join": "model.mtp_layers.0.input_proj",
        "final_norm": "model.mtp_layers.0.final_layernorm",
    },
    "mimo-v2": {
        "layer": "model.mtp.layers.0.",
        "embedding_norm": "model.mtp.layers.0.enorm",
        "hidden_norm": "model.mtp.layers.0.hnorm",
        "join": "model.mtp.layers.0.eh_proj",
        "final_norm": "model.mtp.layers.0.final_layernorm",
    },
    "qwen3-next": APART,
    "qwen3.5": APART,
    "qwen3.5-moe": APART,
}
"""Of each model the names of what its checkpoint has besides; ``{layer}`` is how many layers its decoder has."""


OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "glm5-shared": {"": "2."},
    "mimo-v2": {
        "input_layernorm": "1.input_layernorm",
        "self_attn": "1.self_attn",
        "pre_mlp_layernorm": "1.post_attention_layernorm",
        "mlp": "0.mlp",
    },
}
"""Of a model whose layer is not as its last one: what its parts are called, and which layer's parts they are like."""


def number_of_layers(name: str) -> int:
    layers: int = reference(name)["config"]["num_hidden_layers"]
    return layers


def drafting_names(name: str) -> dict[str, str]:
    """`DRAFTING`, with the layer's number."""
    return {part: text.format(layer=number_of_layers(name)) for part, text in DRAFTING[name].items()}


@cache
def drafting_weights(name: str) -> dict[str, np.ndarray]:
    """A tiny model's weights, and those of a layer that drafts, behind them."""
    known, names = reference(name), drafting_names(name)
    config, hidden = known["config"], known["config"]["hidden_size"]
    parts = OTHERWISE.get(name, {"": f"{config['num_hidden_layers'] - 1}."})
    alike = {
        names["layer"] + part + key.removeprefix(f"model.layers.{like}"): shape
        for part, like in parts.items()
        for key, shape in known["shapes"].items()
        if key.startswith(f"model.layers.{like}")
    }
    norms = {f"{names[part]}.weight": [hidden] for part in ("embedding_norm", "hidden_norm", "final_norm")}
    shapes = {**alike, **norms, f"{names['join']}.weight": [hidden, 2 * hidden]}
    if name == "deepseek-v4":  # it sees no entries, and has a projection of each stream
        shapes = {key: shape for key, shape in shapes.items() if ".compressor." not in key}
        shapes |= {f"mtp.0.{part}_proj.weight": [hidden, hidden] for part in "eh"}
        heads = {key: shape for key, shape in known["shapes"].items() if ".hc_head." in key}
        shapes |= {key.replace("model.hc_head.hc_", "mtp.0.hc_head_"): shape for key, shape in heads.items()}
    return {**draw_weights(config, known["shapes"]), **draw_weights(config, shapes)}


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-drafting-")


@cache
def drafting_checkpoint(name: str) -> Path:
    """The directory of a tiny model that drafts, written when it is first asked for and gone with this process."""
    known = reference(name)
    config = {**known["config"], "num_nextn_predict_layers": 1}
    return write_checkpoint(Path(_scratch().name) / name, config, known["shapes"], drafting_weights(name))
