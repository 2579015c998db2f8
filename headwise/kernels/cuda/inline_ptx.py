"""The PTX that kernels have inline, run on NumPy arrays: as much of it as they use (PTX ISA, section 9.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype

Word = NDArray[np.uint32]
"""What a 32-bit register holds in each thread."""

WORD_BYTES = 4


def run_inline(
    text: str, inputs: Sequence[NDArray[Any]], outputs: Sequence[np.dtype[Any]], pack: int
) -> list[NDArray[Any]]:
    """What ``tl.inline_asm_elementwise`` of ``text`` makes of ``inputs``, all of one shape: an array for each output.

    A thread has ``pack`` elements of each, which lie in a row, in as many registers as they fill; registers are
    numbered from the first output's on.

    Raises:
        ValueError: an instruction or an operand that is not known here, or elements that fill no whole registers.
    """
    registers: dict[str, Word] = {}
    made = [_numbered(count, registers) for count in (_words(dtype, pack) for dtype in outputs)]
    for array in inputs:
        columns = np.ascontiguousarray(array).reshape(-1, pack).view(np.uint32).T
        registers.update(zip(_numbered(_words(array.dtype, pack), registers), columns, strict=True))
    for name, targets, operands in _instructions(text):
        found = _INSTRUCTIONS[name](*(_value(operand, registers) for operand in operands))
        registers.update(zip(targets, [found] if len(targets) == 1 else _split(found), strict=True))
    return [
        np.stack([registers[name] for name in names], axis=-1).view(dtype).reshape(inputs[0].shape)
        for names, dtype in zip(made, outputs, strict=True)
    ]


def _words(dtype: np.dtype[Any], pack: int) -> int:
    words, rest = divmod(pack * dtype.itemsize, WORD_BYTES)
    if rest:
        raise ValueError(f"{pack} elements of {dtype} fill no whole registers")
    return words


def _numbered(count: int, registers: dict[str, Word]) -> list[str]:
    """Names of the next ``count`` of the operands' registers, which are there from now on."""
    names = [f"${len(registers) + index}" for index in range(count)]
    registers.update((name, np.empty(0, np.uint32)) for name in names)
    return names


def _instructions(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(name, targets, operands), one after the other."""
    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name not in _INSTRUCTIONS:
            raise ValueError(f"instruction {name!r} is not known: only {', '.join(_INSTRUCTIONS)}")
        targets, others = operands.strip("{").split("}") if operands.startswith("{") else operands.split(",", 1)
        yield name, _listed(targets), _listed(others)


def _listed(text: str) -> list[str]:
    return [operand.strip() for operand in text.strip(", ").split(",")]


def _value(operand: str, registers: dict[str, Word]) -> Word:
    if operand not in registers:
        return np.array(int(operand, 0), np.uint32)
    return registers[operand]


def _split(word: Word) -> list[Word]:
    """The lower and the upper half of a register, which braces name together."""
    return [word & np.uint32(0xFFFF), word >> np.uint32(16)]


def _permuted(first: Word, second: Word, selector: Word) -> Word:
    """Of the eight bytes of both, those that the selector's digits name, the lowest first."""
    both = first.astype(np.uint64) | second.astype(np.uint64) << np.uint64(32)
    digits = [int(selector) >> 4 * place & 7 for place in range(WORD_BYTES)]
    picked = [(both >> np.uint64(8 * digit) & np.uint64(0xFF)) << np.uint64(8 * at) for at, digit in enumerate(digits)]
    return np.asarray(np.bitwise_or.reduce(picked), np.uint32)


def _halves(word: Word) -> NDArray[np.float64]:
    """Two float16 of a register, wide enough that a product and a sum of them are rounded once."""
    return np.ascontiguousarray(word).reshape(-1, 1).view(np.float16).astype(np.float64)


def _fused(first: Word, second: Word, addend: Word) -> Word:
    mixed: Word = (_halves(first) * _halves(second) + _halves(addend)).astype(np.float16).view(np.uint32)[:, 0]
    return mixed


def _fused_bf16(*words: Word) -> Word:
    """Of two bfloat16 of a register, as `_fused`: float32 holds every product of two."""
    dtype = numpy_dtype("bfloat16")
    first, second, addend = (np.ascontiguousarray(word).reshape(-1, 1).view(dtype).astype(np.float32) for word in words)
    mixed: Word = (first * second + addend).astype(dtype).view(np.uint32)[:, 0]
    return mixed


def _sum(first: Word, second: Word) -> Word:
    """Of float16, as `_fused`."""
    return _fused(first, np.array(0x3C003C00, np.uint32), second)  # times 1


def _of_e4m3(pair: Word) -> Word:
    """Two float16 of the float8_e4m3fn in the lower half of a register."""
    halves: Word = pair.astype(np.uint16).view(numpy_dtype("float8_e4m3fn")).astype(np.float16).view(np.uint32)
    return halves


def _on_floats(step: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Callable[[Word], Word]:
    return lambda word: step(word.view(np.float32)).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Word]] = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "prmt.b32": _permuted,
    "mov.b32": np.positive,
    "fma.rn.f16x2": _fused,
    "fma.rn.bf16x2": _fused_bf16,
    "add.f16x2": _sum,
    "cvt.rn.f16x2.e4m3x2": _of_e4m3,
    "lg2.approx.ftz.f32": _on_floats(np.log2),
    "rcp.approx.ftz.f32": _on_floats(np.reciprocal),
}
