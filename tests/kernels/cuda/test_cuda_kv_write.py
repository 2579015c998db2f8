"""KV writes in CUDA C++, executed on a CPU by `cuda_shim`: byte for byte what the reference writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gpu.cuda_shim import ShimPrograms

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.kv_write import CudaKvWrite
from headwise.kernels.gqa import gqa_layout, kv_views, scale_views
from headwise.kernels.reference import ReferenceKernels

ALIKE = [
    ("float16", "float16", 64),
    ("bfloat16", "bfloat16", 128),
    ("float32", "float32", 256),
    ("float16", "int8", 96),
    ("float16", "float8_e4m3fn", 256),
    ("bfloat16", "float8_e4m3fn", 128),
    ("float32", "int8", 64),
    ("bfloat16", "bfloat16", 512),
    ("float16", "int8", 512),
    ("bfloat16", "int4", 96),
    ("float32", "int4", 512),
]
VARIANTS = [
    *((*each, each[2]) for each in ALIKE),
    ("bfloat16", "bfloat16", 192, 128),
    ("float16", "int8", 96, 64),
    ("bfloat16", "int4", 192, 128),
    ("float32", "float32", 512, 32),
]
"""Dtypes of what is given and kept, and sizes of keys and values."""


@pytest.fixture(scope="module")
def shim() -> ShimPrograms:
    return ShimPrograms()


@dataclass(repr=False)
class Step:
    """One step's arguments; ``padded`` is the batch with padding behind its tokens and sequences."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    arena: np.ndarray
    layout: BlockLayout
    batch: AttentionBatch
    padded: AttentionBatch
    heads: HeadTable

    def __repr__(self) -> str:
        return f"Step({self.batch}, {self.layout.identity}, {self.key.dtype} {self.key.shape})"

    @property
    def tokens(self) -> int:
        return int(self.batch.cu_seqlens_q[-1])

    def expected(self, key: np.ndarray) -> np.ndarray:
        """The arena after the reference wrote ``key``, rounded as the input was, and the values."""
        arena = self.arena.copy()
        rows = slice(0, self.tokens)
        ReferenceKernels().write_kv(key[rows], self.value[rows], arena, self.layout, self.batch, self.heads)
        return arena

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.arena, self.layout, self.padded, self.heads


@st.composite
def steps(draw: st.DrawFn, dtype: str, cache: str, head_dim: int, value_dim: int) -> Step:
    """Sequences with and without queries, blocks that are not there, padding, rows within wider ones or not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=40))
    block_size, groups = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 3))
    kv_heads, q_heads = draw(st.sampled_from([(1, 1), (2, 6), (5, 5)]))
    spare_tokens, spare_sequences = draw(st.sampled_from([(0, 0), (3, 2), (1, 35)]))
    seq_lens = np.array([queries + before for queries, before in lengths], np.int32)
    cu = np.concatenate([[0], np.cumsum([queries for queries, _ in lengths])]).astype(np.int32)
    columns = -(-max(int(seq_lens.max()), 1) // block_size)
    tables = rng.permutation(len(lengths) * groups * columns).astype(np.int32)
    tables[rng.random(tables.shape) < 0.3] = -1
    wide = np.full(((len(lengths) + spare_sequences) * groups, columns + draw(st.integers(0, 2))), -1, np.int32)
    wide[: len(lengths) * groups, :columns] = tables.reshape(-1, columns)

    layout = gqa_layout(block_size, kv_heads, head_dim, cache, value_dim)
    arena = rng.integers(0, 256, len(tables) * layout.block_bytes, dtype=np.uint8)
    heads = HeadTable(
        rng.integers(0, groups, kv_heads, dtype=np.int32), rng.permutation(kv_heads).astype(np.int32),
        np.zeros(kv_heads, np.int32), np.zeros(kv_heads, np.int32),
    )  # fmt: skip
    batch = AttentionBatch(cu, seq_lens, wide[: len(lengths) * groups, :columns], groups)
    padded = AttentionBatch(
        np.pad(cu, (0, spare_sequences), mode="edge"), np.pad(seq_lens, (0, spare_sequences)), wide[:, :columns], groups
    )
    tokens, sizes = int(cu[-1]) + spare_tokens, [(q_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)]
    rows = [some_rows(rng, (tokens, *size), dtype).reshape(tokens, size[0] * size[1]) for size in sizes]
    parts = np.split(np.concatenate(rows, axis=1), np.cumsum([each.shape[1] for each in rows])[:-1], axis=1)
    query, key, value = (each.reshape(tokens, *size) for each, size in zip(parts, sizes, strict=True))
    for each in (query, key, value):
        each[int(cu[-1]) :] = np.nan
    if draw(st.booleans()):
        query, key, value = query.copy(), key.copy(), value.copy()
    return Step(query, key, value, arena, layout, batch, padded, heads)


def some_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rows of very different size, some zero, some of numbers that lie halfway between stored ones."""
    rows = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, (*shape[:2], 1))
    halves = rng.integers(-126, 127, shape) + 0.5
    halves[..., 0] = 127
    kind = rng.random((*shape[:2], 1))
    return np.where(kind < 0.1, 0.0, np.where(kind < 0.3, halves, rows)).astype(numpy_dtype(dtype))


