"""What the CPU's kernels promise beyond the contract: fewer bits, rotation, views, results that depend on no one else.

The oracle computes on what the arena holds, so a tolerance is of the arithmetic alone: float32 throughout, or queries
and probabilities as bfloat16 (8 bits), or, of one token over int8, as 15 bits of their row's largest. Keys and values
of int4, which the arena has exactly, are rounded to bfloat16 when they are expanded: against such as are so rounded,
errors are those of bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attention_scene import Case, Scene
from support.other_cpus import assert_passes

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, RotatingKernels
from headwise.kernels.bfloat16 import to_float32
from headwise.kernels.cpu.attention import NumbaKernels
from headwise.kernels.cpu.attention_pass import STORED
from headwise.kernels.cpu.attention_plan import Plan, Planner
from headwise.kernels.gqa import bit_views, gqa_layout
from headwise.kernels.nibbles import GROUP, INT4
from headwise.kernels.reference import ReferenceKernels

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2, "int8": 1.5e-2, "float8_e4m3fn": 1.5e-2, "int4": 2.5e-2}
ONE_TOKEN_TOLERANCE = {**TOLERANCE, "int8": 5e-4}


def head_dim_for(dtype: str, dim: int) -> int:
    """Heads of int4 are whole groups of 32."""
    return -(-dim // GROUP) * GROUP if dtype == INT4 else dim


@pytest.fixture(scope="module")
def kernels() -> NumbaKernels:
    return NumbaKernels(threads=2)


@pytest.fixture(params=STORED)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def assert_right(kernels: NumbaKernels, case: Case) -> None:
    scene = Scene(case)
    tolerance = (TOLERANCE if max(case.query_lens) > 1 else ONE_TOKEN_TOLERANCE)[case.dtype]
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    query_lens = [draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths]
    window = st.tuples(st.integers(1, 80), st.integers(0, 70))
    return Case(
        query_lens=tuple(query_lens),
        seq_lens=tuple(lengths),
        policies=tuple(draw(st.lists(st.one_of(st.just((0, 0)), window), min_size=1, max_size=3))),
        share=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([16, 48, 64])),
        block_size=draw(st.sampled_from([1, 3, 16, 24, 64, 96])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        has_sink_logits=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def test_any_batch_matches_dense_attention(kernels: NumbaKernels, dtype: str) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def check(case: Case) -> None:
        assert_right(kernels, replace(case, dtype=dtype, head_dim=head_dim_for(dtype, case.head_dim)))

    check()


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (1, 0), (17, 1), (40, 20), (16, 200), (300, 4)])
@pytest.mark.parametrize("queries", [1, 30, 170])
def test_windows_and_sinks_of_any_dtype(
    kernels: NumbaKernels, dtype: str, window: int, sink: int, queries: int
) -> None:
    assert_right(kernels, Case((queries,), (403,), ((window, sink),), share=3, head_dim=64, block_size=16, dtype=dtype))


def test_tokens_of_an_item_see_all_of_it_in_any_dtype(kernels: NumbaKernels, dtype: str) -> None:
    items = ((0, 30, 300), (0, 310, 330), (1, 0, 40))
    case = Case((290, 20, 1), (331, 90, 50), ((0, 0), (40, 4)), share=3, head_dim=64, block_size=16, items=items)
    assert_right(kernels, replace(case, dtype=dtype))


@pytest.mark.parametrize(("share", "head_dim"), [(1, 32), (3, 64), (4, 256), (8, 128), (5, 80), (2, 96), (6, 16)])
def test_common_head_geometries_of_any_dtype(kernels: NumbaKernels, dtype: str, share: int, head_dim: int) -> None:
    head_dim = head_dim_for(dtype, head_dim)
    for queries in ((1, 1), (1, 70)):
        case = Case(queries, (131, 90), ((0, 0), (64, 4)), share=share, head_dim=head_dim, block_size=64, dtype=dtype)
        assert_right(kernels, case)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size"),
    [
        pytest.param(*dims, block_size, marks=() if block_size == blocks else pytest.mark.soak)
        for *dims, blocks in ((192, 128, 16), (96, 64, 128), (64, 16, 16), (80, 48, 128))
        for block_size in (16, 128)
    ],
)
def test_values_that_are_smaller_than_keys(
    kernels: NumbaKernels, dtype: str, head_dim: int, value_dim: int, block_size: int
) -> None:
    sizes = {"head_dim": head_dim_for(dtype, head_dim), "value_dim": head_dim_for(dtype, value_dim)}
    for queries, lengths in (((1, 1), (331, 90)), ((1, 170), (131, 300)), ((1, 40), (1999, 4500))):
        case = Case(queries, lengths, ((0, 0), (128, 4)), share=3, block_size=block_size, dtype=dtype, **sizes)
        assert_right(kernels, replace(case, has_sink_logits=True))


def test_contexts_long_enough_to_be_split(kernels: NumbaKernels, dtype: str) -> None:
    for queries, length in ((1, 1999), (40, 4500)):
        assert_right(kernels, Case((queries,), (length,), ((0, 0),), share=3, head_dim=64, block_size=64, dtype=dtype))


@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_rows_that_are_no_whole_vectors_take_nothing_of_what_lies_behind_them(
    kernels: NumbaKernels, dtype: str, head_dim: int
) -> None:
    # Scratch is not initialised: whatever a call before left there is where this one's vectors end.
    head_dim = head_dim_for(dtype, head_dim)
    poison = Scene(Case((1, 9), (40, 40), ((0, 0),), share=5, head_dim=256, block_size=1, dtype=dtype))
    poison.query[:] = np.nan
    for _ in range(3):
        poison.attend(kernels)
        case = Case((1, 1, 46, 1), (46, 1, 125, 33), ((0, 0),), head_dim=head_dim, block_size=1, dtype=dtype)
        assert_right(kernels, case)


def test_a_nan_in_a_query_shows_in_that_query_only(kernels: NumbaKernels, dtype: str) -> None:
    scene = Scene(Case((1, 1, 4), (90, 30, 30), ((0, 0),), head_dim=64, dtype=dtype))
    scene.query[[0, 4]] = np.nan
    out = scene.attend(kernels)
    assert np.isnan(out[[0, 4]]).all()
    assert np.isfinite(out[[1, 2, 3, 5]]).all()


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_scores_of_any_size_stay_finite(kernels: NumbaKernels, dtype: str, softcap: float) -> None:
    scene = Scene(Case((1, 40), (40, 90), ((0, 0), (20, 4)), head_dim=64, softcap=softcap, dtype=dtype))
    scene.query *= 1e4
    assert np.isfinite(scene.attend(kernels)).all()


def test_a_sequence_has_the_same_bits_in_any_company_and_on_any_number_of_threads(dtype: str) -> None:
    case = Case((1, 75, 1), (900, 800, 2500), ((0, 0), (300, 4)), share=3, head_dim=64, block_size=64, dtype=dtype)
    scene = Scene(case)
    together = scene.attend(NumbaKernels(threads=2))
    np.testing.assert_array_equal(scene.attend(NumbaKernels(threads=1)), together)
    whole = scene.batch
    for index, (first, last) in enumerate(zip(whole.cu_seqlens_q, whole.cu_seqlens_q[1:], strict=False)):
        tables = whole.block_tables[index * whole.groups : (index + 1) * whole.groups]
        cu = np.array([0, last - first], np.int32)
        alone = AttentionBatch(cu, whole.seq_lens[index : index + 1], tables, whole.groups)
        out = np.empty((last - first, *scene.query.shape[1:]), np.float32)
        arguments = (scene.arena, scene.layout, alone, scene.heads)
        NumbaKernels(threads=2).attend(scene.query[first:last], *arguments, scale=scene.scale, softcap=0.0, out=out)
        np.testing.assert_array_equal(out, together[first:last])


@pytest.mark.parametrize(("length", "share"), [(9, 3), (70, 5), (261, 3), (516, 2), (771, 8), (1283, 1), (2050, 3)])
def test_tokens_that_follow_each_other_have_the_same_bits_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, dtype: str, length: int, share: int
) -> None:
    """Across the lengths from which on a token's keys are cut otherwise. Of int8, whose probabilities are rounded by
    the scales of some keys at a time, the bits may differ."""
    count = min(11, length)
    case = Case((count,), (length,), ((0, 0), (300, 4)), share=share, head_dim=64, block_size=16, dtype=dtype)
    scene, found = Scene(replace(case, has_sink_logits=True)), []
    items = spied_items(monkeypatch)
    follows = np.array([0] + [1] * (count - 1), np.int32)
    lens = np.arange(length - count + 1, length + 1, dtype=np.int32)
    tables = np.tile(scene.batch.block_tables, (count, 1))
    for told in (follows, None):
        batch = AttentionBatch(np.arange(count + 1, dtype=np.int32), lens, tables, scene.groups, follows=told)
        scene.batch = batch
        found.append(scene.attend(NumbaKernels(threads=2)))
    if dtype == "int8":
        np.testing.assert_allclose(*found, atol=1e-4)
    else:
        np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], scene.attend(ReferenceKernels()), atol=0.02)
    assert 2 <= items[0] < items[-1] == 2 * count, "together"


@pytest.mark.parametrize(
    ("lengths", "shared", "items"),
    [
        pytest.param((1600, 1900, 1537), (0, 1536, 1536), 4, id="what is its own is less than a part, or several"),
        pytest.param((700, 800), (0, 688), 3, id="a part ends within a shared block"),
        pytest.param((600, 300, 900), (0, 256, 256), 3, id="one is too short for a part besides"),
        pytest.param((600, 700), (0, 240), 2, id="not a part is shared"),
        pytest.param((900, 950, 800, 801, 900), (0, 640, 0, 512, 512), 7, id="two groups"),
        pytest.param((300,) + (1300,) * 19, (0, 0) + (1024,) * 18, 1 + 19 + 3, id="more than an item has rows"),
    ],
)
def test_sequences_that_share_their_first_blocks_have_the_same_bits_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, dtype: str, lengths: tuple[int, ...], shared: tuple[int, ...], items: int
) -> None:
    case = Case(
        (1,) * len(lengths), lengths, ((0, 0), (300, 4)), share=3, head_dim=64, block_size=16, dtype=dtype,
        has_sink_logits=True, shared=shared,
    )  # fmt: skip
    scene = Scene(case)
    made = spied_items(monkeypatch)
    found = scene.attend(NumbaKernels(threads=2))
    scene.batch = replace(scene.batch, shared=None)
    np.testing.assert_array_equal(found, scene.attend(NumbaKernels(threads=1)))
    np.testing.assert_allclose(found, scene.expected(), rtol=0, atol=ONE_TOKEN_TOLERANCE[dtype])
    assert (made[0], made[-1]) == (len(lengths) + items, 2 * len(lengths)), "those of a head with a window are alone"


@pytest.mark.parametrize(
    ("counts", "items"), [((3, 1, 2), 1 + 4), ((1, 1, 9), 2 + 3 + 1), ((2, 1, 1), 1 + 4), ((1, 8, 1), 2 + 2 + 2)]
)
def test_drafts_are_of_their_sequences_group(
    monkeypatch: pytest.MonkeyPatch, dtype: str, counts: tuple[int, ...], items: int
) -> None:
    """Of the first one they go across a length from which on a token's keys are in one more part."""
    policies = ((0, 0), (300, 4))
    case = Case((1, 1, 1), (768, 900, 1020), policies, share=3, head_dim=64, block_size=16, shared=(0, 512, 512))
    scene, index = Scene(replace(case, dtype=dtype)), np.repeat(np.arange(3), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    lens = (np.array(case.seq_lens)[index] - np.array(counts)[index] + 1 + within).astype(np.int32)
    tables = scene.batch.block_tables.reshape(3, scene.groups, -1)[index].reshape(-1, scene.batch.block_tables.shape[1])
    scene.query = np.random.default_rng(1).standard_normal((len(index), 6, 64)).astype(np.float32)
    shared, follows = np.full(len(index), 512, np.int32), (within > 0).astype(np.int32)
    shared[0] = 0
    made, found = spied_items(monkeypatch), []
    for told in ({"follows": follows, "shared": shared}, {}):
        scene.batch = AttentionBatch(np.arange(len(index) + 1, dtype=np.int32), lens, tables, scene.groups, **told)
        found.append(scene.attend(NumbaKernels(threads=2)))
    if dtype == "int8":  # as of drafts alone
        np.testing.assert_allclose(*found, atol=1e-4)
    else:
        np.testing.assert_array_equal(*found)
    assert made[0] == items + len(index), "a head with a window sees other tokens of each"


def spied_items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items each plan has that is made from now on."""
    counts, plan = list[int](), Planner.plan

    def watched(self: Planner, batch: AttentionBatch) -> Plan:
        found = plan(self, batch)
        counts.append(len(found.items))
        return found

    monkeypatch.setattr(Planner, "plan", watched)
    return counts


# --- writes -------------------------------------------------------------------------------------------------------


class Writing:
    """A step of several sequences whose new tokens are slices of one ``[tokens, heads, dim]`` array."""

    def __init__(
        self, dtype: str, head_dim: int, query_lens: tuple[int, ...], seed: int = 0, value_dim: int | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        scene = Scene(Case(query_lens, tuple(n + 9 for n in query_lens), ((0, 0), (7, 2)), head_dim=head_dim))
        self.batch, self.heads, tokens = scene.batch, scene.heads, sum(query_lens)
        self.layout = gqa_layout(4, scene.slots, head_dim, dtype, value_dim)
        self.blocks = scene.arena.size // scene.layout.block_bytes
        sizes = 2.0 ** rng.integers(-12, 12, (tokens, 8, 1))
        self.qkv = (rng.standard_normal((tokens, 8, head_dim)) * sizes).astype(np.float32)
        self.qkv[0, 6:] = 0.0  # a key and value of zeros
        angles = rng.uniform(0, 2 * np.pi, (tokens, head_dim // 2)).astype(np.float32)
        self.cosines, self.sines = np.cos(angles), np.sin(angles)

    def arena(self) -> np.ndarray:
        return np.full(self.blocks * self.layout.block_bytes, 0xFF, np.uint8)

    def rotated(self, rows: np.ndarray) -> np.ndarray:
        """In float32, product by product."""
        first, second = np.split(rows, 2, axis=-1)
        cosines, sines = self.cosines[:, None], self.sines[:, None]
        return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("query_lens", [(1,), (3, 0, 9), (200, 1)])
def test_writes_are_bit_by_bit_those_of_the_reference(
    kernels: NumbaKernels, dtype: str, head_dim: int, query_lens: tuple[int, ...]
) -> None:
    step = Writing(dtype, head_dim_for(dtype, head_dim), query_lens)
    key, value = step.qkv[:, 4:6], step.qkv[:, 6:]
    expected, arena = step.arena(), step.arena()
    ReferenceKernels().write_kv(key, value, expected, step.layout, step.batch, step.heads)
    kernels.write_kv(key, value, arena, step.layout, step.batch, step.heads)
    np.testing.assert_array_equal(arena, expected)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("query_lens", [(1,), (3, 0, 9), (200, 1)])
def test_with_rope_views_of_one_array_are_rotated_and_written_without_a_copy(
    kernels: NumbaKernels, dtype: str, head_dim: int, query_lens: tuple[int, ...]
) -> None:
    step = Writing(dtype, head_dim_for(dtype, head_dim), query_lens)
    assert isinstance(kernels, RotatingKernels)
    before, query, key, value = step.qkv.copy(), step.qkv[:, :4], step.qkv[:, 4:6], step.qkv[:, 6:]
    rotated, expected, arena = step.rotated(query), step.arena(), step.arena()
    ReferenceKernels().write_kv(step.rotated(key), value, expected, step.layout, step.batch, step.heads)
    angles = step.cosines[:, None], step.sines
    kernels.write_kv_rope(query, key, value, *angles, arena, step.layout, step.batch, step.heads)
    np.testing.assert_array_equal(arena, expected)
    np.testing.assert_array_equal(step.qkv[:, :4], rotated)
    np.testing.assert_array_equal(step.qkv[:, 4:], before[:, 4:])


@pytest.mark.parametrize("value_dim", [16, 48, 64])
def test_values_of_another_size_are_written_bit_by_bit_as_the_reference_does(
    kernels: NumbaKernels, dtype: str, value_dim: int
) -> None:
    value_dim = head_dim_for(dtype, value_dim)
    step = Writing(dtype, 96, (3, 0, 9), value_dim=value_dim)
    query, key, value = step.qkv[:, :4], step.qkv[:, 4:6], step.qkv[:, :2, :value_dim].copy()
    expected, arena = step.arena(), step.arena()
    ReferenceKernels().write_kv(step.rotated(key), value, expected, step.layout, step.batch, step.heads)
    kernels.write_kv_rope(query, key, value, step.cosines, step.sines, arena, step.layout, step.batch, step.heads)
    np.testing.assert_array_equal(arena, expected)


def test_nan_is_written_as_nan(kernels: NumbaKernels) -> None:
    step = Writing("bfloat16", 16, (1,))
    step.qkv[:] = np.array([0x7F800001], np.uint32).view(np.float32)  # whose highest 16 bits alone would be infinity
    arena = np.zeros(step.blocks * step.layout.block_bytes, np.uint8)
    kernels.write_kv(step.qkv[:, 4:6], step.qkv[:, 6:], arena, step.layout, step.batch, step.heads)
    assert np.isnan(to_float32(bit_views(arena, step.layout)[0])).any()
    assert not np.isinf(to_float32(bit_views(arena, step.layout)[0])).any()


def test_attend_takes_queries_whose_rows_lie_apart(kernels: NumbaKernels, dtype: str) -> None:
    scene = Scene(Case((1, 40), (90, 80), ((0, 0),), share=3, head_dim=64, dtype=dtype))
    expected = scene.attend(kernels)
    wide = np.full((len(scene.query), 5, 64), np.nan, np.float32)
    wide[:, 1:4] = scene.query
    out = np.empty_like(scene.query)
    arguments = (scene.arena, scene.layout, scene.batch, scene.heads)
    kernels.attend(wide[:, 1:4], *arguments, scale=scene.scale, softcap=0.0, out=out)
    np.testing.assert_array_equal(out, expected)


def test_arrays_that_do_not_fit_are_refused(kernels: NumbaKernels) -> None:
    step = Writing("float32", 16, (3,))
    query, key, value = step.qkv[:, :4], step.qkv[:, 4:6], step.qkv[:, 6:]
    rest = (step.arena(), step.layout, step.batch, step.heads)
    turned = np.ascontiguousarray(step.qkv.transpose(0, 2, 1)).transpose(0, 2, 1)
    for cosines, sines in ((step.cosines[:2], step.sines), (step.cosines, step.sines[:, :4])):
        with pytest.raises(ValueError, match="do not fit"):
            kernels.write_kv_rope(query, key, value, np.ascontiguousarray(cosines), np.ascontiguousarray(sines), *rest)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.write_kv(turned[:, 4:6], value, *rest)
    with pytest.raises(ValueError, match="the size of values is 32, larger than that of the block layout, 16"):
        kernels.write_kv(key, np.zeros((3, 2, 32), np.float32), *rest)
    with pytest.raises(ConfigError, match=r"float32, bfloat16, int8, float8_e4m3fn, int4, got float16"):
        kernels.prepare("float16")


# --- other CPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("cpu", ["without AVX-512", "without bfloat16"])
def test_attention_compiled_for_other_cpus_passes_all_tests(cpu: str) -> None:
    assert_passes(__file__, cpu)
