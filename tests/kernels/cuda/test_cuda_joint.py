"""Decodes that read a prefix together on a GPU, in Triton's interpreter: they see what each of them sees alone."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.attention_scene import Case
from support.gpu.typed_scene import Dtypes, TypedScene

from headwise.kernels.joint import JOINT_ROWS, JOINT_TOKENS, joint_of
from headwise.kernels.nibbles import INT4
from headwise.kernels.reference import ReferenceKernels

pytest.importorskip("triton")

from support.gpu.interpreted_attention import triton_attention
from support.gpu.machine_code import variant_code

from headwise.kernels.cuda.attention import AttentionShape, TritonAttention, Tuning, every_variant_of, variants_of
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.launch import OVERLAPS_FROM

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
OF_STEPS = 2e-2
"""Of four bits, see `test_cuda_attention`."""

GROUP = Case(
    (1, 1, 1, 1), (300, 270, 290, 40), ((0, 0), (30, 4)), share=2, head_dim=64, block_size=16, shared=(0, 256, 256, 0)
)  # fmt: skip
"""Three of four decodes share 256 tokens; the other head has a window."""

EXACT, HALVES = Dtypes(), Dtypes("float16", "float16")


def assert_right(case: Case, dtypes: Dtypes = EXACT, attention: TritonAttention | None = None) -> TritonAttention:
    scene, attention = TypedScene(case, dtypes), attention or triton_attention()
    joint = joint_of(np.array(case.shared, np.int32), case.share)
    expected = scene.answer(ReferenceKernels())
    scene.batch = replace(scene.batch, joint=joint, max_query_len=max(case.query_lens))
    tolerance = TOLERANCE[dtypes.query] + (OF_STEPS if dtypes.kv == INT4 and dtypes.query != "float32" else 0)
    np.testing.assert_allclose(scene.answer(attention), expected, rtol=0, atol=tolerance)
    return attention


def kernels_of(attention: TritonAttention) -> list[str]:
    return [kernel for kernel, _ in attention.launcher.launched]


@pytest.mark.parametrize("kv", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", INT4])
@pytest.mark.parametrize("query", ["float32", "float16", "bfloat16"])
def test_every_pair_of_dtypes(query: str, kv: str) -> None:
    attention = assert_right(GROUP, Dtypes(query, kv))
    assert kernels_of(attention) == ["attend_joint", "attend"]


@pytest.mark.parametrize("kv", ["float16", "int8", INT4])
@pytest.mark.parametrize(
    ("share", "head_dim", "block_size"), [(4, 128, 64), (1, 256, 16), (3, 32, 128), (8, 96, 64), (30, 64, 32)]
)
def test_common_head_geometries_in_tiles_of_production(share: int, head_dim: int, block_size: int, kv: str) -> None:
    case = replace(GROUP, share=share, head_dim=head_dim, block_size=block_size, has_sink_logits=True, softcap=5.0)
    attention = assert_right(case, Dtypes("float16", kv), triton_attention(Tuning()))
    assert "attend_joint" in kernels_of(attention)


def test_values_that_are_smaller_than_keys() -> None:
    assert_right(replace(GROUP, head_dim=96, value_dim=64, has_sink_logits=True), HALVES)


@pytest.mark.parametrize("sms", [1, 8, 64])
def test_prefixes_in_one_split_or_in_more_than_are_merged_at_once(sms: int) -> None:
    case = replace(GROUP, seq_lens=(5000, 4993, 5200, 40), shared=(0, 4992, 4992, 0), policies=((0, 0),))
    assert_right(case, HALVES, triton_attention(sms=sms))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups of decodes, prompts beside them, and sequences without a query, as padding has."""
    lengths, queries, shared = list[int](), list[int](), list[int]()
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.sampled_from([0, 128, 256, 272]))
        members = draw(st.integers(1, 4))
        shared += [0, *[tokens] * (members - 1)]
        lengths += [tokens + draw(st.integers(1, 80)) for _ in range(members)]
        queries += [1] * members
    for _ in range(draw(st.integers(0, 2))):
        lengths.append(draw(st.integers(3, 60)))
        queries.append(draw(st.sampled_from([0, 2, 3])))
        shared.append(0)
    return Case(
        tuple(queries), tuple(lengths), draw(st.sampled_from([((0, 0),), ((0, 0), (20, 4)), ((5, 0), (0, 0), (0, 0))])),
        share=draw(st.sampled_from([1, 2, 7])), head_dim=64, block_size=draw(st.sampled_from([4, 16])),
        softcap=draw(st.sampled_from([0.0, 5.0])), has_sink_logits=draw(st.booleans()), shared=tuple(shared),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_any_groups(case: Case) -> None:
    assert_right(case, HALVES)


def test_larger_groups_are_read_by_several_programs_each_of_as_many_of_them() -> None:
    shared = np.array([0, *[300] * 69, 0, 200, 0], np.int32)
    joint = joint_of(shared, 2)
    tokens, members, before = joint
    assert tokens[tokens > 0].tolist() == [256] * 3 + [128]
    assert sorted(members[members > 0].tolist()) == [2, 23, 23, 24]
    assert before.tolist() == [256] * 70 + [128] * 2 + [0]
    assert (2 * members <= JOINT_ROWS).all()
    small = replace(GROUP, query_lens=(1,) * 5, seq_lens=(140,) * 5, shared=(0, 128, 128, 128, 128), share=30)
    assert joint_of(np.array(small.shared, np.int32), 30)[:2].tolist() == [[0, 128, 0, 128, 0], [0, 2, 0, 2, 0]]
    assert_right(small, HALVES)


def test_what_is_less_than_a_tile_or_behind_what_is_kept_room_for_is_read_by_each_alone() -> None:
    assert joint_of(np.array([0, JOINT_TOKENS - 1, JOINT_TOKENS - 1], np.int32), 1) is None
    assert joint_of(np.array([0, 512, 512], np.int32), JOINT_ROWS) is None
    assert joint_of(np.zeros(3, np.int32), 1) is None
    assert joint_of(np.array([0, 0, 512, 512], np.int32), 1, most=3).tolist() == [
        [0, 512, 0, 0],
        [0, 2, 0, 0],
        [0, 512, 512, 0],
    ]


@pytest.mark.parametrize("sm", [90, *(pytest.param(sm, marks=pytest.mark.soak) for sm in (80, 100))])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", INT4])
def test_machine_code_does_not_spill_and_plans_before_it_waits(sm: int, kv_dtype: str) -> None:
    together, apart = every_variant_of(AttentionShape(4, 128, 64, "bfloat16", kv_dtype), sm)[2:]
    for variant, planned_by in (
        (together, ["head_window", "joint"]),
        (apart, ["cu_seqlens_q", "head_sink", "head_window", "joint", "seq_lens"]),
    ):
        compiled = variant_code(variant, Target(sm, cuda=12))
        assert (compiled.spilled_bytes, compiled.is_serialised) == (0, False)
        assert variant.waits == (sm >= OVERLAPS_FROM)
        if variant.waits:
            before, _, after = compiled.ptx.partition("griddepcontrol.wait")
            pointers = {variant.signature[int(at)][0] for at in re.findall(r"ld\.param\.b64.*_param_(\d+)\]", before)}
            assert sorted(pointers) == planned_by
            assert not re.search(r"\b(st|atom|red|cp)\.(global|async)|\bret;", before)
            assert "griddepcontrol.wait" not in after


@pytest.mark.parametrize(
    "shape", [AttentionShape(4, 512, 64, "float16", "float16"), AttentionShape(40, 64, 64, "float16", "float16")]
)
def test_larger_heads_and_more_of_them_read_alone(shape: AttentionShape) -> None:
    assert every_variant_of(shape, 90) == variants_of(shape, 90)
    case = Case((1, 1), (140, 150), ((0, 0),), shape.share, shape.head_dim, shape.block_size, shared=(0, 128))
    scene = TypedScene(case, HALVES)
    expected = scene.answer(ReferenceKernels())
    scene.batch = replace(scene.batch, joint=joint_of(np.array([0, 128], np.int32), 1), max_query_len=1)
    attention = triton_attention()
    np.testing.assert_allclose(scene.answer(attention), expected, rtol=0, atol=TOLERANCE["float16"])
    assert kernels_of(attention) == ["attend"]
