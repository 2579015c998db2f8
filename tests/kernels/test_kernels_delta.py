"""What all kernels of gated delta-nets promise, by an oracle that knows nothing of blocks, on poisoned arenas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.delta_scene import DeltaScene
from support.projected_delta import OfProjected, expected_of
from support.state_scene import StateCase, state_cases

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.cpu.state_room_jit import CHUNK
from headwise.kernels.delta_base import DeltaKernels, ProjectedDeltaKernels
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.select import make_delta_kernels
from headwise.kernels.state_layout import StateSizes, sizes_of, state_layout, state_views


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> DeltaKernels:
    kernels = make_delta_kernels(request.param, threads=2)
    return OfProjected(kernels) if isinstance(kernels, ProjectedDeltaKernels) else kernels


def assert_right(kernels: DeltaKernels, scene: DeltaScene, atol: float = 5e-5, guesses: int | None = None) -> None:
    wanted = expected_of(scene) if isinstance(kernels, OfProjected) else scene.expected()
    for found, expected in zip(scene.run(kernels, guesses), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_any_steps_make_of_a_sequence_what_the_definition_says(kernels: DeltaKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(2 * CHUNK + 5))
    def check(case: StateCase) -> None:
        assert_right(kernels, DeltaScene(case))

    check()


def test_of_guesses_no_state_is_left(kernels: DeltaKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(6), guesses=st.integers(0, 5))
    def check(case: StateCase, guesses: int) -> None:
        assert_right(kernels, DeltaScene(case), guesses=guesses)

    check()


def test_the_geometry_of_published_models(kernels: DeltaKernels) -> None:
    steps = ((40, 1, 1), (0, 70, 1))
    assert_right(kernels, DeltaScene(StateCase(steps, StateSizes(128, 128, 2, 4), heads=2, block_size=64)), atol=2e-4)


def test_repeated_keys_do_not_blow_up_a_chunk(kernels: DeltaKernels) -> None:
    scene = DeltaScene(StateCase(((90,),), block_size=64))
    scene.inputs[0].mixed[:] = scene.inputs[0].mixed[0]
    scene.inputs[0].rate[:] = 1 - 1e-6
    scene.inputs[0].decay[:] = -1e-6
    assert_right(kernels, scene, atol=1e-3)


def test_without_blocks_nothing_is_written_and_nothing_read(kernels: DeltaKernels) -> None:
    scene = DeltaScene(StateCase(((5,),)))
    scene._make_room = lambda *arguments: None
    before = scene.arena.copy()
    assert_right(kernels, scene)
    assert (scene.arena == before).all()


def test_a_layout_says_its_sizes_and_views_share_the_arenas_memory() -> None:
    sizes = StateSizes(8, 12, 2, 4)
    layout = state_layout(16, 3, sizes)
    assert sizes_of(layout) == sizes
    assert layout.slot_bytes == 4 * (3 * 40) + 32 + 4 * (2 * 8 * 12)  # the first role ends on a multiple of 64
    arena = np.zeros(2 * layout.block_bytes, np.uint8)
    convolution, recurrent = state_views(arena, layout)
    assert (convolution.shape, recurrent.shape) == ((2, 3, 3, 40), (2, 3, 2, 8, 12))
    recurrent[1, 2, -1, -1, -1] = 1
    assert arena[-4:].view(np.float32) == 1
    with pytest.raises(ConfigError, match="not one of recurrent states"):
        sizes_of(gqa_layout(16, 1, 8))
    with pytest.raises(ConfigError, match="not a whole number"):
        state_views(arena[:-64], layout)


def test_states_do_not_grow_with_the_tokens_of_a_block_and_padding_is_part_of_the_layout() -> None:
    sizes = StateSizes(8, 12, 2, 4)
    small, large = state_layout(16, 3, sizes), state_layout(64, 3, sizes)
    assert small.block_bytes == large.block_bytes
    padded = BlockLayout(16, 3, small.roles, tail_bytes=64)
    assert padded.block_bytes == small.block_bytes + 64
    assert padded.slot_bytes == small.slot_bytes
    assert len({small.identity, large.identity, padded.identity}) == 3


def test_inputs_that_do_not_fit_the_layout_are_refused() -> None:
    scene = DeltaScene(StateCase(((3,),)))
    scene.weights = scene.weights[:, :3]
    with pytest.raises(ValueError, match="this layout's are"):
        scene.run(OfProjected(make_delta_kernels("numba", threads=1)))
