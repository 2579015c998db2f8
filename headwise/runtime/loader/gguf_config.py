"""A GGUF file's metadata as a Hugging Face ``config.json``, and its tensors as those of a Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_afmoe import AFMOE
from headwise.runtime.loader.gguf_arcee import ARCEE
from headwise.runtime.loader.gguf_architecture import GLOBAL_NAMES, Architecture, Config
from headwise.runtime.loader.gguf_cohere import COHERE
from headwise.runtime.loader.gguf_delta import DELTA
from headwise.runtime.loader.gguf_dots1 import DOTS1
from headwise.runtime.loader.gguf_exaone import EXAONE
from headwise.runtime.loader.gguf_experts import WITH_EXPERTS
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_gemma import GEMMA
from headwise.runtime.loader.gguf_gemma4 import GEMMA4
from headwise.runtime.loader.gguf_glm import GLM
from headwise.runtime.loader.gguf_granite import GRANITE
from headwise.runtime.loader.gguf_keys import count, integer, served_layers, shortest
from headwise.runtime.loader.gguf_kimi import KIMI
from headwise.runtime.loader.gguf_latents import LATENTS
from headwise.runtime.loader.gguf_llama import LLAMA
from headwise.runtime.loader.gguf_minimax import MINIMAX
from headwise.runtime.loader.gguf_mistral import MISTRAL3
from headwise.runtime.loader.gguf_nemotron import NEMOTRON
from headwise.runtime.loader.gguf_olmo import OLMO
from headwise.runtime.loader.gguf_part import Part, rows_of, whole
from headwise.runtime.loader.gguf_phi3 import PHI3
from headwise.runtime.loader.gguf_qwen import QWEN
from headwise.runtime.loader.gguf_seed_oss import SEED_OSS
from headwise.runtime.loader.gguf_smollm3 import SMOLLM3
from headwise.runtime.models.model_config import ModelConfig

ARCHITECTURES: Mapping[str, Architecture] = {
    **LLAMA,
    **QWEN,
    **GEMMA,
    **GEMMA4,
    **PHI3,
    **WITH_EXPERTS,
    **LATENTS,
    **DELTA,
    **GLM,
    **SEED_OSS,
    **ARCEE,
    **GRANITE,
    **SMOLLM3,
    **MINIMAX,
    **OLMO,
    **EXAONE,
    **COHERE,
    **DOTS1,
    **AFMOE,
    **MISTRAL3,
    **NEMOTRON,
    **KIMI,
}
"""By their names in GGUF."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_SUFFIXES = (".weight", ".bias", ".scale", ".ssm_a", ".ssm_d")
"""That names of tensors end in; some numbers of states have none."""


def architecture_of(source: GgufFile) -> Architecture:
    """The file's architecture.

    Raises:
        ModelError: it is none of `ARCHITECTURES`, or has experts where it is not known to.
    """
    name = source.require("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{source.path} holds a model of architecture {name!r}; GGUF files of {known} can be converted"
        )
    architecture = ARCHITECTURES[name]
    if count(source, f"{name}.expert_count") and not architecture.experts:
        raise ModelError(
            f"{source.path} is a {name} with {source.get(f'{name}.expert_count')} experts, which cannot be served; "
            "use a dense model"
        )
    return architecture


