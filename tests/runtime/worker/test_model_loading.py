"""What a worker loads a second time comes from disk, wherever it is the same, and gives the same bits."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.eagle_checkpoints import head_config, head_weights, write_head
from support.engine.dense_oracle import DenseAttention
from support.engine.loaded_model import serve
from support.packed_logits import IDS, KEEP_ALL, load
from support.random_models import CONFIGS, random_weights
from support.reference import answers
from support.tiny_checkpoints import checkpoint
from support.tiny_ggufs import TINY_GGUFS, write_tiny_gguf
from support.tiny_models import llama_tensors, write_llama_gguf

import headwise
from headwise.errors import ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.loader.checkpoint import SINGLE, Checkpoint
from headwise.runtime.loader.packed_cache import DIRECTORY
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.base import PackingOps
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.model_loading import load_model, packed_key
from headwise.runtime.worker.worker import ModelWorker
from headwise.runtime.worker.worker_parts import WorkerParts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of a random model in bfloat16, as most are published."""
    config = {**CONFIGS["llama_biased_tied"], "intermediate_size": 64}
    directory, weights = tmp_path / "model", random_weights(model_config(config))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    bits = {name: (weights.tensor(name).view(np.uint32) >> 16).astype(np.uint16) for name in weights.names}
    forms = {name: TensorForm("BF16", array.shape) for name, array in bits.items()}
    write_safetensors(directory / SINGLE, forms, bits.values())
    return directory


@pytest.fixture
def quantised_model(tmp_path: Path) -> Path:
    """A GGUF file whose matrices are of several types."""
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0")]
    matrices = [name for name, values in llama_tensors().items() if values.ndim == 2]
    quantised = {name: kinds[at % len(kinds)] for at, name in enumerate(matrices)}
    return write_llama_gguf(tmp_path / "model.gguf", quantized=quantised)


def config_of(tmp_path: Path, model: Path, **changes: object) -> EngineConfig:
    given: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_cache": "16MiB", **changes}
    return EngineConfig(model=str(model), cache_dir=str(tmp_path / "cache"), **given)


def kept(config: EngineConfig) -> list[Path]:
    directory = config.cache_path / DIRECTORY
    return sorted(directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_a_model_comes_from_disk_the_second_time(
    tmp_path: Path, model: Path, weights_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, model, weights_dtype=weights_dtype)
    with caplog.at_level(logging.INFO):
        first, again = load(config), load(config)
    assert "came from" in caplog.text
    (path,) = kept(config)
    assert str(path) not in Path("/proc/self/maps").read_text(), "it is let go of with the model"
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(
        first, load(config_of(tmp_path, model, weights_dtype=weights_dtype, packed_cache=False))
    )


def drafted(config: EngineConfig) -> np.ndarray:
    """What the model's head makes of some tokens, of a model that is loaded as a worker does."""
    directory = Path(config.model)
    card = read_model_card(config, directory)
    shard, ops = Shard.of(card.config, card.plan, 0), make_ops("numba", 1, config.dtype_name, config.weights_dtype_name)
    model = load_model(card, config, directory, ops, SingleRank(), shard, KEEP_ALL)
    attention, positions = DenseAttention(model.config, shard, ops), np.arange(len(IDS), dtype=np.int32)
    given = model.for_drafts(model.forward(IDS, positions, attention))
    return np.array(ops.numpy(model.draft(IDS, positions, given, attention)))


def test_a_head_that_drafts_comes_from_disk_with_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = write_head(tmp_path / "head", head_config("qwen3"), head_weights("qwen3"))
    given: dict[str, Any] = {"draft_model": str(head), "speculation": 2, "max_model_len": 1024}
    config = config_of(tmp_path, checkpoint("qwen3"), **given)
    with caplog.at_level(logging.INFO):
        first, again = drafted(config), drafted(config)
    assert "came from" in caplog.text
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, drafted(replace(config, packed_cache=False)))
    write_head(head, head_config("qwen3"), {**head_weights("qwen3"), "fc.weight": -head_weights("qwen3")["fc.weight"]})
    assert not np.array_equal(first, drafted(config))
    assert len(kept(config)) == 2


