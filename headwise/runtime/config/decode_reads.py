"""What a decode step reads: the weights once, and each sequence's cache. That bounds its speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from headwise.cache_controller.dtypes import dtype_bytes
from headwise.cache_controller.policy import HeadPolicy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.loader.block_file import BLOCKS, EXPERTS, BlockFile
from headwise.runtime.loader.checkpoint import Checkpoint, read_json
from headwise.runtime.loader.gguf_blocks import FORMATS
from headwise.runtime.loader.quantisation import scheme_of
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import ModelConfig
from headwise.runtime.ops.quantised import INT8_GROUP

_THOUSAND = 1000
_SCALE_BYTES = 4
_EXPANDED_BYTES = 2
"""Of a number that is not computed from as a file has it: bfloat16."""


@dataclass(frozen=True)
class DecodeReads:
    """Bytes that a decode step reads, over all ranks. Norms, biases and the embedding's rows are too small to count.

    layers:   of the layers' matrices; of a mixture of experts, those that one token goes through
    lm_head:  of the output matrix, which may be that of the embedding
    thousand: of the cache of a sequence of 1,000 tokens
    """

    layers: int
    lm_head: int
    thousand: int

    @property
    def weights(self) -> int:
        return self.layers + self.lm_head


def decode_reads(config: EngineConfig, card: ModelCard, directory: Path) -> DecodeReads:
    """What a decode step of the model in ``directory`` reads; loads no weights."""
    thousand = _bytes_of_thousand(card)
    if config.computes_from_blocks:
        return DecodeReads(*_block_bytes(card.config, directory), thousand)
    model, size = card.config, _element_bytes(config.weights_dtype_name, directory)
    is_own = config.weights_dtype in ("int4", "fp8")
    head_size = _EXPANDED_BYTES if is_own else size  # hardly a checkpoint quantises that
    head = int(model.vocab_size * model.hidden_size * head_size)
    return DecodeReads(int(_layer_elements(model) * size), head, thousand)


def codes_in_memory(config: EngineConfig, card: ModelCard, directory: Path) -> int:
    """Bytes of all weights, over all ranks, where matrices are kept as codes; the embedding is of ``dtype``."""
    model = card.config
    table = model.vocab_size * model.hidden_size * dtype_bytes(config.dtype_name)
    if config.computes_from_blocks:
        return sum(_block_bytes(model, directory, every_expert=True)) + table
    reads = decode_reads(config, card, directory)
    layers = _layer_elements(model, every_expert=True) * _element_bytes(config.weights_dtype_name, directory)
    return int(layers) + reads.lm_head + table


def kinds_of_blocks(directory: Path) -> str:
    """In words, of which GGUF types a model's matrices are, how many, and which are kept in bfloat16."""
    counts = Counter(kind for blocks in _block_files(directory) for kind in blocks.kinds.values())
    kept, others = (
        ", ".join(f"{count} {kind}" for kind, count in counts.most_common() if (kind in FORMATS) is wanted)
        for wanted in (True, False)
    )
    return "; ".join(part for part in (kept, others and f"{others} as bfloat16") if part)


def _block_files(directory: Path) -> list[BlockFile]:
    return [BlockFile(directory / name) for name in (BLOCKS, EXPERTS) if (directory / name).exists()]


def _element_bytes(dtype: str, directory: Path) -> float:
    if dtype in ("int4", "fp8"):
        scheme = scheme_of(read_json(directory / "config.json"))
        assert scheme is not None, "as the model's card has it"
        return scheme.code_bytes
    return 1 + _SCALE_BYTES / INT8_GROUP if dtype == "int8" else dtype_bytes(dtype)


def _layer_elements(model: ModelConfig, every_expert: bool = False) -> int:
    """Numbers in all layers' matrices that a token is multiplied with, or that there are."""
    hidden, moe = model.hidden_size, model.moe
    variant, layers = attention_of(model), range(model.num_layers)
    attention = sum(variant.weight_elements(layer) for layer in layers) + model.side_elements
    if moe is None:
        return attention + 3 * hidden * sum(map(model.mlp_size, layers))
    shared = moe.num_shared_experts * moe.expert_size + moe.gated_shared_size
    count = moe.num_experts if every_expert else moe.experts_per_token
    experts = 3 * hidden * (count * moe.expert_size + shared)
    routed = len(moe.layers) * (experts + hidden * moe.num_experts)
    dense = 3 * hidden * sum(model.mlp_size(layer) for layer in layers if layer not in moe.layers)
    return attention + dense + routed


def _block_bytes(model: ModelConfig, directory: Path, every_expert: bool = False) -> tuple[int, int]:
    """Bytes of the layers and of the LM head as a GGUF file's blocks; see `_layer_elements`."""
    checkpoint, layers, experts, head = Checkpoint(directory), 0, 0, 0
    head_name = "embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    for blocks in _block_files(directory):
        for name in blocks.kinds:
            num_bytes = blocks.num_bytes(name) or _EXPANDED_BYTES * prod(checkpoint.shape(name))
            if ".experts." in name:
                experts += num_bytes
            elif ".layers." in name:
                layers += num_bytes
            elif name.endswith(head_name):
                head += num_bytes
    if model.moe is not None and not every_expert:
        experts = experts * model.moe.experts_per_token // model.moe.num_experts
    return layers + experts, head


def _bytes_of_thousand(card: ModelCard) -> int:
    """Of the cache of 1,000 tokens, what its last token's heads see: of states, all."""
    model, total = card.config, 0
    for row, layout in zip(model.by_cache_layer(model.policies), card.layouts, strict=True):
        total += sum(_tokens_seen(policy, layout.block_size) for policy in row) * layout.slot_bytes
    return total // card.layout.block_size


def _tokens_seen(policy: HeadPolicy, block_size: int) -> int:
    """Those whose bytes a head reads; a state is as large as a slot."""
    if policy.is_state:
        return block_size
    return _THOUSAND if policy.is_full else min(_THOUSAND, policy.window + policy.sink)
