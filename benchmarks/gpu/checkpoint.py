"""Random checkpoints of any geometry, written faster than they could be drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu.sizes import Sizes

from headwise.cache_controller.dtypes import numpy_dtype

MOST_POOL = 1 << 24
"""Numbers drawn, at most; weights are taken from them again and again, each tensor from another place."""

LLAMA, ERNIE, MOE = "llama", "ernie", "moe"
"""Directories of random models."""

Shape = tuple[int, ...]
DEVIATION = 0.02
WEIGHTS = "model.safetensors"


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    weights: Path | None = None,
    tensors: Sequence[tuple[str, Shape]] | None = None,
) -> Path:
    """``directory`` with ``config.json``, random weights in bfloat16 and a tokenizer; kept if it is there.

    weights: a checkpoint of the same geometry to take them from
    tensors: names and shapes of the weights; None: a decoder's as `random_models` has them
    """
    described, last = json.dumps(config), directory / "tokenizer.json"
    if last.exists() and (directory / "config.json").read_text() == described:
        return directory
    last.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(described)
    if weights is None:
        _write_weights(directory / WEIGHTS, tensors or list(decoder_tensors(config)))
    else:
        (directory / WEIGHTS).unlink(missing_ok=True)  # of a run that was stopped
        (directory / WEIGHTS).symlink_to(weights / WEIGHTS)
    _write_tokenizer(last)
    return directory


def random_models(sizes: Sizes, layers: int | None) -> dict[str, dict[str, Any]]:
    """Configurations by the names of their directories. ``layers`` are Llama's, in place of its own."""
    llama = {**sizes.llama, "num_hidden_layers": layers} if layers else sizes.llama
    return {LLAMA: llama, ERNIE: sizes.ernie, MOE: sizes.moe}


def weight_bytes(config: Mapping[str, Any], tokens: int = 1) -> int:
    """Bytes of bfloat16 weights that a decode step reads: all, the embedding once, as the LM head.

    Of experts, those that one of ``tokens`` goes to, where each goes anywhere alike.
    """
    sizes = {name: 2 * math.prod(shape) for name, shape in decoder_tensors(config)}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    if not routed:
        return sum(sizes.values())
    asked: float = 1 - (1 - config["moe_k"] / config["moe_num_experts"]) ** tokens
    return sum(sizes.values()) - round(routed * (1 - asked))


def kv_token_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of bfloat16 keys and values of a token, all layers and heads."""
    return 4 * math.prod(int(config[key]) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))


def decoder_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a decoder with tied embeddings and no biases."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield f"{at}self_attn.q_proj.weight", (q, hidden)
        yield f"{at}self_attn.k_proj.weight", (kv, hidden)
        yield f"{at}self_attn.v_proj.weight", (kv, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, q)
        if layer >= config.get("moe_layer_start_index", config["num_hidden_layers"]):
            yield from _experts(config, f"{at}mlp.")
        else:
            yield from _mlp(f"{at}mlp.", inner, hidden)
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _experts(config: Mapping[str, Any], at: str) -> Iterator[tuple[str, Shape]]:
    """A layer's in ERNIE 4.5."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["moe_num_experts"]
    yield f"{at}gate.weight", (experts, hidden)
    yield f"{at}moe_statics.e_score_correction_bias", (1, experts)
    for expert in range(experts):
        yield from _mlp(f"{at}experts.{expert}.", inner, hidden)
    yield from _mlp(f"{at}shared_experts.", config["moe_num_shared_experts"] * inner, hidden)


def _mlp(at: str, inner: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}gate_proj.weight", (inner, hidden)
    yield f"{at}up_proj.weight", (inner, hidden)
    yield f"{at}down_proj.weight", (hidden, inner)


def _write_weights(path: Path, tensors: Sequence[tuple[str, Shape]]) -> None:
    """A safetensors file: the header's length, the header, then every tensor's bytes."""
    bfloat16, rng = numpy_dtype("bfloat16"), np.random.default_rng(0)
    size = min(MOST_POOL, max(math.prod(shape) for _, shape in tensors))
    pool = (DEVIATION * rng.standard_normal(2 * size, dtype=np.float32)).astype(bfloat16).view(np.uint16)
    norm = np.ones(max(shape[0] for _, shape in tensors if len(shape) == 1), np.float32).astype(bfloat16)
    header, at = {}, 0
    for name, shape in tensors:
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for _, shape in tensors:
            count = math.prod(shape)
            if len(shape) == 1:
                file.write(norm[:count].tobytes())
                continue
            start = int(rng.integers(size))
            for done in range(0, count, size):
                file.write(pool[start : start + min(size, count - done)].data)


def _write_tokenizer(path: Path) -> None:
    """Bytes; the model's other tokens have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
