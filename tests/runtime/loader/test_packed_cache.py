"""Packed weights from disk are those that would be made anew, to the bit; what cannot be used or written is not."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DenseAttention, DictWeights, ThreadComm
from support.random_ernie import DENSE, MOE, draw_weights
from support.random_models import CONFIGS, random_weights

from headwise.cache_controller.planner import plan_head_groups
from headwise.runtime.loader.files import LockedFile
from headwise.runtime.loader.packed_cache import Limits, PackedKey, PackedWeights
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.loader.safetensors_file import write_safetensors
from headwise.runtime.models.base import Model
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import Prepare, Weights, make_anew
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.ops.numba_ops import NumbaOps
from headwise.runtime.ops.select import make_ops

MODELS = {**CONFIGS, "ernie": DENSE, "ernie with experts": {**MOE, "moe_intermediate_size": 64}}
RECIPE = "as this code makes them"
KEY = PackedKey("a model", {"dtype": "any"}, 0, 1, RECIPE)
KEEP_ALL = Limits(least_s=0.0, spare_bytes=0)
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
SMALL = ("norm.weight", "bias", "mlp.gate.weight")
"""What is read from the source at every start."""


class SmallOnly(DictWeights):
    """A source whose matrices nobody may read."""

    def tensor(self, name: str) -> np.ndarray:
        assert name.endswith(SMALL), name
        return super().tensor(name)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        assert name.endswith(SMALL), name
        return super().rows(name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> np.ndarray:
        raise AssertionError(name)

    def kept_rows(self, name: str, start: int, stop: int) -> None:
        raise AssertionError(name)

    def kept_columns(self, name: str, start: int, stop: int) -> None:
        raise AssertionError(name)


def config_of(name: str) -> dict:
    return {**MODELS[name], "intermediate_size": 64}  # whole groups of int8, on two ranks too


def weights_of(name: str) -> DictWeights:
    config = config_of(name)
    return DictWeights(draw_weights(config)) if "ernie" in name else random_weights(model_config(config))


def only_small(name: str) -> SmallOnly:
    weights = weights_of(name)
    return SmallOnly({each: weights.tensor(each) for each in weights.names})


def ops_in(weights_dtype: str = "float32") -> NumbaOps:
    ops = make_ops("numba", 1, "float32" if weights_dtype == "float32" else "bfloat16", weights_dtype)
    assert isinstance(ops, NumbaOps)
    return ops


def packed_in(
    directory: Path, ops: NumbaOps | None = None, key: PackedKey = KEY, limits: Limits = KEEP_ALL, **more: Any
) -> PackedWeights:
    return PackedWeights(directory, key, ops or ops_in(), lambda: 1000, limits, **more)


def build(
    name: str, weights: Weights, ops: NumbaOps, prepare: Prepare, comm: Communicator | None = None
) -> tuple[Model, Shard]:
    config, comm = model_config(config_of(name)), comm or SingleRank()
    shard = Shard.of(config, plan_head_groups(config.policies, comm.size), comm.rank)
    return build_model(config, weights, ops, comm, shard, prepare), shard


def logits(model: Model, ops: NumbaOps, shard: Shard) -> np.ndarray | None:
    attention = DenseAttention(model.config, shard, ops)
    return model.logits(model.forward(IDS, np.arange(len(IDS), dtype=np.int32), attention))


def start(directory: Path, name: str, weights_dtype: str, weights: Weights, comm: Communicator | None = None):
    """What a start computes with weights of ``directory``, or keeps them there."""
    ops = ops_in(weights_dtype)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    packed = packed_in(directory, ops, PackedKey("a model", {"dtype": weights_dtype}, rank, size, RECIPE))
    model, shard = build(name, weights, ops, packed.prepare, comm)
    packed.keep()
    return logits(model, ops, shard)


def entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


# ---- the bits ----


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_start_reads_no_matrix_and_computes_the_same_bits(
    tmp_path: Path, name: str, weights_dtype: str
) -> None:
    ops = ops_in(weights_dtype)
    model, shard = build(name, weights_of(name), ops, make_anew)
    expected = logits(model, ops, shard)
    np.testing.assert_array_equal(start(tmp_path, name, weights_dtype, weights_of(name)), expected)
    np.testing.assert_array_equal(start(tmp_path, name, weights_dtype, only_small(name)), expected)


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3", "ernie with experts"])
def test_every_rank_has_a_file_of_its_own(tmp_path: Path, name: str, weights_dtype: str) -> None:
    def ranks(source: Callable[[str], Weights]) -> np.ndarray | None:
        shared, barrier, results = [None] * 2, threading.Barrier(2), {}

        def rank_main(rank: int) -> None:
            comm = ThreadComm(rank, 2, shared, barrier)
            results[rank] = start(tmp_path, name, weights_dtype, source(name), comm)

        _run_all([lambda rank=rank: rank_main(rank) for rank in range(2)])
        return results[0]

    first = ranks(weights_of)
    assert first is not None
    assert [path.name[-11:] for path in entries(tmp_path)] == ["0of2.packed", "1of2.packed"]
    np.testing.assert_array_equal(ranks(only_small), first)


def _run_all(works: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_weights_of_another_key_are_not_used(tmp_path: Path) -> None:
    start(tmp_path, "llama", "bfloat16", weights_of("llama"))
    with pytest.raises(AssertionError, match="embed_tokens"):
        start(tmp_path, "llama", "int8", only_small("llama"))
    other = [PackedKey("another", {"dtype": "any"}, 0, 1, RECIPE), PackedKey("a model", {"dtype": "any"}, 0, 2, RECIPE)]
    other += [
        PackedKey("a model", {"dtype": "any", "more": 1}, 0, 1, RECIPE),
        PackedKey("a model", {"dtype": "any"}, 1, 2, RECIPE),
    ]
    assert len({key.file_name for key in [KEY, *other]}) == len({key.text for key in [KEY, *other]}) == 5


# ---- files that cannot be used ----


def made(directory: Path, **more: object) -> list[str]:
    """The names of the weights that a start of two weights makes anew, in ``directory``."""
    packed, names = packed_in(directory, **more), []

    def make(name: str) -> object:
        names.append(name)
        return ops_in().linear_weight(np.full((70, 16), len(name), np.float32))

    for name in ("one", "three"):
        weight = packed.prepare(name, lambda name=name: make(name))
        values = ops_in().numpy(ops_in().embedding(weight, np.arange(70, dtype=np.int32)))
        np.testing.assert_array_equal(values, len(name))
    packed.keep()
    return names


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _longer(data: bytes) -> bytes:
    return data + b"\0"


def _flipped(at: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        place = at(len(data))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "a byte short": _cut,
    "half": lambda data: data[: len(data) // 2],
    "longer": _longer,
    "another file": lambda data: b"\x89PNG" * 100,
    "zeros in an array": lambda data: data[:-4096] + bytes(4096),
    "a bit of the first weight": _flipped(lambda size: size - 2 * 128 * 16 * 4),
    "the last bit": _flipped(lambda size: size - 1),
    "facts": lambda data: data.replace(b'\\"outputs\\": 70', b'\\"outputs\\": 71', 1),
    "checks": lambda data: data.replace(b'\\"checks\\": {\\"o', b'\\"checks\\": {\\"p', 1),
    "shapes": lambda data: data.replace(b"[2,16,64]", b"[16,2,64]", 1),
    "names": lambda data: data.replace(b'"one.packed":{', b'"two.packed":{', 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_of_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    assert made(tmp_path) == ["one", "three"]
    (path,) = entries(tmp_path)
    data = path.read_bytes()
    path.unlink()  # others may have it mapped
    path.write_bytes(DAMAGES[damage](data))
    assert path.read_bytes() != data
    caplog.clear()
    assert made(tmp_path) == ["one", "three"]
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.message.startswith(f"packed weights are made anew: {path} cannot be used, and is deleted: ")
    assert path.read_bytes() == data
    assert made(tmp_path) == []


def test_a_file_with_the_name_of_another_key_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path)
    other = PackedKey("another", {}, 0, 1, RECIPE)
    (path,) = entries(tmp_path)
    path.rename(tmp_path / other.file_name)
    assert made(tmp_path, key=other) == ["one", "three"]
    assert "it is of another model, or of other settings" in caplog.text


def test_a_file_that_lacks_a_weight_is_written_again(tmp_path: Path) -> None:
    packed = packed_in(tmp_path)
    packed.prepare("one", lambda: ops_in().linear_weight(np.full((70, 16), 3, np.float32)))
    packed.keep()
    (path,) = entries(tmp_path)
    both = Limits(0.0, most_bytes=2 * path.stat().st_size, spare_bytes=0)  # not three times as much: it is replaced
    assert made(tmp_path, limits=both) == ["three"]
    assert made(tmp_path) == []


def test_weights_that_other_code_made_are_made_anew_in_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(KEY, recipe="as code makes them that orders rows otherwise")
    made(tmp_path)
    with caplog.at_level(logging.INFO):
        assert made(tmp_path, key=other) == ["one", "three"]
    assert f"made anew: those in {tmp_path / KEY.file_name} were made by another version" in caplog.text
    assert entries(tmp_path) == [tmp_path / KEY.file_name]
    assert made(tmp_path, key=other) == []
    assert made(tmp_path) == ["one", "three"], "as older code finds those of newer"


def test_a_file_that_does_not_say_what_code_made_it_is_made_anew(tmp_path: Path) -> None:
    contents = json.dumps({"key": KEY.text, "weights": {}, "checks": {}})
    told = {"contents": contents, "digest": sha256(contents.encode()).hexdigest()}
    write_safetensors(tmp_path / KEY.file_name, {}, [], told)
    assert made(tmp_path) == ["one", "three"]
    assert made(tmp_path) == []


def test_mapped_weights_cannot_be_written_to(tmp_path: Path) -> None:
    made(tmp_path)
    weight = packed_in(tmp_path).prepare("one", pytest.fail)
    with pytest.raises(ValueError, match="read-only"):
        weight.packed[:] = 0


# ---- what is kept ----


@pytest.mark.parametrize(("step_s", "is_kept"), [(0.9, False), (1.0, True)])
def test_weights_are_kept_from_the_time_on_that_making_them_may_take(
    tmp_path: Path, step_s: float, is_kept: bool
) -> None:
    seconds = count()
    made(tmp_path / "packed", limits=Limits(2.0, spare_bytes=0), clock=lambda: step_s * next(seconds))
    assert bool(entries(tmp_path / "packed")) == is_kept


def test_a_disk_that_would_not_keep_its_margin_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made(tmp_path, limits=Limits(0.0, spare_bytes=1 << 60))
    (record,) = [record for record in caplog.records if "packed weights" in record.message]
    assert "are not kept on disk" in record.message
    assert "1.049e+06 TiB are to stay so" in record.message
    assert entries(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert made(tmp_path / "file" / "packed") == ["one", "three"]
    (warning,) = [record for record in caplog.records if "are not kept in" in record.message]
    assert "Not a directory" in warning.message


def test_the_oldest_of_the_same_model_go_beyond_the_limit_and_nothing_else(tmp_path: Path) -> None:
    keys = {at: PackedKey("a model", {"at": at}, 0, 1, RECIPE) for at in ("used", "old", "new")}
    neighbours = {
        "another model": PackedKey("another", {}, 0, 1, RECIPE),
        "another rank": PackedKey("a model", {"at": "latest"}, 1, 2, RECIPE),
    }
    for key in [*keys.values(), *neighbours.values()]:
        made(tmp_path, key=key)
    paths = {at: tmp_path / key.file_name for at, key in {**keys, **neighbours}.items()}
    size = paths["used"].stat().st_size
    foreign = tmp_path / "notes.packed"
    foreign.write_bytes(bytes(10 * size))
    for age, path in enumerate([*neighbours, "used", "old", "new"]):
        os.utime(paths[path], (age, age))
    made(tmp_path, key=keys["used"])  # which makes it the newest
    latest = PackedKey("a model", {"at": "latest"}, 0, 2, RECIPE)
    made(tmp_path, key=latest, limits=Limits(0.0, most_bytes=4 * size + size // 2, spare_bytes=0))
    kept = {*(paths[at] for at in ("used", *neighbours)), foreign, tmp_path / latest.file_name}
    assert set(entries(tmp_path)) == kept
    last = PackedKey("a third", {}, 0, 1, RECIPE)
    made(tmp_path, key=last, limits=Limits(0.0, most_bytes=4 * size, spare_bytes=0))
    assert set(entries(tmp_path)) == kept, "nothing of other models goes"


# ---- several at once ----


def test_two_that_start_at_once_both_have_their_weights_and_leave_one_whole_file(tmp_path: Path) -> None:
    barrier, results = threading.Barrier(2), []

    def begin() -> None:
        barrier.wait(20)
        results.append(start(tmp_path, "llama", "bfloat16", weights_of("llama")))

    _run_all([begin, begin])
    assert len(entries(tmp_path)) == 1
    results.append(start(tmp_path, "llama", "bfloat16", only_small("llama")))
    assert len(results) == 3
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_what_another_writes_is_left_to_it_until_it_is_dead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    partial = tmp_path / f"{KEY.file_name}.0.partial"
    writer = LockedFile(partial)
    assert writer.acquire()
    with caplog.at_level(logging.INFO):
        made(tmp_path)
    assert entries(tmp_path) == [partial]
    assert "by another process" in caplog.text
    writer.close()
    made(tmp_path)
    assert entries(tmp_path) == [tmp_path / KEY.file_name]


# ---- what is said ----


class Said(SilentProgress):
    def __init__(self) -> None:
        self.stages: dict[str, list[tuple[int, int]]] = {}

    def stage(self, text: str) -> None:
        self.stages[text] = self.now = []

    def update(self, done: int, total: int) -> None:
        self.now.append((done, total))


def test_progress_is_told_of_what_is_packed_and_of_what_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, again = Said(), Said()
    with caplog.at_level(logging.INFO):
        made(tmp_path, progress=said)
        made(tmp_path, progress=again)
    assert list(said.stages) == ["reading packed weights", "packing the weights", "keeping the packed weights on disk"]
    assert said.stages["packing the weights"] == [(1000, 1000), (1000, 1000)]
    assert list(again.stages) == ["reading packed weights"]
    assert len(again.stages["reading packed weights"]) == 2
    first, second = [record.message for record in caplog.records]
    assert "were made in" in first
    assert f"came from {tmp_path / KEY.file_name} in" in second