def build_config(source: GgufFile) -> dict[str, Any]:
    """The ``config.json`` that describes a GGUF file's model; raises `ModelError` if its metadata do not say enough."""
    name, architecture = source.require("general.architecture"), architecture_of(source)
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source.path} lacks the tensor 'token_embd.weight'; download it again")
    blocks = integer(source, f"{name}.block_count")
    if blocks > len(source.tensors):
        raise ModelError(
            f"{source.path}: {name}.block_count says {blocks} layers, and there are {len(source.tensors)} tensors; "
            "download it again"
        )
    own = architecture.config(source)
    heads, hidden = integer(source, f"{name}.attention.head_count"), integer(source, f"{name}.embedding_length")
    common: dict[str, Callable[[], Any]] = {
        "dtype": lambda: "float32",
        "hidden_size": lambda: hidden,
        "intermediate_size": lambda: integer(source, f"{name}.feed_forward_length"),
        "num_hidden_layers": lambda: served_layers(source),
        "num_attention_heads": lambda: heads,
        "num_key_value_heads": lambda: integer(source, f"{name}.attention.head_count_kv", heads),
        "head_dim": lambda: integer(source, f"{name}.attention.key_length", hidden // heads),
        "vocab_size": lambda: embedding.shape[0],
        "max_position_embeddings": lambda: integer(source, f"{name}.context_length"),
        "rms_norm_eps": lambda: shortest(source.require(f"{name}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": lambda: "output.weight" not in source.tensors,
        "attention_bias": lambda: "blk.0.attn_q.bias" in source.tensors,
        "bos_token_id": lambda: source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": lambda: _eos(source),
        "pad_token_id": lambda: source.get("tokenizer.ggml.padding_token_id"),
    }
    return {**{key: read() for key, read in common.items() if key not in own}, **own}


def parts_of(source: GgufFile, config: Config, model: ModelConfig) -> list[Part]:
    """All tensors of the Hugging Face model that ``config`` describes, which is parsed as ``model``.

    Raises:
        ModelError: a tensor is missing, has another number of experts than the metadata say, or is none that the
            architecture has.
    """
    architecture = architecture_of(source)
    _check_needed(source, architecture, model)
    made = list(architecture.made(source, config))
    taken = {name for part in made for name in part.sources} | architecture.in_config
    layers = served_layers(source)
    plain = (name for name in source.tensors if name not in taken and not _is_behind(name, layers))
    return [*made, *(part for name in plain for part in _parts(source, name, architecture, config, model))]


def _is_behind(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the last that is served."""
    layer = _LAYER.fullmatch(name)
    return layer is not None and int(layer[1]) >= layers


def _check_needed(source: GgufFile, architecture: Architecture, model: ModelConfig) -> None:
    needed = [f"{stem}.weight" for stem in ("token_embd", "output_norm")]
    for layer in range(served_layers(source)):
        needed += [f"blk.{layer}.{name}" for name in architecture.needed(model, layer)]
    for name in needed:
        if not {name, f"{name}.weight", *_instead_of(name)} & source.tensors.keys():
            has_suffix = name.endswith(_SUFFIXES)
            raise ModelError(
                f"{source.path} lacks the tensor {name if has_suffix else f'{name}.weight'!r}; download it again"
            )


def _instead_of(name: str) -> tuple[str, ...]:
    """Where gates and ups of all experts are one tensor."""
    stem, _, kind = name.partition("_exps")
    parts = ("ffn_gate", "ffn_up")
    found = next((stem.removesuffix(part) for part in parts if stem.endswith(part) and f"{part}_exps" in name), None)
    return () if found is None else (f"{found}ffn_gate_up_exps{kind or '.weight'}",)


def _parts(
    source: GgufFile, name: str, architecture: Architecture, config: Config, model: ModelConfig
) -> Iterator[Part]:
    """What one GGUF tensor becomes."""
    layer = _LAYER.fullmatch(name)
    names = architecture.layer_names if layer else {**GLOBAL_NAMES, **architecture.global_names}
    within, at = (layer[2], f"{architecture.layers_at}.{layer[1]}.") if layer else (name, "")
    stem, _, kind = within.rpartition(".")
    of_experts = architecture.experts.get(within, architecture.experts.get(stem))
    if layer and of_experts is not None and within not in names:
        yield from _experts(source, name, [f"{at}{each}.{kind}" for each in of_experts], model)
    elif within in names or stem in names:
        hf = names[within] if within in names else f"{names[stem]}.{kind}"
        yield whole(
            source, name, at + hf, partial(_undone, architecture, name, config), architecture.columns(name, config)
        )
    else:
        raise ModelError(
            f"{source.path}: the tensor {name!r} is no part of a {source.require('general.architecture')} model as "
            "headwise knows it; serving without it would be wrong"
        )


def _undone(architecture: Architecture, name: str, config: Config, values: NDArray[Any]) -> NDArray[Any]:
    return architecture.undo(name, values, config)


def _experts(source: GgufFile, name: str, names: list[str], model: ModelConfig) -> Iterator[Part]:
    """What a tensor of all of a layer's experts becomes. names: of an expert's parts, ``{}`` for its number"""
    moe, shape = model.moe, source.tensors[name].shape
    if moe is None:
        raise ModelError(f"{source.path}: {name!r} is of experts, and the metadata say that there are none")
    inner, outer = moe.expert_size * len(names), moe.latent_size or model.hidden_size
    matrix = (outer, moe.expert_size) if "down" in name else (inner, outer)
    expected = (moe.num_experts, *matrix) if name.endswith("weight") else (moe.num_experts, matrix[0])
    if shape != expected:
        raise ModelError(
            f"{source.path}: {name} has the shape {shape}, and the metadata say {expected}: {moe.num_experts} experts "
            f"of size {moe.expert_size}; download it again"
        )
    share = matrix[0] // len(names)
    for expert in range(moe.num_experts):
        for index, hf in enumerate(names):
            if name.endswith("weight"):
                start = expert * matrix[0] + index * share
                yield rows_of(source, name, hf.format(expert), start, start + share)
            else:
                cut = slice(index * share, (index + 1) * share)
                yield Part(hf.format(expert), (share,), (name,), partial(_vector, source, name, expert, cut))


def _vector(source: GgufFile, name: str, row: int, part: slice) -> NDArray[np.float32]:
    return source.rows(name, row, row + 1)[0, part]


def _eos(source: GgufFile) -> int | list[int] | None:
    """Ids of the tokens that end the output: end of text and, where they differ, of a turn, and of a message that
    a tool is to answer."""
    ids = [source.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(token for token in ids if token is not None))
    return known if len(known) > 1 else next(iter(known), None)
