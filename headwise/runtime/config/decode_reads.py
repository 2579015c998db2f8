"""What a decode step reads: the weights once, and each sequence's cache. That bounds its speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from headwise.cache_controller.dtypes import dtype_bytes
from headwise.cache_controller.policy import HeadPolicy
from headwise.kernels.code_bytes import code_bytes
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.loader.block_file import BLOCKS, EXPERTS, BlockFile
from headwise.runtime.loader.checkpoint import Checkpoint, read_config
from headwise.runtime.loader.gguf_blocks import FORMATS
from headwise.runtime.loader.quantisation import scheme_of
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.quantised import INT8_GROUP, common_form

_THOUSAND = 1000
_EXPANDED_BYTES = 2
"""Of a number that is not computed from as a file has it: bfloat16."""
_TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Matrices that are one in memory, and so of one form."""


@dataclass(frozen=True)
class DecodeReads:
    """Bytes that a decode step reads, over all ranks. Norms, biases and the embedding's rows are too small to count.

    The few weights that several ranks have are counted once, and the cache as often as ranks read it.

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
    thousand = cache_reads(card, _THOUSAND)
    if config.computes_from_blocks:
        return DecodeReads(*_block_bytes(card.config, directory, config.on_gpu), thousand)
    model, size = card.config, _element_bytes(config, directory)
    is_own = config.weights_dtype in ("int4", "fp8")
    head_size = _EXPANDED_BYTES if is_own else size  # hardly a checkpoint quantises that
    head = int(model.vocab_size * model.hidden_size * head_size)
    return DecodeReads(int(layer_elements(model) * size), head, thousand)


def cache_reads(card: ModelCard, tokens: int) -> int:
    """Bytes of the cache that the last of a sequence's ``tokens`` tokens reads on all ranks: of states, all."""
    model, total = card.config, 0
    on_ranks = [card.plan.kv_heads(rank) for rank in range(card.plan.ranks)]
    kept = [
        [row[head] for rank in on_ranks for head in rank[layer]] for layer, row in enumerate(model.policies)
    ]  # a head as often as ranks keep it
    for row, layout in zip((*model.by_cache_layer(kept), *kept[model.num_layers :]), card.layouts, strict=True):
        total += layout.slot_bytes * sum(_tokens_seen(policy, tokens, layout.block_size) for policy in row)
    return total // card.layout.block_size


def codes_in_memory(config: EngineConfig, card: ModelCard, directory: Path) -> int:
    """Bytes of all weights, over all ranks, where matrices are kept as codes; the embedding is of ``dtype``."""
    model = card.config
    table = model.vocab_size * model.hidden_size * dtype_bytes(config.dtype_name)
    if config.computes_from_blocks:
        return sum(_block_bytes(model, directory, config.on_gpu, every_expert=True)) + table
    reads = decode_reads(config, card, directory)
    layers = layer_elements(model, every_expert=True) * _element_bytes(config, directory)
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


def _element_bytes(config: EngineConfig, directory: Path) -> float:
    dtype = config.weights_dtype_name
    if dtype in ("int4", "fp8"):
        scheme = scheme_of(read_config(directory))
        assert scheme is not None, "as the model's card has it"
        return code_bytes(scheme.bits, scheme.group, scheme.has_minimum, config.on_gpu)
    return code_bytes(8, INT8_GROUP, False, config.on_gpu) if dtype == "int8" else dtype_bytes(dtype)


def layer_elements(model: ModelConfig, every_expert: bool = False) -> int:
    """Numbers in all layers' matrices that a token is multiplied with, or that there are."""
    hidden, moe = model.hidden_size, model.moe
    variant, layers = attention_of(model), range(model.num_layers)
    attention = sum(variant.weight_elements(layer) for layer in layers) + model.side_elements
    parts = 3 if model.mlp_gate else 2
    column = parts * hidden
    if moe is None:
        return attention + column * sum(map(model.mlp_size, layers))
    shared = moe.shared_size + moe.gated_shared_size
    count = moe.num_experts if every_expert else moe.experts_per_token
    experts = parts * count * moe.expert_size * (moe.latent_size or hidden) + column * shared
    experts += 2 * hidden * moe.latent_size
    routed = len(moe.layers) * (experts + hidden * moe.num_experts)
    dense = column * sum(model.mlp_size(layer) for layer in layers if layer not in moe.layers)
    return attention + dense + routed


def _block_bytes(model: ModelConfig, directory: Path, on_gpu: bool, every_expert: bool = False) -> tuple[int, int]:
    """Bytes of the layers and of the LM head, computed from a GGUF file's blocks; see `layer_elements`."""
    checkpoint, layers, experts, head = Checkpoint(directory), 0.0, 0.0, 0.0
    head_name = "embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    for blocks in _block_files(directory):
        together: dict[str, list[str]] = defaultdict(list)
        for name in blocks.kinds:
            together[_matrix_of(name)].append(name)
        for names in together.values():
            num_bytes = _matrix_bytes(blocks, checkpoint, names, on_gpu)
            if ".experts." in names[0]:
                experts += num_bytes
            elif ".layers." in names[0]:
                layers += num_bytes
            elif names[0].endswith(head_name):
                head += num_bytes
    if model.moe is not None and not every_expert:
        experts *= model.moe.experts_per_token / model.moe.num_experts
    return int(layers + experts), int(head)


def _matrix_bytes(blocks: BlockFile, checkpoint: Checkpoint, names: Sequence[str], on_gpu: bool) -> float:
    """Of parts that are one matrix in memory: in their common form, or expanded if one of them is not in the file."""
    forms = [form for form in map(blocks.code_form, names) if form is not None]
    size: float = _EXPANDED_BYTES
    if len(forms) == len(names):
        _, bits, group, has_minimum = common_form(forms)
        size = code_bytes(bits, group, has_minimum, on_gpu)
    shapes = (blocks.shape(name) if blocks.code_form(name) else checkpoint.shape(name) for name in names)
    return size * sum(map(prod, shapes))


def _matrix_of(name: str) -> str:
    """What a matrix is part of in memory; itself if it is alone."""
    at, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{at}.{'+'.join(parts)}" for parts in _TOGETHER if last in parts), name)


def _tokens_seen(policy: HeadPolicy, tokens: int, block_size: int) -> int:
    """Those whose bytes a head reads; a state is as large as a slot."""
    if policy.is_state:
        return block_size
    return tokens if policy.is_full else min(tokens, policy.window + policy.sink)
