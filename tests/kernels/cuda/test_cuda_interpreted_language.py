"""The interpreter of GPU kernels computes what Triton's own does, and leaves the language as it was."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder, interpreter_semantic

from headwise.kernels.cuda import interpreted_language

interpreted_language.install()


@pytest.fixture
def language() -> Any:
    """Patched as while a kernel runs."""
    patched = interpreter._patch_lang(None)
    yield
    patched.restore()


def test_the_language_is_patched_while_a_kernel_runs_and_never_else() -> None:
    before = {name: dict(vars(of)) for name, of in {"tl": tl, "core": tl.core, "tensor": tl.tensor}.items()}
    types = tl.block_type.__init__, tl.dtype.__eq__
    patched = interpreter._patch_lang(None)
    assert tl.load is not before["tl"]["load"]
    patched.restore()
    for name, of in {"tl": tl, "core": tl.core, "tensor": tl.tensor}.items():
        for member, value in before[name].items():
            assert vars(of)[member] is value or member in ("__dict__", "__doc__"), f"{name}.{member}"
    assert (tl.block_type.__init__, tl.dtype.__eq__) == types


@pytest.mark.parametrize(("of", "to"), [(tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)])
def test_bfloat16_is_converted_as_triton_does(of: Any, to: Any) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    codes = codes[(codes >> 7 & 255 != 0) | (codes & 127 == 0)]  # those without an exponent it gets wrong
    data = codes if of == tl.bfloat16 else (codes.astype(np.uint32) << 16 | np.uint32(0x9876)).view(np.float32)
    if of == tl.float32:
        data = data[data.view(np.uint32) >> 23 & 255 != 0]
    for shape in ((-1,), (2, -1)):
        source = TensorHandle(data[: len(data) // 2 * 2].reshape(shape).T, of)
        found, expected = (cast(interpreter_builder, source, to) for cast in (_cast(), InterpreterBuilder.cast_impl))
        assert found.dtype == expected.dtype == to
        assert found.data.shape == expected.data.shape
        assert found.data.tobytes() == expected.data.tobytes()


def _cast() -> Any:
    return type(interpreter_builder).cast_impl


@pytest.mark.parametrize("to", [tl.float16, tl.bfloat16, tl.float32])
@pytest.mark.parametrize("of", [tl.float8e4nv, tl.float8e5])
def test_numbers_of_8_bits_are_converted_as_triton_does(of: Any, to: Any) -> None:
    codes = TensorHandle(np.arange(256, dtype=np.uint8).reshape(16, 16).T, of)
    found = interpreter_builder.create_fp_to_fp(codes, to, None)
    expected = InterpreterBuilder.create_fp_to_fp(interpreter_builder, codes, to, None)
    assert found.data.shape == expected.data.shape
    assert found.data.tobytes() == expected.data.tobytes()


SHAPES = [(), (1,), (4,), (1, 4), (8, 1), (8, 4), (2, 8, 4)]


@pytest.mark.parametrize("left", SHAPES)
@pytest.mark.parametrize("right", SHAPES)
@pytest.mark.usefixtures("language")
def test_shapes_are_broadcast_as_triton_does(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    def made(shape: tuple[int, ...], kind: Any) -> Any:
        array = np.arange(np.prod(shape or (1,)), dtype=np.int32).reshape(shape or (1,))
        return tl.tensor(TensorHandle(array, kind), tl.block_type(kind, list(shape)) if shape else kind)

    both = made(left, tl.int32), made(right, tl.int32)
    try:
        expected = TritonSemantic.broadcast_impl_value(interpreter_semantic, *both)
    except ValueError:
        with pytest.raises(ValueError, match="incompatible"):
            interpreter_semantic.broadcast_impl_value(*both)
        return
    for one, other in zip(interpreter_semantic.broadcast_impl_value(*both), expected, strict=True):
        assert one.type == other.type
        assert [length.value for length in one.shape] == [length.value for length in other.shape]
        np.testing.assert_array_equal(one.handle.data, other.handle.data)


NUMBERS = [0, 1, -1, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 0.0, -0.0, 1.5, -2.5e-40, float("inf"), True, False]
KINDS = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64]


@pytest.mark.parametrize("shape", [(), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.usefixtures("language")
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_numbers_beside_tensors_are_what_triton_has_them_be(kind: Any, shape: tuple[int, ...]) -> None:
    """Also when one that equals them came before."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape or (1,)).astype(interpreter._get_np_dtype(kind))
    tensor = tl.tensor(TensorHandle(array, kind), tl.block_type(kind, list(shape)) if shape else kind)
    for number, is_left, of_quotients in product(NUMBERS * 2, (False, True), (False, True)):
        both = (number, tensor) if is_left else (tensor, number)
        of_triton = partial(TritonSemantic.binary_op_type_checking_impl, interpreter_semantic)
        try:
            expected = of_triton(*both, div_or_mod=of_quotients)
        except (ValueError, TypeError) as error:
            with pytest.raises(type(error)):
                interpreter_semantic.binary_op_type_checking_impl(*both, div_or_mod=of_quotients)
            continue
        found = interpreter_semantic.binary_op_type_checking_impl(*both, div_or_mod=of_quotients)
        for one, other in zip(found, expected, strict=True):
            assert one.type == other.type
            assert one.handle.data.dtype == other.handle.data.dtype
            assert one.handle.data.tobytes() == other.handle.data.tobytes()
