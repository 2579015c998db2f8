"""Kimi Delta Attention on a GPU, interpreted: as by the definition, on poisoned arenas; and its machine code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.gpu.interpreted_attention import RecordingLauncher
from support.gpu.machine_code import TARGETS, variant_code
from support.kda_scene import BEHIND, KdaScene
from support.state_scene import NEVER, StateCase, on_device, spoilt

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda import kda, kda_jit
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.kda import CudaKda, KdaShape, variants_of
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90
from headwise.kernels.kda_base import KdaProjected
from headwise.kernels.select import make_kda_kernels
from headwise.kernels.state_layout import StateSizes


@dataclass
class OnPoison:
    """`CudaKda` with rooms of NaN, told of a step's longest sequence; decodes as graphs have them, with ``padding``.

    tells: also that no sequence follows another; spoils: guesses are `spoilt`
    """

    padding: int = 0
    tells: bool = False
    spoils: bool = False
    launcher: RecordingLauncher = field(default_factory=RecordingLauncher)
    name = "cuda"

    def attend_kda(
        self,
        projected: KdaProjected,
        arena: np.ndarray,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: np.ndarray,
    ) -> None:
        batch = on_device(batch, layout.block_size, self.padding, self.tells)
        numbers, decays, gates = (
            np.concatenate(
                [
                    spoilt(rows, batch) if self.spoils else rows,
                    np.full((self.padding, rows.shape[1]), np.nan, rows.dtype),
                ]
            )
            for rows in (projected.numbers, projected.decays, projected.gates)
        )
        made = np.full((len(numbers), out.shape[1]), np.nan, out.dtype)
        kernels = CudaKda(self.launcher, lambda nbytes: np.full(nbytes, 0xFF, np.uint8))
        rows = numbers, decays, gates
        kernels.attend_kda(KdaProjected(*rows, projected.weights), arena, layout, batch, heads, out=made)
        out[...] = made[: len(out)]
        assert np.isnan(made[len(out) :].astype(np.float32)).all()


def assert_right(scene: KdaScene, atol: float = 1e-4, rtol: float = 1e-4, **options: Any) -> OnPoison:
    kernels = OnPoison(**options)
    for found, expected in zip(scene.run(kernels), scene.expected(), strict=True):
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rtol, atol=atol)
    return kernels


CASES = {
    "decodes behind prompts, alone and beside them": StateCase(((5, 1, 1), (0, 20, 1)), heads=1),
    "blocks of two chunks, begun within the second": StateCase(((131, 1, 66), (5, 1, 100)), heads=1, block_size=128),
    "chunks of several blocks, begun within one": StateCase(((70, 1, 66), (5, 1, 2)), heads=3, block_size=64),
    "fewer tokens than the convolution spans, across blocks": StateCase(
        ((1, 1, 2), (63, 2, 3)), block_size=64, heads=1
    ),
    "blocks of less than a tile, sizes that are no powers of two": StateCase(
        ((9, 1, 4),), StateSizes(20, 36, 1, 3), heads=2, block_size=4
    ),
    "nothing to convolve with": StateCase(((3, 1, 7), (1, 1, 1)), StateSizes(8, 16, 1, 1), heads=1, block_size=16),
    "several pieces of a head": StateCase(((66, 1),), StateSizes(16, 80, 1, 4), heads=1, block_size=32),
    "the largest keys": StateCase(((3, 1, 1),), StateSizes(256, 24, 1, 4), heads=2),
}


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_any_steps_make_of_a_sequence_what_the_definition_says(case: StateCase) -> None:
    assert_right(KdaScene(case))


@pytest.mark.soak
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_states_move_and_checkpoints_stay_in_any_way(case: StateCase) -> None:
    for seed in range(1, 6):
        assert_right(KdaScene(replace(case, heads=4, seed=seed)))


def test_the_geometry_of_published_models() -> None:
    assert_right(KdaScene(StateCase(((40, 1, 1), (0, 70, 1)), StateSizes(128, 128, 1, 4), block_size=64)), atol=5e-4)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.15), pytest.param("float16", 2e-2, marks=pytest.mark.soak)])
def test_narrow_numbers_are_rounded_where_they_are_handed_on(dtype: str, atol: float) -> None:
    case = StateCase(((70, 1, 1),), StateSizes(32, 32, 1, 4), block_size=64)
    assert_right(KdaScene(case, dtype), atol, rtol=3e-2)  # the interpreter truncates bfloat16


@pytest.mark.parametrize("told", [-60.0, 30.0, 1e4])
def test_channels_that_forget_at_once_beside_ones_that_never_do(told: float) -> None:
    """Of a chunk decays add up to far more than float32 can have the exponential of, either way."""
    scene = KdaScene(StateCase(((90, 1, 40),), StateSizes(16, 16, 1, 4), block_size=64))
    scene.weights.speed[:] = 16, 1e-9
    scene.decays[0][:, ::2] = told
    scene.decays[0][40:, 1::4] = told
    assert_right(scene, atol=5e-4)


def test_without_blocks_nothing_is_written_and_nothing_read() -> None:
    for count in (1, 5):
        scene = KdaScene(StateCase(((count,),)))
        scene._make_room = lambda *arguments: None
        before = scene.arena.copy()
        assert_right(scene)
        assert (scene.arena == before).all()


def test_a_decode_is_one_launch_known_from_shapes_and_padding_is_left_alone() -> None:
    kernels = assert_right(KdaScene(StateCase(((1, 1), (1, 1), (1, 1)))), padding=3)
    assert kernels.launcher.launched == [("step", (6 * 2, 1, 1))] * 2


def test_without_tokens_or_sequences_nothing_is_launched() -> None:
    scene = KdaScene(StateCase(((1,),)))
    batch = AttentionBatch(np.zeros(2, np.int32), np.zeros(1, np.int32), scene.tables.reshape(3, 1), 3)
    for tokens, cu in ((0, np.zeros(2, np.int32)), (1, np.zeros(1, np.int32))):
        launcher = RecordingLauncher()
        rows = [np.zeros((tokens, of[0].shape[1]), np.float32) for of in (scene.numbers, scene.decays, scene.gates)]
        where = scene.arena, scene.layout, replace(batch, cu_seqlens_q=cu), scene.heads
        CudaKda(launcher, np.empty).attend_kda(
            KdaProjected(*rows, scene.weights), *where, out=np.zeros((tokens, 24), np.float32)
        )
        assert launcher.launched == []


KIMI = KdaShape(32, StateSizes(128, 128, 1, 4), 128, "bfloat16", 32 * 385 + 256)
"""Kimi-Linear's."""


