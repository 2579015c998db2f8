"""Sizes of everything `gpu_checks.py` runs: those of a real run, and tiny ones of the same shape for the emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heads:
    """Attention of one layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        scale: float = self.head_dim**-0.5
        return scale


@dataclass(frozen=True)
class DeltaNet:
    """A layer of gated delta-nets, with keys and values of ``dim``; the batches it decodes, and tokens of prompts."""

    key_heads: int
    share: int
    dim: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    convolution: int = 4


@dataclass(frozen=True)
class KdaNet:
    """A layer of Kimi Delta Attention, with keys and values of ``dim``; the batches it decodes, and tokens of
    prompts."""

    heads: int
    dim: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    convolution: int = 4


@dataclass(frozen=True)
class SsmNet:
    """A layer of a state space model, whose members are ``share`` heads each; the batches it decodes, and tokens of
    prompts."""

    name: str
    members: int
    groups: int
    share: int
    key_dim: int
    value_dim: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    convolution: int = 4


@dataclass(frozen=True)
class CopySizes:
    """Copies between arenas of ``num_bytes`` each.

    model:        whose head groups and layers make the blocks
    block_sizes:  tokens per block; the fewer, the smaller the pieces
    step:         (batch, context) of the decode that copies run beside
    layer_tokens: prompt tokens of the attention that layers are loaded behind
    """

    num_bytes: int
    model: dict[str, Any]
    block_sizes: tuple[int, ...]
    step: tuple[int, int]
    layer_tokens: int


@dataclass(frozen=True)
class LoadSizes:
    """Requests that do not fit together: ``requests`` in the memory of ``whole`` of mean length.

    output_tokens: the mean; requests end at different times
    seconds:       that each engine serves them, at most
    """

    requests: int
    whole: int
    input_tokens: int
    output_tokens: int
    batched_tokens: int
    block_size: int
    seconds: float


@dataclass(frozen=True)
class LatentSizes:
    """Latent attention of one rank: its heads, the parts of a latent and of a head, and an indexer."""

    heads: int
    rank: int
    rotated: int
    plain: int
    value_dim: int
    index_heads: int
    index_dim: int


@dataclass(frozen=True)
class EntrySizes:
    """Attention of one rank to a window and entries: heads of ``size``, of each half of which ``turning`` are rotated,
    tokens that entries stand for, in two kinds of layers, of which an indexer chooses those of ``indexed``. timed:
    tokens of sequences whose decodes are"""

    heads: int
    size: int
    turning: int
    window: int
    rates: tuple[int, int]
    indexed: int
    index_heads: int
    index_dim: int
    index_top: int
    timed: int


@dataclass(frozen=True)
class Sizes:
    """See `FULL`.

    rehearsed:   whether works run before they are timed: the first calls load kernels and warm up
    long:        whether inputs of the correctness section have hundreds of tokens
    compiled:    kernels to compile, of the first shape of attention; None: all, of all
    single_from: tokens of a single sequence from which on a decode has an aim
    skewed:      (batch, context of all but one, context of that one)
    together:    (batch, context, how many tokens of it all share) of decodes that read these together
    quantised_at: (batch, context) of decodes over caches of fewer bits
    also_at:     (head sizes, dtypes of caches, (batch, context)) of decodes whose bandwidth is told, without an aim
    fills_card:  bytes of KV from which on a decode has enough to read to keep the card busy
    window:      (window, sink) of the windowed heads in `heads`
    head_dims:   (prompt, head sizes) of prompts that are timed by head size
    product:     rows and columns of matrices whose product shows what the card computes at best
    weight:      (width, depth) of a weight that products read, of ``few_rows`` each; every way to, of ``tile_rows``
    experts:     (how many, width of tokens, of an expert) of a layer whose products read as few
    decode_context, decode_batches, decode_steps: of the whole model's decode
    most_repeats: calls of one layer's attention that stand for a layer of a forward pass, at most
    host_at:     (batches, context) of decode steps whose Python is timed
    warm_steps:  of decode before the clock starts: the first of a batch size load kernels
    prefills:    tokens of prompts that are computed alone, by graphs and without
    ttft, tbt:   prompt tokens; (batch, context, steps of a round)
    recycled:    window fields of the model in `recycling`
    """

    rounds: int
    rehearsed: bool
    long: bool
    compiled: int | None
    copied_bytes: int
    block_size: int
    attention: Heads
    latents: LatentSizes
    entries: EntrySizes
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    single_from: int
    skewed: tuple[int, int, int]
    together: tuple[tuple[int, int, int], ...]
    quantised_at: tuple[int, int]
    also_at: tuple[tuple[int, ...], tuple[str, ...], tuple[tuple[int, int], ...]]
    fills_card: int
    heads_at: tuple[int, int]
    window: tuple[int, int]
    prompts: tuple[int, ...]
    head_dims: tuple[int, tuple[int, ...]]
    product: int
    weight: tuple[int, int]
    few_rows: tuple[int, ...]
    tile_rows: tuple[int, ...]
    experts: tuple[int, int, int]
    copies: CopySizes
    delta: DeltaNet
    kda: KdaNet
    ssm: tuple[SsmNet, ...]
    most_repeats: int
    warm_steps: int
    prefills: tuple[int, ...]
    llama: dict[str, Any]
    ernie: dict[str, Any]
    moe: dict[str, Any]
    decode_context: int
    decode_batches: tuple[int, ...]
    decode_steps: int
    host_at: tuple[tuple[int, ...], int]
    ttft: int
    tbt: tuple[int, int, int]
    recycled: dict[str, Any]
    load: LoadSizes
    greedy: tuple[int, int]
    """(prompts, tokens of each) of SmolLM2."""
    sanitized: tuple[tuple[int, int], ...]
    """(queries, context) of sequences that run under compute-sanitizer, a hundred times slower; every other decodes."""
    sanitized_cases: int | None
    """Cases of the section correctness that do; None is all."""


LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Llama-3.2-1B's geometry."""

ERNIE_LIKE = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "window_size": 256,
    "sink_size": 64,
    "head_wise_swa_ratio": 0.5,
}
"""The attention of ERNIE-4.5-21B-A3B, half of its heads windowed, with a dense MLP in place of the experts."""

WINDOW_FIELDS = ("window_size", "sink_size", "head_wise_swa_ratio")

ERNIE_MOE = {
    **{name: value for name, value in ERNIE_LIKE.items() if name not in WINDOW_FIELDS},
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "intermediate_size": 12288,
    "num_hidden_layers": 3,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
}
"""ERNIE-4.5-21B-A3B's geometry, but for its windows: its dense layer, and two of its 27 with experts, 1.6 GB each."""

PUBLISHED_SCALE = 0.4
"""Of the lengths of the published measurement, 10,600 tokens in and 4,000 out, and of its windows, so that requests
come and go within seconds. `capacity.py` says where its windows are from: 4,096 tokens in three of four heads.

Of the memory of four whole requests: the published measurement's GPU spends four times as long on reading 21 billion
weights as on the caches that fit beside them. The model here has a twentieth of the weights, and as large caches.
"""

FULL = Sizes(
    rounds=11,
    rehearsed=True,
    long=True,
    compiled=None,
    copied_bytes=2 << 30,
    block_size=64,
    attention=Heads(32, 8, 128),
    latents=LatentSizes(16, 512, 64, 128, 128, index_heads=64, index_dim=128),
    entries=EntrySizes(64, 512, 32, 128, (4, 128), indexed=4, index_heads=64, index_dim=128, index_top=512, timed=8192),
    batches=(1, 8, 64),
    contexts=(2048, 8192, 32768),
    single_from=8192,
    skewed=(256, 1024, 131072),
    together=((4, 33024, 32768), (64, 33024, 32768), (64, 4352, 4096)),
    quantised_at=(64, 8192),
    also_at=((128, 64), ("bfloat16", "int8"), ((64, 8192), (64, 1024), (8, 2048), (1, 32768), (1, 8192))),
    fills_card=512 << 20,
    heads_at=(8, 32768),
    window=(1024, 64),
    prompts=(4096, 16384),
    head_dims=(4096, (64, 128, 256)),
    product=8192,
    weight=(14336, 4096),  # Llama-3-8B's to its MLP
    few_rows=(1, 8, 16, 32, 64, 128),
    tile_rows=(8, 16, 32, 64, 128, 192, 256),
    experts=(16, 2048, 768),  # Qwen3-30B-A3B's, of 128
    copies=CopySizes(1 << 30, ERNIE_LIKE, block_sizes=(64, 16), step=(64, 8192), layer_tokens=4096),
    delta=DeltaNet(16, 2, 128, batches=(1, 8, 64, 256), prompts=(4096, 16384)),  # Qwen3-Next-80B's
    kda=KdaNet(32, 128, batches=(1, 8, 64, 256), prompts=(4096, 16384)),  # Kimi-Linear-48B's
    ssm=(
        SsmNet("nano", 16, 8, 4, 128, 64, batches=(1, 8, 64, 256), prompts=(4096, 16384)),  # Nemotron 3 Nano's
        SsmNet("granite", 32, 1, 4, 128, 64, batches=(1, 8, 64, 256), prompts=(4096,)),  # Granite 4.0 H Small's
    ),
    most_repeats=64,
    warm_steps=6,
    prefills=(16, 128, 512, 1024),
    llama=LLAMA_1B,
    ernie=ERNIE_LIKE,
    moe=ERNIE_MOE,
    decode_context=1024,
    decode_batches=(1, 8, 64),
    decode_steps=48,
    host_at=((64, 256), 128),
    ttft=16384,
    tbt=(16, 16384, 12),
    recycled={"window_size": round(PUBLISHED_SCALE * 4096 / 64) * 64, "sink_size": 0, "head_wise_swa_ratio": 0.75},
    load=LoadSizes(
        requests=30,
        whole=4,
        input_tokens=round(PUBLISHED_SCALE * 10_600),
        output_tokens=round(PUBLISHED_SCALE * 4_000),
        batched_tokens=2048,
        block_size=64,
        seconds=20,
    ),
    greedy=(4, 32),
    sanitized=((1, 300), (40, 70), (1, 1)),
    sanitized_cases=None,
)
_TINY_HEADS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}

