"""Gated delta-nets on a GPU, interpreted: as by the definition, on poisoned arenas; and their machine code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support.covering import covering
from support.delta_scene import DeltaScene
from support.gpu.interpreted_attention import RecordingLauncher
from support.gpu.machine_code import TARGETS, variant_code
from support.projected_delta import expected_of, projected, weights_of
from support.state_scene import NEVER, StateCase, on_device, spoilt

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.delta import CudaDelta, DeltaShape, variants_of
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90
from headwise.kernels.delta_base import DeltaInputs
from headwise.kernels.select import make_delta_kernels
from headwise.kernels.state_layout import StateSizes, state_layout


@dataclass
class OfProjected:
    """`DeltaKernels` that are handed what is projected: of what comes, `expected_of` says the norm.

    padding: of decodes, as graphs have it; tells: also that no sequence follows another; spoils: guesses are `spoilt`
    """

    dtype: str = "float32"
    padding: int = 0
    tells: bool = False
    spoils: bool = False
    launcher: RecordingLauncher = field(default_factory=RecordingLauncher)
    name = "cuda"

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: np.ndarray,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out: np.ndarray,
    ) -> None:
        batch = on_device(batch, layout.block_size, self.padding, self.tells)
        numbers = projected(inputs, out.shape[2] * out.shape[3], self.dtype)
        numbers = spoilt(numbers, batch) if self.spoils else numbers
        numbers = np.concatenate([numbers, np.full((self.padding, numbers.shape[1]), np.nan, numbers.dtype)])
        made = np.full((len(numbers), out[0].size), np.nan, numbers.dtype)
        kernels = CudaDelta(self.launcher, lambda nbytes: np.full(nbytes, 0xFF, np.uint8))
        kernels.attend_projected(numbers, weights_of(inputs.weights, out.shape), arena, layout, batch, heads, out=made)
        out[...] = made[: len(out)].reshape(out.shape)


def assert_right(scene: DeltaScene, atol: float = 5e-5, **options: Any) -> OfProjected:
    kernels = OfProjected(**options)
    for found, expected in zip(scene.run(kernels), expected_of(scene, kernels.dtype), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    return kernels


CASES = {
    "decodes behind prompts, alone and beside them": StateCase(((5, 1, 1), (0, 20, 1)), heads=1),
    "blocks of two chunks, begun within the second": StateCase(((131, 1, 66), (5, 1, 100)), heads=1, block_size=128),
    "chunks of several blocks, begun within one": StateCase(((70, 1, 66), (5, 1, 2)), heads=1, block_size=64),
    "fewer tokens than the convolution spans, across blocks": StateCase(
        ((1, 1, 2), (63, 2, 3)), block_size=64, heads=1
    ),
    "blocks of less than a tile, sizes that are no powers of two": StateCase(
        ((9, 1, 4),), StateSizes(20, 36, 3, 3), heads=2, block_size=4
    ),
    "nothing to convolve with": StateCase(((3, 1, 7), (1, 1, 1)), StateSizes(8, 16, 1, 1), heads=1, block_size=16),
    "several pieces of a head": StateCase(((66, 1),), StateSizes(16, 80, 1, 4), heads=1, block_size=32),
}


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_any_steps_make_of_a_sequence_what_the_definition_says(case: StateCase) -> None:
    assert_right(DeltaScene(case))


@pytest.mark.soak
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_states_move_and_checkpoints_stay_in_any_way(case: StateCase) -> None:
    for seed in range(1, 6):
        assert_right(DeltaScene(replace(case, heads=2, seed=seed)))


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.15), pytest.param("float16", 1e-2, marks=pytest.mark.soak)])
def test_narrow_numbers_are_rounded_where_they_are_handed_on(dtype: str, atol: float) -> None:
    assert_right(DeltaScene(StateCase(((70, 1, 1),), StateSizes(32, 32, 2, 4), block_size=64)), atol, dtype=dtype)


def test_repeated_keys_do_not_blow_up_a_chunk() -> None:
    scene = DeltaScene(StateCase(((90,),), heads=1, block_size=64))
    scene.inputs[0].mixed[:] = scene.inputs[0].mixed[0]
    scene.inputs[0].rate[:] = 1 - 1e-6
    scene.inputs[0].decay[:] = -1e-6
    assert_right(scene, atol=1e-3)


def test_without_blocks_nothing_is_written_and_nothing_read() -> None:
    for count in (1, 5):
        scene = DeltaScene(StateCase(((count,),)))
        scene._make_room = lambda *arguments: None
        before = scene.arena.copy()
        assert_right(scene)
        assert (scene.arena == before).all()


def test_a_decode_is_one_launch_known_from_shapes_and_padding_is_left_alone() -> None:
    kernels = assert_right(DeltaScene(StateCase(((1, 1), (1, 1), (1, 1)))), padding=3)
    assert kernels.launcher.launched == [("step", (6 * 2, 1, 1))] * 2


def test_what_is_not_served_is_refused_with_the_remedy() -> None:
    shape = DeltaShape(16, StateSizes(128, 128, 2, 4), 64, "bfloat16")
    for wrong, message in (
        (replace(shape, dtype="int8"), "dtype int8 is not supported on a GPU"),
        (replace(shape, sizes=StateSizes(512, 128, 2, 4)), "heads of 512 and 128.*at most 256.*device cpu"),
        (replace(shape, sizes=StateSizes(128, 128, 32, 4)), "32 of which share a key head.*shared by 16"),
        (replace(shape, block_size=48), "block_size 48.*power of two, 16 or more"),
        (replace(shape, block_size=2), "block_size 2.*convolution over 4 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            CudaDelta(RecordingLauncher(), np.empty).prepare([wrong])
    numbers = np.zeros((1, 90), np.float32)
    layout, batch = state_layout(16, 1, StateSizes(8, 8, 1, 4)), AttentionBatch(np.zeros(2), None, None, 1)
    heads = HeadTable(np.zeros(1, np.int32), None, None, None)
    with pytest.raises(ValueError, match="this layout's are"):
        CudaDelta(RecordingLauncher(), np.empty).attend_projected(
            numbers, weights_of(np.zeros(0), (0, 1, 1, 8)), np.zeros(0), layout, batch, heads, out=numbers
        )


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
    scene, kernels = DeltaScene(replace(case, seed=seed)), OfProjected(padding=2, spoils=spoils)
    wanted = expected_of(scene)
    for found, expected in zip(scene.run(kernels, 3, whole), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    if not spoils:
        scene.assert_guesses(wanted, rtol=0, atol=5e-5)
    launched = {kernel for kernel, _ in kernels.launcher.launched}
    assert "step" not in launched
    assert ("carry" in launched) == (whole < NEVER)
    reference = DeltaScene(replace(case, seed=seed))
    reference.run(make_delta_kernels("reference", threads=1), 3, whole)
    scene.assert_same_states(reference, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TELLING else pytest.mark.soak) for name in CASES]
)
def test_where_none_follows_another_all_is_the_same_to_the_bit(name: str) -> None:
    plain, told = (DeltaScene(CASES[name]) for _ in range(2))
    for found, expected in zip(told.run(OfProjected(tells=True)), plain.run(OfProjected()), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(told.arena, plain.arena)


def test_followers_without_blocks_write_nothing() -> None:
    scene, kernels = DeltaScene(StateCase(((4, 1),))), OfProjected()
    scene._make_room = lambda *arguments: None
    before, count = scene.arena.copy(), 4
    found = scene.run(kernels, 1)[0][:count]
    np.testing.assert_allclose(found, expected_of(scene)[0][:count], rtol=0, atol=5e-5)
    assert (scene.arena == before).all()


# ---- machine code ----

NEXT = DeltaShape(16, StateSizes(128, 128, 2, 4), 64, "bfloat16")
"""Qwen3-Next's."""
SPILLED_BELOW_90 = {"solve": 256, "carry": 64}


