"""Write what transformers computes in float32 for tiny random models: `tiny-NAME.json`.

    PYTHONPATH=tests python tests/references/make_tiny_references.py [name ...]

Needs torch and transformers, which nothing else here does. `support.tiny_checkpoints` has the configs and draws the
weights, whose names and shapes transformers gives: those of the checkpoints that it writes. Each file holds:

    config, shapes   `config.json`, and each weight's shape
    prompts          as `make_references.py` writes them
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_references import reference
from support.tiny_checkpoints import TINY_CONFIGS, write_checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4ForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
    Step3p7ForConditionalGeneration,
)

from headwise.runtime.loader.safetensors_file import FLOATS, TABLES, SafetensorsFile

PROMPT_LENGTHS = {"one": 1, "few": 9, "some": 40, "more": 90, "many": 200, "long_300": 300, "long_700": 700}
FIRST_ID, VOCABULARY = 3, 259


def prompts() -> dict[str, list[int]]:
    """Random tokens; the long ones begin alike."""
    draw = np.random.default_rng(5)
    found = {name: draw.integers(FIRST_ID, VOCABULARY, length).tolist() for name, length in PROMPT_LENGTHS.items()}
    found["long_300"][:150] = found["long_700"][:150]
    return found


_AS_ANOTHER = {"MiMoForCausalLM": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}}
"""What transformers does not know, by what it computes the same as."""


def for_transformers(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **_AS_ANOTHER.get(config["architectures"][0], {})}


_PUBLISHED_HY_V4 = (
    (r"\.hc_pre\.hc_(attn|mlp)_layer\.", r".hc_\1_layer.hc_pre."),
    (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"\.(mlp|shared_experts)\.linear_gate\.", r".\1.gate_proj."),
)
"""Of Hunyuan 4, what transformers writes otherwise than it was published, and reads either way."""


def as_published(name: str, model_type: str) -> str:
    for pattern, published in _PUBLISHED_HY_V4 if model_type == "hy_v4" else ():
        name = re.sub(pattern, published, name)
    return name


def class_of(config: dict[str, Any]) -> Any:
    """What makes such a model; transformers' own choice by a config lacks some."""
    others = {"mistral4": Mistral4ForCausalLM, "step3p7": Step3p7ForConditionalGeneration}
    return others.get(config["model_type"], AutoModelForCausalLM)


def published_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of a model's weights, as transformers saves them; with MXFP4, as they are published."""
    config = for_transformers(config)
    is_mxfp4 = config.pop("quantization_config", None) is not None
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        given, kind = AutoConfig.from_pretrained(scratch), class_of(config)
        model = kind.from_config(given, dtype=torch.float32) if kind is AutoModelForCausalLM else kind(given)
        model.save_pretrained(scratch)
        saved = SafetensorsFile(Path(scratch) / "model.safetensors", {**FLOATS, **TABLES})
        shapes = {as_published(name, config["model_type"]): list(saved.shape(name)) for name in saved.names}
    return mxfp4_shapes(shapes) if is_mxfp4 else shapes


def mxfp4_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    found = {}
    for name, shape in shapes.items():
        if len(shape) != 3:
            found[name] = shape
            continue
        experts, inputs, outputs = shape
        found[f"{name}_blocks"] = [experts, outputs, inputs // 32, 16]
        found[f"{name}_scales"] = [experts, outputs, inputs // 32]
    return found


def load(kind: Any, directory: Path, is_mxfp4: bool) -> PreTrainedModel:
    """The model that transformers makes of a directory, all of whose weights it must have found a use for."""
    model, loading = kind.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **({"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}),
    )
    wrong = {kind: keys for kind, keys in loading.items() if keys}
    assert not wrong, wrong
    return model.eval()


def make(name: str) -> None:
    config = TINY_CONFIGS[name]
    shapes = published_shapes(config)
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_checkpoint(Path(scratch), for_transformers(config), shapes)
        model = load(class_of(config), directory, "quantization_config" in config)
    entries = [reference(model, prompt, ids) for prompt, ids in prompts().items()]
    judged = [next((i for i, gap in enumerate(entry["gaps"]) if gap < 1e-3), 64) for entry in entries]
    distinct = [len(set(entry["output_ids"])) for entry in entries]
    print(name, f"judged {judged} of 64 tokens, {distinct} different ones", flush=True)
    header = json.dumps({"transformers": transformers.__version__, "config": config, "shapes": shapes})[:-1]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    Path(__file__).with_name(f"tiny-{name}.json").write_text(f'{header}, "prompts": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(TINY_CONFIGS))
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        make(name)


if __name__ == "__main__":
    main()
