"""Triton's language as its interpreter runs it, without what is the same at every launch and every operation.

As it comes, the interpreter searches all of the language for what it has to patch at every launch, and makes every type
and shape anew for every operation: most of the time that a kernel of small tiles takes. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder, interpreter_semantic


def install() -> None:
    """Have Triton's interpreter run this language from now on, in this process. Compiling is left as it is."""
    interpreter._patch_attr = _patch_builtin_member
    interpreter._patch_lang = _patch_language
    interpreter._get_np_dtype = _numpy_dtype
    interpreter_semantic.__class__ = _Semantic
    interpreter_builder.__class__ = _Builder


# ---- what is patched for as long as a kernel runs ----


def _patch_builtin_member(of: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    unchecked = getattr(member, "__wrapped__", member)  # the wrapper asks for what is given here

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return unchecked(*arguments, **options)

    scope.set_attr(of, name, call)


class _Patch(NamedTuple):
    of: Any
    name: str
    before: Any
    patched: Any


class _Patched:
    """What a launch patched; `restore` ends that."""

    def restore(self) -> None:
        for of, name, before, _ in _patches():
            if before is interpreter._MISSING:
                delattr(of, name)
            else:
                setattr(of, name, before)


_find_patches = interpreter._patch_lang


@cache
def _patches() -> tuple[_Patch, ...]:
    """All that the interpreter patches for a function that knows the language as `tl` and its core, found once."""

    def anything() -> None:
        pass

    scope = _find_patches(FunctionType(anything.__code__, {"tl": tl, "core": tl.core}))
    scope.set_attr(tl.block_type, "__init__", _make_block_type)
    scope.set_attr(tl.tensor, "__init__", _make_tensor)
    scope.set_attr(tl.dtype, "__eq__", _are_equal)
    scope.set_attr(tl.core, "_unwrap_if_constexpr", _unwrapped)
    before: dict[tuple[int, str], tuple[Any, Any]] = {}
    for of, name, original in scope._changes:
        before.setdefault((id(of), name), (of, original))
    patched = {key: vars(of)[key[1]] for key, (of, _) in before.items()}
    scope.restore()
    return tuple(_Patch(of, key[1], original, patched[key]) for key, (of, original) in before.items())


def _patch_language(function: Any) -> _Patched:
    for of, name, _, patched in _patches():
        setattr(of, name, patched)
    return _Patched()


_are_equal_types = tl.dtype.__eq__


def _are_equal(self: Any, other: Any) -> bool:
    return self is other or _are_equal_types(self, other)


_unwrap = tl.core._unwrap_if_constexpr
_NEVER_WRAPPED = frozenset({tl.tensor, tl.dtype, tl.pointer_type, tl.block_type, int, float, bool, str, type(None)})


def _unwrapped(value: Any) -> Any:
    return value if type(value) in _NEVER_WRAPPED else _unwrap(value)


# ---- types and shapes ----

_make_any_block_type = tl.block_type.__init__


class _Shape(NamedTuple):
    """Of a block: as its type has it and as its tensors do, each with the number of elements."""

    of_type: Any
    numel: int
    of_tensor: Any
    numel_of_tensor: Any


@cache
def _shape_of(lengths: tuple[int, ...]) -> _Shape:
    block: Any = tl.block_type.__new__(tl.block_type)
    _make_any_block_type(block, tl.int1, list(lengths))
    return _Shape(block.shape, block.numel, _constants(lengths), tl.constexpr(block.numel))


def _constants(lengths: tuple[int, ...]) -> Any:
    return tl.tuple([tl.constexpr(length) for length in lengths])


_SCALAR = _Shape((), 1, _constants(()), tl.constexpr(1))


def _lengths(shape: Any) -> tuple[int, ...]:
    of = shape.values if isinstance(shape, tl.tuple) else shape
    return tuple([each.value if isinstance(each, tl.constexpr) else each for each in of])


def _lengths_of(block: Any) -> tuple[int, ...]:
    found: tuple[int, ...] | None = getattr(block, "lengths", None)  # of what was made while no kernel ran, none
    return _lengths(block.shape) if found is None else found


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    lengths = _lengths(shape)
    known = _shape_of(lengths)
    self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
    self.lengths, self.name = lengths, f"<{lengths}, {element_ty}>"


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    known = _shape_of(_lengths_of(type)) if type.is_block() else _SCALAR
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = known.of_tensor, known.numel_of_tensor


_numpy_dtype_of = interpreter._get_np_dtype
_numpy_dtype_of_numbers = cache(_numpy_dtype_of)  # it makes a dictionary of all dtypes at every call


def _numpy_dtype(kind: Any) -> Any:
    of = _numpy_dtype_of if kind.scalar.is_ptr() else _numpy_dtype_of_numbers
    return of(kind.scalar)


class _Semantic(TritonSemantic):  # type: ignore[misc]
    """Which operation is meant: as Triton has it, where shapes are compared as numbers."""

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if arithmetic_check and type(lhs) is tl.tensor and _is_known(rhs) and not lhs.dtype.is_ptr():
            wanted, number = _beside(rhs, lhs.dtype, _lengths_beside(lhs), False, div_or_mod)
            return lhs if lhs.dtype is wanted else self.cast(lhs, wanted), number
        if arithmetic_check and type(rhs) is tl.tensor and _is_known(lhs) and not rhs.dtype.is_ptr():
            wanted, number = _beside(lhs, rhs.dtype, _lengths_beside(rhs), True, div_or_mod)
            return number, rhs if rhs.dtype is wanted else self.cast(rhs, wanted)
        if arithmetic_check and type(lhs) is type(rhs) is tl.tensor:
            left, right = lhs.dtype, rhs.dtype
            if not left.is_ptr() and not right.is_ptr():
                wanted = _computation_type(left, False, right, False, div_or_mod)
                lhs = lhs if left is wanted else self.cast(lhs, wanted)
                rhs = rhs if right is wanted else self.cast(rhs, wanted)
                return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(  # type: ignore[no-any-return]
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if not lhs.type.is_block():
            return (self._filled(lhs, rhs.type), rhs) if rhs.type.is_block() else (lhs, rhs)
        if not rhs.type.is_block():
            return lhs, self._filled(rhs, lhs.type)
        left, right = _lengths_of(lhs.type), _lengths_of(rhs.type)
        if left == right:
            return lhs, rhs
        both = tuple([b if a == 1 else a for a, b in zip(left, right, strict=False)])
        if len(left) != len(right) or any(b not in (1, n) for b, n in zip(right, both, strict=True)):
            return super().broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
        return self._spread(lhs, left, both), self._spread(rhs, right, both)

    def _filled(self, scalar: Any, like: Any) -> Any:
        kind = like.with_element_ty(scalar.type.scalar)
        return self.make_tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def _spread(self, tensor: Any, lengths: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
        if lengths == wanted:
            return tensor
        kind = tl.block_type(tensor.type.scalar, wanted)
        return self.make_tensor(self.builder.create_broadcast(tensor.handle, wanted), kind)

    def computation_type_impl(self, *types: Any) -> Any:
        return _computation_type(*types)


@cache
def _computation_type(*types: Any) -> Any:
    return TritonSemantic.computation_type_impl(interpreter_semantic, *types)


def _is_known(value: Any) -> bool:
    """Whether it is a number that equals none of another meaning, as 0.0 does."""
    return type(value) is int or (type(value) is float and value != 0)


def _lengths_beside(tensor: Any) -> tuple[int, ...] | None:
    return _lengths_of(tensor.type) if tensor.type.is_block() else None


@lru_cache(maxsize=1 << 12, typed=True)
def _beside(
    number: float, kind: Any, lengths: tuple[int, ...] | None, is_left: bool, div_or_mod: bool
) -> tuple[Any, Any]:
    """What a tensor of ``kind`` and a number are computed in, and the number as a tensor of it and of this shape."""
    of = interpreter_semantic.to_tensor_type(number)
    both = (of, True, kind, False) if is_left else (kind, False, of, True)
    wanted = _computation_type(*both, div_or_mod)
    tensor = interpreter_semantic._cast_to_computation_type(number, wanted)
    tensor.handle.data.flags.writeable = False  # whoever meets the same number gets the same memory
    if lengths is not None:
        tensor = interpreter_semantic._filled(tensor, tl.block_type(wanted, lengths))
    return wanted, tensor


# ---- arrays ----

_BFLOAT16_AND_BACK = {(tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)}


class _Builder(InterpreterBuilder):  # type: ignore[misc]
    """What is done: as the interpreter does it, with fewer passes over the arrays."""

    def create_splat(self, ret_ty: Any, arg: Any) -> TensorHandle:
        value = arg.data.astype(_numpy_dtype(arg.dtype), copy=False)
        lengths = _lengths_of(ret_ty)
        return TensorHandle(np.ndarray(lengths, value.dtype, value, 0, (0,) * len(lengths)), arg.dtype.scalar)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        of, to = src.dtype.scalar, dst_type.scalar
        if (of, to) == (tl.bfloat16, tl.float32):
            return TensorHandle((src.data.astype(np.uint32) << np.uint32(16)).view(np.float32), to)
        if (of, to) == (tl.float32, tl.bfloat16):  # the interpreter cuts off, where a GPU rounds
            return TensorHandle((np.ascontiguousarray(src.data).view(np.uint32) >> np.uint32(16)).astype(np.uint16), to)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if src.dtype.scalar.primitive_bitwidth == 8:
            return TensorHandle(self._all_of_8_bits(src.dtype.scalar, dst_type.scalar)[src.data], dst_type.scalar)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    @staticmethod
    @cache
    def _all_of_8_bits(of: Any, to: Any) -> Any:
        codes = TensorHandle(np.arange(256, dtype=np.uint8), of)
        return InterpreterBuilder.create_fp_to_fp(interpreter_builder, codes, to, None).data