def every_kernel() -> Iterator[Any]:
    """As ``(sm, kernel, shape)``: each takes seconds to compile."""
    larger = replace(NEXT, sizes=StateSizes(128, 128, 4, 4))  # of Qwen3.5's largest
    for sm in TARGETS:
        for kernel in variants_of(NEXT, sm):
            is_telling = sm == 90 and kernel in ("step", "walk", "carry")
            yield pytest.param(sm, kernel, NEXT, id=f"sm{sm}-{kernel}", marks=() if is_telling else pytest.mark.soak)
    unequal = replace(NEXT, sizes=StateSizes(64, 128, 2, 4))
    yield pytest.param(90, "convolve", unequal, id="sm90-convolve-unequal")
    for kernel in variants_of(larger, 90):
        yield pytest.param(90, kernel, larger, id=f"sm90-{kernel}-share4", marks=pytest.mark.soak)


@pytest.mark.parametrize(("sm", "kernel", "shape"), list(every_kernel()))
def test_states_stay_in_registers_and_loads_are_of_16_bytes(sm: int, kernel: str, shape: DeltaShape) -> None:
    compiled = variant_code(variants_of(shape, sm)[kernel], Target(sm, 12))
    assert compiled.spilled_bytes <= (SPILLED_BELOW_90.get(kernel, 0) if sm < 90 else 0)
    assert not compiled.is_serialised
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    if kernel in ("step", "walk"):  # two states of 64 KiB: 256 threads have 16 vectors of each
        assert compiled.ptx.count("ld.global.v4") >= 32, "16 bytes at once"
    if kernel == "carry":
        assert compiled.ptx.count("cp.async.cg.shared.global") >= 16
        assert sm != 90 or "wgmma.mma_async" in compiled.ptx