def test_a_head_that_changes_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", head_config("qwen3"), head_weights("qwen3"))
    given: dict[str, Any] = {"draft_model": str(head), "speculation": 2, "max_model_len": 1024}
    config = config_of(tmp_path, model := checkpoint("qwen3"), **given)
    card, ops = read_model_card(config, model), make_ops("numba", 1, "bfloat16", "bfloat16")
    write_head(head, {**head_config("qwen3"), "norm_before_residual": False}, head_weights("qwen3"))
    with pytest.raises(ModelError, match=r"the draft model in .* is no longer the one"):
        load_model(card, config, model, ops, SingleRank(), Shard.of(card.config, card.plan, 0), KEEP_ALL)


OTHER_CODE = """
_in_order = DecoderWeights._rows
DecoderWeights._rows = lambda self, where: np.ascontiguousarray(_in_order(self, where)[::-1])
"""
"""At the end of `decoder_weights`: code that puts the same rows under the same names, in another order."""
LOADS_TWICE = """
import pickle, sys
from dataclasses import replace
from support.packed_logits import load
import headwise
config = pickle.loads(sys.stdin.buffer.read())
found = headwise.__file__, load(config), load(replace(config, packed_cache=False))
sys.stdout.buffer.write(pickle.dumps(found))
"""


def test_what_other_code_has_kept_of_the_same_files_is_not_taken(tmp_path: Path, model: Path) -> None:
    config, own = config_of(tmp_path, model), Path(headwise.__file__).parent
    first, (path,) = load(config), kept(config)
    changed = tmp_path / "other" / "headwise"
    shutil.copytree(own, changed, ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "runtime" / "models" / "decoder_weights.py").open("a") as file:
        file.write(OTHER_CODE)
    sources = os.pathsep.join(map(str, (changed.parent, Path(__file__).parents[2])))
    how: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": sources}, "cwd": changed.parent, "timeout": 300}
    done = subprocess.run(
        [sys.executable, "-c", LOADS_TWICE], input=pickle.dumps(config), capture_output=True, check=False, **how
    )
    assert not done.returncode, done.stderr.decode()
    where, found, right = pickle.loads(done.stdout)
    assert where == str(changed / "__init__.py")
    assert not np.array_equal(right, first), "it does order rows otherwise"
    np.testing.assert_array_equal(found, right)
    assert kept(config) == [path], "in the place of those before"
    np.testing.assert_array_equal(load(config), first)


