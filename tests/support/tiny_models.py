"""Tiny models for the loader's tests: GGUF files and Hugging Face directories of a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 2, 8, 64, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_TOKENS = CONTROL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["th", "the", "Ġthe"]
BYTE_MERGES = ["t h", "th e", "Ġ the"]
CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llama_tensors(vocabulary: int = len(BYTE_TOKENS), seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by their GGUF names, in the layout that GGUF files have."""
    draw = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
            }.items()
        }
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gemma3_tensors(vocabulary: int) -> dict[str, np.ndarray]:
    tensors = llama_tensors(vocabulary)
    draw = np.random.default_rng(1)
    for layer in range(LAYERS):
        for name, size in (("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM)):
            tensors[f"blk.{layer}.{name}.weight"] = draw.standard_normal(size, np.float32)
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = draw.standard_normal(HIDDEN, np.float32)
    return tensors


def write_llama_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
    quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, Any] | None = None,
    theta: float = 10_000.0,
) -> Path:
    """A llama GGUF file with a byte-level tokenizer; ``extra`` adds metadata."""
    writer = _writer(path, architecture)
    writer.add_rope_freq_base(theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(BYTE_TOKENS) - len(CONTROL)))
    writer.add_token_merges(BYTE_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    return _finish(writer, path, tensors or llama_tensors(), quantized or {}, extra or {})


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [SPACE, "a", "b", "c", "ab", "bc", "abc", f"{SPACE}a", "é"]


def write_gemma3_gguf(path: Path, extra: Mapping[str, Any] | None = None) -> Path:
    """A gemma3 GGUF file with a SentencePiece tokenizer in which "bc" scores higher than "ab"."""
    scores = {"ab": -3.0, "bc": -2.0, "abc": -4.0, f"{SPACE}a": -5.0}
    kinds = {"\n\n": 4, "<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2}
    writer = _writer(path, "gemma3")
    writer.add_key_length(HEAD_DIM)
    writer.add_sliding_window(16)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([scores.get(piece, -100.0) for piece in PIECES])
    writer.add_token_types([kinds.get(piece, 6 if piece.startswith("<0x") else 1) for piece in PIECES])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return _finish(writer, path, gemma3_tensors(len(PIECES)), {}, extra or {})


def _writer(path: Path, architecture: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _finish(
    writer: gguf.GGUFWriter,
    path: Path,
    tensors: Mapping[str, np.ndarray],
    quantized: Mapping[str, gguf.GGMLQuantizationType],
    extra: Mapping[str, Any],
) -> Path:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in extra.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, values in tensors.items():
        kind = quantized.get(name)
        writer.add_tensor(name, values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with control tokens and one visible added token."""
    vocabulary = {token: index for index, token in enumerate(BYTE_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in BYTE_MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return tokenizer


def write_tokenizer_directory(directory: Path, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return directory
