"""What all attention kernels promise, by a dense oracle that knows nothing of blocks, on arenas poisoned with NaN."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attention_scene import Case, Scene

from headwise.errors import ConfigError
from headwise.kernels.base import AttentionKernels
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.reference import ReferenceKernels
from headwise.kernels.select import make_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities that are meant


@dataclass(frozen=True)
class Implementation:
    """Kernels, what they can serve, and how much of it a test has time for."""

    kernels: AttentionKernels
    head_dims: tuple[int, ...] = (16, 64)
    value_dims: tuple[int, ...] = (0, 16)
    block_sizes: tuple[int, ...] = (1, 3, 16, 24, 64, 96)
    most_tokens: int = 150
    most_sequences: int = 5
    most_heads: int = 3
    long_context: int = 1999
    examples: int = 60


def interpreted() -> Implementation:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from support.gpu.interpreted_attention import triton_attention

    limits = {"most_tokens": 90, "most_sequences": 3, "most_heads": 2, "long_context": 400, "examples": 12}
    return Implementation(triton_attention(), (64, 96), block_sizes=(1, 4, 16, 64), value_dims=(0, 32, 64), **limits)


def interpreted_tma() -> Implementation:
    """Of prompts; tiles are one block, or two."""
    from support.gpu.interpreted_attention import SMALL_TMA, triton_attention

    return replace(
        interpreted(),
        kernels=triton_attention(SMALL_TMA),
        head_dims=(64, 128),
        value_dims=(0,),
        block_sizes=(8, 16, 64),
    )


@pytest.fixture(scope="module", params=["reference", "numba", "cuda", pytest.param("cuda-tma", marks=pytest.mark.soak)])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "cuda":
        return interpreted()
    if request.param == "cuda-tma":
        return interpreted_tma()
    return Implementation(make_kernels(request.param, threads=2))


@pytest.fixture
def kernels(implementation: Implementation) -> AttentionKernels:
    return implementation.kernels


def assert_right(kernels: AttentionKernels, case: Case) -> None:
    scene = Scene(case)
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=2e-5)


@st.composite
def cases(draw: st.DrawFn, of: Implementation) -> Case:
    lengths = draw(st.lists(st.integers(1, of.most_tokens), min_size=1, max_size=of.most_sequences))
    query_lens = [draw(st.one_of(st.integers(0, 1), st.integers(1, length))) for length in lengths]
    window = st.tuples(st.integers(1, 80), st.integers(0, 70))
    return Case(
        query_lens=tuple(query_lens),
        seq_lens=tuple(lengths),
        policies=tuple(draw(st.lists(st.one_of(st.just((0, 0)), window), min_size=1, max_size=of.most_heads))),
        share=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from(of.head_dims)),
        block_size=draw(st.sampled_from(of.block_sizes)),
        softcap=draw(st.sampled_from([0.0, 5.0])),
        has_sink_logits=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        tail_bytes=draw(st.sampled_from([0, 64, 4160])),
        value_dim=draw(st.sampled_from(of.value_dims)),
    )


def test_any_batch_matches_dense_attention(implementation: Implementation) -> None:
    @settings(max_examples=implementation.examples, suppress_health_check=list(HealthCheck))
    @given(case=cases(implementation))
    def check(case: Case) -> None:
        assert_right(implementation.kernels, case)

    check()


@st.composite
def cases_with_items(draw: st.DrawFn, of: Implementation) -> Case:
    case, items = draw(cases(of)), []
    for sequence, length in enumerate(case.seq_lens):
        bounds = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        items += [(sequence, start, end) for start, end in pairwise(bounds) if draw(st.booleans())]
    return replace(case, items=tuple(items) or ((0, 0, 1),))


@pytest.mark.parametrize(
    "implementation", ["reference", "numba", pytest.param("cuda", marks=pytest.mark.soak)], indirect=True
)
def test_tokens_of_an_item_see_all_of_it_wherever_the_step_begins(implementation: Implementation) -> None:
    @settings(max_examples=implementation.examples, suppress_health_check=list(HealthCheck))
    @given(case=cases_with_items(implementation))
    def check(case: Case) -> None:
        assert_right(implementation.kernels, case)

    check()


def test_an_item_longer_than_a_tile_and_than_a_window(kernels: AttentionKernels) -> None:
    items = ((0, 20, 190), (1, 3, 5))
    assert_right(kernels, Case((180, 6), (200, 9), ((0, 0), (16, 4)), share=2, head_dim=64, block_size=16, items=items))


def test_heads_that_do_not_go_by_it_see_up_to_themselves(kernels: AttentionKernels) -> None:
    case = Case((30,), (40,), ((0, 0), (7, 2)), head_dim=64, block_size=16)
    scene, told = Scene(case), Scene(replace(case, items=((0, 12, 31),)))
    assert told.batch.sees is not None
    scene.batch = replace(scene.batch, sees=told.batch.sees)
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("window", "sink"), [(1, 0), (3, 0), (16, 0), (17, 1), (16, 16), (40, 20), (16, 200), (500, 4), (500, 0)]
)
@pytest.mark.parametrize("queries", [1, 30])
def test_windowed_head_with_recycled_middle_blocks(
    kernels: AttentionKernels, window: int, sink: int, queries: int
) -> None:
    # Two sequences, so that one query is a decode step to kernels that have a way of their own for these.
    assert_right(kernels, Case((queries, 0), (203, 9), ((window, sink),), share=3, head_dim=64, block_size=16))


# Of a GPU's kernels test_cuda_attention.py has these in the tiles of production.
@pytest.mark.parametrize(
    "implementation", ["reference", "numba", pytest.param("cuda", marks=pytest.mark.soak)], indirect=True
)
@pytest.mark.parametrize(("share", "head_dim"), [(1, 32), (3, 64), (4, 256), (8, 128), (5, 80), (2, 96), (2, 512)])
def test_common_head_geometries(implementation: Implementation, share: int, head_dim: int) -> None:
    if head_dim in (32, 80, 512) and 16 not in implementation.head_dims:
        pytest.skip("kernels of a GPU have no heads of this size, and say so")
    case = Case((1, 70), (131, 90), ((0, 0), (64, 4)), share=share, head_dim=head_dim, block_size=64)
    assert_right(implementation.kernels, case)


def test_contexts_long_enough_to_be_split(implementation: Implementation) -> None:
    kernels, length = implementation.kernels, implementation.long_context
    assert_right(kernels, Case((1,), (length,), ((0, 0), (700, 4)), share=3, head_dim=64, block_size=64))
    assert_right(kernels, Case((75,), (length * 3 // 4,), ((0, 0),), share=3, head_dim=64, block_size=64))


@pytest.mark.parametrize("queries", [1, 30])
def test_learned_sinks_take_their_share_once_however_a_sequence_is_split(
    implementation: Implementation, queries: int
) -> None:
    lengths, policies = (implementation.long_context, 40), ((0, 0), (60, 2))
    case = Case((queries, 1), lengths, policies, share=4, head_dim=64, block_size=16, has_sink_logits=True)
    assert_right(implementation.kernels, case)


@pytest.mark.parametrize("logit", [-300.0, 300.0])
def test_sinks_of_any_size_leave_numbers(kernels: AttentionKernels, logit: float) -> None:
    scene = Scene(Case((1, 5), (90, 9), ((0, 0), (20, 4)), share=2, head_dim=64, has_sink_logits=True))
    assert scene.sink_logits is not None
    without = replace(scene.case, has_sink_logits=False)
    scene.sink_logits[:] = logit
    expected = Scene(without).expected() if logit < 0 else np.zeros(scene.query.shape)
    np.testing.assert_allclose(scene.attend(kernels), expected, rtol=0, atol=2e-5)


def test_batch_without_queries_leaves_the_output_alone(kernels: AttentionKernels) -> None:
    scene = Scene(Case((0, 2, 0), (5, 9, 3), ((0, 0),), head_dim=64))
    np.testing.assert_allclose(scene.attend(kernels), scene.expected(), rtol=0, atol=2e-5)
    nothing = replace(scene.batch, cu_seqlens_q=np.zeros(4, np.int32))
    out = np.full_like(scene.query, 7.0)
    kernels.attend(scene.query, scene.arena, scene.layout, nothing, scene.heads, scale=1.0, softcap=0.0, out=out)
    assert (out == 7.0).all()


def test_query_that_sees_no_mapped_block_gets_zeros(kernels: AttentionKernels) -> None:
    scene = Scene(Case((1, 5), (90, 9), ((0, 0),), head_dim=64))
    scene.batch.block_tables[:] = -1
    assert (scene.attend(kernels) == 0).all()


def test_visible_token_without_a_block_counts_as_not_visible(kernels: AttentionKernels) -> None:
    scene = Scene(Case((1, 40), (90, 80), ((0, 0),), head_dim=64, block_size=16))
    scene.batch.block_tables[:, 1:3] = -1
    np.testing.assert_allclose(scene.attend(kernels), scene.attend(ReferenceKernels()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_scores_of_any_size_stay_finite(kernels: AttentionKernels, softcap: float) -> None:
    scene = Scene(Case((1, 40), (40, 90), ((0, 0), (20, 4)), head_dim=64, softcap=softcap))
    scene.query *= 1e4
    assert np.isfinite(scene.attend(kernels)).all()


def test_a_nan_in_a_query_shows_in_that_query_only(kernels: AttentionKernels) -> None:
    scene = Scene(Case((1, 1, 4), (90, 30, 30), ((0, 0),), head_dim=64))
    scene.query[[0, 4]] = np.nan
    out = scene.attend(kernels)
    assert np.isnan(out[[0, 4]]).all()
    assert np.isfinite(out[[1, 2, 3, 5]]).all()


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    numba_kernels = make_kernels("numba", threads=1)
    scene = Scene(Case((1, 75), (900, 800), ((0, 0), (300, 4)), share=3, head_dim=64, block_size=64))
    one = scene.attend(numba_kernels)
    np.testing.assert_allclose(one, scene.attend(make_kernels("numba", threads=2)), rtol=0, atol=2e-6)


def test_numba_kernels_may_be_called_from_several_threads_at_once() -> None:
    numba_kernels = make_kernels("numba", threads=2)
    scene = Scene(Case((1, 40), (900, 500), ((0, 0),), share=3, head_dim=64, block_size=64))
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(scene.attend(numba_kernels))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        np.testing.assert_allclose(result, scene.expected(), rtol=0, atol=2e-5)


def test_numba_kernels_take_read_only_queries() -> None:
    scene = Scene(Case((1,), (9,), ((0, 0),)))
    scene.query.flags.writeable = False
    np.testing.assert_allclose(scene.attend(make_kernels("numba", 1)), scene.expected(), rtol=0, atol=2e-5)


def test_wrong_use_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'cuda'.*auto, numba, reference"):
        make_kernels("cuda", threads=1)
    with pytest.raises(ConfigError, match="threads=0"):
        make_kernels("numba", threads=0)
    scene = Scene(Case((1,), (9,), ((0, 0),)))
    for layout, message in ((gqa_layout(4, 1, 20), "head_dim.*20"), (gqa_layout(4, 1, 16, "float16"), "float16")):
        scene.layout = layout
        with pytest.raises(ConfigError, match=message):
            scene.attend(make_kernels("numba", threads=1))


def test_numba_kernels_refuse_arrays_that_do_not_fit_each_other() -> None:
    numba_kernels, scene = make_kernels("numba", threads=1), Scene(Case((1,), (9,), ((0, 0), (0, 0))))
    arguments = (scene.arena, scene.layout, scene.batch, scene.heads)
    for query, out in (
        (scene.query, scene.query[:, :1].copy()),
        (scene.query[:0], scene.query[:0]),
        (np.zeros((1, 3, 16), np.float32),) * 2,
        (np.zeros((1, 2, 64), np.float32),) * 2,
    ):
        with pytest.raises(ValueError, match=r"do not fit|larger than"):
            numba_kernels.attend(query, *arguments, scale=1.0, softcap=0.0, out=out)
    for key, value in ((np.zeros((1, 3, 16), np.float32),) * 2, (np.zeros((1, 2, 64), np.float32),) * 2):
        with pytest.raises(ValueError, match=r"do not fit|larger than"):
            numba_kernels.write_kv(key, value, *arguments)
    told = Scene(Case((9,), (9,), ((0, 0),), items=((0, 2, 5),)))
    told.batch = replace(told.batch, sees=told.batch.sees[:-1])
    with pytest.raises(ValueError, match="sees of 8 rows does not fit cu_seqlens_q up to 9"):
        told.attend(numba_kernels)


def test_missing_numba_is_a_config_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "headwise.kernels.cpu.attention", None)
    with pytest.raises(ConfigError, match="pip install numba"):
        make_kernels("auto", threads=1)
    assert isinstance(make_kernels("reference", threads=1), ReferenceKernels)
