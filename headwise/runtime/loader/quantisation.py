"""What ``quantization_config`` of a ``config.json`` says of how matrices are stored, and how those are read.

    fp8                 FP8 (E4M3) with a scale for each tile, row or matrix: DeepSeek, Qwen, MiniMax
    compressed-tensors  FP8 and int8 so, or integers of 4 or 8 bits in groups: what LLM Compressor writes
    awq, gptq           integers of 4 (GPTQ: or 8) bits in groups

Activations are never quantised: where a scheme says that they are, weights are computed from as if it did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.loader.fp4_matrix import fp4_matrix
from headwise.runtime.loader.packed_groups import (
    AWQ_ORDER,
    PackedCodes,
    PackedGroups,
    check_groups,
    neighbours_or_none,
    words,
)
from headwise.runtime.loader.scaled_matrix import scaled_matrix
from headwise.runtime.loader.stored_matrix import StoredMatrix, StoredTensors
from headwise.runtime.models.values import shown

KEY = "quantization_config"
_NOT_OURS = "mxfp4"
"""Its matrices are experts, which a model's class reads."""

_FLOAT_FORMATS, _PACKED_FORMAT = ("float-quantized", "int-quantized", "naive-quantized"), "pack-quantized"
_MOST_GROUP = 1 << 20


class Scheme(Protocol):
    """How a checkpoint stores what it has quantised.

    suffix:  of the tensor that has a matrix's codes, in place of ``weight``
    beside:  suffixes of tensors that are no weights of their own
    is_int4: whether codes have 4 bits
    is_fp8:  whether they are floats of 8
    group:   neighbours in a row that share a scale; 0: all do
    bits:    of a code
    has_minimum: whether a group may have a minimum, too, where it is computed from as it is
    """

    @property
    def suffix(self) -> str: ...

    @property
    def beside(self) -> tuple[str, ...]: ...

    @property
    def is_int4(self) -> bool: ...

    @property
    def is_fp8(self) -> bool: ...

    @property
    def group(self) -> int: ...

    @property
    def bits(self) -> int: ...

    @property
    def has_minimum(self) -> bool: ...

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        """The matrix ``at + "weight"``; None if it is stored as floats. Raises ModelError if it is corrupt."""


@dataclass(frozen=True)
class ScaledScheme:
    """``weight`` in 8 bits, and ``weight_scale`` or, by other names, ``weight_scale_inv`` or ``scale``.

    In a checkpoint of FP8, int8 is FP4, two numbers in a byte: DeepSeek-V4's experts.

    tile: as in `scaled_matrix`
    """

    tile: tuple[int, int] | None
    is_fp8: bool
    suffix: str = "weight"
    is_int4: bool = False
    bits: int = 8
    has_minimum: bool = False

    _SCALES = ("weight_scale_inv", "weight_scale", "scale")

    @property
    def group(self) -> int:
        return self.tile[1] if self.tile else 0

    @property
    def beside(self) -> tuple[str, ...]:
        return (*self._SCALES, "input_scale", "k_scale", "v_scale", "output_scale")

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        scales = next((at + name for name in self._SCALES if at + name in tensors), None)
        if scales is None:
            return None
        name = f"{at}weight"
        if self.is_fp8 and tensors.stored(name).dtype == np.int8:
            return fp4_matrix(name, tensors.stored(name), tensors.stored(scales))
        return scaled_matrix(tensors, name, scales, self.tile)


@dataclass(frozen=True)
class _GroupScheme:
    """bits of codes; group: neighbours that share a scale, 0: all of a row"""

    bits: int
    group: int

    is_fp8: ClassVar[bool] = False
    has_minimum: ClassVar[bool] = True

    @property
    def is_int4(self) -> bool:
        return self.bits == 4

    @property
    def each(self) -> int:
        """Codes in a word."""
        return 32 // self.bits

    def codes(self, words: Any, axis: int, length: int, order: tuple[int, ...] | None = None) -> PackedCodes:
        return PackedCodes(words, self.bits, axis, length, order or tuple(range(self.each)))

    def width(self, columns: int) -> int:
        return self.group or max(columns, 1)


