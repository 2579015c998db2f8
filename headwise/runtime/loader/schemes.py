"""How checkpoints store matrices that they have quantised, each kind a `Scheme`; which one, `quantisation` reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.loader.bitsandbytes_matrix import KINDS, row_matrix, table_matrix
from headwise.runtime.loader.fp4_matrix import NV_GROUP, mxfp4_matrix, nvfp4_matrix, overall_scale
from headwise.runtime.loader.packed_groups import (
    PackedCodes,
    PackedGroups,
    check_groups,
    neighbours_or_none,
    words,
)
from headwise.runtime.loader.scaled_matrix import scaled_matrix
from headwise.runtime.loader.stored_matrix import StoredMatrix, StoredTensors
from headwise.runtime.ops.fp4 import GROUP as MX_GROUP


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


class _OfBytes:
    """What is computed from, if anything is, has 8 bits, and no minima."""

    is_int4: ClassVar[bool] = False
    bits: ClassVar[int] = 8
    has_minimum: ClassVar[bool] = False


@dataclass(frozen=True)
class ScaledScheme(_OfBytes):
    """``weight`` in 8 bits, and ``weight_scale`` or, by other names, ``weight_scale_inv`` or ``scale``.

    In a checkpoint of FP8, int8 is FP4, two numbers in a byte: DeepSeek-V4's experts.

    tile:   as in `scaled_matrix`
    powers: whether scales are powers of two (E8M0) that are stored as bytes (MXFP8)
    """

    tile: tuple[int, int] | None
    is_fp8: bool
    powers: bool = False
    suffix: str = "weight"

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
            return mxfp4_matrix(tensors, name, scales)
        return scaled_matrix(tensors, name, scales, self.tile, self.powers)


@dataclass(frozen=True)
class Fp4Scheme(_OfBytes):
    """compressed-tensors' ``weight_packed``, FP4 in bytes, with a ``weight_scale`` for each group.

    is_mx: scales are powers of two (MXFP4); else E4M3, all of them divided by ``weight_global_scale`` (NVFP4)
    """

    is_mx: bool
    suffix: str = "weight_packed"
    beside: tuple[str, ...] = ("weight_scale", "weight_global_scale", "input_global_scale", "k_scale", "v_scale")
    is_fp8: bool = False

    @property
    def group(self) -> int:
        return MX_GROUP if self.is_mx else NV_GROUP

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        name, scales = at + self.suffix, f"{at}weight_scale"
        if name not in tensors:
            return None
        if self.is_mx:
            return mxfp4_matrix(tensors, name, scales)
        divisor = overall_scale(tensors, f"{at}weight_global_scale")
        return nvfp4_matrix(tensors, name, scales, divisor=divisor)


@dataclass(frozen=True)
class ModelOptScheme(_OfBytes):
    """Model Optimizer's ``weight`` in FP4 (NVFP4), whose scales are times ``weight_scale_2``; others may be in FP8,
    with a ``weight_scale`` alone.
    """

    suffix: str = "weight"
    beside: tuple[str, ...] = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
    is_fp8: bool = False
    group: int = NV_GROUP

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        name, scales, overall = f"{at}weight", f"{at}weight_scale", f"{at}weight_scale_2"
        if overall in tensors:
            return nvfp4_matrix(tensors, name, scales, factor=overall_scale(tensors, overall))
        return scaled_matrix(tensors, name, scales, None) if scales in tensors else None


@dataclass(frozen=True)
class BitsAndBytesScheme(_OfBytes):
    """bitsandbytes' ``weight`` in 4 bits, with its state in tensors behind that name, or in int8, with ``SCB``."""

    suffix: str = "weight"
    beside: tuple[str, ...] = (
        "absmax", "quant_map", "nested_absmax", "nested_quant_map", *(f"bitsandbytes__{kind}" for kind in KINDS), "SCB",
        "weight_format",
    )  # fmt: skip
    is_fp8: bool = False
    group: int = 0

    def matrix(self, tensors: StoredTensors, at: str) -> StoredMatrix | None:
        name = f"{at}weight"
        if f"{name}.absmax" in tensors:
            return table_matrix(tensors, name)
        return row_matrix(tensors, name, f"{at}SCB") if f"{at}SCB" in tensors else None


@dataclass(frozen=True)
class GroupScheme:
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
class CompressedScheme(GroupScheme):
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
class TransposedScheme(GroupScheme):
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
