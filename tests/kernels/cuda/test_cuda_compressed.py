"""Attention to a window and entries of several tokens on a GPU: the kernels on NumPy arrays, and their machine code.

They are run by Triton's interpreter and the shim, on poisoned arenas, against the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.compressed_scene import CompressedCase, CompressedScene, write_keys
from support.entries_scene import GROUPS, EntriesCase, EntriesScene
from support.gpu.cuda_shim import LIBRARIES, ShimPrograms
from support.gpu.machine_code import SERVED, accesses, machine_code, variant_code
from support.tiny_checkpoints import TINY_CONFIGS

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.compressed_base import Kept, TurningCompressedKernels
from headwise.kernels.compressed_reference import ReferenceCompressedKernels
from headwise.kernels.compressed_rows import load_rows
from headwise.kernels.dsa import load_keys
from headwise.kernels.mla import latent_view, latent_width, load_latents
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.registry import model_config
from headwise.runtime.ops.numpy_ops import NumpyOps

pytest.importorskip("triton")

from support.gpu.interpreted_latents import SMALL, gpu_parts

from headwise.kernels.cuda import entries
from headwise.kernels.cuda.attention import OLDEST_SM_E4M3
from headwise.kernels.cuda.compressed import CompressedShape, check_compressed, variant_of
from headwise.kernels.cuda.compressed_kernels import CudaCompressedKernels
from headwise.kernels.cuda.compressed_model import CompressedModel
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.entries import check_size, queries_of
from headwise.kernels.cuda.launch import Program, Variant
from headwise.kernels.cuda.programs import Defines
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90
from headwise.kernels.cuda.turned import check_turning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant

CSA = {"rate": 4, "index_dim": 32}
HCA = {"rate": 32, "index_dim": 0, "beside": 3, "place": 1}
NONE = {"rate": 0, "index_dim": 0}


def kernels_of(sms: int = 4, score_bytes: int = 1 << 16) -> CudaCompressedKernels:
    return CudaCompressedKernels(gpu_parts(sms), threads=64, score_bytes=score_bytes, tuning=SMALL)


def kept_of(scene: EntriesScene) -> list[np.ndarray]:
    """Keys, rows, entries and keys for an indexer as they are stored, as numbers."""

    def blocks_of(kept: Kept) -> tuple[Any, ...]:
        return np.s_[scene.tables[:, int(kept.heads.group[0])].ravel(), int(kept.heads.slot[0])]

    found = [load_rows(scene.arena, scene.window.layout, blocks_of(scene.window), scene.case.size)]
    if scene.entries is not None:
        made = scene.entries.made
        found += [
            load_latents(scene.arena, rows.layout, blocks_of(rows.piece(index)), latent_width(rows.layout))
            for rows in scene.entries.rows
            for index in range(rows.pieces)
        ]
        begin = scene.entries.making.begin
        found.append(load_rows(scene.arena, made.layout.own, blocks_of(made), scene.case.size, begin))
        if scene.index is not None:
            found.append(load_keys(scene.arena, made.layout.own, blocks_of(made)))
    return found


def assert_right(
    case: EntriesCase, kernels: CudaCompressedKernels, atol: float = 2e-5, of_codes: float = 0.0
) -> EntriesScene:
    """What is stored is what the reference stores, and of the same arena the same is seen.

    of_codes: by what stored numbers may differ where another sum is rounded to another code
    """
    scene, reference = EntriesScene(case), EntriesScene(case)
    scene.write(kernels)
    reference.write(ReferenceCompressedKernels())
    for found, right in zip(kept_of(scene), kept_of(reference), strict=True):
        np.testing.assert_allclose(found, right, rtol=of_codes, atol=max(atol, of_codes))
        if of_codes:
            is_there = np.isfinite(right)
            alike = np.isclose(found[is_there], right[is_there], rtol=1e-5, atol=1e-6)
            assert alike.mean() > 0.99, "few sums lie between two codes"
    scene.arena[:] = reference.arena
    found = scene.attend(kernels)
    np.testing.assert_allclose(found, reference.attend(ReferenceCompressedKernels()), rtol=0, atol=atol)
    return scene


@st.composite
def cases(draw: st.DrawFn) -> EntriesCase:
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    kind = draw(st.sampled_from([CSA, HCA, {**HCA, "rate": 4}, NONE]))
    return EntriesCase(
        query_lens=tuple(draw(st.one_of(st.integers(0, 1), st.integers(0, min(length, 40)))) for length in lengths),
        seq_lens=tuple(lengths),
        window=draw(st.sampled_from([1, 24, 40])),
        top=draw(st.sampled_from([1, 6, 20])),
        heads=draw(st.sampled_from([1, 3, 20])),
        block_size=draw(st.sampled_from([16, 64])),
        seed=draw(st.integers(0, 2**16)),
        **kind,
    )


@pytest.mark.parametrize("kind", [CSA, HCA, NONE])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_keys_and_entries_are_kept_as_codes(kv_dtype: str, kind: dict[str, int]) -> None:
    """All but rows; and seen through splits."""
    case = EntriesCase((4, 1), (90, 130), heads=18, kv_dtype=kv_dtype, **kind)
    assert_right(case, kernels_of(sms=10), of_codes=0.07)


@pytest.mark.parametrize("kind", [CSA, HCA])
def test_entries_are_the_same_of_rows_in_pieces(kind: dict[str, int]) -> None:
    whole, cut = (EntriesCase((4, 1), (90, 130), pieces=pieces, **kind) for pieces in (1, 2))
    scenes = [EntriesScene(whole), assert_right(cut, kernels_of())]
    scenes[0].write(ReferenceCompressedKernels())
    found = [scene.attend(ReferenceCompressedKernels()) for scene in scenes]
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(), rows=st.integers(1, 9))
def test_any_batch_matches_the_reference(case: EntriesCase, rows: int) -> None:
    assert_right(case, kernels_of(score_bytes=4 * 40 * rows))


class KnownScene(CompressedScene):
    """Of whose lengths the host knows."""

    def batch(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionBatch:
        batch = super().batch(query_lens, seq_lens)
        return replace(batch, on_host=HostLengths(batch.cu_seqlens_q, batch.seq_lens))


@pytest.mark.parametrize(
    "case",
    [
        CompressedCase((5, 1, 16), (61, 40, 16)),
        CompressedCase((9, 1), (70, 33), rate=16, is_indexed=False, block_size=4),
        CompressedCase((3, 30), (50, 30), rate=8, is_indexed=False, beside=3),
        CompressedCase((2, 3), (2, 3)),
    ],
)
def test_what_is_seen_is_what_sums_over_tokens_give(case: CompressedCase) -> None:
    """By an oracle that makes entries one number after the other, of tokens that came in steps of seven."""
    scene, kernels = KnownScene(case), kernels_of()
    scene.write(kernels)
    scene.recycle()
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(scene.attend(kernels, with_entries=False), scene.expected(False), atol=2e-5, rtol=1e-4)


def launches(kernels: CudaCompressedKernels, name: str) -> list[tuple[int, int, int]]:
    return [grid for launched, grid in kernels._attention._launcher.launched if launched == name]


@pytest.mark.parametrize("kind", [{**CSA, "top": 30}, {"rate": 4, "index_dim": 0}, {**HCA, "rate": 2}])
def test_splits_of_unlike_lengths_are_merged(kind: dict[str, int]) -> None:
    case, kernels = EntriesCase((1, 0, 1), (300, 9, 33), heads=18, **kind), kernels_of(sms=10)
    for _ in range(2):  # the second time with what the first one left
        scene = assert_right(case, kernels)
    pieces = 2
    assert {grid[0] > pieces * scene.tokens for grid in launches(kernels, "attend_compressed")} == {True}
    workspace = kernels._attention.workspace
    assert not workspace._memory[: workspace._counters_bytes].any()


def test_all_entries_are_seen_unscored_where_no_more_fit_the_tables() -> None:
    kernels = kernels_of()
    assert_right(EntriesCase((5, 1), (40, 47), top=12), kernels)
    assert not launches(kernels, "score_tokens")
    assert_right(EntriesCase((5, 1), (40, 47), top=11), kernels)
    assert launches(kernels, "score_tokens")


@pytest.mark.parametrize("kind", [CSA, HCA])
def test_padding_of_a_graph_is_left_alone(kind: dict[str, int]) -> None:
    """Rows and sequences behind the last one: nothing is made or stored for them."""
    case = EntriesCase((1, 1), (160, 64), **kind)
    scene, reference, kernels = EntriesScene(case), EntriesScene(case), kernels_of()
    reference.write(ReferenceCompressedKernels())
    (first, keys, rows), (step, more_keys, more_rows) = scene.steps()
    assert scene.entries is not None

    def padded(array: np.ndarray, value: float) -> np.ndarray:
        return np.concatenate([array, np.full((2, *array.shape[1:]), value, array.dtype)])

    graph = replace(
        step,
        cu_seqlens_q=padded(step.cu_seqlens_q, 2),
        seq_lens=padded(step.seq_lens, 0),
        block_tables=np.concatenate([step.block_tables, np.full_like(step.block_tables, 0x7F000000)]),
        max_query_len=1,
    )
    for batch, of_keys, of_rows in (
        (replace(first, max_query_len=None, on_host=HostLengths(first.cu_seqlens_q, first.seq_lens)), keys, rows),
        (graph, padded(more_keys, np.nan), padded(more_rows, np.nan)),
    ):
        write_keys(kernels, of_keys, case.turning, scene.arena, scene.window, batch)
        scene.write_rows(kernels, of_rows, batch)
        kernels.make_entries(scene.arena, scene.entries, batch)
    for kept in (scene.window, *scene.entries.rows, scene.entries.made):
        of_both = (latent_view(each.arena, kept.layout.own) for each in (scene, reference))
        np.testing.assert_allclose(*of_both, rtol=0, atol=2e-5)
    right = reference.attend(ReferenceCompressedKernels())
    scene.query, index = padded(scene.query, np.nan), scene.index
    if index is not None:
        scene.index = replace(index, query=padded(index.query, np.nan), weights=padded(index.weights, np.nan))
    found = scene.attend(kernels, last=graph)
    np.testing.assert_allclose(found[:2], right, rtol=0, atol=2e-5)
    assert np.isnan(found[2:]).all()


@pytest.mark.parametrize("kind", [CSA, HCA])
def test_what_is_not_mapped_is_not_seen(kind: dict[str, int]) -> None:
    case, kernels = EntriesCase((3,), (170,), **{**kind, "rate": 16}, window=40), kernels_of()
    scene = EntriesScene(case)
    scene.write(ReferenceCompressedKernels())
    batch = scene.steps()[1][0]
    tables = batch.block_tables.copy()
    assert scene.entries is not None
    tables[scene.window.heads.group, 9], tables[scene.entries.made.heads.group, 2:6] = -1, -1
    batch = replace(batch, block_tables=tables)
    right = scene.attend(ReferenceCompressedKernels(), last=batch)
    assert not np.allclose(right, scene.attend(ReferenceCompressedKernels()), atol=1e-3)
    np.testing.assert_allclose(scene.attend(kernels, last=batch), right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [CSA, HCA, NONE])
def test_in_bfloat16_the_same_is_stored_and_seen_but_for_rounding(kind: dict[str, int]) -> None:
    case = EntriesCase((4, 1), (90, 130), dtype="bfloat16", heads=18, **kind)
    scene, reference = EntriesScene(case), EntriesScene(case)
    kernels = kernels_of()
    scene.write(kernels)
    reference.write(ReferenceCompressedKernels(), wide=True)
    if scene.entries is not None:
        own = scene.entries.made.layout.own
        stored, right = (latent_view(each.arena, own).astype(np.int32) for each in (scene, reference))
        assert np.abs(stored - right).max() <= 1, "of the same sums, rounded once"
    scene.arena[:] = reference.arena
    found = scene.attend(kernels).astype(np.float32)
    right = np.full(found.shape, np.nan, np.float32)
    scene.query = scene.query.astype(np.float32)
    right = scene.attend(ReferenceCompressedKernels(), wide=True)
    assert np.linalg.norm(found - right) / np.linalg.norm(right) < 6e-3


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_heads_are_turned_in_place_and_keys_on_the_way_to_the_cache(dtype: str, atol: float) -> None:
    """As by a rotation of whole heads; nothing else is touched, and where there is no block nothing is stored."""
    scene, kernels = EntriesScene(EntriesCase((4, 0, 20), (9, 3, 50), dtype=dtype, **NONE)), kernels_of()
    batch, keys, _ = scene.steps()[1]
    tables = batch.block_tables.copy()
    tables[2 * GROUPS + scene.window.heads.group, 2] = -1  # of the last sequence tokens 32 to 47
    batch, padding = replace(batch, block_tables=tables), 2
    inverse = np.array([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, *[0.0] * 8], np.float32)
    cosines, sines = NumpyOps().rotation(np.arange(len(keys) + padding, dtype=np.int32) * 7, inverse)
    padded = [np.concatenate([array, np.full_like(array[:padding], 5)]) for array in (scene.query, keys)]
    of_query, of_keys = (
        NumpyOps().rope(array.reshape(len(array), -1, 32).astype(np.float32), cosines[:-padding], sines[:-padding])
        for array in (scene.query, keys)
    )
    reference = EntriesScene(scene.case)
    ReferenceCompressedKernels().write_rows(of_keys[:, 0], reference.arena, scene.window, batch)
    kernels.write_turned(*padded, cosines, sines, 8, scene.arena, scene.window, batch)
    np.testing.assert_allclose(padded[0][:-padding].astype(np.float32), of_query, rtol=0, atol=atol)
    both = [load_latents(each.arena, scene.window.layout, np.s_[:, :, :], 32) for each in (scene, reference)]
    assert np.isfinite(both[1]).any()
    np.testing.assert_allclose(*both, rtol=0, atol=atol)
    kernels.turn(padded[0], cosines, -sines, 8)
    np.testing.assert_allclose(
        *(each.astype(np.float32) for each in (padded[0][:-padding], scene.query)), atol=2 * atol
    )


def test_heads_that_are_no_whole_vectors_are_refused() -> None:
    for size, turning in ((24, 8), (32, 4), (32, 0), (32, 24)):
        with pytest.raises(ConfigError, match="elements turn"):
            check_turning(size, turning, 2)
    check_turning(512, 32, 2)


def test_a_score_that_is_none_breaks_its_query_alone() -> None:
    scene = EntriesScene(EntriesCase((3,), (120,), top=6))
    scene.write(ReferenceCompressedKernels())
    right = scene.attend(ReferenceCompressedKernels())
    assert scene.index is not None
    scene.index.query[1] = np.nan
    found = scene.attend(kernels_of())
    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[::2], right[::2], rtol=0, atol=2e-5)


def test_what_the_kernels_cannot_serve_is_refused_by_name() -> None:
    shape = CompressedShape(64, 512, 64, "bfloat16", "bfloat16", rate=4)
    check_compressed(shape, 90)
    for change, name in (
        ({"size": 520}, "head_dim 520"),
        ({"size": 1024}, "head_dim 1024"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_dtype": "float32"}, "kv_dtype float32"),
        ({"kv_dtype": "int8", "turning": 4}, "8 rotated numbers of a row in int8"),
        ({"block_size": 24}, "block_size 24"),
        ({"rate": 12}, "entries of 12 tokens"),
        ({"rate": 128, "is_chosen": True}, "choose a block_size of 128 or more"),
    ):
        with pytest.raises(ConfigError, match=name):
            check_compressed(replace(shape, **change), 90)
    with pytest.raises(ConfigError, match="too old"):
        check_compressed(shape, 70)
    with pytest.raises(ConfigError, match="entries of 24 numbers"):
        check_size(24, 2)
    with pytest.raises(ConfigError, match="only of multiples of 64 up to"):
        check_size(32, 2, pieces=4)
    given = EntriesScene(EntriesCase((1,), (9,)))
    assert given.entries is not None
    with pytest.raises(ValueError, match="entries are made of 256 numbers of float32"):
        kernels_of().write_pieces(np.zeros((1, 128), np.float32), given.arena, given.entries, given.steps()[1][0])
    with pytest.raises(ConfigError, match="needs compute capability"):
        check_compressed(replace(shape, kv_dtype="float8_e4m3fn"), 80)
    scene = EntriesScene(EntriesCase((1,), (9,), dtype="bfloat16"))
    unknown = replace(scene.steps()[1][0], max_query_len=None)
    with pytest.raises(ValueError, match="neither a batch's lengths nor its max_query_len"):
        queries_of(unknown)


class Made:
    """What is made ready of kernels."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        self.programs: set[tuple[str, tuple[tuple[str, str | int], ...]]] = set()
        self.parts = replace(gpu_parts(), launcher=self, programs=self)
        self.sm, self.sms = 90, 4

    def prepare(self, variant: Variant) -> None:
        self.variants.add(variant)

    def __call__(self, source: str, defines: Defines) -> Program:
        self.programs.add((source, tuple(sorted(defines.items()))))
        return ShimPrograms(LIBRARIES)(source, defines)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_what_an_engine_makes_ready_is_what_is_compiled_ahead(tp_size: int) -> None:
    config, made, dtype = model_config(TINY_CONFIGS["deepseek-v4"]), Made(), "float32"
    variant, own = attention_of(config), config.compressed
    assert own is not None
    layouts = [variant.layout(16, 1, dtype, layer) for layer in range(len(own.rates) + len(own.caches))]
    kernels = variant.gpu_kernels(made.parts, layouts, tp_size, dtype)
    ahead = [
        CompressedModel(heads, own.head_dim, 16, dtype, dtype, 8, (4, 16), 4, own.index_heads, own.index_dim)
        for heads in {1: (4,), 3: (1, 2)}[tp_size]
    ]
    assert made.variants == {each for model in ahead for each in model.variants(90)}
    told = [(source, tuple(sorted(defines.items()))) for source, defines in ahead[0].programs()]
    assert made.programs == set(told)
    assert isinstance(kernels, TurningCompressedKernels)