@dataclass(frozen=True)
class CompressedScheme(_GroupScheme):
    """``weight_packed [N, K / 8]``, ``weight_scale [N, groups]`` and perhaps ``weight_zero_point [N / 8, groups]``."""

    suffix: str = "weight_packed"
    beside: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        name = at + self.suffix
        if name not in tensors:
            return None
        packed, scales = words(tensors, name), tensors.tensor(f"{at}weight_scale")
        rows, columns = self._shape(tensors, at, (len(packed), packed.shape[1] * self.each))
        group, zero_name, order_name = self.width(columns), f"{at}weight_zero_point", f"{at}weight_g_idx"
        zeros = self.codes(words(tensors, zero_name), 0, rows) if zero_name in tensors else None
        order = tensors.stored(order_name) if order_name in tensors else None
        return check_groups(
            name,
            PackedGroups(
                self.codes(packed, 1, columns), scales, zeros, 0, group,
                None if order is None else neighbours_or_none(order, group),
            ),
        )  # fmt: skip

    def _shape(self, tensors: StoredTensors, at: str, packed: tuple[int, int]) -> tuple[int, int]:
        """Of the matrix, unpacked; words of a row may be padded."""
        if f"{at}weight_shape" not in tensors:
            return packed
        shape = tensors.stored(f"{at}weight_shape").tolist()
        if len(shape) != 2 or shape[0] != packed[0] or not packed[1] - self.each < shape[1] <= packed[1]:
            raise ModelError(
                f"{at}weight_shape says {shape}, and the codes are of {list(packed)}: fetch the model again"
            )
        return int(shape[0]), int(shape[1])


@dataclass(frozen=True)
class TransposedScheme(_GroupScheme):
    """AWQ and GPTQ: inputs by outputs. ``qweight``, ``scales [groups, N]`` and ``qzeros [groups, N / 8]``.

    axis:        of ``qweight`` that is packed: 0 (GPTQ: inputs) or 1 (AWQ: outputs)
    order:       see `PackedCodes`
    zero_offset: to be added to what ``qzeros`` has
    """

    axis: int
    order: tuple[int, ...] | None
    zero_offset: int
    suffix: str = "qweight"
    beside: tuple[str, ...] = ("qzeros", "scales", "g_idx")

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        name = at + self.suffix
        if name not in tensors:
            return None
        packed = words(tensors, name)
        length = packed.shape[self.axis] * self.each
        codes = self.codes(packed.T, 1 - self.axis, length, self.order)
        rows, columns = codes.shape
        group = self.width(columns)
        zeros = self.codes(words(tensors, f"{at}qzeros").T, 0, rows, self.order)
        order = tensors.stored(f"{at}g_idx") if f"{at}g_idx" in tensors else None
        return check_groups(
            name,
            PackedGroups(
                codes, tensors.tensor(f"{at}scales").T, zeros, self.zero_offset, group,
                None if order is None else neighbours_or_none(order, group),
            ),
        )  # fmt: skip


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
    read = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}.get(str(method))
    if read is None:
        raise ModelError(
            f"config.json: the weights are quantised by {shown(method)}; fp8, compressed-tensors, awq, gptq and "
            "gpt-oss's mxfp4 can be read: use one of those, or an unquantised version of the model"
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
    raise ModelError(
        f"config.json: compressed-tensors' format {shown(form)} with {shown(first.get('num_bits'))} bits is not read: "
        f"{', '.join(_FLOAT_FORMATS)} with 8 bits and {_PACKED_FORMAT} with 4 or 8 are"
    )


def _awq(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "version", (None, "gemm", "GEMM"))
    return TransposedScheme(_bits(given, "bits", (4,)), _group(given.get("group_size")), 1, AWQ_ORDER, 0)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "checkpoint_format", (None, "gptq", "gptq_v2"))
    # The older format, which nearly all have, stores zero points less 1.
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    return TransposedScheme(_bits(given, "bits", (4, 8)), _group(given.get("group_size")), 0, None, offset)


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
