"""What all kernels of Kimi Delta Attention promise, by an oracle that knows nothing of blocks, on poisoned arenas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kda_scene import KdaScene
from support.state_scene import StateCase, state_cases

from headwise.kernels.cpu.state_room_jit import CHUNK
from headwise.kernels.kda_base import KdaKernels
from headwise.kernels.select import make_kda_kernels
from headwise.kernels.state_layout import StateSizes


@pytest.fixture(scope="module", params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> KdaKernels:
    return make_kda_kernels(request.param, threads=2)


def assert_right(kernels: KdaKernels, scene: KdaScene, atol: float = 1e-4, guesses: int | None = None) -> None:
    for found, expected in zip(scene.run(kernels, guesses), scene.expected(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


def test_any_steps_make_of_a_sequence_what_the_definition_says(kernels: KdaKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(2 * CHUNK + 5))
    def check(case: StateCase) -> None:
        assert_right(kernels, KdaScene(case))

    check()


def test_of_guesses_no_state_is_left(kernels: KdaKernels) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=state_cases(6), guesses=st.integers(0, 5))
    def check(case: StateCase, guesses: int) -> None:
        assert_right(kernels, KdaScene(case), guesses=guesses)

    check()


def test_the_geometry_of_published_models(kernels: KdaKernels) -> None:
    steps = ((40, 1, 1), (0, 70, 1))
    assert_right(kernels, KdaScene(StateCase(steps, StateSizes(128, 128, 1, 4), heads=2, block_size=64)))


@pytest.mark.parametrize("told", [-60.0, 30.0, 1e4])
def test_channels_that_forget_at_once_beside_ones_that_never_do(kernels: KdaKernels, told: float) -> None:
    """Of a chunk decays add up to far more than float32 can have the exponential of, either way."""
    scene = KdaScene(StateCase(((90, 1, 40),), StateSizes(16, 16, 1, 4), block_size=64))
    scene.weights.speed[:] = 16, 1e-9
    scene.decays[0][:, ::2] = told
    scene.decays[0][40:, 1::4] = told
    assert_right(kernels, scene)


def test_a_decay_is_as_exact_as_it_is_small(kernels: KdaKernels) -> None:
    """Of a channel that hardly forgets, over many tokens: what is left of the first is what they all keep of it."""
    scene = KdaScene(StateCase(((1500,),), StateSizes(4, 4, 1, 1), heads=1, block_size=16))
    scene.weights.speed[:], scene.weights.bias[:] = 1, 0
    scene.decays[0][:] = -7  # keep 0.99909 each
    scene.numbers[0][1:, scene.case.sizes.channels] = -40  # nothing is written behind the first token
    assert_right(kernels, scene)


def test_without_blocks_nothing_is_written_and_nothing_read(kernels: KdaKernels) -> None:
    scene = KdaScene(StateCase(((5,),)))
    scene._make_room = lambda *arguments: None
    before = scene.arena.copy()
    assert_right(kernels, scene)
    assert (scene.arena == before).all()


@pytest.mark.parametrize("what", ["numbers", "decays", "gates", "convolution", "bias", "speed", "norm"])
def test_inputs_that_do_not_fit_the_layout_are_refused(what: str) -> None:
    scene, kernels = KdaScene(StateCase(((3,),))), make_kda_kernels("numba", threads=1)
    if what in ("numbers", "decays", "gates"):
        setattr(scene, what, [rows[:, 6:] for rows in getattr(scene, what)])
    else:
        object.__setattr__(scene.weights, what, np.ascontiguousarray(getattr(scene.weights, what)[:1]))
    with pytest.raises(ValueError, match="this layout's are"):
        scene.run(kernels)
