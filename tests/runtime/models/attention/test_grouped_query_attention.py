"""Which ranks can share a model's heads, and what its kernels are made ready for."""

from __future__ import annotations

import pytest
from support.random_models import BASE
from support.tiny_checkpoints import checkpoint

from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.base import Serving
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.registry import model_config


def attention(query_heads: int, kv_heads: int) -> GroupedQueryAttention:
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "intermediate_size": 48}
    return GroupedQueryAttention(model_config({**BASE, "architectures": ["LlamaForCausalLM"], **heads}))


def serving(tp_size: int) -> Serving:
    return Serving("a model", tp_size, "cpu", "auto", "bfloat16")


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "sizes"),
    [
        (16, 2, [*range(1, 17)]),
        (24, 4, [1, 2, *range(4, 25)]),
        (14, 2, [*range(1, 15)]),
        (16, 8, [1, 2, 4, *range(8, 17)]),
    ],
)
def test_ranks_that_have_as_many_kv_heads_each_or_one_are_served_and_the_others_told_which_are(
    query_heads: int, kv_heads: int, sizes: list[int]
) -> None:
    served = attention(query_heads, kv_heads)
    for size in range(1, 25):
        if size in sizes:
            served.check(serving(size))
            continue
        with pytest.raises(ConfigError, match=rf"tp_size {size} .* heads.*; sizes that fit: ") as error:
            served.check(serving(size))
        assert str(error.value).endswith(f"fit: {sizes}")


@pytest.mark.parametrize(
    ("name", "tp_size", "shares"),
    [
        ("gemma4", 1, {(1, 32), (2, 64)}),
        ("gemma4", 2, {(1, 32), (2, 64)}),
        ("gemma4", 4, {(1, 32), (1, 64)}),
        ("qwen3", 3, {(1, 64), (2, 64)}),
    ],
)
def test_gpu_kernels_are_made_ready_for_the_query_heads_of_any_rank(
    name: str, tp_size: int, shares: set[tuple[int, int]]
) -> None:
    """Of four in each layer, over four KV heads of 32 or two of 64."""
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from support.gpu.cuda_shim import LIBRARIES
    from support.gpu.emulated_gpu import EmulatedGpu

    directory, gpu = checkpoint(name), EmulatedGpu(LIBRARIES, "float32")
    config = EngineConfig(model=str(directory), device="cuda", dtype="float32", kv_cache="1MiB", tp_size=tp_size)
    gpu.check(read_model_card(config, directory, identify=False), directory)
    assert {(shape.share, shape.head_dim) for shape in gpu.kernels._attention._ready} == shares
