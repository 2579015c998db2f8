"""Matrices that other programs quantised are read as those programs expand them, whole or in parts."""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.e4m3 import E4M3
from headwise.runtime.loader.bitsandbytes_matrix import TableMatrix
from headwise.runtime.loader.quantisation import scheme_of, without_scheme
from headwise.runtime.loader.quantised_checkpoint import QuantisedCheckpoint, open_weights
from headwise.runtime.ops.numba_ops import NumbaOps
from headwise.runtime.ops.quantised import GroupQuantised

REFERENCES = json.loads((Path(__file__).parents[2] / "references" / "quantised.json").read_text())
NAME = "layer.weight"
FP4, MXFP4 = "fp4 beside fp8", "compressed mxfp4"
TABLES = [name for name in REFERENCES if name.startswith(("bitsandbytes nf4", "bitsandbytes fp4"))]
INTEGERS = [name for name in REFERENCES if "fp8" not in name and name not in (MXFP4, *TABLES)]


def write(directory: Path, tensors: dict[str, dict[str, Any]], config: dict[str, Any]) -> Path:
    """A model directory with these tensors, as `REFERENCES` has them."""
    header, data = {}, b""
    for name, entry in tensors.items():
        raw = b64decode(entry["data"])
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def opened(
    directory: Path, case: str, keeps_codes: bool = False, keeps_fp8: bool = False, **changes: dict[str, Any]
) -> QuantisedCheckpoint:
    known = REFERENCES[case]
    config = {"quantization_config": known["quantization_config"]}
    path = write(directory, {**known["tensors"], **changes}, config)
    weights = open_weights(path, keeps_codes=keeps_codes, keeps_fp8=keeps_fp8)
    assert isinstance(weights, QuantisedCheckpoint)
    return weights


def expected(case: str) -> NDArray[np.float32]:
    entry = REFERENCES[case]["expected"]
    return np.frombuffer(b64decode(entry["data"]), np.float32).reshape(entry["shape"])


@pytest.mark.parametrize("case", REFERENCES)
def test_a_matrix_is_what_the_program_that_stored_it_expands_it_to(case: str, tmp_path: Path) -> None:
    weights, matrix = opened(tmp_path, case), expected(case)
    assert weights.names == (NAME,)
    assert weights.shape(NAME) == matrix.shape
    assert weights.num_elements == matrix.size
    np.testing.assert_array_equal(weights.tensor(NAME), matrix)
    for start, stop in ((0, 24), (3, 19), (16, 24), (5, 5)):
        np.testing.assert_array_equal(weights.rows(NAME, start, stop), matrix[start:stop])
    for start, stop in ((0, 64), (16, 48), (5, 39)):
        np.testing.assert_array_equal(weights.columns(NAME, start, stop), matrix[:, start:stop])


