"""What the attention kernels of a GPU promise beyond the contract of all: other dtypes, tiles, splits and launches.

They are run by Triton's interpreter on poisoned arenas, against the reference kernels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.attention_scene import Case
from support.gpu.typed_scene import Dtypes, TypedScene

from headwise.errors import ConfigError
from headwise.kernels.gqa import gqa_layout, scale_views
from headwise.kernels.nibbles import INT4
from headwise.kernels.reference import ReferenceKernels

pytest.importorskip("triton")

import triton.language as tl
from support.gpu.interpreted_attention import SMALL, triton_attention
from triton.runtime.interpreter import interpreter_builder

from headwise.kernels.cuda import interpreter
from headwise.kernels.cuda.attention import AttentionShape, TritonAttention, Tuning, check_supported, variants_of
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.cuda.tiles import Tile, tma_tile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
OF_STEPS = 2e-2
"""Tolerance of elements in four bits in float16, which are a 32nd of a step off at most: steps are 0.3 here."""
EXACT = Dtypes()


def assert_right(case: Case, dtypes: Dtypes = EXACT, attention: TritonAttention | None = None) -> None:
    scene = TypedScene(case, dtypes)
    got, expected = scene.answer(attention or triton_attention()), scene.answer(ReferenceKernels())
    tolerance = TOLERANCE[dtypes.query]
    if dtypes.kv == INT4 and dtypes.query != "float32":
        tolerance += OF_STEPS
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seq_lens = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    query_lens = [draw(st.one_of(st.integers(0, 1), st.integers(0, length))) for length in seq_lens]
    window = st.tuples(st.integers(1, 60), st.integers(0, 50))
    return Case(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        policies=tuple(draw(st.lists(st.one_of(st.just((0, 0)), window), min_size=1, max_size=2))),
        share=draw(st.sampled_from([1, 2, 3, 7])),
        head_dim=64,
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        has_sink_logits=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


NARROW = [Dtypes("float16", "float16"), Dtypes("float32", "int8"), Dtypes("bfloat16", INT4)]


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(case=cases(), dtypes=st.sampled_from(NARROW))
@example(case=Case((1,), (2,), ((0, 0),) * 2, share=7, head_dim=64, block_size=1, seed=1762), dtypes=NARROW[2])
def test_any_batch_of_narrow_numbers_matches_the_reference(case: Case, dtypes: Dtypes) -> None:
    assert_right(case, dtypes)


@pytest.mark.parametrize("kv", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", INT4])
@pytest.mark.parametrize("query", ["float32", "float16", "bfloat16"])
def test_every_pair_of_dtypes_prefill_and_decode(query: str, kv: str) -> None:
    case = Case((1, 20), (70, 40), ((0, 0), (20, 4)), share=2, head_dim=64, block_size=16)
    assert_right(case, Dtypes(query, kv))


@pytest.mark.parametrize(("share", "head_dim"), [(3, 64), (8, 128), (4, 256), (2, 96), (1, 64), (20, 64), (2, 32)])
def test_common_head_geometries_in_tiles_of_production(share: int, head_dim: int) -> None:
    case = Case((1, 70), (131, 90), ((0, 0), (64, 4)), share=share, head_dim=head_dim, block_size=64)
    assert_right(case, Dtypes("float16", "float16"), triton_attention(Tuning()))


@pytest.mark.parametrize("kv", ["int8", "float8_e4m3fn", INT4])
@pytest.mark.parametrize(("share", "head_dim", "block_size"), [(4, 128, 64), (2, 96, 16), (1, 256, 64), (3, 32, 32)])
def test_decodes_over_few_bits_in_tiles_of_production(share: int, head_dim: int, block_size: int, kv: str) -> None:
    """Several numbers of which are read as one, by tiles within a block and over several; in one split and in some."""
    policies = ((0, 0), (100, 4))
    case = Case((1, 1, 1), (300, 70, 1), policies, share=share, head_dim=head_dim, block_size=block_size)
    assert_right(replace(case, softcap=5.0), Dtypes("bfloat16", kv), triton_attention(Tuning(split_bytes=0)))
    assert_right(replace(case, has_sink_logits=True), Dtypes("float16", kv), triton_attention(Tuning(), sms=1))


@pytest.mark.parametrize("kv", ["float16", "int8", "float8_e4m3fn", INT4])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size"), [(192, 128, 64), (96, 64, 16), (128, 96, 64), (192, 192, 64)]
)
def test_values_that_are_smaller_than_keys_in_tiles_of_production(
    head_dim: int, value_dim: int, block_size: int, kv: str
) -> None:
    policies, sizes = ((0, 0), (128, 4)), {"head_dim": head_dim, "value_dim": value_dim, "block_size": block_size}
    case = Case((1, 40), (300, 210), policies, share=4, has_sink_logits=True, **sizes)
    assert_right(case, Dtypes("float16", kv), triton_attention(Tuning(split_bytes=0)))


def test_results_of_512_that_two_programs_share_may_be_of_smaller_values() -> None:
    case = Case((1, 70), (131, 90), ((0, 0), (40, 4)), share=4, head_dim=512, value_dim=256, block_size=32)
    assert_right(case, Dtypes("bfloat16", "bfloat16"), triton_attention(Tuning()))


@pytest.mark.parametrize(("share", "head_dim", "block_size"), [(4, 128, 64), (4, 128, 128), (4, 256, 128)])
def test_tiles_that_tma_brings_in_pieces_of_blocks(share: int, head_dim: int, block_size: int) -> None:
    case = Case((1, 40), (131, 300), ((0, 0), (180, 4)), share=share, head_dim=head_dim, block_size=block_size)
    attention = triton_attention(Tuning(tma=True))
    assert_right(case, Dtypes("float16", "float16"), attention)
    shape = AttentionShape(share, head_dim, block_size, "float16", "float16")
    assert dict(variants_of(shape, 90, tma=True)[0].constants)["BULK"]


def test_a_tile_that_tma_cannot_bring_is_brought_by_copies() -> None:
    assert tma_tile(128, "bfloat16", "bfloat16", 90, 64) == Tile(128, 128, 8, 2, tma=True)
    assert tma_tile(128, "bfloat16", "bfloat16", 90, 16) == Tile(128, 32, 8, 2, tma=True), "two blocks"
    for head_dim, kv_dtype, sm in [
        (96, "bfloat16", 90),  # padded to 128
        (64, "bfloat16", 90),  # slower by it
        (128, "int8", 90),  # converted in registers
        (128, "bfloat16", 80),  # has none
    ]:
        assert tma_tile(head_dim, "bfloat16", kv_dtype, sm, 64) is None
        shape = AttentionShape(4, head_dim, 64, "bfloat16", kv_dtype)
        assert variants_of(shape, sm, tma=True) == variants_of(shape, sm)


@pytest.mark.parametrize(
    ("dtypes", "tokens"),
    [
        (Dtypes("bfloat16", "bfloat16"), 32),
        (Dtypes("float16", "int8"), 16),
        pytest.param(Dtypes("bfloat16", INT4), 16, marks=pytest.mark.soak),
    ],
)
def test_heads_of_512_whose_results_two_programs_share(dtypes: Dtypes, tokens: int) -> None:
    case = Case((1, 70), (131, 90), ((0, 0), (40, 4)), share=4, head_dim=512, block_size=32, has_sink_logits=True)
    attention = triton_attention(Tuning())
    assert_right(case, dtypes, attention)
    assert attention.launcher.launched[0] == ("attend", (2 * (71 // tokens + 2) * 2, 1, 1)), "twice as many programs"


@st.composite
def chunked_cases(draw: st.DrawFn) -> Case:
    case = draw(cases())
    chunks = [(draw(st.sampled_from([1, 5, 16, 24, 32])), sink) if window else (0, 0) for window, sink in case.policies]
    return replace(case, policies=tuple(chunks), chunked=True, block_size=draw(st.sampled_from([1, 4, 16])))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=chunked_cases())
def test_a_query_sees_its_own_chunk_and_no_other(case: Case) -> None:
    assert_right(case)


@pytest.mark.parametrize("length", [63, 64, 65, 96, 97])
def test_decode_and_a_prompt_where_chunks_begin(length: int) -> None:
    """Rows of one tile of two chunks, tiles that all rows see whole, and splits of one sequence."""
    case = Case(
        (1, min(length, 50)), (length, length), ((32, 0), (0, 0)), share=2, head_dim=64, block_size=16, chunked=True
    )
    assert_right(case, attention=triton_attention(sms=10))


def test_splits_are_merged_whatever_each_head_sees() -> None:
    case = Case((1, 1, 1), (400, 33, 90), ((0, 0), (40, 4), (5, 0)), share=3, head_dim=64, block_size=16)
    attention = triton_attention(sms=10)
    assert_right(case, attention=attention)
    kernels = dict(attention.launcher.launched)
    assert kernels["attend"] == (26 + 3, 3, 1)  # 80 programs of 3 heads, and one of each sequence


def test_whichever_split_ends_last_merges_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one workspace, batch after batch, as graphs are replayed: with two levels of merges, one, none; padding."""
    batches = (((1, 0, 1), (300, 9, 40)), ((0, 1, 0), (9, 60, 9)), ((1, 1, 1), (9, 14, 16)))
    cases = [Case(*batch, ((0, 0),), share=3, head_dim=32, block_size=16, has_sink_logits=True) for batch in batches]
    scenes = [TypedScene(case, Dtypes()) for case in cases]
    attention = triton_attention(replace(SMALL, min_split_tokens=16))
    in_order = [scene.answer(attention) for scene in scenes]
    for scene, result in zip(scenes, in_order, strict=True):
        np.testing.assert_allclose(result, scene.answer(ReferenceKernels()), rtol=0, atol=2e-5)
    set_index = interpreter_builder.set_grid_idx
    backwards = lambda x, y, z: set_index(interpreter_builder.grid_dim[0] - 1 - x, y, z)  # noqa: E731
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    for scene, result in zip(scenes, in_order, strict=True):
        np.testing.assert_array_equal(scene.answer(attention), result)


