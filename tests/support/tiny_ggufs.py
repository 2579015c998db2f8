"""GGUF files of the tiny models, as llama.cpp's converter would write them.

Keys are those of the format, names of tensors those that the ``gguf`` package knows, and what is done to numbers is
written down here once more: nothing of this is what headwise reads them with.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from support.random_ernie import DENSE, MOE
from support.random_ernie import draw_weights as draw_ernie
from support.tiny_checkpoints import TINY_CONFIGS, draw_weights, reference, write_checkpoint
from support.tiny_gguf_keys import layers_of, model_keys
from support.tiny_models import BYTE_MERGES, BYTE_TOKENS, CONTROL
from tokenizers import pre_tokenizers

Config = Mapping[str, Any]
Weights = Mapping[str, np.ndarray]
Kind = gguf.GGMLQuantizationType
Choose = Callable[[str, np.ndarray], Kind]
"""Name in GGUF and values of a matrix, or of all experts' -> the type that it gets."""


@dataclass(frozen=True)
class TinyGguf:
    """A tiny model whose file is written.

    architecture: by its name in GGUF
    checkpoint:   whose config and weights it has
    changes:      to the config: what GGUF cannot say, so that a file means something else. None: transformers has
                  computed this very model
    like:         layer -> another one of the checkpoint, whose weights' names and shapes it gets
    sizes:        a part of weights' names -> their sizes, and the ones that they have instead
    without:      ends of the names of weights that it does not have
    """

    architecture: str
    checkpoint: str
    changes: Mapping[str, Any] | None = None
    like: Mapping[int, int] | None = None
    sizes: Mapping[str, Mapping[int, int]] | None = None
    without: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {**_config_of(self.checkpoint), **(self.changes or {})}

    @property
    def shapes(self) -> dict[str, list[int]]:
        known: dict[str, list[int]] = reference(self.checkpoint)["shapes"]
        found = dict(known)
        for layer, other in (self.like or {}).items():
            at, theirs = f"model.layers.{layer}.", f"model.layers.{other}."
            found = {name: shape for name, shape in found.items() if not name.startswith(at)}
            found |= {name.replace(theirs, at): shape for name, shape in known.items() if name.startswith(theirs)}
        for part, sizes in (self.sizes or {}).items():
            found |= {name: [sizes.get(size, size) for size in found[name]] for name in found if part in name}
        return {name: shape for name, shape in found.items() if not name.endswith(self.without)}

    def weights(self) -> dict[str, np.ndarray]:
        if self.checkpoint in _ERNIE:
            return draw_ernie(self.config)
        return draw_weights(self.config, self.shapes)