@pytest.mark.parametrize("case", INTEGERS)
def test_codes_are_computed_from_as_they_are(case: str, tmp_path: Path) -> None:
    weights, matrix, ops = opened(tmp_path, case, keeps_codes=True), expected(case), NumbaOps(1, "int4")
    rows, columns = weights.kept_rows(NAME, 3, 19), weights.kept_columns(NAME, 16, 48)
    if case == "gptq by importance":
        assert rows is None, "groups are not of neighbours"
        return
    assert rows is not None
    assert columns is not None
    assert (rows.bits == 4) == ("int4" in case or case in ("awq", "gptq symmetric"))
    np.testing.assert_allclose(rows.dequantised(), matrix[3:19], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(columns.dequantised(), matrix[:, 16:48], rtol=1e-6, atol=1e-6)
    if rows.shape[1] // rows.group > 1:
        assert weights.kept_columns(NAME, 8, 48) is None, "which cuts through a group"
    x = np.eye(64, dtype=np.float32)
    packed = ops.linear_weight(rows)
    assert packed.dtype == f"int{rows.bits}"
    np.testing.assert_allclose(ops.linear(x, packed), matrix[3:19].T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("case", "scales"), [(FP4, "layer.scale"), (MXFP4, "layer.weight_scale")])
def test_fp4_is_computed_from_as_integers_where_packed_weights_can_hold_its_scales(
    case: str, scales: str, tmp_path: Path
) -> None:
    weights, matrix = opened(tmp_path, case, keeps_codes=True), expected(case)
    rows, columns = weights.kept_rows(NAME, 3, 19), weights.kept_columns(NAME, 32, 64)
    assert rows is not None
    assert columns is not None
    assert (rows.bits, rows.group) == (8, 32)
    np.testing.assert_array_equal(rows.dequantised(), matrix[3:19])
    np.testing.assert_array_equal(columns.dequantised(), matrix[:, 32:])
    assert weights.kept_columns(NAME, 16, 48) is None, "which cuts through a group"
    beyond = {**REFERENCES[case]["tensors"][scales], "data": b64encode(bytes([90] * 48)).decode()}
    tiny = opened(tmp_path, case, keeps_codes=True, **{scales: beyond})
    assert tiny.kept_rows(NAME, 0, 8) is None, "such powers of two are beyond float16"
    assert np.abs(tiny.tensor(NAME)).max() <= 6 * 2.0 ** (90 - 127)


def test_integers_beside_fp8_that_are_no_fp4_are_refused(tmp_path: Path) -> None:
    short = {**REFERENCES[FP4]["tensors"]["layer.scale"], "shape": [48, 1]}
    told = r"'layer\.scale' uint8 \[48, 1\]: FP4, two numbers in a byte, with a power of two"
    with pytest.raises(ModelError, match=told):
        opened(tmp_path, FP4, **{"layer.scale": short}).tensor(NAME)


@pytest.mark.parametrize("case", [name for name in REFERENCES if "fp8" in name and name != FP4])
def test_fp8_is_computed_from_as_it_is_wherever_a_part_cuts_through_tiles(case: str, tmp_path: Path) -> None:
    weights, matrix = opened(tmp_path, case, keeps_fp8=True), expected(case)
    for start, stop in ((0, 24), (3, 19)):
        rows = weights.kept_rows(NAME, start, stop)
        assert rows is not None
        assert rows.is_float
        np.testing.assert_array_equal(rows.dequantised(), matrix[start:stop])
    parts = [weights.kept_columns(NAME, *part) for part in ((0, 16), (16, 64))]
    assert parts[0] is not None
    assert parts[1] is not None
    assert parts[1].group == (16 if "block" in case else 48)
    np.testing.assert_array_equal(parts[1].dequantised(), matrix[:, 16:])
    joined = GroupQuantised.concatenate([parts[1], parts[0]], 1)
    assert joined.is_float
    np.testing.assert_array_equal(joined.dequantised(), np.concatenate([matrix[:, 16:], matrix[:, :16]], 1))


def test_codes_that_are_to_be_expanded_are(tmp_path: Path) -> None:
    assert opened(tmp_path, "awq", keeps_fp8=True).kept_rows(NAME, 0, 8) is None
    fp8 = next(name for name in REFERENCES if "fp8" in name)
    assert opened(tmp_path, fp8, keeps_codes=True).kept_rows(NAME, 0, 8) is None


@pytest.mark.parametrize("case", TABLES)
def test_numbers_of_a_table_are_expanded(case: str, tmp_path: Path) -> None:
    weights = opened(tmp_path, case, keeps_codes=True)
    assert weights.kept_rows(NAME, 0, 8) is None
    np.testing.assert_array_equal(weights.columns(NAME, 3, 8), expected(case)[:, 3:8])


def test_rows_of_a_table_may_begin_within_a_byte_and_within_a_run(tmp_path: Path) -> None:
    """Rows of 5 numbers, in runs of 4."""
    rng = np.random.default_rng(0)
    codes, table, largest = rng.integers(0, 16, 15), rng.random(16, np.float32), rng.random(4, np.float32)
    halves = np.append(codes, 0).reshape(-1, 2)
    matrix = TableMatrix((3, 5), (halves[:, 0] << 4 | halves[:, 1]).astype(np.uint8), table, largest, 4)
    expanded = (table[codes] * largest[np.arange(15) // 4]).reshape(3, 5)
    for rows in (slice(0, 3), slice(1, 2), slice(1, 3), slice(2, 2)):
        for columns in (slice(0, 5), slice(2, 4)):
            np.testing.assert_array_equal(matrix.part(rows, columns), expanded[rows, columns])


def test_fp8_has_the_numbers_of_its_definition() -> None:
    assert E4M3[0b0_1111_110] == 448
    assert E4M3[0b1_0111_000] == -1
    assert E4M3[0b0_0000_001] == 2.0**-9
    assert E4M3[0b0_0001_000] == 2.0**-6
    assert np.isnan(E4M3[[0b0_1111_111, 0b1_1111_111]]).all()
    assert np.isnan(E4M3).sum() == 2
    assert (np.diff(E4M3[:127]) > 0).all()


BAD_CONFIGS = [
    ({"quant_method": "hqq"}, "quantised by 'hqq'; fp8, compressed-tensors, modelopt, awq, gptq, bitsandbytes and"),
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "'bnb_4bit_quant_storage' .*'bfloat16'"),
    ({}, "quantised by None"),
    ("fp8", "must be an object, got 'fp8'"),
    ({"quant_method": "awq", "bits": 3}, "'bits' .*is 3"),
    ({"quant_method": "awq"}, "'bits'"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version' .*'gemv'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 0}, "'group_size' .*positive integer or -1, got 0"),
    ({"quant_method": "gptq", "bits": 2}, "'bits' .*is 2"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'checkpoint_format' .*'marlin'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt' .*'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"two positive integers, got \[128\]"),
    ({"quant_method": "compressed-tensors"}, "has no 'config_groups'"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
        },
        "format 'nvfp4-pack-quantized' with 4 bits in groups of None is not read",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
        "'mxfp4-pack-quantized' with 4 bits in groups of 16 is not read: .*mxfp4-pack-quantized with 4 in groups",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": False}}
            },
        },
        "'symmetric' .*is False",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "Optimizer's 'NVFP4_AWQ' is not read: FP8, .*NVFP4"),
    ({"quant_method": "modelopt"}, "Optimizer's None is not read"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "'group_size' .*is 32"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": False}}},
        },
        "'symmetric' .*is False",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
        },
        "in unlike ways",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_a_scheme_that_is_not_read_is_named(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        without_scheme({"quantization_config": config})


def test_what_is_not_quantised_or_a_models_own_is_left_alone() -> None:
    for config in ({}, {"quantization_config": None}, {"quantization_config": {"quant_method": "mxfp4"}}):
        assert scheme_of(config) is None
        assert without_scheme(config) == config


@pytest.mark.parametrize("said", [{"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, None])
def test_model_optimizer_may_say_it_in_a_file_of_its_own(said: dict[str, Any] | None, tmp_path: Path) -> None:
    case = REFERENCES["modelopt nvfp4"]
    path = write(tmp_path, case["tensors"], {"quantization_config": None})
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    if said is None:
        with pytest.raises(ModelError, match="Optimizer's None is not read"):
            open_weights(path)
        return
    np.testing.assert_array_equal(open_weights(path).tensor(NAME), expected("modelopt nvfp4"))


def test_of_mixed_matrices_some_are_nvfp4_and_others_fp8(tmp_path: Path) -> None:
    small, large = (REFERENCES[name]["tensors"] for name in ("modelopt nvfp4", "modelopt fp8"))
    tensors = {**small, **{name.replace("layer", "other"): entry for name, entry in large.items()}}
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}
    weights = open_weights(write(tmp_path, tensors, config))
    assert sorted(weights.names) == ["layer.weight", "other.weight"]
    np.testing.assert_array_equal(weights.tensor(NAME), expected("modelopt nvfp4"))
    np.testing.assert_array_equal(weights.tensor("other.weight"), expected("modelopt fp8"))


def of_zeros(dtype: str, shape: list[int], item_bytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": b64encode(bytes(int(np.prod(shape)) * item_bytes)).decode()}


@pytest.mark.parametrize(
    ("case", "name", "entry", "message"),
    [
        ("awq", "layer.scales", ("F16", [4, 23], 2), "do not fit scales"),
        ("awq", "layer.qzeros", ("I32", [3, 3], 4), "do not fit scales"),
        ("awq", "layer.qweight", ("F16", [64, 3], 2), "packed int32 is expected"),
        ("gptq symmetric", "layer.g_idx", ("I32", [63], 4), "do not fit scales"),
        ("fp8 by blocks", "layer.weight_scale_inv", ("F32", [3, 2], 4), "one scale is expected, .*each 16 x 32"),
        ("fp8 by blocks", "layer.weight", ("F32", [24, 64], 4), "FP8 .* or int8 is expected"),
        ("compressed int4 symmetric", "layer.weight_shape", ("I64", [2], 8), r"says \[0, 0\]"),
        ("compressed int4 symmetric", "layer.weight_scale", ("F8_E4M3", [24, 4], 1), "stored as F8_E4M3"),
        ("compressed nvfp4", "layer.weight_scale", ("F8_E4M3", [24, 2], 1), r"a scale \(E4M3\) for each 16 .*expected"),
        ("compressed nvfp4", "layer.weight_packed", ("F16", [24, 32], 2), "FP4, two numbers in a byte"),
        ("compressed nvfp4", "layer.weight_global_scale", ("F32", [2], 4), r"is \[2\]: one number that is not 0"),
        ("compressed nvfp4", "layer.weight_global_scale", ("F32", [1], 4), "one number that is not 0"),
        ("modelopt nvfp4", "layer.weight_scale_2", ("F32", [], 4), "one number that is not 0"),
        ("compressed mxfp8 by blocks", "layer.weight_scale", ("I8", [24, 2], 1), "powers of two .*are expected"),
        ("modelopt mxfp8 by blocks", "layer.weight_scale", ("U8", [32, 3], 1), "one for each 1 x 32"),
        ("bitsandbytes nf4", "layer.weight", ("U8", [100, 1], 1), "100 codes as uint8, .*: 768 as uint8, 16 and 24"),
        ("bitsandbytes nf4", "layer.weight.absmax", ("F32", [23], 4), "23 scales: "),
        ("bitsandbytes nf4", "layer.weight.quant_map", ("F32", [8], 4), "a table of 8"),
        ("bitsandbytes nf4", "layer.weight.quant_state.bitsandbytes__nf4", ("U8", [9], 1), "is no JSON object"),
        ("bitsandbytes fp4", "layer.weight.nested_absmax", ("F32", [2], 4), "there are 2 scales .*256, 1 and a number"),
        ("bitsandbytes int8", "layer.SCB", ("F32", [23], 4), "the largest number of each row, are expected"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    case: str, name: str, entry: tuple[str, list[int], int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, case, **{name: of_zeros(*entry)}).tensor(NAME)


def test_a_part_outside_a_matrix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape("no part 20:25 of axis 0")):
        opened(tmp_path, "awq").rows(NAME, 20, 25)
    with pytest.raises(ModelError, match=r"lacks the tensor 'layer\.wight'"):
        opened(tmp_path, "awq").tensor("layer.wight")
