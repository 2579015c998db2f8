"""What `headwise info` says a decode step reads, and what that takes at least."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.random_ernie import DENSE, MOE, draw_weights
from support.tiny_ggufs import TINY_GGUFS, write_tiny_gguf
from support.tiny_models import llama_tensors, write_gemma3_gguf, write_llama_gguf

from headwise.kernels import bandwidth
from headwise.kernels.bandwidth import measure_bandwidth
from headwise.runtime.config.decode_reads import DecodeReads, codes_in_memory, decode_reads
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import chosen, describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.ops.numba_ops import NumbaOps

KINDS = gguf.GGMLQuantizationType


def convert(source: Path) -> Path:
    return converted_directory(source, source.parent / "cache", SilentProgress())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Matrices of Q8_0, but for one of Q4_1 and one of F16."""
    kinds = {name: KINDS.Q8_0 for name, values in llama_tensors().items() if values.ndim == 2}
    kinds |= {"blk.0.ffn_up.weight": KINDS.Q4_1, "blk.1.ffn_up.weight": KINDS.F16}
    return convert(write_llama_gguf(tmp_path / "tiny.gguf", quantized=kinds))


def reads(directory: Path, **changes: Any) -> DecodeReads:
    config = EngineConfig(model="tiny", device="cpu", **changes)
    return decode_reads(config, read_model_card(config, directory, identify=False), directory)


def elements(weights: dict[str, np.ndarray], *parts: str) -> int:
    """Numbers in the matrices whose names have one of the parts."""
    return sum(values.size for name, values in weights.items() if values.ndim == 2 and any(p in name for p in parts))


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, 4.0),
        ({"dtype": "bfloat16"}, 2.0),
        ({"weights_dtype": "bfloat16"}, 2.0),
        ({"weights_dtype": "int8"}, 1 + 2 / 32),
    ],
)
def test_weights_are_the_matrices_of_all_layers_and_of_the_lm_head(llama: Path, given: dict, size: float) -> None:
    checkpoint, found = Checkpoint(llama), reads(llama, **given)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names}
    assert found.layers == elements(weights, ".layers.") * size
    assert found.lm_head == elements(weights, "embed_tokens") * size, "the embedding is the LM head's"


def test_of_a_gguf_file_its_own_blocks_are_read_and_the_rest_as_bfloat16(llama: Path) -> None:
    found, q8_0, mixed = reads(llama, weights_dtype="gguf"), 1 + 2 / 32, 1 + 2 * 2 / 32
    weights = llama_tensors()
    odd = elements(weights, "blk.0.ffn_up", "blk.0.ffn_gate")
    expected = (elements(weights, "blk.") - 2 * odd) * q8_0 + odd * mixed + odd * 2
    assert found.layers == expected, "gate and up are one matrix, of one form"
    assert found.lm_head == elements(weights, "token_embd") * q8_0


@pytest.mark.parametrize(("kind", "bits"), [("Q5_0", 5.5), ("Q5_1", 6), ("Q4_0", 4.5), ("Q4_1", 5)])
def test_of_a_gguf_file_few_bits_are_read_where_it_has_few(tmp_path: Path, kind: str, bits: float) -> None:
    kinds = {name: KINDS[kind] for name, values in llama_tensors().items() if values.ndim == 2}
    directory = convert(write_llama_gguf(tmp_path / "tiny.gguf", quantized=kinds))
    found, ops = reads(directory, weights_dtype="gguf"), NumbaOps(1, "gguf")
    assert found.layers == elements(llama_tensors(), "blk.") * bits / 8
    checkpoint = Checkpoint(directory, blocks=True)
    head = checkpoint.kept_rows("model.embed_tokens.weight", 0, 64)
    assert head is not None
    assert ops.linear_weight(head).nbytes == head.codes.size * bits / 8, "as packed"


def test_of_a_gguf_files_experts_those_of_a_token_are_read_and_all_are_kept(tmp_path: Path) -> None:
    tiny = TINY_GGUFS["qwen3-moe"]
    directory = convert(write_tiny_gguf(tmp_path / "moe.gguf", tiny, lambda name, values: KINDS.Q8_0))
    found, weights = reads(directory, weights_dtype="gguf"), tiny.weights()
    experts, others = elements(weights, ".experts."), elements(weights, "self_attn", "mlp.gate.")
    config = tiny.config
    share = config["num_experts_per_tok"] / config["num_experts"]
    assert found.layers == pytest.approx((others + experts * share) * 1.0625)
    table = elements(weights, "embed_tokens")
    engine = EngineConfig(model="tiny", device="cpu", weights_dtype="gguf", dtype="bfloat16")
    card = read_model_card(engine, directory, identify=False)
    expected = (others + experts + elements(weights, "lm_head")) * 1.0625 + table * 2
    assert codes_in_memory(engine, card, directory) == pytest.approx(expected)


