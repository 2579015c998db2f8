"""What ``quantization_config`` of a ``config.json`` says of how matrices are stored, and how those are read.

    fp8                 FP8 (E4M3) with a scale for each tile, row or matrix: DeepSeek, Qwen, MiniMax
    compressed-tensors  FP8 and int8 so, integers of 4 or 8 bits in groups, NVFP4, MXFP4, MXFP8: LLM Compressor's
    modelopt            FP8, NVFP4, MXFP8: NVIDIA's Model Optimizer's
    awq, gptq           integers of 4 (GPTQ: or 8) bits in groups
    bitsandbytes        NF4 and FP4, or int8 by rows

Activations are never quantised: where a scheme says that they are, weights are computed from as if it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.checkpoint import QUANTISATION as KEY
from headwise.runtime.loader.fp4_matrix import NV_GROUP
from headwise.runtime.loader.packed_groups import AWQ_ORDER
from headwise.runtime.loader.schemes import (
    BitsAndBytesScheme,
    CompressedScheme,
    Fp4Scheme,
    ModelOptScheme,
    ScaledScheme,
    Scheme,
    TransposedScheme,
)
from headwise.runtime.models.values import shown
from headwise.runtime.ops.fp4 import GROUP as MX_GROUP

_NOT_OURS = "mxfp4"
"""Its matrices are experts, which a model's class reads."""

_FP4_FORMATS = {"nvfp4-pack-quantized": NV_GROUP, "mxfp4-pack-quantized": MX_GROUP}
"""And how many numbers of a row share a scale."""
_MX8_FORMAT = "mxfp8-quantized"
_MODELOPT: Mapping[str, Scheme] = {
    "FP8": ScaledScheme(None, is_fp8=True),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledScheme(None, is_fp8=True),
    "MXFP8": ScaledScheme((1, MX_GROUP), is_fp8=True, powers=True),
    "NVFP4": ModelOptScheme(),
    "MIXED_PRECISION": ModelOptScheme(),
}
"""By ``quant_algo``. Of the mixed ones some matrices are NVFP4, others FP8."""
_FLOAT_FORMATS, _PACKED_FORMAT = ("float-quantized", "int-quantized", "naive-quantized"), "pack-quantized"
_MOST_GROUP = 1 << 20


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """How the checkpoint with this ``config.json`` stores matrices; None: as floats, or as its model's class knows.

    Raises:
        ModelError: it is quantised in a way that is not read, which the message names with those that are.
    """
    given = config.get(KEY)
    given = _text(config).get(KEY) if given is None else given
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {KEY!r} must be an object, got {shown(given)}")
    method = given.get("quant_method")
    if method == _NOT_OURS:
        return None
    read = _READ.get(str(method))
    if read is None:
        raise ModelError(
            f"config.json: the weights are quantised by {shown(method)}; {', '.join(_READ)} and gpt-oss's mxfp4 can be "
            "read: use one of those, or an unquantised version of the model"
        )
    return read(given)


