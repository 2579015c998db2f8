# mypy: ignore-errors
"""The inner loops of `matmul_jit`: some rows times some columns of a packed weight, in registers.

A *turn* is one round of an inner loop: as much depth as one vector of the packed weight holds. A weight's kind says
what that is, and how it becomes operands of a product (`Kind`). Where the CPU multiplies pairs of bfloat16, a step of
the product takes two numbers of depth at once; elsewhere everything is widened to float32 first, which computes the
same up to the rounding of float32 sums.

Whatever the number of rows and columns of a tile, an output is summed in the same order: what a row gives does not
depend on the rows beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwise.kernels.cpu.code_words import WORD_BITS, Piece, depth_of, pieces_of, words_of
from headwise.kernels.cpu.simd import ISA, LANES, BFloat, Emitter

NATIVE = ISA.avx512bf16 and ISA.avx512bw
"""Whether pairs of bfloat16 are multiplied as they are."""

PANEL = 64
"""Columns of a weight that are packed side by side."""

TILE_ROWS = (6 if ISA.avx512f else 4, 4, 2, 1)
"""Rows of a tile: with its columns, what fits in the registers."""

VECTORS, FEW_VECTORS = (4, 2) if ISA.avx512f else (2, 2)
"""Vectors of columns of a tile; the fewer where scales need registers, too."""


LINE = 64
"""Bytes of a cache line."""

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


def _constant(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _load(e: Emitter, pointer: Any, kind: Any) -> Any:
    return e.builder.load(e.builder.bitcast(pointer, kind.as_pointer()), align=16)


def splat(e: Emitter, number: Any) -> Any:
    """A vector of one 32-bit integer."""
    first = e.builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, _I32(0))
    return e.builder.shuffle_vector(first, ir.Constant(_INTS, ir.Undefined), _constant(_INTS, 0))


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
        number = e.builder.load(e.builder.bitcast(pointer, _I32.as_pointer()))
        return e.builder.bitcast(splat(e, number), _PAIRS if self.native else _FLOATS)

    def product(self, e: Emitter, total: Any, x: Any, weight: Any) -> Any:
        return pair_product(e, total, x, weight) if self.native else e.multiply_add(x, weight, total)


class Float32(Kind):
    turn_bytes, column_bytes, x_per_turn = 4 * PANEL, 4, 1
    native = False

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        yield 0, [_load(e, _vector_at(e, pointer, v, 4), _FLOATS) for v in range(vectors)]


class Bfloat16(Kind):
    turn_bytes, column_bytes, x_per_turn = 4 * PANEL, 4, 1 if NATIVE else 2

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        pairs = [_load(e, _vector_at(e, pointer, v, 4), _INTS) for v in range(vectors)]
        if self.native:
            yield 0, [e.builder.bitcast(pair, _PAIRS) for pair in pairs]
            return
        low = [e.builder.shl(pair, _constant(_INTS, 16)) for pair in pairs]
        high = [e.builder.and_(pair, _constant(_INTS, 0xFFFF0000)) for pair in pairs]
        yield from ((i, [e.builder.bitcast(half, _FLOATS) for half in halves]) for i, halves in enumerate((low, high)))


class Int8(Kind):
    turn_bytes, column_bytes, x_per_turn = 2 * PANEL, 2, 1 if NATIVE else 2

    def steps(self, e: Emitter, pointer: Any, vectors: int, prepared: Any) -> Iterator[tuple[int, list[Any]]]:
        places = [_vector_at(e, pointer, v, 2) for v in range(vectors)]
        if self.native:
            yield 0, [self._pairs(e, place) for place in places]
            return
        words = [e.builder.zext(_load(e, place, ir.VectorType(_I16, LANES)), _INTS) for place in places]
        low = [e.builder.and_(word, _constant(_INTS, 255)) for word in words]
        high = [e.builder.lshr(word, _constant(_INTS, 8)) for word in words]
        for i, codes in enumerate((low, high)):
            # With its sign turned a byte is a code plus 128: no sign to be spread, and nothing to be converted.
            large = [e.builder.xor(code, _constant(_INTS, _LARGE | 128)) for code in codes]
            yield i, [e.builder.fsub(e.builder.bitcast(each, _FLOATS), e.fill(_LARGE_VALUE + 128)) for each in large]

    def _pairs(self, e: Emitter, place: Any) -> Any:
        # Integers of eight bits are exact in bfloat16.
        bytes_ = _load(e, place, ir.VectorType(ir.IntType(8), 2 * LANES))
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
    """Codes of ``bits`` bits from 0 on, as `code_words` has them; ``offset`` is taken off each."""

    def __init__(self, bits: int) -> None:
        self._bits, self._words, depth = bits, words_of(bits), depth_of(bits)
        self.turn_bytes, self.column_bytes = 4 * PANEL * self._words, 4
        self.x_per_turn, self._places = depth // 2 if NATIVE else depth, depth // 2
        self._looks_up = NATIVE or (ISA.avx512f and bits <= MOST_LOOKED_UP)

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
        kind = _WORDS if self.native else _INTS
        first = [_vector_at(e, pointer, v, 4) for v in range(vectors)]
        words = [
            [_load(e, e.at(place, ir.IntType(64)(4 * PANEL * word)), kind) for word in range(self._words)]
            for place in first
        ]
        for place in range(self._places):
            pieces = pieces_of(self._bits, place)
            together = [self._together(e, own, pieces) for own in words]
            if self.native:
                yield place, [e.builder.bitcast(_looked_up(e, each, prepared), _PAIRS) for each in together]
                continue
            for half in range(2):
                shift = _constant(_INTS, WORD_BITS * half)
                yield 2 * place + half, [self._widened(e, e.builder.lshr(each, shift), prepared) for each in together]

    def _together(self, e: Emitter, words: list[Any], pieces: list[Piece]) -> Any:
        """A code in the lowest bits of each word; if it is of one piece, others' bits are above it."""
        parts = [e.builder.lshr(words[at.word], _constant(words[at.word].type, at.at - at.to)) for at in pieces]
        if len(parts) == 1:
            return parts[0]
        masked = [e.builder.and_(part, _in_each(part.type, piece)) for part, piece in zip(parts, pieces, strict=True)]
        return reduce(e.builder.or_, masked)

    def _widened(self, e: Emitter, code: Any, prepared: Any) -> Any:
        if self._looks_up:
            return _looked_up(e, code, prepared)
        code = e.builder.and_(code, _constant(_INTS, (1 << self._bits) - 1))
        large = e.builder.or_(code, _constant(_INTS, _LARGE))
        return e.builder.fsub(e.builder.bitcast(large, _FLOATS), prepared)


