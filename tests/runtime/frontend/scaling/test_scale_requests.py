"""What clients are told who ask for engines at the same time."""

from __future__ import annotations

from headwise.errors import DeploymentError, InvalidRequestError
from headwise.runtime.frontend.scaling import Exchange, FleetState, Split
from headwise.runtime.frontend.scaling.requests import ScaleRequests

ONE, TWO, THREE = (b"one", 1), (b"two", 1), (b"three", 1)


class Deciding:
    """Requests, and an owner that takes the last wish and tells of it."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.requests = ScaleRequests(self.exchange, "it")

    def told(self, reason: str = "decided", refusal: str = "") -> dict[tuple[bytes, int], object]:
        wish = self.exchange.swap(FleetState(1, "")).wish
        assert wish is not None
        self.exchange.swap(FleetState(1, reason, wish=wish.id, refusal=refusal))
        return dict(self.requests.answers(0.0))


def test_of_two_numbers_the_last_one_counts_and_both_are_told_so() -> None:
    deciding = Deciding()
    deciding.requests.scale(ONE, 3, 0.0, Split(2, 1))
    deciding.requests.scale(TWO, 5, 0.0)
    told = deciding.told("1 -> 5: set by hand")
    assert isinstance(told[ONE], DeploymentError)
    assert str(told[ONE]) == (
        "another client asked for 5 engines at the same time, and the last one counts: 1 -> 5: set by hand"
    )
    assert told[TWO] == (
        "1 -> 5: set by hand, in place of 3 engines (2 for prompts, 1 to decode), which another client asked for at "
        "the same time"
    )


def test_a_number_that_two_ask_for_is_nobody_s_error() -> None:
    deciding = Deciding()
    deciding.requests.scale(ONE, 3, 0.0)
    deciding.requests.scale(TWO, 3, 0.0)
    assert deciding.told() == {ONE: "decided", TWO: "decided"}


def test_who_asks_later_replaces_nobody() -> None:
    deciding = Deciding()
    deciding.requests.scale(ONE, 3, 0.0)
    assert deciding.told() == {ONE: "decided"}
    deciding.requests.scale(TWO, 5, 0.0)
    assert deciding.told("3 -> 5: set by hand") == {TWO: "3 -> 5: set by hand"}


def test_what_a_client_asked_for_that_has_gone_counts_all_the_same() -> None:
    deciding = Deciding()
    deciding.requests.scale(ONE, 3, 0.0)
    deciding.requests.scale(TWO, None, 0.0)
    deciding.requests.forget(frozenset((b"two",)))
    told = deciding.told()
    assert set(told) == {ONE}
    assert "another client asked for as many engines as are needed" in str(told[ONE])


def test_a_refusal_is_for_who_asked_for_that_and_the_number_that_it_replaced_was_not_taken_either() -> None:
    deciding = Deciding()
    deciding.requests.scale(ONE, 3, 0.0)
    deciding.requests.scale(TWO, 99, 0.0)
    deciding.requests.roll(THREE, 0.0)
    told = deciding.told("1: all are replaced", "too many")
    assert isinstance(told[ONE], DeploymentError)
    assert str(told[ONE]).endswith("99 engines at the same time, and that was refused: too many")
    assert isinstance(told[TWO], InvalidRequestError)
    assert told[THREE] == "1: all are replaced"


def test_one_roll_does_for_all_who_ask_at_the_same_time() -> None:
    deciding = Deciding()
    deciding.requests.roll(ONE, 0.0)
    assert deciding.told() == {ONE: "decided"}
    deciding.requests.roll(ONE, 0.0)
    deciding.requests.roll(TWO, 0.0)
    both = "decided; one roll for all who asked at the same time"
    assert deciding.told() == {ONE: both, TWO: both}


def test_a_roll_and_a_number_do_not_touch_each_other() -> None:
    deciding = Deciding()
    deciding.requests.roll(ONE, 0.0)
    deciding.requests.scale(TWO, 3, 0.0)
    assert deciding.told() == {ONE: "decided", TWO: "decided"}