def without_scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the same model, not quantised, if `scheme_of` reads how it is; raises as that does."""
    if scheme_of(config) is None:
        return config
    own = {key: value for key, value in config.items() if key != KEY}
    text = {key: value for key, value in _text(config).items() if key != KEY}
    return {**own, "text_config": text} if text else own


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a multimodal model's config says of its text; some say there how it is quantised."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else {}


def _fp8(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "fmt", (None, "e4m3", "float8_e4m3fn"))
    tile = given.get("weight_block_size")
    return ScaledScheme(None if tile is None else _tile(tile), is_fp8=True)


def _compressed(given: Mapping[str, Any]) -> Scheme:
    for key in ("sparsity_config", "transform_config"):
        _expect(given, key, (None, {}))
    groups = given.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    found = [group.get("weights") for group in values if isinstance(group, Mapping)]
    weights = [each for each in found if isinstance(each, Mapping)]
    if not weights or len(weights) < len(values):
        raise ModelError(f"config.json: {KEY!r} has no 'config_groups' that say how weights are stored")
    form, first = given.get("format"), weights[0]
    named = ("num_bits", "type", "strategy", "group_size", "block_structure")
    if any(each.get(key) != first.get(key) for each in weights for key in named):
        raise ModelError(f"config.json: the groups of {KEY!r} store weights in unlike ways: one for all is read")
    if form == _PACKED_FORMAT and first.get("type", "int") == "int":
        return CompressedScheme(_bits(first, "num_bits", (4, 8)), _group(first.get("group_size")))
    if form in _FLOAT_FORMATS and first.get("num_bits") == 8:
        _expect(first, "symmetric", (None, True))
        tile = first.get("block_structure")
        return ScaledScheme(None if tile is None else _tile(tile), is_fp8=first.get("type") == "float")
    is_float, group = first.get("type") == "float", first.get("group_size")
    if form in _FP4_FORMATS and is_float and (first.get("num_bits"), group) == (4, _FP4_FORMATS[form]):
        _expect(first, "symmetric", (None, True))
        return Fp4Scheme(is_mx=group == MX_GROUP)
    if form == _MX8_FORMAT and is_float and (first.get("num_bits"), group) == (8, MX_GROUP):
        return ScaledScheme((1, MX_GROUP), is_fp8=True, powers=True)
    raise ModelError(
        f"config.json: compressed-tensors' format {shown(form)} with {shown(first.get('num_bits'))} bits in groups of "
        f"{shown(group)} is not read: {', '.join((*_FLOAT_FORMATS, _MX8_FORMAT))} with 8 bits, {_PACKED_FORMAT} with 4 "
        f"or 8, and {' and '.join(f'{name} with 4 in groups of {size}' for name, size in _FP4_FORMATS.items())} are"
    )


def _modelopt(given: Mapping[str, Any]) -> Scheme:
    algorithm = given.get("quant_algo")
    scheme = _MODELOPT.get(str(algorithm))
    if scheme is None:
        raise ModelError(f"config.json: Model Optimizer's {shown(algorithm)} is not read: {', '.join(_MODELOPT)} are")
    if isinstance(scheme, ModelOptScheme):
        _expect(given, "group_size", (None, NV_GROUP))
    return scheme


def _awq(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "version", (None, "gemm", "GEMM"))
    return TransposedScheme(_bits(given, "bits", (4,)), _group(given.get("group_size")), 1, AWQ_ORDER, 0)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "checkpoint_format", (None, "gptq", "gptq_v2"))
    # The older format, which nearly all have, stores zero points less 1.
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    return TransposedScheme(_bits(given, "bits", (4, 8)), _group(given.get("group_size")), 0, None, offset)


def _bitsandbytes(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "bnb_4bit_quant_storage", (None, "uint8"))
    return BitsAndBytesScheme()


_READ: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
}
"""By ``quant_method``."""


def _expect(given: Mapping[str, Any], key: str, read: tuple[Any, ...]) -> None:
    if given.get(key) not in read:
        raise ModelError(
            f"config.json: {key!r} of {KEY!r} is {shown(given.get(key))}, which is not read: use an unquantised version"
        )


def _bits(given: Mapping[str, Any], key: str, read: tuple[int, ...]) -> int:
    _expect(given, key, read)
    return int(given[key])


def _group(value: Any) -> int:
    """-1 and None are a whole row: 0."""
    if value in (None, -1):
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_GROUP:
        raise ModelError(f"config.json: 'group_size' of {KEY!r} must be a positive integer or -1, got {shown(value)}")
    return value


def _tile(value: Any) -> tuple[int, int]:
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _MOST_GROUP for size in sizes):
        raise ModelError(f"config.json: blocks of {KEY!r} must be two positive integers, got {shown(value)}")
    rows, columns = sizes
    return rows, columns