def _in_each(kind: Any, piece: Piece) -> Any:
    """A mask of a piece's bits, in each word of 16 bits."""
    mask = ((1 << piece.count) - 1) << piece.to
    return _constant(kind, mask if kind == _WORDS else mask | mask << WORD_BITS)


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


def plain_tile(kind: Kind, rows: int, vectors: int, lines: int = 0) -> Any:
    """Make ``tile[r, j] (+)= x[r] . weight[:, j]`` of a weight without scales.

    Arguments: ``x, x_at, x_stride`` (in 32-bit numbers), ``weight, weight_at`` (bytes, of the first turn and column),
    ``turns``, ``tile, tile_at, fresh``: whether the tile begins at 0; ``ahead``: so many ``lines`` are prefetched that
    lie so many bytes behind each turn. Rows of a tile are `PANEL` apart.
    """

    @intrinsic
    def run(typing, x, xa, xs, w, wa, turns, tile, ta, fresh, ahead):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            x, xa, xs, w, wa, turns, tile, ta, fresh, ahead = e.args
            x_rows, w = [e.at(x, xa, e.times(xs, row)) for row in range(rows)], e.at(w, wa)
            cells = _cells(e, e.at(tile, ta), rows, vectors)
            is_fresh = builder.icmp_signed("!=", fresh, fresh.type(0))
            sums = [e.variable(builder.select(is_fresh, e.fill(0.0), e.load(cell))) for cell in cells]
            _sum_turns(e, kind, x_rows, w, turns, sums, vectors, None, ahead, lines)
            for cell, total in zip(cells, sums, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, n, w, n, n, tile, n, n, n), emit

    return run


