"""A quantised checkpoint gives what the same model gives expanded: on one rank and two, and computed from as it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import run_rank, run_ranks
from support.quantised_models import (
    FP8,
    INT4,
    NVFP4,
    in_fp4,
    in_fp8,
    in_fp8_by_powers,
    in_int4,
    in_nvfp4,
    write_quantised,
)
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise import EngineConfig, LocalEngine, SamplingParams
from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.checkpoint import Checkpoint, read_json
from headwise.runtime.loader.quantisation import without_scheme
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import served_up_to
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.quantised import GroupQuantised
from headwise.runtime.protocol.request import GenerationResult

IDS = np.arange(3, 60, dtype=np.int32)
AS_V4 = {
    r"[.]experts[.]\d+[.]w\d[.]weight$": in_fp4,
    r"[.](attn|indexer)[.]w(q_a|q_b|kv|o_a|o_b)[.]weight$|[.]shared_experts[.]w\d[.]weight$": in_fp8_by_powers,
}
CASES: dict[str, tuple[Any, ...]] = {
    "deepseek-v4": (FP8, in_fp8, False, AS_V4),
    "qwen3": (INT4, in_int4),
    "qwen3-moe": (INT4, in_int4),
    "deepseek-v3": (FP8, in_fp8),
    "kimi-linear": (FP8, in_fp8),
    "mimo-v2": (FP8, in_fp8),
    "qwen2-moe": (NVFP4, in_nvfp4),
    "mistral4": (NVFP4, in_nvfp4),
}


@pytest.fixture(scope="module", params=CASES)
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised model, and the same one expanded."""
    return write_quantised(tmp_path_factory.mktemp(request.param), request.param, *CASES[request.param])


def test_logits_are_those_of_the_expanded_model(directories: tuple[Path, Path]) -> None:
    config = model_config(without_scheme(read_json(directories[0] / "config.json")))
    config = served_up_to(config, config.max_position)
    quantised, expanded = map(open_weights, directories)
    expected = run_rank(config, expanded, SingleRank(), IDS)
    assert expected is not None
    np.testing.assert_allclose(run_rank(config, quantised, SingleRank(), IDS), expected, atol=1e-5, rtol=0)
    for size in (2, 4):
        np.testing.assert_allclose(run_ranks(config, quantised, size, IDS)[0], expected, atol=1e-4, rtol=0)


def test_ranks_of_a_gpu_that_compute_from_fp8_add_up_to_the_expanded_model(tmp_path: Path) -> None:
    """An expert's part begins and ends within tiles of `BLOCK`."""
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from support.gpu.cuda_shim import LIBRARIES
    from support.gpu.emulated_gpu import EmulatedOps, SerialPrograms

    quantised, expanded = write_quantised(tmp_path, "qwen3-moe", FP8, in_fp8)
    config = model_config(without_scheme(read_json(quantised / "config.json")))
    config = served_up_to(config, config.max_position)
    expected = run_rank(config, open_weights(expanded), SingleRank(), IDS[:9])
    programs = SerialPrograms(LIBRARIES)
    kept = open_weights(quantised, keeps_fp8=True)
    found = run_ranks(config, kept, 2, IDS[:9], lambda: EmulatedOps("float32", programs, "fp8"))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["phi3-long", "llama4", "qwen3.5", "deepseek-v2", "kimi-linear", "cohere2-moe"])
def test_models_that_reorder_rows_compute_from_codes_the_same(name: str, tmp_path: Path) -> None:
    quantised, _ = write_quantised(tmp_path, name, INT4, in_int4)
    config = served_up_to(model_config(without_scheme(read_json(quantised / "config.json"))), 512)
    codes, expanded = (open_weights(quantised, keeps_codes=keeps) for keeps in (True, False))
    found, expected = (run_rank(config, weights, SingleRank(), IDS) for weights in (codes, expanded))
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


class ToldCheckpoint(Checkpoint):
    """Knows which of its matrices were read as float32."""

    def __init__(self, directory: Path, keeps: np.dtype[Any]) -> None:
        super().__init__(directory, keeps=keeps)
        self.widened: set[str] = set()

    def _open(self, name: str) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if caller in ("tensor", "rows", "columns") and len(super()._open(name).shape(name)) > 1:
            self.widened.add(re.sub(r"[.]\d+[.]", ".", name))
        return super()._open(name)


