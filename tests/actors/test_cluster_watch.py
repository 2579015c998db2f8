from __future__ import annotations

from headwise.actors.cluster import LOST_S, ClusterWatch

TICK_S = 0.25


class Time:
    """A cluster that is there or not, looked at as the watch's thread does."""

    def __init__(self) -> None:
        self.now, self.is_there = 9_000.0, True
        self.watch = ClusterWatch(
            "control service", "10.0.0.1:6379", lambda error: None, lambda address: self.is_there, lambda: self.now
        )

    def passes(self, seconds: float) -> bool:
        """Whether the cluster counts as lost at any look."""
        lost = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            lost.append(self.watch.look())
        return any(lost)


def test_a_cluster_that_does_not_answer_for_long_is_lost() -> None:
    time = Time()
    assert not time.passes(100.0)
    time.is_there = False
    assert not time.passes(LOST_S - 1.0)
    assert time.passes(2.0)


def test_a_cluster_that_comes_back_in_time_is_not() -> None:
    time = Time()
    for _ in range(5):
        time.is_there = False
        assert not time.passes(LOST_S - 1.0)
        time.is_there = True
        assert not time.passes(1.0)


def test_a_process_that_was_suspended_does_not_take_the_cluster_for_lost_at_its_first_look() -> None:
    time = Time()
    time.is_there = False
    assert not time.passes(1.0)
    time.now += 3600.0
    assert not time.watch.look()
    assert not time.passes(LOST_S - 3.0)
    assert time.passes(3.0)
