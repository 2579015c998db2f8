# mypy: ignore-errors
"""What a packed weight's numbers become in registers, kind by kind, and what they are multiplied with.

Where the CPU multiplies pairs of bfloat16, a step of a product takes two numbers of depth at once. So it does with AVX2
alone where a weight's numbers are integers: rows are multiplied as integers of 16 bits with scales of their own
(`matmul_rows`), by the instruction that adds up two such products in a lane. Elsewhere all is widened to float32. Where
the CPU has tiles for it, bfloat16 is multiplied in these: weights in it (`matmul_amx`), and integers (`codes_amx`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from headwise.kernels.cpu.code_words import WORD_BITS, Piece, depth_of, pieces_of, words_of
from headwise.kernels.cpu.simd import ISA, LANES, BFloat, Emitter

KINDS = FLOAT32, BFLOAT16, INT8, INT4, INT5, INT6 = range(6)
"""Kinds of packed weights."""

NATIVE = ISA.avx512bf16 and ISA.avx512bw
"""Whether pairs of bfloat16 are multiplied as they are."""

TILES = ISA.amx
"""Whether bfloat16 is multiplied in tiles."""

INTEGERS = ISA.avx2 and not ISA.avx512f
"""Whether rows are multiplied as integers with weights that are."""

PANEL = 64
"""Columns of a weight that are packed side by side."""

BFLOAT = BFloat()
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(BFLOAT, 2 * LANES)
_WORDS = ir.VectorType(_I16, 2 * LANES)

MOST_LOOKED_UP = 5
"""Bits of codes whose numbers, as floats, have room in two registers."""

_LARGE, _LARGE_VALUE = 0x4B000000, float(1 << 23)
"""The bits of a float whose last bit stands for 1, and that float. A small integer in its last bits is added to it, and
taking the float off again makes a float of it: a conversion would wait for the one unit that shifts need, too.
"""


def constant(kind: Any, value: int) -> Any:
    """A vector of one constant."""
    return ir.Constant(kind, [value] * kind.count)


def load_vector(e: Emitter, pointer: Any, kind: Any) -> Any:
    """The vector of this kind at ``pointer``, whatever that points to."""
    return e.builder.load(e.builder.bitcast(pointer, kind.as_pointer()), align=16)


def load_integer(e: Emitter, pointer: Any) -> Any:
    """The 32-bit integer at ``pointer``, whatever that points to."""
    return e.builder.load(e.builder.bitcast(pointer, _I32.as_pointer()))


def splat(e: Emitter, number: Any) -> Any:
    """A vector of one 32-bit integer."""
    first = e.builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, _I32(0))
    return e.builder.shuffle_vector(first, ir.Constant(_INTS, ir.Undefined), constant(_INTS, 0))


def pair_product(e: Emitter, total: Any, x: Any, weight: Any) -> Any:
    """``total`` plus products of pairs of bfloat16: lane ``i`` takes elements ``2 * i`` and ``2 * i + 1``."""
    function = cgutils.get_or_insert_function(
        e.builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return e.builder.call(function, [total, x, weight])


class Kind(ABC):
    """How a packed weight of one dtype is multiplied.

    turn_bytes:   bytes of a turn of a whole panel
    column_bytes: bytes of a turn of one column
    x_per_turn:   32-bit numbers of ``x`` that a turn multiplies
    """

    turn_bytes: int
    column_bytes: int
    x_per_turn: int
    native = NATIVE

    def prepare(self, e: Emitter, offset: Any) -> Any:
        """What stays the same in all turns."""
        return None

    @abstractmethod
    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        """Steps of the turn at ``pointer``: which of its numbers of ``x`` is multiplied, and by what vectors."""

    def factor(self, e: Emitter, pointer: Any) -> Any:
        """A number of ``x``, 32 bits at ``pointer``, as one operand of `product`."""
        return e.builder.bitcast(splat(e, load_integer(e, pointer)), _PAIRS if self.native else _FLOATS)

    def product(self, e: Emitter, total: Any, x: Any, weight: Any) -> Any:
        return pair_product(e, total, x, weight) if self.native else e.multiply_add(x, weight, total)


class Float32(Kind):
    turn_bytes, column_bytes, x_per_turn = 4 * PANEL, 4, 1
    native = False

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        yield 0, [load_vector(e, _vector_at(e, pointer, v, 4), _FLOATS) for v in range(vectors)]


class Bfloat16(Kind):
    turn_bytes, column_bytes, x_per_turn = 4 * PANEL, 4, 1 if NATIVE else 2

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        pairs = [load_vector(e, _vector_at(e, pointer, v, 4), _INTS) for v in range(vectors)]
        if self.native:
            yield 0, [e.builder.bitcast(pair, _PAIRS) for pair in pairs]
            return
        low = [e.builder.shl(pair, constant(_INTS, 16)) for pair in pairs]
        high = [e.builder.and_(pair, constant(_INTS, 0xFFFF0000)) for pair in pairs]
        yield from ((i, [e.builder.bitcast(half, _FLOATS) for half in halves]) for i, halves in enumerate((low, high)))


class Int8(Kind):
    """native: whether its numbers become pairs of bfloat16"""

    turn_bytes, column_bytes = 2 * PANEL, 2

    def __init__(self, native: bool = NATIVE) -> None:
        self.native, self.x_per_turn = native, 1 if native else 2

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        places = [_vector_at(e, pointer, v, 2) for v in range(vectors)]
        if self.native:
            yield 0, [self._pairs(e, place) for place in places]
            return
        words = [e.builder.zext(load_vector(e, place, ir.VectorType(_I16, LANES)), _INTS) for place in places]
        low = [e.builder.and_(word, constant(_INTS, 255)) for word in words]
        high = [e.builder.lshr(word, constant(_INTS, 8)) for word in words]
        for i, codes in enumerate((low, high)):
            # With its sign turned a byte is a code plus 128: no sign to be spread, and nothing to be converted.
            large = [e.builder.xor(code, constant(_INTS, _LARGE | 128)) for code in codes]
            yield i, [e.builder.fsub(e.builder.bitcast(each, _FLOATS), e.fill(_LARGE_VALUE + 128)) for each in large]

    def _pairs(self, e: Emitter, place: Any) -> Any:
        # Integers of eight bits are exact in bfloat16.
        bytes_ = load_vector(e, place, ir.VectorType(ir.IntType(8), 2 * LANES))
        halves = []
        for first in (0, LANES):
            lanes = ir.Constant(_INTS, list(range(first, first + LANES)))
            half = e.builder.shuffle_vector(bytes_, ir.Constant(bytes_.type, ir.Undefined), lanes)
            halves.append(e.builder.sitofp(e.builder.sext(half, _INTS), _FLOATS))
        function = cgutils.get_or_insert_function(
            e.builder.module, ir.FunctionType(_PAIRS, [_FLOATS, _FLOATS]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        )
        return e.builder.call(function, [halves[1], halves[0]])


class Codes(Kind):
    """Codes of ``bits`` bits from 0 on, as `code_words` has them; ``offset`` is taken off each.

    native: whether they become pairs of bfloat16
    """

    def __init__(self, bits: int, native: bool = NATIVE) -> None:
        self.native = native
        self._bits, self._words, depth = bits, words_of(bits), depth_of(bits)
        self.turn_bytes, self.column_bytes = 4 * PANEL * self._words, 4
        self.x_per_turn, self._places = depth // 2 if native else depth, depth // 2
        self._looks_up = native or (ISA.avx512f and bits <= MOST_LOOKED_UP)

    def prepare(self, e: Emitter, offset: Any) -> Any:
        """Registers with what each code stands for; or what turns a code with `_LARGE` into it."""
        if not self._looks_up:
            return e.fill(e.builder.fadd(e.builder.sitofp(offset, ir.FloatType()), ir.FloatType()(_LARGE_VALUE)))
        unsigned, signed = (self._registers(off) for off in (0, 1 << self._bits - 1))
        is_unsigned = e.builder.icmp_signed("==", offset, offset.type(0))
        return [e.builder.select(is_unsigned, *both) for both in zip(unsigned, signed, strict=True)]

    def _registers(self, offset: int) -> list[Any]:
        """Constants: a table of all codes' numbers, over as many registers as it takes, and repeated to fill one."""
        kind, value = (_WORDS, _bfloat16_bits) if self.native else (_FLOATS, float)
        numbers = [value(code - offset) for code in range(1 << self._bits)]
        numbers *= max(1, kind.count // len(numbers))
        return [ir.Constant(kind, numbers[at : at + kind.count]) for at in range(0, len(numbers), kind.count)]

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        words = self._words_at(e, pointer, vectors, _WORDS if self.native else _INTS)
        for place in range(self._places):
            pieces = pieces_of(self._bits, place)
            together = [self._together(e, own, pieces) for own in words]
            if self.native:
                yield place, [e.builder.bitcast(_looked_up(e, each, prepared), _PAIRS) for each in together]
                continue
            for half in range(2):
                shift = constant(_INTS, WORD_BITS * half)
                yield 2 * place + half, [self._widened(e, e.builder.lshr(each, shift), prepared) for each in together]

    def _words_at(self, e: Emitter, pointer: Any, vectors: int, kind: Any) -> list[list[Any]]:
        """A turn's words of some vectors of columns."""
        first = [_vector_at(e, pointer, v, 4) for v in range(vectors)]
        return [
            [load_vector(e, e.at(place, ir.IntType(64)(4 * PANEL * word)), kind) for word in range(self._words)]
            for place in first
        ]

    def _together(self, e: Emitter, words: list[Any], pieces: list[Piece]) -> Any:
        """A code in the lowest bits of each word; if it is of one piece, others' bits are above it."""
        parts = [e.builder.lshr(words[at.word], constant(words[at.word].type, at.at - at.to)) for at in pieces]
        if len(parts) == 1:
            return parts[0]
        masked = [e.builder.and_(part, _in_each(part.type, piece)) for part, piece in zip(parts, pieces, strict=True)]
        return reduce(e.builder.or_, masked)

    def _widened(self, e: Emitter, code: Any, prepared: Any) -> Any:
        if self._looks_up:
            return _looked_up(e, code, prepared)
        code = e.builder.and_(code, constant(_INTS, (1 << self._bits) - 1))
        large = e.builder.or_(code, constant(_INTS, _LARGE))
        return e.builder.fsub(e.builder.bitcast(large, _FLOATS), prepared)


class _OfIntegers(Kind):
    """Whose numbers are multiplied with pairs of int16, in int32."""

    def factor(self, e: Emitter, pointer: Any) -> Any:
        return splat(e, load_integer(e, pointer))

    def product(self, e: Emitter, total: Any, x: Any, weight: Any) -> Any:
        return e.multiply_add_integers(x, weight, total)


class IntegersOfInt8(_OfIntegers, Int8):
    def __init__(self) -> None:
        super().__init__()
        self.x_per_turn = 1

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        raw, places = ir.VectorType(ir.IntType(8), 2 * LANES), (_vector_at(e, pointer, v, 2) for v in range(vectors))
        yield 0, [e.builder.sext(load_vector(e, place, raw), _WORDS) for place in places]


class IntegersOfCodes(_OfIntegers, Codes):
    """Nothing is taken off the codes: sums begin at less than 0 instead."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.x_per_turn = self._places

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        words = self._words_at(e, pointer, vectors, _WORDS)
        for place in range(self._places):
            together = [self._together(e, own, pieces_of(self._bits, place)) for own in words]
            yield place, [e.builder.and_(each, constant(_WORDS, (1 << self._bits) - 1)) for each in together]


def _in_each(kind: Any, piece: Piece) -> Any:
    """A mask of a piece's bits, in each word of 16 bits."""
    mask = ((1 << piece.count) - 1) << piece.to
    return constant(kind, mask if kind == _WORDS else mask | mask << WORD_BITS)


def _looked_up(e: Emitter, index: Any, table: list[Any]) -> Any:
    """What one or two registers have at the lowest bits of each index: as many as count them all."""
    kind, is_words = table[0].type, table[0].type == _WORDS
    name, args = f"permvar.{'hi' if is_words else 'sf'}", [table[0], index]
    if len(table) == 2:
        name, args = f"vpermi2var.{'hi' if is_words else 'ps'}", [table[0], index, table[1]]
    signature = ir.FunctionType(kind, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(e.builder.module, signature, f"llvm.x86.avx512.{name}.512")
    return e.builder.call(function, args)


def _vector_at(e: Emitter, pointer: Any, vector: int, column_bytes: int) -> Any:
    return e.at(pointer, ir.IntType(64)(vector * LANES * column_bytes))


def _bfloat16_bits(number: int) -> int:
    """A small integer in bfloat16: the upper half of its float32."""
    import struct

    return struct.unpack("<I", struct.pack("<f", number))[0] >> 16
