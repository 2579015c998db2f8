"""State space models on a GPU, interpreted: as by the definition, on poisoned arenas; and their machine code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.gpu.interpreted_attention import RecordingLauncher
from support.gpu.machine_code import TARGETS, variant_code
from support.ssm_scene import SsmScene
from support.state_scene import NEVER, StateCase, on_device, spoilt

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.ssm import CudaSsm, SsmShape, variants_of
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90
from headwise.kernels.select import make_ssm_kernels
from headwise.kernels.ssm_base import SsmWeights
from headwise.kernels.state_layout import StateSizes


@dataclass
class OnPoison:
    """`CudaSsm` with rooms of NaN, told of a step's longest sequence; decodes as graphs have them, with ``padding``.

    tells: also that no sequence follows another; spoils: guesses are `spoilt`
    """

    padding: int = 0
    tells: bool = False
    spoils: bool = False
    launcher: RecordingLauncher = field(default_factory=RecordingLauncher)
    name = "cuda"

    def attend_ssm(
        self,
        projected: np.ndarray,
        weights: SsmWeights,
        arena: np.ndarray,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: np.ndarray,
    ) -> None:
        batch = on_device(batch, layout.block_size, self.padding, self.tells)
        nothing = np.full((self.padding, projected.shape[1]), np.nan, projected.dtype)
        numbers = np.concatenate([spoilt(projected, batch) if self.spoils else projected, nothing])
        made = np.full((len(numbers), out.shape[1]), np.nan, out.dtype)
        kernels = CudaSsm(self.launcher, lambda nbytes: np.full(nbytes, 0xFF, np.uint8))
        kernels.attend_ssm(numbers, weights, arena, layout, batch, heads, out=made)
        out[...] = made[: len(out)]
        assert np.isnan(made[len(out) :].astype(np.float32)).all()


def assert_right(scene: SsmScene, atol: float = 5e-5, rtol: float = 1e-5, **options: Any) -> OnPoison:
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
        ((9, 1, 4),), StateSizes(20, 36, 3, 3), heads=2, block_size=4
    ),
    "nothing to convolve with": StateCase(((3, 1, 7), (1, 1, 1)), StateSizes(8, 16, 1, 1), heads=1, block_size=16),
    "several pieces of a head": StateCase(((66, 1),), StateSizes(16, 80, 1, 4), heads=1, block_size=32),
    "several tiles of a member, which end within heads": StateCase(((3, 1, 1),), StateSizes(256, 24, 5, 4), heads=2),
}


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_any_steps_make_of_a_sequence_what_the_definition_says(case: StateCase) -> None:
    assert_right(SsmScene(case))


@pytest.mark.soak
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_states_move_and_checkpoints_stay_in_any_way(case: StateCase) -> None:
    for seed in range(1, 6):
        assert_right(SsmScene(replace(case, heads=4, seed=seed)))


def test_the_geometry_of_published_models() -> None:
    assert_right(SsmScene(StateCase(((40, 1, 1), (0, 70, 1)), StateSizes(128, 64, 8, 4), block_size=64)), atol=5e-4)


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.15), pytest.param("float16", 1e-2, marks=pytest.mark.soak)])
def test_narrow_numbers_are_rounded_where_they_are_handed_on(dtype: str, atol: float) -> None:
    case = StateCase(((70, 1, 1),), StateSizes(32, 32, 2, 4), block_size=64)
    assert_right(SsmScene(case, dtype), atol, rtol=3e-2)  # the interpreter truncates bfloat16


def test_heads_that_forget_at_once_or_never_do_not_overflow() -> None:
    scene = SsmScene(StateCase(((90, 1),), block_size=64))
    scene.weights.speed[0], scene.weights.speed[1] = 1e4, 1e-9
    scene.numbers[0][:, -4:] = 30
    assert_right(scene, atol=2e-2)


def test_without_blocks_nothing_is_written_and_nothing_read() -> None:
    for count in (1, 5):
        scene = SsmScene(StateCase(((count,),)))
        scene._make_room = lambda *arguments: None
        before = scene.arena.copy()
        assert_right(scene)
        assert (scene.arena == before).all()


def test_a_decode_is_one_launch_known_from_shapes_and_padding_is_left_alone() -> None:
    kernels = assert_right(SsmScene(StateCase(((1, 1), (1, 1), (1, 1)))), padding=3)
    assert kernels.launcher.launched == [("step", (6 * 2, 1, 1))] * 2


def test_without_tokens_or_sequences_nothing_is_launched() -> None:
    scene = SsmScene(StateCase(((1,),)))
    batch = AttentionBatch(np.zeros(2, np.int32), np.zeros(1, np.int32), scene.tables.reshape(3, 1), 3)
    for tokens, cu in ((0, np.zeros(2, np.int32)), (1, np.zeros(1, np.int32))):
        launcher, numbers = RecordingLauncher(), np.zeros((tokens, scene.width), np.float32)
        out = np.zeros((tokens, 48), np.float32)
        CudaSsm(launcher, np.empty).attend_ssm(
            numbers, scene.weights, scene.arena, scene.layout, replace(batch, cu_seqlens_q=cu), scene.heads, out=out
        )
        assert launcher.launched == []


NANO = SsmShape(16, 8, StateSizes(128, 64, 4, 4), 64, "bfloat16")
"""Nemotron 3 Nano's."""


