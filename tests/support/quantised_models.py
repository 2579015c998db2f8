"""Tiny models again, their layers' matrices quantised: as a checkpoint of such has them, and expanded to floats."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.tiny_checkpoints import checkpoint

from headwise.kernels.bfloat16 import to_bits
from headwise.kernels.e4m3 import E4M3
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

GROUP, BLOCK = 16, (16, 32)
Stored = tuple[dict[str, tuple[str, NDArray[Any]]], NDArray[np.float32]]
"""Tensors by what takes the place of ``weight``, with their dtypes; and the matrix that they stand for."""

INT4: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}}},
}
NVFP4: Mapping[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": GROUP}
FP8: Mapping[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def in_int4(matrix: NDArray[np.float32]) -> Stored:
    rows = len(matrix)
    grouped = matrix.reshape(rows, -1, GROUP)
    scale = np.abs(grouped).max(axis=2).astype(np.float16).astype(np.float32) / 8 + np.float32(2**-14)
    scale = scale.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(grouped / scale[..., None]), -8, 7)
    places = (codes + 8).astype(np.uint32).reshape(rows, -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    packed = np.bitwise_or.reduce(places, axis=2).view(np.int32)
    tensors = {
        "weight_packed": ("I32", packed),
        "weight_scale": ("F16", scale),
        "weight_shape": ("I64", np.array(matrix.shape)),
    }
    return tensors, (codes * scale[..., None]).astype(np.float32).reshape(matrix.shape)


def in_fp8(matrix: NDArray[np.float32]) -> Stored:
    rows, columns = matrix.shape
    high, wide = BLOCK
    scale = np.full((-(-rows // high), -(-columns // wide)), np.float32(np.abs(matrix).max() / 448))
    scale *= 1 + np.arange(scale.size, dtype=np.float32).reshape(scale.shape) / 8
    spread = scale.repeat(high, 0)[:rows].repeat(wide, 1)[:, :columns]
    numbers = E4M3[:127]  # ascending, from 0 on
    codes = np.abs(np.abs(matrix / spread)[..., None] - numbers).argmin(axis=2).astype(np.uint8)
    codes |= (matrix < 0).astype(np.uint8) << 7
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scale)}, E4M3[codes] * spread


def in_fp8_by_powers(matrix: NDArray[np.float32]) -> Stored:
    """As DeepSeek-V4's are, by other names and with powers of two."""
    tensors, _ = in_fp8(matrix)
    (_, codes), (_, scale) = tensors["weight"], tensors["weight_scale_inv"]
    exponents = (np.round(np.log2(scale)) + 127).astype(np.uint8)
    spread = np.exp2(exponents.astype(np.float32) - 127).repeat(BLOCK[0], 0)[: len(matrix)]
    spread = spread.repeat(BLOCK[1], 1)[:, : matrix.shape[1]]
    return {"weight": ("F8_E4M3", codes), "scale": ("F8_E8M0", exponents)}, E4M3[codes] * spread


def in_fp4(matrix: NDArray[np.float32]) -> Stored:
    """As DeepSeek-V4's experts are."""
    largest = np.abs(matrix.reshape(len(matrix), -1, 32)).max(axis=2)
    exponents = (np.ceil(np.log2(largest / 6)) + 127).astype(np.uint8)
    packed, expanded = _fp4(matrix, np.exp2(exponents.astype(np.float32) - 127))
    return {"weight": ("I8", packed.view(np.int8)), "scale": ("F8_E8M0", exponents)}, expanded


def in_nvfp4(matrix: NDArray[np.float32]) -> Stored:
    """As Model Optimizer has it."""
    largest = np.abs(matrix.reshape(len(matrix), -1, GROUP)).max(axis=2)
    overall = np.float32(largest.max() / 6 / 448)
    scales = np.abs((largest / 6 / overall)[..., None] - E4M3[1:127]).argmin(axis=2).astype(np.uint8) + 1
    packed, expanded = _fp4(matrix, E4M3[scales] * overall)
    tensors = {
        "weight": ("U8", packed),
        "weight_scale": ("F8_E4M3", scales.astype(np.uint8)),
        "weight_scale_2": ("F32", np.array(overall)),
        "input_scale": ("F32", np.array(np.float32(0.01))),
    }
    return tensors, expanded


def _fp4(matrix: NDArray[np.float32], scales: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes of a matrix, two in a byte, with ``scales [N, groups]``; and what they stand for."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    grouped, scale = matrix.reshape(*scales.shape, -1), scales[..., None]
    codes = np.abs(np.abs(grouped / scale)[..., None] - numbers).argmin(axis=3).astype(np.uint8)
    expanded = (np.sign(grouped) * numbers[codes] * scale).reshape(matrix.shape)
    codes = (codes | (grouped < 0).astype(np.uint8) << 3).reshape(matrix.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, expanded


def write_quantised(
    directory: Path,
    name: str,
    scheme: Mapping[str, Any],
    quantise: Callable[[NDArray[np.float32]], Stored],
    in_bfloat16: bool = False,
    by_name: Mapping[str, Callable[[NDArray[np.float32]], Stored]] = MappingProxyType({}),
) -> tuple[Path, Path]:
    """The directories of a tiny model that was quantised, and of the same one expanded.

    in_bfloat16: what is not quantised
    by_name:     how weights are whose names have this pattern, in place of those that are called projections
    """
    source = Checkpoint(checkpoint(name))
    stored: dict[str, tuple[str, NDArray[Any]]] = {}
    expanded: dict[str, tuple[str, NDArray[Any]]] = {}
    for weight in source.names:
        values = source.tensor(weight)
        found = next((how for pattern, how in by_name.items() if re.search(pattern, weight)), None)
        if not by_name and weight.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            found = quantise
        if found is None:
            stored[weight] = expanded[weight] = ("BF16", to_bits(values)) if in_bfloat16 else ("F32", values)
            continue
        tensors, matrix = found(values)
        stored |= {weight.removesuffix("weight") + part: entry for part, entry in tensors.items()}
        expanded[weight] = ("F32", matrix)
    paths = directory / "quantised", directory / "expanded"
    for path, tensors in zip(paths, (stored, expanded), strict=True):
        shutil.copytree(checkpoint(name), path)
        forms = {name: TensorForm(dtype, values.shape) for name, (dtype, values) in tensors.items()}
        write_safetensors(path / "model.safetensors", forms, (values for _, values in tensors.values()))
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return paths