def grouped_tile(kind: Kind, rows: int, vectors: int) -> Any:
    """As `plain_tile`, of a weight with a scale, and perhaps a minimum, per column and group of turns.

    Further arguments: ``offset`` of the codes, ``scales, minima`` (float16), ``scales_at`` (of the first group and
    column), ``sums, sums_at, sums_stride`` (of ``x`` by group, where there are minima), ``groups``, ``group_turns``,
    ``has_minima``.
    """

    @intrinsic
    def run(
        typing,
        x,
        xa,
        xs,
        w,
        wa,
        offset,
        scales,
        minima,
        sa,
        xsum,
        ga,
        gs,
        groups,
        group_turns,
        has_min,
        tile,
        ta,
        fresh,
    ):
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            e = Emitter(context, builder, signature, args)
            (
                x,
                xa,
                xs,
                w,
                wa,
                offset,
                scales,
                minima,
                sa,
                xsum,
                ga,
                gs,
                groups,
                group_turns,
                has_min,
                tile,
                ta,
                fresh,
            ) = e.args
            cells = _cells(e, e.at(tile, ta), rows, vectors)
            is_fresh = builder.icmp_signed("!=", fresh, fresh.type(0))
            totals = [e.variable(builder.select(is_fresh, e.fill(0.0), e.load(cell))) for cell in cells]
            sums = [e.variable(e.fill(0.0)) for _ in cells]
            prepared = kind.prepare(e, offset)
            with cgutils.for_range(builder, groups) as loop:
                turn = builder.mul(loop.index, group_turns)
                x_at = builder.add(xa, e.times(turn, kind.x_per_turn))
                x_rows = [e.at(x, x_at, e.times(xs, row)) for row in range(rows)]
                for total in sums:
                    e.update(total, e.fill(0.0))
                _sum_turns(
                    e, kind, x_rows, e.at(w, wa, e.times(turn, kind.turn_bytes)), group_turns, sums, vectors, prepared
                )
                at = builder.add(sa, e.times(loop.index, PANEL))
                for cell, total in enumerate(totals):
                    scale = _half_vector(e, scales, at, cell % vectors)
                    e.update(total, e.multiply_add(e.value(sums[cell]), scale, e.value(total)))
                with builder.if_then(builder.icmp_signed("!=", has_min, has_min.type(0))):
                    for cell, total in enumerate(totals):
                        minimum = _half_vector(e, minima, at, cell % vectors)
                        row_sum = e.fill(builder.load(e.at(xsum, ga, e.times(gs, cell // vectors), loop.index)))
                        e.update(total, e.multiply_add(row_sum, minimum, e.value(total)))
            for cell, total in zip(cells, totals, strict=True):
                e.store(e.value(total), cell)
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, n, w, n, n, scales, minima, n, xsum, n, n, n, n, n, tile, n, n), emit

    return run


def _cells(e: Emitter, tile: Any, rows: int, vectors: int) -> list[Any]:
    n = ir.IntType(64)
    return [e.at(tile, n(row * PANEL + v * LANES)) for row in range(rows) for v in range(vectors)]


def _sum_turns(
    e: Emitter,
    kind: Kind,
    x_rows: list[Any],
    w: Any,
    turns: Any,
    sums: list[Any],
    vectors: int,
    prepared: Any,
    ahead: Any = None,
    lines: int = 0,
) -> None:
    """Add ``turns`` turns to the variables ``sums``, ``vectors`` for each row; ``ahead, lines`` as in `plain_tile`."""
    with cgutils.for_range(e.builder, turns) as loop:
        pointer = e.at(w, e.times(loop.index, kind.turn_bytes))
        for line in range(lines):
            e.prefetch(e.at(pointer, ahead, ahead.type(line * LINE)))
        at = e.times(loop.index, kind.x_per_turn)
        for step, operands in kind.steps(e, pointer, vectors, prepared):
            for row, x in enumerate(x_rows):
                factor = kind.factor(e, e.at(x, at, at.type(step)))
                for v, operand in enumerate(operands):
                    total = sums[row * vectors + v]
                    e.update(total, kind.product(e, e.value(total), factor, operand))


def _half_vector(e: Emitter, array: Any, at: Any, vector: int) -> Any:
    """A vector of finite float16 numbers, as float32."""
    return _widened_halves(e, _load(e, e.at(array, at, at.type(vector * LANES)), ir.VectorType(_I16, LANES)))


def _widened_halves(e: Emitter, bits: Any) -> Any:
    if ISA.f16c:
        return e.builder.fpext(e.builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    # By integers: LLVM would call a function for it, which is not there. Exponents are 112 apart.
    words = e.builder.zext(bits, _INTS)
    sign = e.builder.shl(e.builder.and_(words, _constant(_INTS, 0x8000)), _constant(_INTS, 16))
    rest = e.builder.shl(e.builder.and_(words, _constant(_INTS, 0x7FFF)), _constant(_INTS, 13))
    return e.builder.fmul(e.builder.bitcast(e.builder.or_(sign, rest), _FLOATS), e.fill(2.0**112))


@intrinsic
def widened_half(typing, bits):
    """A finite float16 number, given as its bits, as float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        first = builder.insert_element(ir.Constant(ir.VectorType(_I16, LANES), ir.Undefined), e.args[0], _I32(0))
        return builder.extract_element(_widened_halves(e, first), _I32(0))

    return types.float32(types.uint16), emit
