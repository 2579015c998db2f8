"""Chunked attention (Llama 4): how a step's sequences are cut, and what is refused of deployments and configs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ConfigError, ModelError
from headwise.kernels.base import AttentionBatch
from headwise.runtime.calibration.calibrate import DenseModel
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.chunked import cut_into_chunks
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.comm import SingleRank

LLAMA4 = TINY_CONFIGS["llama4"]
CONFIG = EngineConfig(dtype="float32", kv_cache="1MiB", device="cpu")


def tokens_seen(batch: AttentionBatch, group: int, block_size: int) -> list[list[tuple[int, int]]]:
    """Of each query row, places (block, offset) of the tokens that full attention sees."""
    seen = []
    for sequence, length in enumerate(batch.seq_lens):
        table = batch.block_tables[sequence * batch.groups + group]
        count = int(batch.cu_seqlens_q[sequence + 1] - batch.cu_seqlens_q[sequence])
        places = [(int(table[key // block_size]), key % block_size) for key in range(length)]
        seen += [places[:end] for end in range(int(length) - count + 1, int(length) + 1)]
    return seen


@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 5),
    groups=st.integers(1, 3),
)
def test_each_query_sees_its_chunk_up_to_itself(lengths, block_size: int, blocks: int, groups: int) -> None:
    chunk, lens = block_size * blocks, [length for length, _ in lengths]
    queries = [min(count, length) for length, count in lengths]
    columns = -(-max(lens) // block_size)
    tables = np.arange(len(lens) * groups * columns, dtype=np.int32).reshape(-1, columns)
    batch = AttentionBatch(np.cumsum([0, *queries], dtype=np.int32), np.array(lens, np.int32), tables, groups)
    cut = cut_into_chunks(batch, chunk, block_size)
    assert cut.cu_seqlens_q[-1] == sum(queries)
    for group in range(groups):
        whole, pieces = (tokens_seen(each, group, block_size) for each in (batch, cut))
        assert pieces == [seen[(len(seen) - 1) // chunk * chunk :] for seen in whole]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": 0}, "'attention_chunk_size' must be a positive integer, got 0"),
        ({"no_rope_layers": [1, 0]}, "'no_rope_layers' must be a 0 or 1 for 4 layers"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "'no_rope_layers' must be a 0 or 1 for 4 layers"),
        ({"moe_layers": [4]}, "'moe_layers' must be a list of the 4 layers"),
        ({"moe_layers": "all"}, "'moe_layers' must be a list of the 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer types .*sliding_attention.* are not supported"),
        ({"num_experts_per_tok": 5}, "'num_experts_per_tok' 5 is more than 'num_local_experts' 4"),
        ({"intermediate_size_mlp": -1}, "'intermediate_size_mlp' must be a positive integer, got -1"),
        ({"floor_scale": 0}, "'floor_scale' must be a positive number, got 0"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_weights_are_read(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        model_config({**LLAMA4, **changes})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 48}, "block_size 48 does not divide the chunks of 64 tokens"),
        ({"head_pattern": "heads.tsv"}, "chunked attention, which no head pattern has"),
        ({"tp_size": 8}, r"tp_size 8 is more than the model's 4 query heads; sizes that fit: \[1, 2, 3, 4\]"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    directory = checkpoint("llama4")
    with pytest.raises(ConfigError, match=message):
        read_model_card(replace(CONFIG, model=str(directory), **changes), directory, identify=False)


def test_there_is_no_head_pattern_of_chunks_to_measure() -> None:
    directory = checkpoint("llama4")
    with pytest.raises(ConfigError, match="chunked attention"):
        DenseModel.load(replace(CONFIG, model=str(directory)), directory)


def test_what_a_config_leaves_out_is_that_of_transformers() -> None:
    nested = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {**LLAMA4, "architectures": None}}
    assert model_config(nested) == model_config(LLAMA4)
    known = model_config({"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"no_rope_layers": []}})
    assert [row[0] for row in known.policies] == ([HeadPolicy(window=8192)] * 3 + [FULL]) * 12
    assert [rope.is_none for rope in known.ropes] == [False, False, False, True] * 12
    assert known.moe is not None
    assert (known.moe.layers, known.moe.num_experts, known.moe.experts_per_token) == (tuple(range(48)), 16, 1)
    unchunked = model_config({**LLAMA4, "attention_chunk_size": None})
    assert (unchunked.chunk, {row[0] for row in unchunked.policies}) == (0, {FULL})


def test_experts_one_by_one_are_those_of_one_tensor() -> None:
    weights = draw_weights(LLAMA4, reference("llama4")["shapes"])
    apart = {name: array for name, array in weights.items() if ".experts." not in name}
    for name in set(weights) - set(apart):
        for expert, matrix in enumerate(weights[name]):
            at = name.replace(".experts.", f".experts.{expert}.")
            parts = np.split(matrix.T, 2) if name.endswith("gate_up_proj") else [matrix.T]
            names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            apart |= {f"{at.rpartition('.')[0]}.{part}.weight": rows for part, rows in zip(names, parts, strict=True)}
    ids = np.arange(3, 83, dtype=np.int32)
    joined, single = (run_rank(model_config(LLAMA4), DictWeights(each), SingleRank(), ids) for each in (weights, apart))
    np.testing.assert_allclose(joined, single, rtol=0, atol=1e-5)


def test_info_tells_chunks_from_windows() -> None:
    directory = checkpoint("llama4")
    card = read_model_card(replace(CONFIG, model=str(directory)), directory, identify=False)
    rows = dict(describe(replace(CONFIG, model=str(directory)), card, directory, [512]))
    groups = [value for key, value in rows.items() if key.startswith("  group")]
    assert groups[0].startswith("full attention, 2 (layer, KV head) pairs, ")
    assert groups[1].startswith("window of 64, 2 (layer, KV head) pairs that see chunks of 64, ")