def test_no_more_splits_are_launched_than_the_longest_sequence_could_have() -> None:
    case = Case((1, 1), (100, 20), ((0, 0),), head_dim=64, block_size=16)
    attention = triton_attention(sms=1000)
    assert_right(case, attention=attention)
    assert dict(attention.launcher.launched)["attend"][0] == 2 * 4 + 2  # 8 columns of 16 tokens are 4 splits of 32


@pytest.mark.parametrize(("sequences", "programs"), [(1, 2), (4, 2), (5, 8)])
def test_few_sequences_are_cut_into_as_many_splits_as_run_at_once(sequences: int, programs: int) -> None:
    case = Case((1,) * sequences, (200,) * sequences, ((0, 0),), head_dim=64, block_size=16)
    attention = triton_attention(replace(SMALL, few_programs=2, min_split_tokens=16), sms=4)
    assert_right(case, attention=attention)
    assert dict(attention.launcher.launched)["attend"][0] == 4 * programs + sequences


SKEWED = Case(
    (1, 1, 0, 1, 5, 1, 1, 1, 0, 1), (30, 17, 40, 1, 25, 1200, 9, 60, 3, 20), ((0, 0), (50, 4)), share=2, head_dim=64,
    block_size=16,
)  # fmt: skip
"""One long sequence among short ones, a chunk, and some without queries."""