def test_an_lm_head_of_its_own_is_read_in_the_embeddings_place(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"]
    source = write_llama_gguf(tmp_path / "untied.gguf", tensors, quantized={"output.weight": KINDS.Q8_0})
    assert reads(convert(source), weights_dtype="gguf").lm_head == tensors["output.weight"].size * 1.0625


@pytest.mark.parametrize("config", [DENSE, MOE])
def test_of_a_mixture_of_experts_those_of_one_token_are_read(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = draw_weights(config)
    unused = [f".experts.{expert}." for expert in range(config.get("moe_k", 0), config.get("moe_num_experts", 0))]
    expected = elements(weights, ".layers.") - elements(weights, *unused) - elements(weights, "moe_statics")
    assert reads(tmp_path).layers == 4 * expected


def test_of_codes_on_a_gpu_all_experts_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"moe_intermediate_size": 32}))
    weights = draw_weights(MOE | {"moe_intermediate_size": 32})
    config = EngineConfig(model="tiny", device="cuda", weights_dtype="int8")
    layers = elements(weights, ".layers.") - elements(weights, "moe_statics")
    table = elements(weights, "embed_tokens")
    head = 0 if "lm_head.weight" in weights else table
    found = codes_in_memory(config, read_model_card(config, tmp_path, identify=False), tmp_path)
    assert found == (layers + elements(weights, "lm_head") + head) * 1.125 + table * 2


@pytest.mark.parametrize(("kv_dtype", "row"), [("float32", 8 * 4), ("bfloat16", 8 * 2)])
def test_the_cache_of_a_thousand_tokens_is_read_as_far_as_its_heads_see(
    tmp_path: Path, kv_dtype: str, row: int
) -> None:
    members, windows = 2 * 2, 16
    full, sliding = convert(write_llama_gguf(tmp_path / "l.gguf")), convert(write_gemma3_gguf(tmp_path / "g.gguf"))
    assert reads(full, kv_dtype=kv_dtype).thousand == 1000 * members * 2 * row
    assert reads(sliding, kv_dtype=kv_dtype).thousand == windows * members * 2 * row
    assert reads(full, kv_dtype=kv_dtype, tp_size=2).thousand == reads(full, kv_dtype=kv_dtype).thousand
    assert reads(full, kv_dtype=kv_dtype, tp_size=4).thousand == 2 * reads(full, kv_dtype=kv_dtype).thousand


def test_info_says_what_a_step_reads_and_takes_at_least(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.runtime.config.info.read_bandwidth", lambda threads: threads * 1e9)
    config = EngineConfig(model="tiny", device="cpu", cpu_threads=3, weights_dtype="bfloat16", dtype="bfloat16")
    rows = dict(describe(config, read_model_card(config, llama, identify=False), llama))
    assert "KiB of bfloat16 weights (36 KiB in layers, " in rows["a decode step reads"]
    assert "3 threads read 3 GB/s" in rows["at this machine's best"]
    on_gpu = EngineConfig(model="tiny", device="cuda")
    card = read_model_card(on_gpu, llama, identify=False)
    assert "at this machine's best" not in dict(describe(on_gpu, card, llama)), "that memory is not the GPU's"


def test_the_line_at_start_says_which_types_are_computed_from_and_which_expanded(llama: Path) -> None:
    config = EngineConfig(model="tiny", device="cpu", weights_dtype="gguf")
    line = chosen(config, read_model_card(config, llama, identify=False), llama)
    assert "weights_dtype=gguf (13 Q8_0, 1 Q4_1; 1 F16 as bfloat16) kv_dtype=float32" in line


@pytest.mark.parametrize("threads", [1, 3])
def test_bandwidth_is_what_all_threads_read_over_the_time_that_they_take(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(bandwidth, "_LEAST_BYTES", 24_000)
    monkeypatch.setattr(bandwidth, "_BYTES_PER_THREAD", 8)
    ticks = count()
    found = measure_bandwidth(threads, lambda: float(next(ticks)))  # two ticks a thread: from the first to the last
    assert found == bandwidth._PASSES * 24_000 / (2 * threads - 1)