def test_what_is_not_served_is_refused_with_the_remedy() -> None:
    for wrong, message in (
        (replace(KIMI, dtype="int8"), "dtype int8 is not supported on a GPU"),
        (replace(KIMI, sizes=StateSizes(512, 64, 1, 4)), "Kimi Delta.*heads of 512 and 64.*at most 256.*device cpu"),
        (replace(KIMI, block_size=48), "block_size 48.*power of two, 16 or more"),
        (replace(KIMI, block_size=2), "block_size 2.*convolution over 4 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            CudaKda(RecordingLauncher(), np.empty).prepare([wrong])


@pytest.mark.parametrize("what", ["numbers", "decays", "gates", "convolution", "speed", "bias", "norm"])
def test_inputs_that_do_not_fit_the_layout_are_refused(what: str) -> None:
    scene = KdaScene(StateCase(((3,),)))
    if what in ("numbers", "decays", "gates"):
        setattr(scene, what, [rows[:, BEHIND + 1 :].copy() for rows in getattr(scene, what)])
        told = r"this layout's are \("
    else:
        scene.weights = replace(scene.weights, **{what: vars(scene.weights)[what][:1].copy()})
        told = rf"weights.{what} is"
    with pytest.raises(ValueError, match=told):
        scene.run(OnPoison())


def test_both_halves_agree_on_the_tokens_of_a_part() -> None:
    assert kda_jit.PART.value == kda.PART


# ---- sequences that follow others ----

TELLING = (
    "decodes behind prompts, alone and beside them",
    "blocks of less than a tile, sizes that are no powers of two",
    "nothing to convolve with",
)
"""Of `CASES`: each launches all kernels, for sequences beside others, for several blocks, and without a convolution."""
FOLLOWED = {
    "within blocks, and across their ends": StateCase(((5, 1, 3, 1, 9, 2, 1), (0, 20, 1, 4, 2, 2, 3)), heads=1),
    "across several blocks, shorter than the convolution": StateCase(
        ((9, 1, 4, 1),), StateSizes(20, 36, 3, 4), heads=2, block_size=4
    ),
    "nothing to convolve with": StateCase(((3, 1, 7, 2),), StateSizes(8, 16, 1, 1), heads=1),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "whole", "spoils"), covering(list(FOLLOWED), [NEVER, 5], [False, True]))
def test_tokens_that_follow_others_are_taken_on_in_turn_and_of_guesses_no_state_is_left(
    name: str, whole: int, spoils: bool, seed: int
) -> None:
    case = FOLLOWED[name]
    scene, kernels = KdaScene(replace(case, seed=seed)), OnPoison(padding=2, spoils=spoils)
    wanted = scene.expected()
    for found, expected in zip(scene.run(kernels, 3, whole), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    if not spoils:
        scene.assert_guesses(wanted, rtol=1e-4, atol=1e-4)
    launched = {kernel for kernel, _ in kernels.launcher.launched}
    assert "step" not in launched
    assert ("carry" in launched) == (whole < NEVER)
    reference = KdaScene(replace(case, seed=seed))
    reference.run(make_kda_kernels("reference", threads=1), 3, whole)
    scene.assert_same_states(reference, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TELLING else pytest.mark.soak) for name in CASES]
)
def test_where_none_follows_another_all_is_the_same_to_the_bit(name: str) -> None:
    plain, told = (KdaScene(CASES[name]) for _ in range(2))
    for found, expected in zip(told.run(OnPoison(tells=True)), plain.run(OnPoison()), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(told.arena, plain.arena)


def test_followers_without_blocks_write_nothing() -> None:
    scene, kernels = KdaScene(StateCase(((4, 1),))), OnPoison()
    scene._make_room = lambda *arguments: None
    before, count = scene.arena.copy(), 4
    found = scene.run(kernels, 1)[0][:count]
    np.testing.assert_allclose(found, scene.expected()[0][:count], rtol=1e-4, atol=1e-4)
    assert (scene.arena == before).all()


# ---- machine code ----


def every_kernel() -> Iterator[Any]:
    """As ``(sm, kernel, shape)``: each takes seconds to compile."""
    others = {
        "of 8 ranks": replace(KIMI, heads=4, row=4 * 385 + 256),
        "key64": replace(KIMI, sizes=StateSizes(64, 64, 1, 4)),
    }
    for sm in TARGETS:
        for kernel in variants_of(KIMI, sm):
            is_telling = sm == 90 and kernel in ("step", "walk", "pair", "carry")
            yield pytest.param(sm, kernel, KIMI, id=f"sm{sm}-{kernel}", marks=() if is_telling else pytest.mark.soak)
    for name, shape in others.items():
        for kernel in variants_of(shape, 90):
            yield pytest.param(90, kernel, shape, id=f"sm90-{kernel}-{name}", marks=pytest.mark.soak)


@pytest.mark.parametrize(("sm", "kernel", "shape"), list(every_kernel()))
def test_states_stay_in_registers_and_loads_are_of_16_bytes(sm: int, kernel: str, shape: KdaShape) -> None:
    compiled = variant_code(variants_of(shape, sm)[kernel], Target(sm, 12))
    assert compiled.spilled_bytes == 0
    assert sm >= 100 or kernel not in ("step", "walk") or compiled.registers <= 128, "two programs at once"
    assert not compiled.is_serialised
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    if kernel in ("step", "walk"):
        tile = dict(variants_of(shape, sm)[kernel].constants)
        vectors = tile["BLOCK_V"] * tile["BLOCK_K"] // 4 // 256  # of a thread
        assert compiled.ptx.count("ld.global.v4") >= vectors, "16 bytes at once"
        assert compiled.ptx.count("st.global.v4") >= vectors
    if kernel == "carry":
        assert sm != 90 or "wgmma.mma_async" in compiled.ptx