def count_tiles(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Of each program that decodes, by its place in the grid, from now on."""
    scope, tiles = interpreter._interpreted_globals("attention_jit"), Counter[tuple[int, ...]]()
    step = scope["attend_tile"]

    def counted(*arguments: Any) -> Any:
        if arguments[-9]:  # decode
            tiles[interpreter_builder.grid_idx] += 1
        return step(*arguments)

    monkeypatch.setitem(scope, "attend_tile", counted)
    return tiles


@pytest.mark.parametrize(("split_bytes", "tiles"), [(0, 3), (32 << 10, 8), (1 << 20, 16)])
def test_splits_have_so_many_bytes_if_that_gives_all_multiprocessors_work(
    split_bytes: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 tiles of 4 KiB: into at most 32 programs, at least 4, which would be more than a sequence each."""
    case = Case((1,) * 5, (256,) * 5, ((0, 0),), head_dim=32, block_size=16)
    programs = {"split_programs": 8, "fewest_programs": 1, "min_split_tokens": 16}
    attention = triton_attention(replace(SMALL, split_bytes=split_bytes, **programs), sms=4)
    counted = count_tiles(monkeypatch)
    assert_right(case, attention=attention)
    assert max(counted.values()) == tiles


@pytest.mark.parametrize(("sms", "searched"), [(1, 128), (10, 128), (2, 4)])
def test_work_is_shared_out_by_what_each_sequence_really_holds(
    sms: int, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_tiles(monkeypatch)
    for module in ("attention_jit", "walk_jit"):
        monkeypatch.setitem(interpreter._interpreted_globals(module), "SEARCHED", tl.constexpr(searched))
    attention = triton_attention(sms=sms)
    assert_right(SKEWED, attention=attention)
    lengths = zip(SKEWED.seq_lens, SKEWED.query_lens, strict=True)
    tiles = sum(-(-length // 16) for length, queries in lengths if queries == 1)
    units = sms * SMALL.split_programs // 2
    per_split = max(-(-tiles // units), 2)
    busiest = {head: max(count for (_, at, _), count in steps.items() if at == head) for head in (0, 1)}
    assert busiest[0] == min(per_split, 75), "no program has more of the long one than its share"
    assert busiest[1] <= 6, "the window and the sinks"


def test_partial_results_of_skewed_batches_fit_into_their_memory() -> None:
    """Of lengths that leave splits nearly empty: each a tile longer than a whole number of splits."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        tiles = rng.integers(0, 2 ** rng.integers(1, 12), rng.integers(1, 40))
        units = int(rng.integers(1, 200))
        per_split = max(-(-int(tiles.sum()) // units), 1)
        splits = -(-tiles // per_split)
        assert splits[splits > 1].sum() <= 2 * units
        assert splits.sum() <= units + len(tiles)


def test_decode_alone_launches_no_prefill() -> None:
    scene = TypedScene(Case((1, 1), (30, 20), ((0, 0),), head_dim=64), Dtypes())
    scene.batch = replace(scene.batch, max_query_len=1)
    attention = triton_attention()
    np.testing.assert_allclose(scene.answer(attention), scene.answer(ReferenceKernels()), rtol=0, atol=2e-5)
    assert [kernel for kernel, _ in attention.launcher.launched] == ["attend"]


def test_what_is_launched_depends_on_shapes_alone() -> None:
    launched = []
    for query_lens, seq_lens in (((1, 20, 0), (70, 40, 3)), ((9, 1, 11), (9, 70, 50))):
        attention = triton_attention()
        TypedScene(Case(query_lens, seq_lens, ((0, 0), (5, 2)), head_dim=64), Dtypes()).answer(attention)
        launched.append(attention.launcher.launched)
    assert launched[0] == launched[1]


def test_padding_of_a_batch_writes_nothing() -> None:
    scene = TypedScene(Case((1, 12), (30, 40), ((0, 0), (20, 4)), share=2, head_dim=64), Dtypes())
    right, real = scene.answer(ReferenceKernels()), scene.batch
    scene.query = np.concatenate([scene.query, np.full_like(scene.query[:5], np.nan)])
    scene.batch = replace(
        real,
        cu_seqlens_q=np.append(real.cu_seqlens_q, [real.cu_seqlens_q[-1]] * 3).astype(np.int32),
        seq_lens=np.append(real.seq_lens, [0] * 3).astype(np.int32),
        block_tables=np.pad(real.block_tables, ((0, 3 * real.groups), (0, 0)), constant_values=-1),
    )
    got = scene.answer(triton_attention())
    np.testing.assert_allclose(got[:13], right, rtol=0, atol=2e-5)
    assert (got[13:] == 7.0).all()


def test_queries_may_be_part_of_a_wider_row() -> None:
    scene = TypedScene(Case((1, 12), (30, 40), ((0, 0),), share=2, head_dim=64), Dtypes())
    right = scene.answer(ReferenceKernels())
    rows = np.full((13, 6, 64), np.nan, np.float32)
    rows[:, :2] = scene.query
    scene.query = rows[:, :2]
    wide = np.full((13, 4, 64), 7.0, np.float32)
    arguments = (scene.query, scene.arena, scene.layout, scene.batch, scene.heads)
    triton_attention().attend(*arguments, scale=scene.scale, softcap=0.0, out=wide[:, :2])
    np.testing.assert_allclose(wide[:, :2], right, rtol=0, atol=2e-5)
    assert (wide[:, 2:] == 7.0).all()


def test_cost_of_a_windowed_head_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    scope, steps = interpreter._interpreted_globals("attention_jit"), []
    step = scope["attend_tile"]
    monkeypatch.setitem(scope, "attend_tile", lambda *arguments: steps.append(1) or step(*arguments))
    counts = []
    for length in (150, 900):
        steps.clear()
        assert_right(Case((1, 12), (length, length), ((30, 20),), head_dim=64, block_size=16))
        counts.append(len(steps))
    # Window and sinks span at most 4 and 2 tiles of 16; the twelve queries of the second sequence are one row each.
    assert counts[0] == counts[1] <= 12


def test_tiny_values_of_a_quantised_cache_keep_their_precision() -> None:
    scene = TypedScene(Case((1, 12), (60, 40), ((0, 0),), head_dim=64, block_size=16), Dtypes("float16", "int8"))
    scene.query *= np.float16(0.1)
    scales = scale_views(scene.arena, scene.layout)[1]
    scales *= np.float32(1e-3)
    got, expected = scene.answer(triton_attention()), scene.answer(ReferenceKernels())
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("query", ["float16", "bfloat16"])
def test_values_of_very_different_size_side_by_side(query: str) -> None:
    """Weights of float16 have their scales in the exponent: next to one of 16 others of a millionth are nothing."""
    scene = TypedScene(Case((1, 9), (60, 40), ((0, 0), (20, 4)), head_dim=64, block_size=16), Dtypes(query, "int8"))
    scales = scale_views(scene.arena, scene.layout)[1]
    scales *= np.exp2(np.random.default_rng(0).integers(-20, 5, scales.shape)).astype(np.float32)
    got, expected = scene.answer(triton_attention()), scene.answer(ReferenceKernels())
    error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() < {"float16": 2e-3, "bfloat16": 6e-3}[query]


def test_blocks_beyond_four_gigabytes_are_reached() -> None:
    scene = TypedScene(Case((1, 3), (20, 20), ((0, 0),), head_dim=64, block_size=64), Dtypes("float16", "float16"))
    right = scene.answer(ReferenceKernels())
    small, far = scene.arena, (5 << 30) // scene.layout.block_bytes
    scene.arena = np.empty(5 << 30, np.uint8)  # untouched memory costs nothing
    scene.arena[-(5 << 30) % scene.layout.block_bytes - small.nbytes :][: small.nbytes] = small
    scene.batch.block_tables[:, 0] += far - small.nbytes // scene.layout.block_bytes
    np.testing.assert_allclose(scene.answer(triton_attention()), right, rtol=0, atol=4e-3)


def test_what_is_not_supported_is_refused_by_name_with_the_remedy() -> None:
    fine = {"head_dim": 128, "q_dtype": "bfloat16", "kv_dtype": "bfloat16", "sm": 90, "block_size": 64}
    check_supported(**fine)
    for change, message in (
        ({"sm": 75}, r"7\.5 is too old.*8\.0"),
        ({"head_dim": 80}, "head_dim 80.*64, 96, 128, 192, 256, 512"),
        ({"value_dim": 192}, "values of 192 beside keys of 128 are not supported.*only 32, 64, 96, 128"),
        ({"value_dim": 80}, "values of 80 beside keys of 128 are not supported.*only 32, 64, 96, 128"),
        ({"q_dtype": "float64"}, "float64.*bfloat16"),
        ({"kv_dtype": "int2"}, "int2.*int8.*int4"),
        ({"kv_dtype": "float8_e4m3fn", "sm": 80}, r"float8_e4m3fn needs .*8\.9.*8\.0.*int8"),
        ({"block_size": 24}, "block_size 24.*power of two"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_supported(**fine | change)
    with pytest.raises(ConfigError, match=r"5 query heads.*2 KV heads"):
        AttentionShape.of(gqa_layout(16, 1, 64), 5, 2, "float16", 0.0)
    with pytest.raises(ConfigError, match="head_dim 80"):
        triton_attention().prepare([AttentionShape(1, 80, 16, "float16", "float16")])


def test_arrays_that_do_not_fit_are_refused() -> None:
    scene, attention = TypedScene(Case((4,), (9,), ((0, 0),), head_dim=64), Dtypes()), triton_attention()
    rest = (scene.arena, scene.layout, scene.batch, scene.heads)
    query, crooked = scene.query, np.zeros((4, 1, 65), np.float32)[:, :, :64]
    for wrong, out, scale, message in (
        (query, query[:2], 1.0, "do not fit"),
        (query, query.astype(np.float16), 1.0, "do not fit"),
        (query, query, 0.0, r"scale 0\.0 is not positive"),
        (crooked, query, 1.0, "query with strides.*multiples of 16 bytes"),
        (query, crooked, 1.0, "out with strides"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.attend(wrong, *rest, scale=scale, softcap=0.0, out=out)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("kv_heads", 1 << 31, "do not fit parameters"),
        ("kv_heads", 1.0, "not an integer"),
        ("key", -16, "do not fit parameters"),
        ("key", 8, "key 8 is no multiple of 16"),
        ("block_bytes", 40, "block_bytes 40 is no multiple of 16"),
    ],
)
def test_the_interpreter_refuses_what_machine_code_would_misread(name: str, wrong: float, message: str) -> None:
    decode = variants_of(AttentionShape(1, 64, 16, "float16", "float16"), 90)[1]
    arguments = dict.fromkeys(dict(decode.signature), 0) | {name: wrong}
    with pytest.raises((AssertionError, ValueError), match=message):
        InterpreterLauncher().launch(decode, (1, 1, 1), list(arguments.values()))
    with pytest.raises(AssertionError, match="no card has a grid"):
        InterpreterLauncher().launch(decode, (1, 1, 1 << 16), list(arguments.values()))
