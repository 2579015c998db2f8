"""Triton kernels run by Triton's own interpreter on NumPy arrays: slow, exact, and needs no GPU.

Triton chooses between compiling and interpreting when a function is decorated, for the whole process. Here both live
side by side: kernels are plain `JITFunction`s, and a launch makes an interpreted twin of the one it runs.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction, TensorHandle, interpreter_builder
from triton.runtime.jit import JITFunction

from headwise.kernels.cuda import interpreted_language
from headwise.kernels.cuda.inline_ptx import run_inline
from headwise.kernels.cuda.launch import Grid, Kernel, Variant
from headwise.kernels.cuda.parameters import Argument, PackedArguments

MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""Of a grid in each dimension (CUDA C++ Programming Guide, technical specifications)."""

# Else it computes every sum of 32 bits in 64 as well, to compare them in debug mode only.
interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)

interpreted_language.install()

_running = Lock()
"""While a kernel runs, Triton's language is patched for all threads."""


class InterpreterLauncher:
    """`TritonLauncher` on NumPy arrays. ``sm`` and ``sms`` are those of the card it stands for."""

    def __init__(self, sm: int = 90, sms: int = 4) -> None:
        self.sm, self.sms = sm, sms

    def prepare(self, variant: Variant) -> Kernel:
        """Nothing is compiled."""
        return partial(self.launch, variant)

    def launch(self, variant: Variant, grid: Grid, arguments: Sequence[Argument]) -> None:
        """See `TritonLauncher.launch`. The addresses are those of NumPy arrays."""
        if not all(grid):
            return
        assert all(blocks <= most for blocks, most in zip(grid, MOST_BLOCKS, strict=True)), f"no card has a grid {grid}"
        packed = PackedArguments(variant.parameters)
        packed.pack(arguments)
        values = {}
        for (name, type_), number in zip(variant.signature, packed.numbers(), strict=True):
            is_promised = name not in variant.multiples or int(number[0]) % 16 == 0
            assert is_promised, f"{name} {number[0]} is no multiple of 16"
            values[name] = _tensor(number, type_)
        with _running:
            kernel = _interpreted(variant.module, variant.kernel)
            kernel.run(grid=grid, warmup=False, **values, **dict(variant.constants))


def _tensor(number: NDArray[Any], type_: str) -> Any:
    triton_type = tl.str_to_ty(type_, None)
    return tl.tensor(TensorHandle(number, triton_type), triton_type)


@cache
def _interpreted(module: str, name: str) -> Any:
    scope = _interpreted_globals(module)
    kernel = getattr(import_module(f"headwise.kernels.cuda.{module}"), name)
    return InterpretedFunction(types.FunctionType(kernel.fn.__code__, scope, name))


@cache
def _interpreted_globals(module: str) -> dict[str, Any]:
    """The globals of a module for interpreted functions, which call each other as plain Python."""
    scope = dict(vars(import_module(f"headwise.kernels.cuda.{module}")))
    # The interpreter patches the modules it finds here for as long as a kernel runs.
    scope |= {"tl": _Language(), "_language": tl, "_core": tl.core}
    for name, helper in list(scope.items()):
        if not isinstance(helper, JITFunction):
            continue
        home = helper.fn.__module__.rpartition(".")[2]
        if home != module:  # what it refers to is known there
            scope[name] = _interpreted_globals(home)[helper.fn.__name__]
        else:
            plain = types.FunctionType(helper.fn.__code__, scope, name, helper.fn.__defaults__)
            scope[name] = FunctionRewriter(plain).rewrite_ast()
    return scope


class _Language:
    """``triton.language`` whose library functions (max, sum, ...) are called as plain Python."""

    def __getattr__(self, name: str) -> Any:
        member = getattr(tl, name)
        return member.fn if isinstance(member, JITFunction) else member

    @staticmethod
    def dot(lhs: Any, rhs: Any, *more: Any, **options: Any) -> Any:
        # The interpreter keeps bfloat16 as integers, and would multiply those.
        lhs, rhs = (value.to(tl.float32) if value.dtype == tl.bfloat16 else value for value in (lhs, rhs))
        if "input_precision" in options:  # NumPy has one, and the interpreter does not know all by name
            options["input_precision"] = "ieee"
        return tl.dot(lhs, rhs, *more, **options)

    @staticmethod
    def inline_asm_elementwise(
        text: str, operands: str, inputs: Sequence[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        """All of the inputs' shapes that they have together; ``operands`` and ``is_pure`` are the compiler's. Without
        inputs it is about the order of kernels, which here is always that of their launches."""
        if not inputs:
            return None
        arrays = np.broadcast_arrays(*(tensor.handle.data for tensor in inputs))
        types = dtype if isinstance(dtype, tuple) else (dtype,)
        made = run_inline(
            tl.core._unwrap_if_constexpr(text),
            arrays,
            [np.dtype(str(type_).replace("fp", "float")) for type_ in types],
            pack,
        )
        shape = [tl.block_type(type_, list(arrays[0].shape)) for type_ in types]
        results = tuple(tl.tensor(TensorHandle(*pair), kind) for *pair, kind in zip(made, types, shape, strict=True))
        return results if isinstance(dtype, tuple) else results[0]