PUBLISHED = {
    "window": CompressedShape(64, 512, 64, "bfloat16", "bfloat16"),
    "chosen": CompressedShape(128, 512, 64, "bfloat16", "bfloat16", rate=4, is_chosen=True),
    "all": CompressedShape(64, 512, 64, "bfloat16", "bfloat16", rate=128),
    "of one of eight ranks": CompressedShape(8, 512, 64, "bfloat16", "bfloat16", rate=4, is_chosen=True),
    "chosen in E4M3": CompressedShape(64, 512, 64, "bfloat16", "float8_e4m3fn", 32, 4, is_chosen=True),
    "chosen in int8, of one of eight ranks": CompressedShape(8, 512, 64, "bfloat16", "int8", 32, 4, is_chosen=True),
}


MOST_SERVED = ("chosen", "all", "chosen in E4M3")
SERVED_BY = [
    pytest.param(name, sm, marks=() if name in MOST_SERVED and sm == 90 else pytest.mark.soak)
    for sm in (80, 90, 100)
    for name, shape in PUBLISHED.items()
    if sm >= OLDEST_SM_E4M3 or shape.kv_dtype != "float8_e4m3fn"
]


@pytest.mark.parametrize(("name", "sm"), SERVED_BY)
def test_machine_code_keeps_all_in_registers(name: str, sm: int) -> None:
    compiled = variant_code(variant_of(PUBLISHED[name], sm), Target(sm, 12))
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)


def of_entries(defines: Defines) -> Any:
    """A case; of codes those that models are served with in ``make test``."""
    given, kept = defines["NUMBER"], defines["CACHE"]
    is_served = given in (kept, "BF16")
    return pytest.param(defines, id=f"{given} {kept}", marks=() if is_served else pytest.mark.soak)


@pytest.mark.parametrize("sm", SERVED)
@pytest.mark.parametrize("defines", map(of_entries, entries.all_variants()))
def test_rows_are_read_in_whole_vectors(defines: dict[str, str], sm: int) -> None:
    """And nothing spills: a stack is for angles of many turns alone."""
    compiled = machine_code(entries.SOURCE, defines, sm)
    assert accesses(compiled, "ld") & {"v4.u32", "v4.f32"}
    assert "u16" not in accesses(compiled, "ld")
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled.log
