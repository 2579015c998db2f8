"""Weights are read in parts, from one file or many, in every common type, or a clear error names the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

DRAW = np.random.default_rng(3)
UP = DRAW.standard_normal((6, 4), np.float32)
NORM = DRAW.standard_normal(4, np.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def single(directory: Path) -> Path:
    save_file({"up": UP, "norm": NORM}, directory / "model.safetensors")
    return directory


@pytest.fixture
def sharded(directory: Path) -> Path:
    save_file({"up": UP}, directory / "model-1.safetensors")
    save_file({"norm": NORM}, directory / "model-2.safetensors")
    weight_map = {"up": "model-1.safetensors", "norm": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_raw(path: Path, dtype: str, shape: Any, data: bytes, offsets: Any = ...) -> None:
    offsets = [0, len(data)] if offsets is ... else offsets
    header = json.dumps({"up": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_tensors_rows_and_columns_are_read_from_one_file_or_shards(kind: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    assert sorted(checkpoint.names) == ["norm", "up"]
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.shape("up") == (6, 4)
    assert "up" in checkpoint
    assert "down" not in checkpoint
    np.testing.assert_array_equal(checkpoint.tensor("up"), UP)
    np.testing.assert_array_equal(checkpoint.tensor("norm"), NORM)
    np.testing.assert_array_equal(checkpoint.rows("up", 2, 5), UP[2:5])
    np.testing.assert_array_equal(checkpoint.rows("norm", 1, 3), NORM[1:3])
    np.testing.assert_array_equal(checkpoint.columns("up", 1, 3), UP[:, 1:3])


def test_float32_is_a_read_only_view_of_the_file(single: Path) -> None:
    rows = Checkpoint(single).rows("up", 0, 2)
    assert not rows.flags.writeable
    assert not rows.flags.owndata


def test_bfloat16_is_widened_exactly(directory: Path) -> None:
    bits = (UP.view(np.uint32) >> 16).astype("<u2")
    write_raw(directory / "model.safetensors", "BF16", [6, 4], bits.tobytes())
    expected = (UP.view(np.uint32) & 0xFFFF0000).view(np.float32)
    checkpoint = Checkpoint(directory)
    np.testing.assert_array_equal(checkpoint.tensor("up"), expected)
    np.testing.assert_array_equal(checkpoint.rows("up", 3, 6), expected[3:6])
    np.testing.assert_array_equal(checkpoint.columns("up", 1, 2), expected[:, 1:2])
    assert checkpoint.tensor("up").dtype == np.float32


@pytest.mark.parametrize(("name", "stored"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_a_dtype_that_is_kept_is_a_view_of_the_file(directory: Path, name: str, stored: str) -> None:
    kept = numpy_dtype(name)
    write_raw(directory / "model.safetensors", stored, [6, 4], UP.astype(kept).tobytes())
    checkpoint = Checkpoint(directory, keeps=kept)
    rows, columns = checkpoint.kept_rows("up", 3, 6), checkpoint.kept_columns("up", 1, 2)
    for part, expected in ((rows, UP[3:6]), (columns, UP[:, 1:2])):
        assert isinstance(part, np.ndarray)
        assert part.dtype == kept
        assert not part.flags.owndata
        np.testing.assert_array_equal(part, expected.astype(kept))
    assert Checkpoint(directory).kept_rows("up", 3, 6) is None
    with pytest.raises(ModelError, match="no part 3:7 of axis 0"):
        checkpoint.kept_rows("up", 3, 7)


def test_what_is_stored_in_another_dtype_is_not_kept(single: Path) -> None:
    assert Checkpoint(single, keeps=numpy_dtype("bfloat16")).kept_rows("up", 0, 2) is None


def test_float16_is_widened(directory: Path) -> None:
    save_file({"up": UP.astype(np.float16)}, directory / "model.safetensors")
    found = Checkpoint(directory).tensor("up")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, UP.astype(np.float16).astype(np.float32))


def test_what_is_written_reads_back_here_and_by_the_safetensors_library(directory: Path) -> None:
    from safetensors.numpy import load_file

    path = directory / "model.safetensors"
    forms = {"up": TensorForm("F32", (6, 4)), "norm": TensorForm("F32", (4,))}
    write_safetensors(path, forms, iter([UP, NORM]))
    np.testing.assert_array_equal(Checkpoint(directory).tensor("norm"), NORM)
    np.testing.assert_array_equal(load_file(path)["up"], UP)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks config\.json"):
        Checkpoint(tmp_path)


def test_a_config_that_is_not_json_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        Checkpoint(directory)


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        _ = Checkpoint(directory).names


def test_a_missing_tensor_is_named_with_its_nearest(single: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks the tensor 'norn'; the nearest it has is 'norm'"):
        Checkpoint(single).tensor("norn")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks the shard 'model-2\.safetensors'.*fetch the model again"):
        Checkpoint(sharded).tensor("up")


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    save_file({"other": NORM}, sharded / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"model-2\.safetensors lacks the tensor 'norm'"):
        Checkpoint(sharded).tensor("norm")


def test_an_index_cannot_lead_out_of_the_directory(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"up": "../model-1.safetensors"}}')
    (sharded.parent / "model-1.safetensors").touch()
    with pytest.raises(ModelError, match="lacks the shard"):
        Checkpoint(sharded).tensor("up")


def test_a_file_cut_anywhere_is_refused(single: Path) -> None:
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            Checkpoint(single).tensor("up")


@pytest.mark.parametrize("shape", [[6, 5], [3], [-6, -4], [6.0, 4], ["6", 4], [2**70, 0], "64", None])
def test_a_shape_that_does_not_fit_its_bytes_is_refused(directory: Path, shape: Any) -> None:
    write_raw(directory / "model.safetensors", "F32", shape, UP.tobytes())
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt: .*fetch the model again"):
        Checkpoint(directory).tensor("up")


@pytest.mark.parametrize("offsets", [[-96, 0], [96, 0], [8, 104], [0, 1 << 40], ["0", 96], [0, None], [0], None])
def test_a_tensor_outside_the_data_is_refused(directory: Path, offsets: Any) -> None:
    write_raw(directory / "model.safetensors", "F32", [6, 4], UP.tobytes(), offsets)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt: .*fetch the model again"):
        Checkpoint(directory).tensor("up")


def test_tensors_lie_where_the_header_says_whatever_its_order(directory: Path) -> None:
    header = {
        "late": {"dtype": "F32", "shape": [2], "data_offsets": [14, 22]},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [14, 14]},
        "half": {"dtype": "F16", "shape": [3], "data_offsets": [8, 14]},
        "early": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }
    text = json.dumps(header).encode()
    data = NORM[:2].tobytes() + NORM[:3].astype("<f2").tobytes() + NORM[2:].tobytes()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    checkpoint = Checkpoint(directory)
    np.testing.assert_array_equal(checkpoint.tensor("early"), NORM[:2, None])
    np.testing.assert_array_equal(checkpoint.tensor("half"), NORM[:3].astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(checkpoint.tensor("late"), NORM[2:])
    assert checkpoint.tensor("empty").shape == (0, 3)


def test_quantised_safetensors_are_refused(directory: Path) -> None:
    write_raw(directory / "model.safetensors", "F8_E4M3", [4], b"1234")
    with pytest.raises(ModelError, match=r"stored as F8_E4M3; F32, F16, BF16, I32, I64, U8 can be read"):
        Checkpoint(directory).tensor("up")


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (4, 2)])
def test_parts_outside_a_tensor_are_refused(single: Path, start: int, stop: int) -> None:
    with pytest.raises(ModelError, match=r"shape \(6, 4\): no part"):
        Checkpoint(single).rows("up", start, stop)


def test_columns_of_a_vector_are_refused(single: Path) -> None:
    with pytest.raises(ModelError, match="axis 1"):
        Checkpoint(single).columns("norm", 0, 1)