STILL_WIDE = re.compile(
    r".*[.](gate|gate[.]wg|router|router[.]layer|shared_expert_gate|([qkv]_)?conv1d|kv_b_proj|indexer[.]\w+)[.]weight"
    r"|.*[.]A_log|.*[.]experts[.]\w+_proj(_bias)?|.*[.](hc_\w+|ape|tid2eid)"
)
"""Routers, convolutions and speeds of decays, which are small; up-projections of latents, and indexers; gpt-oss'
experts as floats; of DeepSeek-V4 hyper-connections, biases by place and tables."""


@pytest.mark.parametrize("name", [name for name in TINY_CONFIGS if name != "gpt-oss-mxfp4"])
def test_weights_that_are_kept_in_their_dtype_are_the_same(name: str, tmp_path: Path) -> None:
    """A GPU is given them so, joined and reordered ones, too."""
    config, source = served_up_to(model_config(TINY_CONFIGS[name]), 512), Checkpoint(checkpoint(name))
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS[name]))
    forms = {weight: TensorForm("BF16", source.shape(weight)) for weight in source.names}
    write_safetensors(tmp_path / "model.safetensors", forms, (to_bits(source.tensor(weight)) for weight in forms))
    weights = ToldCheckpoint(tmp_path, numpy_dtype("bfloat16"))
    found, expected = (run_rank(config, each, SingleRank(), IDS) for each in (weights, Checkpoint(tmp_path)))
    np.testing.assert_array_equal(found, expected)
    assert not [weight for weight in weights.widened if not STILL_WIDE.fullmatch(weight)]
    if name != "gpt-oss":
        assert not [weight for weight in weights.widened if "experts" in weight]


def test_what_a_quantised_checkpoint_has_in_the_models_dtype_is_kept_so(tmp_path: Path) -> None:
    directory, _ = write_quantised(tmp_path, "qwen3", INT4, in_int4, in_bfloat16=True)
    weights = open_weights(directory, keeps=numpy_dtype("bfloat16"))
    plain = open_weights(directory)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = weights.kept_rows(name, 3, 9)
        assert isinstance(kept, np.ndarray)
        assert (kept.dtype.name, kept.nbytes) == ("bfloat16", 2 * kept.size)
        np.testing.assert_array_equal(kept.astype(np.float32), plain.rows(name, 3, 9))
        columns = weights.kept_columns(name, 8, 16)
        assert isinstance(columns, np.ndarray)
        np.testing.assert_array_equal(columns.astype(np.float32), plain.columns(name, 8, 16))
        assert plain.kept_rows(name, 3, 9) is None
    assert weights.kept_rows("model.layers.0.self_attn.q_proj.weight", 0, 8) is None, "codes, which are expanded"
    kept = open_weights(directory, keeps=numpy_dtype("bfloat16"), keeps_codes=True)
    assert isinstance(kept.kept_rows("model.layers.0.self_attn.q_proj.weight", 0, 8), GroupQuantised)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_quantised(tmp_path_factory.mktemp("int4"), "qwen3", *CASES["qwen3"])


def answered(directory: Path, **changes: object) -> GenerationResult:
    config = EngineConfig(model=str(directory), kv_cache="24MiB", **changes)
    with LocalEngine(config) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
        return engine.generate([IDS.tolist()], greedy)[0]


def test_an_engine_serves_it_expanded(int4: tuple[Path, Path]) -> None:
    found, expected = (answered(directory, dtype="float32") for directory in int4)
    assert found.token_ids == expected.token_ids


def test_an_engine_computes_from_codes_of_4_bits(int4: tuple[Path, Path]) -> None:
    """Of the layers' weights nothing is lost; activations are rounded, at most to bfloat16."""
    found = answered(int4[0], dtype="bfloat16", kv_dtype="float32", weights_dtype="int4")
    expected = answered(int4[1], dtype="float32")
    assert found.token_ids == expected.token_ids
    np.testing.assert_allclose(chosen(found), chosen(expected), atol=0.05, rtol=0)


def chosen(result: GenerationResult) -> list[float]:
    """Log-probabilities of the tokens of an answer."""
    return [entry.chosen for entry in result.logprobs]


def test_int4_needs_a_checkpoint_that_has_it(int4: tuple[Path, Path]) -> None:
    config = EngineConfig(model=str(int4[1]), weights_dtype="int4")
    with pytest.raises(ConfigError, match=r"own codes of 4 bits, and .*expanded has none"):
        read_model_card(config, int4[1])


def test_fp8_needs_a_checkpoint_that_has_it(int4: tuple[Path, Path]) -> None:
    config = EngineConfig(model=str(int4[0]), device="cuda", weights_dtype="fp8")
    with pytest.raises(ConfigError, match=r"fp8 computes from .* own FP8 matrices, .* quantised by fp8 or compress"):
        read_model_card(config, int4[0])
