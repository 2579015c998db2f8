"""Write what transformers computes in float32 for tiny random ERNIE 4.5 models: `ernie45.json`.

    PYTHONPATH=tests python tests/references/make_ernie_references.py

Needs torch and transformers, which nothing else here does. `support.random_ernie.draw_weights` draws the weights;
they are written by their published names and read by transformers itself. Each entry holds:

    name, config       the `config.json` that the weights were drawn for, with NumPy's seed 0
    ids                the prompt
    rows, logits       logits ``[len(rows), vocab_size]`` at these positions
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.random_ernie import DENSE, MOE, draw_weights
from transformers import AutoModelForCausalLM

from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

MODELS = {
    "dense_tied": {**DENSE, "tie_word_embeddings": True},
    "dense_untied": {**DENSE, "tie_word_embeddings": False},
    "moe_tied": {**MOE, "tie_word_embeddings": True},
    "moe_untied": {
        **MOE,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "moe_num_shared_experts": 0,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 0,
        "moe_norm_min": 0.9,
    },
}
ROWS = (0, 1, 7, 23)
PROMPT_LENGTH = 24


@torch.inference_mode()
def logits_of(config: dict[str, Any], ids: list[int]) -> np.ndarray:
    weights = draw_weights(config)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "config.json").write_text(json.dumps(config))
        forms = {name: TensorForm("F32", values.shape) for name, values in weights.items()}
        write_safetensors(directory / "model.safetensors", forms, iter(weights.values()))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def main() -> None:
    entries = []
    for name, config in MODELS.items():
        ids = np.random.default_rng(1).integers(0, config["vocab_size"], PROMPT_LENGTH).tolist()
        logits = logits_of(config, ids)[list(ROWS)]
        rounded = [[round(float(x), 5) for x in row] for row in logits]
        entries.append(json.dumps({"name": name, "config": config, "ids": ids, "rows": ROWS, "logits": rounded}))
    Path(__file__).with_name("ernie45.json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
