"""Write the inverse frequencies and factors that transformers computes for each RoPE scaling: `rope.json`.

    PYTHONPATH=tests python tests/references/make_rope_references.py

Needs torch and transformers, which nothing else here does. Each entry holds:

    name, config, tokens   a ``config.json``'s fields, and the length of the sequence that is rotated
    inverse, factor        inverse frequencies of the pairs that are rotated; what cosines and sines are multiplied with
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BASE = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 4096, "rope_theta": 10000.0}
FACTORS = {"short_factor": [1 + i / 9 for i in range(32)], "long_factor": [2 + i / 5 for i in range(32)]}
PARTS = {key: values[:24] for key, values in FACTORS.items()}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 100),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        100,
    ),
    "yarn": ({"rope_scaling": YARN}, 100),
    "yarn_untruncated": ({"rope_scaling": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}}, 100),
    "yarn_mscale": ({"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}}, 100),
    "yarn_attention_factor": ({"rope_scaling": {**YARN, "attention_factor": 1.25}}, 100),
    "longrope_short": (
        {"original_max_position_embeddings": 512, "rope_scaling": {"rope_type": "longrope", **FACTORS}},
        512,
    ),
    "longrope_long": (
        {"original_max_position_embeddings": 512, "rope_scaling": {"rope_type": "longrope", **FACTORS}},
        513,
    ),
    "longrope_partial": (
        {
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"rope_type": "longrope", **PARTS},
        },
        4096,
    ),
}


def main() -> None:
    entries = []
    for name, (fields, tokens) in CASES.items():
        config = {**BASE, **fields}
        read = LlamaConfig(**json.loads(json.dumps(config)))
        inverse, factor = ROPE_INIT_FUNCTIONS[fields["rope_scaling"]["rope_type"]](read, seq_len=tokens)
        entry = {"name": name, "config": config, "tokens": tokens, "inverse": inverse.tolist(), "factor": factor}
        entries.append(json.dumps(entry))
    Path(__file__).with_name("rope.json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
