"""LoRA adapters of tiny models, as PEFT writes them, and the models that they amount to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny_checkpoints import draw_weights, reference, write_checkpoint

from headwise import EngineConfig
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

ALPHA, RANK = 8.0, 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def modules_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Names, without ``.weight``, and shapes of a checkpoint's matrices that adapters may change."""
    found = {}
    for name, shape in shapes.items():
        at, _, last = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight") and last in MODULES and at.endswith(("self_attn", "mlp")):
            found[name.removesuffix(".weight")] = shape
    return found


def draw_adapter(
    shapes: Mapping[str, Sequence[int]], seed: int, rank: int = RANK
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each matrix ``A [rank, inputs]`` and ``B [outputs, rank]``, that change what a model says."""
    draw = np.random.default_rng(seed)
    return {
        name: (
            draw.standard_normal((rank, shape[1]), np.float32) / np.float32(shape[1] ** 0.5),
            draw.standard_normal((shape[0], rank), np.float32) * np.float32(0.4),
        )
        for name, shape in modules_of(shapes).items()
    }


def write_adapter(
    directory: Path, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], rank: int = RANK, **config: Any
) -> Path:
    directory.mkdir(parents=True)
    given = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": ["q_proj"],
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(given))
    arrays = {}
    for name, both in matrices.items():
        for which, array in zip("AB", both, strict=True):
            arrays[f"base_model.model.{name}.lora_{which}.weight"] = array
    forms = {name: TensorForm("F32", array.shape) for name, array in arrays.items()}
    write_safetensors(directory / "adapter_model.safetensors", forms, iter(arrays.values()))
    return directory


def merged(
    weights: Mapping[str, np.ndarray], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], rank: int = RANK
) -> dict[str, np.ndarray]:
    """The weights with what an adapter adds to them."""
    found = dict(weights)
    for name, (down, up) in matrices.items():
        found[f"{name}.weight"] = found[f"{name}.weight"] + np.float32(ALPHA / rank) * (up @ down)
    return found


def write_both(directory: Path, model: str, seed: int) -> tuple[Path, Path]:
    """An adapter of a tiny model, and the checkpoint that the model becomes with it."""
    known = reference(model)
    config, shapes = known["config"], known["shapes"]
    matrices = draw_adapter(shapes, seed)
    whole = write_checkpoint(
        directory / f"merged-{seed}", config, shapes, merged(draw_weights(config, shapes), matrices)
    )
    return write_adapter(directory / f"adapter-{seed}", matrices), whole


def write_adapter_of(model: str, directory: Path) -> Path:
    """An adapter of a model that is fetched: it says other things with it, though not much is changed."""
    source = Checkpoint(resolve_model(model, EngineConfig().cache_path))
    matrices = draw_adapter({name: source.shape(name) for name in source.names}, 1)
    return write_adapter(directory, {name: (down, up * np.float32(0.05)) for name, (down, up) in matrices.items()})