def rotated(rows: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> np.ndarray:
    """In float32, product by product, rounded to the rows' dtype."""
    first, second = np.split(rows.astype(np.float32), 2, axis=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1).astype(rows.dtype)


@pytest.mark.parametrize(("dtype", "cache", "head_dim", "value_dim"), VARIANTS)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data(), backwards=st.booleans())
def test_writes_what_the_reference_writes_and_nothing_else(
    shim: ShimPrograms, dtype: str, cache: str, head_dim: int, value_dim: int, data: st.DataObject, backwards: bool
) -> None:
    step = data.draw(steps(dtype, cache, head_dim, value_dim))
    expected = step.expected(step.key)
    shim.backwards = backwards
    CudaKvWrite(shim).write_kv(step.key, step.value, *step.arguments)
    np.testing.assert_array_equal(step.arena, expected)


@pytest.mark.parametrize(("dtype", "cache", "head_dim", "value_dim"), VARIANTS)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 99), backwards=st.booleans())
def test_with_rope_queries_are_rotated_in_place_and_rotated_keys_are_written(
    shim: ShimPrograms,
    dtype: str,
    cache: str,
    head_dim: int,
    value_dim: int,
    data: st.DataObject,
    seed: int,
    backwards: bool,
) -> None:
    step = data.draw(steps(dtype, cache, head_dim, value_dim))
    angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, (len(step.key), head_dim // 2)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    key, query = step.key.copy(), step.query.copy()
    query[: step.tokens] = rotated(query, cosines, sines)[: step.tokens]
    expected = step.expected(rotated(key, cosines, sines))
    shim.backwards = backwards
    CudaKvWrite(shim).write_kv_rope(step.query, step.key, step.value, cosines, sines, *step.arguments)
    np.testing.assert_array_equal(step.arena, expected)
    np.testing.assert_array_equal(bits(step.query), bits(query))
    np.testing.assert_array_equal(bits(step.key), bits(key))


@pytest.mark.parametrize(("dtype", "cache", "head_dim", "value_dim"), VARIANTS)
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 99), backwards=st.booleans())
def test_a_bias_is_added_before_anything_else(
    shim: ShimPrograms,
    dtype: str,
    cache: str,
    head_dim: int,
    value_dim: int,
    data: st.DataObject,
    seed: int,
    backwards: bool,
) -> None:
    step, rng = data.draw(steps(dtype, cache, head_dim, value_dim)), np.random.default_rng(seed)
    of_query, of_key, of_value = (
        rng.standard_normal(rows.shape[1:]).astype(step.key.dtype) for rows in (step.query, step.key, step.value)
    )
    bias = np.concatenate([each.reshape(-1) for each in (of_query, of_key, of_value)])
    angles = rng.uniform(0, 2 * np.pi, (len(step.key), head_dim // 2)).astype(np.float32)
    cosines, sines = np.cos(angles), np.sin(angles)
    query, given_query = rotated(summed(step.query, of_query), cosines, sines), step.query.copy()
    key, value, given_value = summed(step.key, of_key), summed(step.value, of_value), step.value
    step.value = value
    expected = step.expected(rotated(key, cosines, sines))
    shim.backwards = backwards
    CudaKvWrite(shim).write_kv_rope(step.query, step.key, given_value, cosines, sines, *step.arguments, bias=bias)
    np.testing.assert_array_equal(step.arena, expected)
    given_query[: step.tokens] = query[: step.tokens]
    np.testing.assert_array_equal(bits(step.query), bits(given_query))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("dtype", "cache", "head_dim", "value_dim"), VARIANTS)
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data(), has_bias=st.booleans(), backwards=st.booleans())
def test_a_share_of_tokens_is_stored_and_queries_of_all_are_rotated(
    shim: ShimPrograms, dtype: str, cache: str, head_dim: int, value_dim: int, parts: int, data: st.DataObject,
    has_bias: bool, backwards: bool,
) -> None:  # fmt: skip
    step, rng, write = data.draw(steps(dtype, cache, head_dim, value_dim)), np.random.default_rng(0), CudaKvWrite(shim)
    shim.backwards, own = backwards, step.layout
    whole = replace(own, block_size=parts * own.block_size)
    numbers = sum(rows.shape[1] * rows.shape[2] for rows in (step.query, step.key, step.value))
    bias = rng.standard_normal(numbers).astype(step.key.dtype)
    angles = rng.uniform(0, 2 * np.pi, (len(step.key), head_dim // 2)).astype(np.float32)
    turning, more = (np.cos(angles), np.sin(angles)), {"bias": bias if has_bias else None}
    turned, where = step.query.copy(), (step.padded, step.heads)
    arena = np.full(len(step.arena) // own.block_bytes * whole.block_bytes, 0xFF, np.uint8)
    write.write_kv_rope(turned, step.key, step.value, *turning, arena, whole, *where, **more)
    for part in range(parts):
        query, found = step.query.copy(), np.full_like(step.arena, 0xFF)
        share = TokenShare(part, parts)
        write.write_kv_rope(query, step.key, step.value, *turning, found, own, *where, **more, share=share)
        np.testing.assert_array_equal(bits(query), bits(turned))
        np.testing.assert_array_equal(found, dealt(arena, whole, own, share))


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_a_share_is_stored_without_rotation_alike(shim: ShimPrograms, cache: str) -> None:
    rng, own = np.random.default_rng(1), gqa_layout(4, 1, 64, cache)
    batch = AttentionBatch(*(np.array(each, np.int32) for each in ([0, 9, 10], [30, 3])), np.arange(8).reshape(2, 4)
                           .astype(np.int32), 1)  # fmt: skip
    heads, write, whole = HeadTable(*np.zeros((4, 1), np.int32)), CudaKvWrite(shim), replace(own, block_size=8)
    key, value = rng.standard_normal((2, 10, 1, 64)).astype(np.float32)
    arena = np.full(8 * whole.block_bytes, 0xFF, np.uint8)
    write.write_kv(key, value, arena, whole, batch, heads)
    for part in range(2):
        found = np.full(8 * own.block_bytes, 0xFF, np.uint8)
        write.write_kv(key, value, found, own, batch, heads, TokenShare(part, 2))
        np.testing.assert_array_equal(found, dealt(arena, whole, own, TokenShare(part, 2)))
        assert (found != 0xFF).any()


def dealt(arena: np.ndarray, whole: BlockLayout, own: BlockLayout, share: TokenShare) -> np.ndarray:
    """What blocks of ``whole`` have of a share, in blocks of it, byte for byte."""
    blocks = len(arena) // whole.block_bytes
    expected = np.full(blocks * own.block_bytes, 0xFF, np.uint8)
    for to, every in zip(views(expected, own), views(arena, whole), strict=True):
        to[:] = every[:, :, share.part :: share.parts]
    return expected


def views(arena: np.ndarray, layout: BlockLayout) -> list[np.ndarray]:
    """Bytes ``[blocks, slots, tokens, any]`` of each role."""
    slots = arena.reshape(-1, layout.slots, layout.slot_bytes)
    return [
        slots[:, :, at : at + layout.block_size * role.token_bytes].reshape(
            *slots.shape[:2], layout.block_size, role.token_bytes
        )
        for role in layout.roles
        for at in [layout.role_offsets[role.name]]
    ]


def summed(rows: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """In float32, rounded once."""
    return (rows.astype(np.float32) + bias.astype(np.float32)).astype(rows.dtype)


def bits(rows: np.ndarray) -> np.ndarray:
    """NaN is as good as any other bits."""
    return np.ascontiguousarray(rows).view(np.uint8)


def write_row(shim: ShimPrograms, row: np.ndarray, cache: str) -> tuple[np.ndarray, np.float32]:
    """(``row`` as stored, its scale), by a step of one token and head."""
    layout = gqa_layout(1, 1, len(row), cache)
    arena, one = np.zeros(layout.block_bytes, np.uint8), np.zeros(1, np.int32)
    batch = AttentionBatch(np.array([0, 1], np.int32), one + 1, np.zeros((1, 1), np.int32), 1)
    rows = row.reshape(1, 1, -1)
    CudaKvWrite(shim).write_kv(rows, rows, arena, layout, batch, HeadTable(one, one, one, one))
    return kv_views(arena, layout)[0][0, 0, 0], scale_views(arena, layout)[0][0, 0, 0]


def test_every_number_of_float8_and_all_halfway_between_are_rounded_half_to_even(shim: ShimPrograms) -> None:
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # 0 to 448
    halfway = (numbers[1:] + numbers[:-1]) / 2
    above, below = np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(0))
    cases = np.concatenate([numbers, halfway, above, below])
    cases = np.concatenate([cases, -cases])
    cases = np.pad(cases, (0, -len(cases) % 63))
    for part in cases.reshape(-1, 63):
        row = np.append(part, np.float32(448.0))
        stored, scale = write_row(shim, row, "float8_e4m3fn")
        assert scale == 1.0
        np.testing.assert_array_equal(stored.view(np.uint8), row.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_a_launch_may_be_replayed_with_other_lengths_of_the_same_shapes(shim: ShimPrograms) -> None:
    """As a CUDA graph does: the same arguments and grid, other numbers in the arrays."""
    launches: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __call__(self, *arguments: Any) -> None:
            launches.append(arguments)

        def replay(self) -> None:
            self._kernel(*launches[0])

    class Recorder:
        def __call__(self, source: str, defines: Any) -> Recorder:
            self._program = shim(source, defines)
            return self

        def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Recorded:
            self.recorded = Recorded(self._program.kernel(name, threads))
            return self.recorded

    rng = np.random.default_rng(3)
    layout = gqa_layout(4, 1, 64, "float16")
    arena = np.zeros(6 * layout.block_bytes, np.uint8)
    batch = AttentionBatch(*(np.zeros(size, np.int32) for size in (4, 3)), np.zeros((3, 2), np.int32), 1)
    heads = HeadTable(*(np.zeros(1, np.int32) for _ in range(4)))
    key, value = rng.standard_normal((2, 3, 1, 64)).astype(np.float16)
    recorder = Recorder()
    CudaKvWrite(recorder).write_kv(key, value, arena, layout, batch, heads)
    for cu, seq_lens in (([0, 1, 2, 3], [8, 1, 5]), ([0, 0, 1, 1], [0, 3, 0]), ([0, 3, 3, 3], [7, 0, 0])):
        batch.cu_seqlens_q[:], batch.seq_lens[:] = cu, seq_lens
        batch.block_tables[:] = rng.permutation(6).reshape(3, 2)
        expected = arena.copy()
        ReferenceKernels().write_kv(key, value, expected, layout, batch, heads)
        recorder.recorded.replay()
        np.testing.assert_array_equal(arena, expected)
    assert len(launches) == 1


def a_step(dtype: str = "float16", cache: str = "float16", head_dim: int = 64) -> Step:
    layout = gqa_layout(4, 2, head_dim, cache)
    one = np.zeros(2, np.int32)
    batch = AttentionBatch(np.array([0, 2], np.int32), one[:1] + 2, np.zeros((1, 1), np.int32), 1)
    rows = np.zeros((2, 2, head_dim), numpy_dtype(dtype))
    return Step(
        rows, rows, rows, np.zeros(layout.block_bytes, np.uint8), layout, batch, batch, HeadTable(one, one, one, one)
    )


@pytest.mark.parametrize(
    ("dtype", "cache", "head_dim", "message"),
    [
        ("float16", "float16", 80, r"head.* 80 .* 64, 96, 128, 192, 256, 512"),
        ("float16", "bfloat16", 64, "float16 cannot be kept as bfloat16"),
        ("int8", "int8", 64, "int8 cannot be kept"),
        ("float64", "float64", 64, "float64 cannot be kept"),
    ],
)
def test_what_the_kernel_does_not_know_is_refused(
    shim: ShimPrograms, dtype: str, cache: str, head_dim: int, message: str
) -> None:
    step = a_step(dtype, cache, head_dim)
    with pytest.raises(ConfigError, match=message):
        CudaKvWrite(shim).write_kv(step.key, step.value, *step.arguments)


def test_arrays_that_the_kernel_would_misread_are_refused(shim: ShimPrograms) -> None:
    step = a_step()
    write = CudaKvWrite(shim)
    with pytest.raises(ConfigError, match=r"value is float16 \[1, 2, 64\]: give float16 \[2, 2, 64\]"):
        write.write_kv(step.key, step.value[:1], *step.arguments)
    with pytest.raises(ConfigError, match="value is float32"):
        write.write_kv(step.key, step.value.astype(np.float32), *step.arguments)
    with pytest.raises(ConfigError, match=r"key at .* side by side"):
        write.write_kv(step.key.transpose(1, 0, 2), step.value, *step.arguments)
    shifted = np.zeros(2 * 2 * 64 + 1, np.float16)[1:].reshape(2, 2, 64)
    with pytest.raises(ConfigError, match=r"value at .* aligned to 16"):
        write.write_kv(step.key, shifted, *step.arguments)
    with pytest.raises(ConfigError, match=r"arena begins at .* 16 bytes"):
        write.write_kv(step.key, step.value, np.zeros(step.arena.size + 8, np.uint8)[8:], *step.arguments[1:])
    with pytest.raises(ConfigError, match="blocks aligned to 8 bytes"):
        write.write_kv(step.key, step.value, step.arena, replace(step.layout, alignment=8), *step.arguments[2:])
    cosines = np.ones((2, 32), np.float32)
    with pytest.raises(ConfigError, match=r"sines are float16 .* give float32 \[2, 32\]"):
        write.write_kv_rope(step.query, step.key, step.value, cosines, cosines.astype(np.float16), *step.arguments)