TINY = Sizes(
    rounds=1,
    rehearsed=False,
    long=False,
    compiled=1,
    copied_bytes=1 << 16,
    block_size=16,
    attention=Heads(4, 2, 64),
    latents=LatentSizes(3, 32, 32, 16, 16, index_heads=2, index_dim=32),
    entries=EntrySizes(3, 32, 8, 24, (4, 8), indexed=4, index_heads=2, index_dim=32, index_top=6, timed=40),
    batches=(1, 2),
    contexts=(48,),
    single_from=48,
    skewed=(2, 8, 40),
    together=((3, 150, 128),),
    quantised_at=(1, 20),
    also_at=((32,), ("bfloat16", "int8"), ((2, 20),)),
    fills_card=1,
    heads_at=(1, 40),
    window=(16, 4),
    prompts=(32,),
    head_dims=(24, (64, 128)),
    product=16,
    weight=(96, 128),
    few_rows=(1, 3, 20),
    tile_rows=(3, 20),
    experts=(3, 64, 64),
    copies=CopySizes(1 << 18, {**ERNIE_LIKE, **_TINY_HEADS, "sink_size": 4}, (8, 16), (1, 20), 16),
    delta=DeltaNet(1, 2, 16, batches=(1, 2), prompts=(20,)),
    kda=KdaNet(2, 16, batches=(1, 2), prompts=(20,)),
    ssm=(
        SsmNet("nano", 2, 2, 2, 16, 8, batches=(1, 2), prompts=(20,)),
        SsmNet("granite", 2, 1, 2, 16, 8, batches=(1,), prompts=()),
    ),
    most_repeats=1,
    warm_steps=1,
    prefills=(20,),
    llama={**LLAMA_1B, **_TINY_HEADS, "num_hidden_layers": 1},
    ernie={**ERNIE_LIKE, **_TINY_HEADS, "num_hidden_layers": 1, "window_size": 16, "sink_size": 4},
    moe={
        **ERNIE_MOE,
        **_TINY_HEADS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
    },
    decode_context=10,
    decode_batches=(1, 2),
    decode_steps=2,
    host_at=((2,), 10),
    ttft=24,
    tbt=(2, 24, 2),
    recycled={"window_size": 16, "sink_size": 0, "head_wise_swa_ratio": 0.5},
    load=LoadSizes(requests=3, whole=2, input_tokens=24, output_tokens=4, batched_tokens=64, block_size=8, seconds=6),
    greedy=(2, 3),
    sanitized=((1, 30), (5, 9), (1, 1)),
    sanitized_cases=1,
)