def test_a_gguf_file_comes_from_disk_the_second_time(
    tmp_path: Path, quantised_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits = {}
    for weights_dtype in ("gguf", "int8", "bfloat16"):
        config = config_of(tmp_path, quantised_model, weights_dtype=weights_dtype)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            logits[weights_dtype], again = load(config), load(config)
        assert "came from" in caplog.text
        np.testing.assert_array_equal(logits[weights_dtype], again)
    assert len(kept(config)) == 3
    assert not np.array_equal(logits["gguf"], logits["int8"])


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss-mxfp4"])
def test_experts_of_a_gguf_file_are_computed_from_as_they_are(tmp_path: Path, name: str) -> None:
    def choose(_: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        kinds = gguf.GGMLQuantizationType
        return kinds.F32 if values.shape[-1] % 32 or values.shape[-2] < 16 else kinds.Q8_0

    path = write_tiny_gguf(tmp_path / "moe.gguf", TINY_GGUFS[name], choose)
    blocks = config_of(tmp_path, path, dtype="float32", weights_dtype="gguf")
    first, again = load(blocks), load(blocks)
    np.testing.assert_array_equal(first, again)
    expanded = load(config_of(tmp_path, path, dtype="float32", weights_dtype="float32"))
    # Codes are the same; activations are rounded to 8 bits, and where experts are about as likely others are chosen.
    alike = [np.corrcoef(ours, theirs)[0, 1] for ours, theirs in zip(first, expanded, strict=True)]
    assert np.median(alike) > 0.999


def test_nothing_is_kept_or_used_where_it_is_off(tmp_path: Path, model: Path) -> None:
    off = config_of(tmp_path, model, packed_cache=False)
    first = load(off)
    assert kept(off) == []
    load(config_of(tmp_path, model))
    (path,) = kept(off)
    path.write_bytes(b"")
    np.testing.assert_array_equal(load(off), first)
    assert path.read_bytes() == b"", "nobody looked"


def test_operations_that_do_not_pack_keep_nothing(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, dtype="float32", tensor_ops="numpy")
    card = read_model_card(config, model)
    load_model(card, config, model, make_ops("numpy"), SingleRank(), Shard.of(card.config, card.plan, 0), KEEP_ALL)
    assert kept(config) == []


def test_a_model_that_changes_while_it_is_loaded_is_not_kept(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model)
    card, ops = read_model_card(config, model), make_ops("numba", 1, "bfloat16", "bfloat16")
    with (model / SINGLE).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    with pytest.raises(ModelError, match="is no longer the one"):
        load_model(card, config, model, ops, SingleRank(), Shard.of(card.config, card.plan, 0), KEEP_ALL)
    assert kept(config) == []


def test_whatever_decides_the_bytes_is_in_the_key(tmp_path: Path, model: Path, quantised_model: Path) -> None:
    """And so two cards, dtypes or ranks never share a file, nor two dealings of heads to ranks."""
    (tmp_path / "pattern.tsv").write_text("1\t1\t0\t0\n" * 3)
    pattern = {"head_pattern": str(tmp_path / "pattern.tsv"), "sink": 64, "window": 64}
    changes: list[dict[str, Any]] = [
        {},
        {"dtype": "float32"},
        {"weights_dtype": "int8"},
        {"weights_dtype": "float32"},
        {"tp_size": 2},
        {"tp_size": 2, **pattern},
    ]
    names = [_file_name(config_of(tmp_path, model, **change)) for change in changes]
    names += [_file_name(config_of(tmp_path, model, tp_size=2), rank=1)]
    names += [_file_name(config_of(tmp_path, model, tp_size=8), part=part) for part in (0, 1)]
    blocks = config_of(tmp_path, quantised_model, weights_dtype="gguf")
    names += [_file_name(blocks), _file_name(replace(blocks, weights_dtype="bfloat16"))]
    names += [_file_name(blocks, weights="others"), _file_name(blocks, blocks="others")]
    assert len(set(names)) == len(names)


def _file_name(config: EngineConfig, rank: int = 0, part: int | None = None, **changes: Any) -> str:
    """part: of the query heads of its KV heads, which as many ranks keep; None: the one that it is dealt"""
    directory = resolve_model(config.model, config.cache_path, weights=False)
    card = replace(read_model_card(config, directory), **changes)
    ops = make_ops("numba", 1, config.dtype_name, config.weights_dtype_name)
    assert isinstance(ops, PackingOps)
    shard = Shard.of(card.config, card.plan, rank)
    if part is not None:
        shard = replace(shard, sharing=tuple(sharing._replace(part=part) for sharing in shard.sharing))
    return packed_key(card, config, ops, shard).file_name


@pytest.mark.soak
@pytest.mark.parametrize("weights_dtype", ["bfloat16", "gguf"])
def test_a_real_model_says_the_same_with_weights_from_disk(
    tmp_path: Path, weights_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = resolve_model("smollm2-135m", EngineConfig().cache_path)
    config = config_of(tmp_path, directory, weights_dtype=weights_dtype, max_model_len=256)
    anew = _answers(config, load_model)
    keeping = partial(load_model, limits=KEEP_ALL)
    assert _answers(config, keeping) == anew
    assert len(kept(config)) == 1
    monkeypatch.setattr(Checkpoint, "columns", pytest.fail)  # every model has an output projection
    monkeypatch.setattr(Checkpoint, "kept_columns", pytest.fail)
    assert _answers(config, keeping) == anew


def _answers(config: EngineConfig, load: Callable[..., Any]) -> dict[str, list[int]]:
    """Greedy tokens, and nothing of the models that computed them."""
    worker = ModelWorker(config, Path(config.model), 0, SingleRank(), parts=WorkerParts(load_model=load))
    worker.initialize_cache()
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(worker)
    try:
        core = EngineCore(config, worker.card, preprocessor.tokenizer, executor)
        wanted = [answer.first(16) for answer in answers("smollm2-135m") if len(answer.prompt_ids) < 128][:3]
        results = serve(core, preprocessor, wanted)
        return {name: list(result.token_ids) for name, result in results.items()}
    finally:
        executor.close()