def test_what_is_not_served_is_refused_with_the_remedy() -> None:
    for wrong, message in (
        (replace(NANO, dtype="int8"), "dtype int8 is not supported on a GPU"),
        (replace(NANO, sizes=StateSizes(512, 64, 8, 4)), "heads of 512 and 64.*at most 256.*device cpu"),
        (replace(NANO, sizes=StateSizes(128, 64, 32, 4)), "state space.*32 of which share a key head.*shared by 16"),
        (replace(NANO, block_size=48), "block_size 48.*power of two, 16 or more"),
        (replace(NANO, block_size=2), "block_size 2.*convolution over 4 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            CudaSsm(RecordingLauncher(), np.empty).prepare([wrong])


@pytest.mark.parametrize("what", ["numbers", "convolution", "convolution_bias", "speed", "bias", "skip", "group"])
def test_inputs_that_do_not_fit_the_layout_are_refused(what: str) -> None:
    scene = SsmScene(StateCase(((3,),)))
    if what == "numbers":
        scene.numbers = [rows[:, 1:].copy() for rows in scene.numbers]
    else:
        scene.weights = replace(scene.weights, **{what: vars(scene.weights)[what][:1].copy()})
    with pytest.raises(ValueError, match=r"this layout's (are|is) \(" if what == "numbers" else rf"weights.{what} is"):
        scene.run(OnPoison())


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
    scene, kernels = SsmScene(replace(case, seed=seed)), OnPoison(padding=2, spoils=spoils)
    wanted = scene.expected()
    for found, expected in zip(scene.run(kernels, 3, whole), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-5)
    if not spoils:
        scene.assert_guesses(wanted, rtol=1e-5, atol=5e-5)
    launched = {kernel for kernel, _ in kernels.launcher.launched}
    assert "step" not in launched
    assert ("carry" in launched) == (whole < NEVER)
    reference = SsmScene(replace(case, seed=seed))
    reference.run(make_ssm_kernels("reference", threads=1), 3, whole)
    scene.assert_same_states(reference, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TELLING else pytest.mark.soak) for name in CASES]
)
def test_where_none_follows_another_all_is_the_same_to_the_bit(name: str) -> None:
    plain, told = (SsmScene(CASES[name]) for _ in range(2))
    for found, expected in zip(told.run(OnPoison(tells=True)), plain.run(OnPoison()), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(told.arena, plain.arena)


def test_followers_without_blocks_write_nothing() -> None:
    scene, kernels = SsmScene(StateCase(((4, 1),))), OnPoison()
    scene._make_room = lambda *arguments: None
    before, count = scene.arena.copy(), 4
    found = scene.run(kernels, 1)[0][:count]
    np.testing.assert_allclose(found, scene.expected()[0][:count], rtol=1e-5, atol=5e-5)
    assert (scene.arena == before).all()


# ---- machine code ----


def every_kernel() -> Iterator[Any]:
    """As ``(sm, kernel, shape)``: each takes seconds to compile."""
    others = {
        "1 group": SsmShape(32, 1, NANO.sizes, 64, "bfloat16"),  # Granite 4.0 H Small's
        "key256": replace(NANO, sizes=StateSizes(256, 64, 4, 4)),
        "key64": replace(NANO, sizes=StateSizes(64, 64, 4, 4)),
    }
    for sm in TARGETS:
        for kernel in variants_of(NANO, sm):
            is_telling = sm == 90 and kernel in ("step", "walk", "carry")
            yield pytest.param(sm, kernel, NANO, id=f"sm{sm}-{kernel}", marks=() if is_telling else pytest.mark.soak)
    for name, shape in others.items():
        for kernel in variants_of(shape, 90):
            yield pytest.param(90, kernel, shape, id=f"sm90-{kernel}-{name}", marks=pytest.mark.soak)


@pytest.mark.parametrize(("sm", "kernel", "shape"), list(every_kernel()))
def test_states_stay_in_registers_and_loads_are_of_16_bytes(sm: int, kernel: str, shape: SsmShape) -> None:
    compiled = variant_code(variants_of(shape, sm)[kernel], Target(sm, 12))
    assert compiled.spilled_bytes <= (8 if kernel == "walk" and sm < 90 else 0)
    assert not compiled.is_serialised
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    if kernel in ("step", "walk"):
        tile = dict(variants_of(shape, sm)[kernel].constants)
        vectors = tile["COLUMNS"] * tile["BLOCK_K"] // 4 // 256  # of a thread
        assert compiled.ptx.count("ld.global.v4") >= 2 * vectors, "16 bytes at once"
        assert compiled.ptx.count("st.global.v4") >= vectors
    if kernel == "carry":
        assert compiled.ptx.count("cp.async.cg.shared.global") >= (16 if sm >= 90 else 8)
        assert sm != 90 or "wgmma.mma_async" in compiled.ptx
