"""When a deployment that starts serves although some of its engines do not, and when it has failed."""

from __future__ import annotations

import pytest

from headwise.actors.first_start import ROOM_S, EngineStart, has_room, is_served
from headwise.actors.restarts import Phase
from headwise.errors import ConfigError, DeploymentError, HeadwiseError, ModelError

RUNNING = EngineStart("engine-0", Phase.RUNNING)
STARTING = EngineStart("engine-1", Phase.STARTING)
WAITING = EngineStart("engine-2", Phase.PLACING, ROOM_S)


def failed(error: HeadwiseError, phase: Phase = Phase.STARTING) -> EngineStart:
    return EngineStart("engine-3", phase, error=error)


def test_it_serves_once_an_engine_does_though_others_wait_for_a_node() -> None:
    assert is_served([RUNNING])
    assert is_served([RUNNING, WAITING, WAITING])
    assert not is_served([WAITING])


def test_engines_that_have_room_are_waited_for() -> None:
    assert not is_served([RUNNING, STARTING])
    assert not is_served([RUNNING, EngineStart("engine-1", Phase.DOWN)])
    assert not is_served([RUNNING, EngineStart("engine-1", Phase.PLACING, ROOM_S / 2)]), "Ray may be about to place it"


def test_an_engine_that_failed_is_not_waited_for_once_another_serves() -> None:
    lost = DeploymentError("its node cannot reach the scheduler")
    assert is_served([RUNNING, failed(lost)])
    assert is_served([RUNNING, failed(lost, Phase.PLACING), WAITING])
    assert not is_served([STARTING, failed(lost)]), "the other one may serve yet"


def test_when_all_engines_that_had_room_failed_the_start_fails_with_the_first_error() -> None:
    with pytest.raises(DeploymentError, match="first"):
        is_served([failed(DeploymentError("first")), failed(DeploymentError("second")), WAITING])


@pytest.mark.parametrize("error", [ConfigError("it does not fit"), ModelError("no such model")])
def test_what_every_engine_would_raise_ends_the_start_at_once(error: HeadwiseError) -> None:
    with pytest.raises(type(error), match=str(error)):
        is_served([STARTING, WAITING, failed(error)])


def test_a_deployment_of_no_engines_serves() -> None:
    assert is_served([])
    assert has_room([])


def test_no_engine_has_room_while_all_wait_for_a_node() -> None:
    assert not has_room([WAITING, EngineStart("engine-0", Phase.DOWN)])
    assert has_room([WAITING, STARTING])
    assert has_room([WAITING, failed(DeploymentError("ended"), Phase.PLACING)])