_ERNIE = {"ernie": DENSE, "ernie-moe": MOE}
_EVERY_LAYER = {"mlp_only_layers": []}
_WORDS = {"vocab_size": 263}
_YARN = dict(TINY_CONFIGS["deepseek-v3"]["rope_scaling"], mscale=0.8, mscale_all_dim=0.8)
_LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
_SQUARE = {"linear_value_head_dim": 32}
_SQUARE_SIZES = {"linear_attn": {48: 32, 192: 128, 320: 256, 512: 384}}
_KINDS = TINY_CONFIGS["gemma4-shared"]["layer_types"]
_LITE_LAYERS = 27
_NARROW = {"head_dim": 16}
_NARROW_SIZES = {"self_attn": {256: 64, 128: 32}}
"""Heads that together are as wide as the hidden state."""
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXAONE_LAYERS = 64
_STATELESS = {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
_NARROW_EXAONE = TinyGguf(
    "exaone4", "exaone4", _NARROW, sizes={"_proj": {256: 64, 128: 32}, "q_norm": {64: 16}, "k_norm": {64: 16}}
)

TINY_GGUFS: Mapping[str, TinyGguf] = {
    "mixtral": TinyGguf("llama", "mixtral"),
    "qwen3-moe": TinyGguf("qwen3moe", "qwen3-moe", _EVERY_LAYER, {1: 0}),
    "gpt-oss": TinyGguf("gpt-oss", "gpt-oss"),
    "gpt-oss-mxfp4": TinyGguf("gpt-oss", "gpt-oss-mxfp4"),
    "deepseek-v2": TinyGguf("deepseek2", "deepseek-v2"),
    "deepseek-v3": TinyGguf("deepseek2", "deepseek-v3", {"rope_scaling": _YARN}),
    "deepseek-v3.2": TinyGguf("deepseek32", "deepseek-v3.2"),
    "ernie": TinyGguf("ernie4_5", "ernie", _WORDS),
    "ernie-moe": TinyGguf("ernie4_5-moe", "ernie-moe", _WORDS),
    "gemma4": TinyGguf("gemma4", "gemma4"),
    "gemma4-shared": TinyGguf("gemma4", "gemma4-shared"),
    "gemma4-moe": TinyGguf("gemma4", "gemma4-moe"),
    "qwen3-next": TinyGguf("qwen3next", "qwen3-next", _EVERY_LAYER, {1: 0}),
    "qwen3.5": TinyGguf("qwen35", "qwen3.5"),
    "qwen3.5-moe": TinyGguf("qwen35moe", "qwen3.5-moe"),
    "llama4": TinyGguf("llama4", "llama4", _LLAMA4),
    "glm4": TinyGguf("glm4", "glm4"),
    "glm4-moe": TinyGguf("glm4moe", "glm4-moe"),
    "glm4-moe-lite": TinyGguf("deepseek2", "glm4-moe-lite"),
    "seed-oss": TinyGguf("seed_oss", "seed-oss"),
    "arcee": TinyGguf("arcee", "arcee"),
    "qwen2-moe": TinyGguf("qwen2moe", "qwen2-moe", _EVERY_LAYER, {1: 0}),
    "smollm3": TinyGguf("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, {3: 2}),
    "minimax-m2": TinyGguf("minimax-m2", "minimax-m2"),
    "olmo2": TinyGguf("olmo2", "olmo2"),
    "olmo3": TinyGguf("olmo2", "olmo3"),
    "exaone4": TinyGguf("exaone4", "exaone4"),
    "exaone-moe": TinyGguf("exaone-moe", "exaone-moe"),
    "cohere2": TinyGguf("cohere2", "cohere2"),
    "dots1": TinyGguf("dots1", "dots1"),
    "afmoe": TinyGguf("afmoe", "afmoe"),
    "ministral3": TinyGguf("mistral3", "ministral3"),
    "granite": TinyGguf("granite", "granite"),
    "granite-moe": TinyGguf("granitemoe", "granite-moe"),
    "granite-hybrid": TinyGguf("granite", "granite-hybrid", {"intermediate_size": 96}),
    "granite-hybrid-shared": TinyGguf("granitemoe", "granite-hybrid-moe", _STATELESS, {0: 2, 1: 2, 3: 2}),
    "granite-hybrid-ssm": TinyGguf("granitehybrid", "granite-hybrid-ssm"),
    "granite-hybrid-moe": TinyGguf("granitehybrid", "granite-hybrid-moe"),
    "nemotron-h": TinyGguf("nemotron_h", "nemotron-h"),
    "nemotron-h-moe": TinyGguf("nemotron_h_moe", "nemotron-h-moe"),
    "kimi-linear": TinyGguf("kimi-linear", "kimi-linear"),
    "nemotron-h-latent": TinyGguf("nemotron_h_moe", "nemotron-h-latent"),
}

JUDGED_GGUFS: Mapping[str, TinyGguf] = {
    **{
        name: tiny
        for name, tiny in TINY_GGUFS.items()
        if not name.startswith(("deepseek-v2", "deepseek-v3.2", "qwen3.5"))
    },
    # llama.cpp knows a model without a rank of queries by its layers,
    "deepseek-v2": replace(
        TINY_GGUFS["deepseek-v2"],
        changes={"num_hidden_layers": _LITE_LAYERS},
        like=dict.fromkeys(range(3, _LITE_LAYERS), 2),
    ),
    # has an indexer's heads turned by a matrix of at least 64,
    "deepseek-v3.2": replace(
        TINY_GGUFS["deepseek-v3.2"],
        changes={"index_head_dim": 128},
        sizes={"indexer.k_norm": {32: 128}, "indexer.wk": {32: 128}, "indexer.wq_b": {512: 2048}},
    ),
    # has layers share the caches of the last two of the others,
    "gemma4-shared": replace(
        TINY_GGUFS["gemma4-shared"],
        changes={"layer_types": [_KINDS[at] for at in (0, 1, 1, 2, 5, 5, 6)]},
        like={2: 1, 3: 2, 4: 5},
    ),
    # and keys and values of a delta-net have one size.
    "qwen3-next": replace(TINY_GGUFS["qwen3-next"], changes={**_EVERY_LAYER, **_SQUARE}, sizes=_SQUARE_SIZES),
    **{name: replace(TINY_GGUFS[name], changes=_SQUARE, sizes=_SQUARE_SIZES) for name in ("qwen3.5", "qwen3.5-moe")},
    # Heads of some are as wide as the hidden state,
    **{name: replace(TINY_GGUFS[name], changes=_NARROW, sizes=_NARROW_SIZES) for name in ("olmo2", "olmo3")},
    "exaone4": replace(_NARROW_EXAONE, changes={**_NARROW, "sliding_window": None, "rope_scaling": _LLAMA3}),
    # llama.cpp knows EXAONE 4 with windows by its layers,
    "exaone4-windows": replace(
        _NARROW_EXAONE,
        changes={**_NARROW, "num_hidden_layers": _EXAONE_LAYERS},
        like={layer: layer % 4 for layer in range(4, _EXAONE_LAYERS)},
    ),
    "qwen2-moe": replace(TINY_GGUFS["qwen2-moe"], changes={**_EVERY_LAYER, **_NARROW}, sizes=_NARROW_SIZES),
    # MLPs without a gate have no bias,
    "arcee": replace(TINY_GGUFS["arcee"], changes={"mlp_bias": False}, without=("_proj.bias",)),
    # and what comes from attention has none.
    "seed-oss": replace(TINY_GGUFS["seed-oss"], changes={"attention_out_bias": False}, without=("o_proj.bias",)),
    "dots1": replace(
        TINY_GGUFS["dots1"],
        changes={"attention_bias": False, "num_key_value_heads": 4},  # no heads share keys and values
        sizes={"self_attn": {128: 256}},
        without=("_proj.bias",),
    ),
}
"""Those that llama.cpp can load, too."""


def _config_of(checkpoint: str) -> dict[str, Any]:
    return dict(_ERNIE[checkpoint] if checkpoint in _ERNIE else TINY_CONFIGS[checkpoint])


def write_directory(directory: Path, tiny: TinyGguf) -> Path:
    """The Hugging Face directory of the same model."""
    shapes = {name: list(values.shape) for name, values in tiny.weights().items()}
    return write_checkpoint(directory, tiny.config, shapes, tiny.weights())


K_QUANTS = TinyGguf(
    "qwen3moe",
    "qwen3-moe",
    {**_EVERY_LAYER, "hidden_size": 256, "moe_intermediate_size": 256},
    {1: 0},
    {
        **{part: {64: 256} for part in ("layernorm", "embed_tokens", "lm_head", "model.norm", "_proj")},
        "mlp": {64: 256, 32: 256},
    },
)
"""Its experts' rows have 256 numbers: a block of the types that are called K."""


def floats(name: str, values: np.ndarray) -> Kind:
    return Kind.F32


def experts_in_k_quants(name: str, values: np.ndarray) -> Kind:
    """As llama.cpp's mixed files have them."""
    return Kind.F32 if "_exps" not in name else Kind.Q6_K if "down" in name else Kind.Q4_K


def quantised(name: str, values: np.ndarray, kind: Kind) -> np.ndarray:
    return values if kind == Kind.F32 else gguf.quantize(np.ascontiguousarray(values), kind)


def random_k_blocks(name: str, values: np.ndarray, kind: Kind) -> np.ndarray:
    """Instead of ``values``, which nothing here can quantise so: random bytes, whose numbers are about as large."""
    if kind == Kind.F32:
        return values
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = draw.integers(0, 256, (values.size // size, nbytes), dtype=np.uint8)
    unit = values.std() * draw.uniform(0.5, 1, (len(blocks), 1))
    if kind == Kind.Q6_K:
        blocks[:, -2:] = (unit / 1300).astype("<f2").view(np.uint8)
    else:
        scale_and_minimum = unit / 200 * [1, 7.5]  # so that the mean is about zero
        blocks[:, :4] = scale_and_minimum.astype("<f2").view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def random_k_numbers(name: str, values: np.ndarray, kind: Kind) -> np.ndarray:
    """What the ``gguf`` package reads of `random_k_blocks`."""
    kind = experts_in_k_quants(name, values)
    return values if kind == Kind.F32 else gguf.dequantize(random_k_blocks(name, values, kind), kind)


def write_tiny_gguf(
    path: Path,
    tiny: TinyGguf,
    choose: Choose = floats,
    encode: Callable[[str, np.ndarray, Kind], np.ndarray] = quantised,
    but: tuple[str, ...] = (),
    keys: Mapping[str, Any] | None = None,
    is_split: bool = True,
    joins_gate_up: bool = False,
) -> Path:
    """
    encode:        name, values and type of a matrix -> what is written of it
    but:           names of tensors that the file lacks
    keys:          that have other values, None for those that the file lacks
    is_split:      whether keys and values of latents, and what goes into delta-nets, are apart, as in newer files
    joins_gate_up: whether experts' gates and ups are one tensor, as they may be
    """
    config, architecture = tiny.config, tiny.architecture
    writer = gguf.GGUFWriter(path, architecture)
    keys_of(writer, config, architecture, {**_tokenizer(config["vocab_size"]), **(keys or {})})
    tensors = _tensors(tiny, is_split)
    for name, values, kind in _joined(tensors) if joins_gate_up else tensors:
        if name in but:
            continue
        if kind is None and values.ndim > 1 and values.shape[-1] > 1 and not name.endswith("_norm.weight"):
            kind = choose(name, values)
            values = encode(name, values, kind)
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys_of(writer: gguf.GGUFWriter, config: Config, architecture: str, more: Mapping[str, Any] | None = None) -> None:
    """Write a model's keys. more: besides, or in their places"""
    found = {f"{architecture}.{key}": value for key, value in model_keys(config, architecture).items()}
    for key, value in {**found, **(more or {})}.items():
        _add_key(writer, key, value)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    spare = vocabulary - len(BYTE_TOKENS)
    tokens = BYTE_TOKENS + [f"[PAD{at}]" for at in range(spare)] if spare >= 0 else BYTE_TOKENS[:vocabulary]
    kinds = [3 if token in CONTROL else 5 if token.startswith("[PAD") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": BYTE_MERGES,
    }


def vocabulary(merges: Sequence[str]) -> list[str]:
    """Tokens of a byte-level vocabulary: bytes, and what merges make of them."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(merge.replace(" ", "") for merge in merges)]


# ---- tensors ----

_Tensor = tuple[str, np.ndarray, Kind | None]
"""Name in GGUF, values, and their type, where that is not chosen."""


def _joined(tensors: Iterator[_Tensor]) -> Iterator[_Tensor]:
    gates: dict[str, np.ndarray] = {}
    for name, values, kind in tensors:
        layer, _, part = name.partition(".ffn_")
        if part in ("gate_exps.weight", "up_exps.weight"):
            gates[name] = values
            both = [gates.get(f"{layer}.ffn_{each}_exps.weight") for each in ("gate", "up")]
            if all(each is not None for each in both):
                yield f"{layer}.ffn_gate_up_exps.weight", np.concatenate(both, axis=1), None
        else:
            yield name, values, kind


def _tensors(tiny: TinyGguf, is_split: bool) -> Iterator[_Tensor]:
    config = tiny.config
    known = gguf.MODEL_ARCH_NAMES.items()
    # The package has no name for DeepSeek-V3.2; GLM's model has the same tensors.
    architecture = next((a for a, name in known if name == tiny.architecture), gguf.MODEL_ARCH.GLM_DSA)
    names = gguf.get_tensor_name_map(architecture, layers_of(config))
    for hf, values in _changed(_stacked(tiny.weights()), config, is_split):
        kind = None
        if values.dtype == np.uint8:
            kind = Kind.MXFP4
        name = names.get_name(hf, try_suffixes=(".weight", ".bias")) or _OTHER_NAMES.get(re.sub(r"\d+", "N", hf))
        assert name, hf
        layer = re.search(r"\d+", hf)
        yield name.replace("N", layer[0] if layer else "N"), values, kind
    if tiny.architecture == "gemma4":
        full = config["global_head_dim"] // 2
        turning = full // 4
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (full - turning), np.float32), Kind.F32
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config), Kind.F32


def _llama3_factors(config: Config) -> np.ndarray:
    """What frequencies are divided by: those of waves longer than the original context by the factor, of waves shorter
    than a quarter of it by 1."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    turns = scaling["original_max_position_embeddings"] / (
        2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    )
    kept = np.clip((turns - 1) / 3, 0, 1)
    return (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32)


_OTHER_NAMES = {
    "model.layers.N.router.scale": "blk.N.ffn_gate_inp.scale",
    "model.layers.N.router.per_expert_scale": "blk.N.ffn_down_exps.scale",
}


def _stacked(weights: Weights) -> dict[str, np.ndarray]:
    """With all experts of a layer in one tensor, as converters write them."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match is None:
            found[name] = values
        else:
            at = match[1].removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            at = at if "feed_forward" in at else match[1]
            experts.setdefault(f"{at}.{match[3]}", {})[int(match[2])] = values
    return found | {name: np.stack([each[at] for at in range(len(each))]) for name, each in experts.items()}


_NEIGHBOURS = ("mixtral", "arcee", "smollm3", "ministral3", "granite", "granitemoe", "granitemoehybrid")
"""Model types whose queries and keys converters reorder."""


def _changed(weights: Weights, config: Config, is_split: bool) -> Iterator[tuple[str, np.ndarray]]:
    """What a converter makes of each tensor."""
    kind = config["model_type"]
    for name, values in weights.items():
        if kind in _NEIGHBOURS and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
            yield name, halves.swapaxes(1, 2).reshape(values.shape)
        elif ".mamba." in name or kind == "nemotron_h":
            yield _state_tensor(name, values, config)
        elif ".shared_mlp." in name:
            yield from _shared_tensor(name, values, config)
        elif name.endswith("input_linear.weight"):
            at = name.replace("model.", "").replace("block_sparse_moe.input_linear", "feed_forward.experts.{}")
            for part, half in zip(("w1", "w3"), np.split(values, 2, axis=1), strict=True):
                yield at.format(part), half
        elif kind == "kimi_linear" and "kv_b_proj" not in name:
            yield _kimi_tensor(name, values)
        elif kind == "gpt_oss":
            yield from _gpt_oss_tensor(name, values, weights)
        elif name.endswith("kv_b_proj.weight") and is_split:
            yield from _split_latents(name, values, config)
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), values.reshape(-1)
        elif name.endswith("expert_bias"):
            yield f"{name}.bias", values
        elif name.endswith("shared_expert_gate.weight"):
            yield name, values[0]
        elif kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
            yield from _delta_tensor(name, values, config, is_split)
        elif name.endswith("experts.gate_up_proj") and kind == "llama4_text":
            gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values.swapaxes(1, 2) if kind == "llama4_text" else values
        elif name.endswith(("experts.gate_up_proj", "layer_scalar")):
            yield f"{name}.weight", values
        else:
            yield name, values


def _state_tensor(name: str, values: np.ndarray, config: Config) -> tuple[str, np.ndarray]:
    part = re.split(r"\.(?:mamba|mixer)\.", name)[-1]
    if part == "A_log":
        return name, -np.exp(values)[:, None]
    if part == "D":
        return name, values[:, None]
    if part == "norm.weight":
        return name, values.reshape(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if part.startswith("experts."):  # of which the package has names elsewhere alone
        return name.replace("backbone", "model").replace("mixer", "mlp"), values
    if part.endswith("e_score_correction_bias"):
        return name.replace("_bias", ".bias"), values
    return name.replace("dt_bias", "dt_proj.bias"), values[:, 0] if part == "conv1d.weight" else values


def _kimi_tensor(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if name.endswith("A_log"):
        return name, -np.exp(values)
    if name.endswith("e_score_correction_bias"):
        return name.replace("_bias", ".bias"), values
    # transformers saves a dense MLP by the name that experts have.
    dense = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
    return dense.replace("dt_bias", "dt_proj.bias"), values


def _shared_tensor(name: str, values: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    to = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
    at = name.replace("shared_mlp", to)
    if name.endswith("output_linear.weight"):
        yield at.replace("output_linear", "down_proj"), values
    else:
        for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2), strict=True):
            yield at.replace("input_linear", part), half


def _gpt_oss_tensor(name: str, values: np.ndarray, weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("_scales"):
        return
    if name.endswith("sinks"):
        yield f"{name}.weight", values
        return
    stem, is_bias = re.sub(r"_(blocks|bias)$", "", name), name.endswith("_bias")
    if not stem.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, values
        return
    if name.endswith("_blocks"):
        values = _mxfp4(values, weights[f"{stem}_scales"])
    elif not is_bias:
        values = values.swapaxes(1, 2)  # outputs first
    kind = "bias" if is_bias else "weight"
    if "down" in stem:
        yield f"{stem}.{kind}", values
    else:
        for part, first in (("gate_proj", 0), ("up_proj", 1)):
            yield f"{stem.replace('gate_up_proj', part)}.{kind}", values[:, first::2]


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of GGUF's blocks: the exponent, then number ``i`` in the low half of a byte and ``i + 16`` in the high one;
    published, neighbours share a byte."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*blocks.shape[:2], -1)


def _split_latents(name: str, values: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = values.reshape(heads, plain + config["v_head_dim"], -1)
    yield name.replace("kv_b", "k_b"), both[:, :plain].swapaxes(1, 2)
    yield name.replace("kv_b", "v_b"), both[:, plain:]


def _delta_tensor(name: str, values: np.ndarray, config: Config, is_split: bool) -> Iterator[tuple[str, np.ndarray]]:
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    share, behind = heads // key_heads, 2 * key_heads * key_dim
    is_next = config["model_type"] == "qwen3_next"

    def tiled(rows: np.ndarray) -> np.ndarray:
        """Value heads of the same place in each key head's share beside each other."""
        if is_next:
            return rows
        return rows.reshape(key_heads, share, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    part = name.split(".")[-2]
    if name.endswith("A_log"):
        yield name, -np.exp(tiled(values))
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tiled(values)
    elif part == "conv1d":
        rows = values[:, 0]
        yield name, np.concatenate([rows[:behind], tiled(rows[behind:])])
    elif part == "in_proj_qkv":
        yield name, np.concatenate([values[:behind], tiled(values[behind:])])
    elif part in ("in_proj_z", "in_proj_a", "in_proj_b"):
        yield name, tiled(values)
    elif part == "out_proj":
        yield name, tiled(values.T).T
    elif part == "in_proj_qkvz" and is_split:
        sizes = np.cumsum([key_dim, key_dim, share * value_dim])
        apart = np.split(values.reshape(key_heads, -1, values.shape[1]), sizes, axis=1)
        *qkv, gates = (rows.reshape(-1, values.shape[1]) for rows in apart)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
        yield name.replace("in_proj_qkvz", "in_proj_z"), gates
    elif part == "shared_expert_gate":
        yield name, values[0]
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, values + np.float32(1)
    else:
        yield name, values
