"""What all kernels of state space models promise, by an oracle that knows nothing of blocks, on poisoned arenas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ssm_scene import SsmScene
from support.state_scene import StateCase, state_cases

from headwise.kernels.cpu.state_room_jit import CHUNK
from headwise.kernels.select import make_ssm_kernels
from headwise.kernels.ssm_base import SsmKernels
from headwise.kernels.state_layout import StateSizes


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> SsmKernels:
    return make_ssm_kernels(request.param, threads=2)


def assert_right(kernels: SsmKernels, scene: SsmScene, atol: float = 5e-5, guesses: int | None = None) -> None:
    for found, expected in zip(scene.run(kernels, guesses), scene.expected(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)


def test_any_steps_make_of_a_sequence_what_the_definition_says(kernels: SsmKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(2 * CHUNK + 5))
    def check(case: StateCase) -> None:
        assert_right(kernels, SsmScene(case))

    check()


def test_of_guesses_no_state_is_left(kernels: SsmKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(6), guesses=st.integers(0, 5))
    def check(case: StateCase, guesses: int) -> None:
        assert_right(kernels, SsmScene(case), guesses=guesses)

    check()


def test_the_geometry_of_published_models(kernels: SsmKernels) -> None:
    steps = ((40, 1, 1), (0, 70, 1))
    assert_right(kernels, SsmScene(StateCase(steps, StateSizes(128, 64, 8, 4), heads=2, block_size=64)), atol=2e-4)


def test_heads_that_forget_at_once_or_never_do_not_overflow(kernels: SsmKernels) -> None:
    scene = SsmScene(StateCase(((90, 1),), block_size=64))
    scene.weights.speed[0], scene.weights.speed[1] = 1e4, 1e-9
    scene.numbers[0][:, -4:] = 30
    assert_right(kernels, scene, atol=2e-2)


def test_without_blocks_nothing_is_written_and_nothing_read(kernels: SsmKernels) -> None:
    scene = SsmScene(StateCase(((5,),)))
    scene._make_room = lambda *arguments: None
    before = scene.arena.copy()
    assert_right(kernels, scene)
    assert (scene.arena == before).all()


@pytest.mark.parametrize("what", ["numbers", "convolution", "bias", "group"])
def test_inputs_that_do_not_fit_the_layout_are_refused(what: str) -> None:
    scene, kernels = SsmScene(StateCase(((3,),))), make_ssm_kernels("numba", threads=1)
    if what == "numbers":
        scene.numbers = [rows[:, 1:] for rows in scene.numbers]
    else:
        weights = vars(scene.weights)
        object.__setattr__(scene.weights, what, np.ascontiguousarray(weights[what][:1]))
    with pytest.raises(ValueError, match=r"this layout's are|of this layout's"):
        scene.run(kernels)
