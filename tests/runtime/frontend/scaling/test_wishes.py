"""What clients ask of the number of engines is done once, whichever scheduler tells of it."""

from __future__ import annotations

from headwise.runtime.frontend.scaling import ReplicaSet, ScalingPolicy, Split, Wish, Wishes


class Controller(ReplicaSet):
    """Counts what it is told."""

    def __init__(self) -> None:
        super().__init__(ScalingPolicy(1, 4))
        self.numbers: list[int | None] = []
        self.rolls = 0

    def set_by_hand(self, number: int | None) -> None:
        super().set_by_hand(number)
        self.numbers.append(number)

    def roll(self) -> None:
        self.rolls += 1


def test_a_wish_that_is_told_again_and_again_is_taken_once() -> None:
    controller = Controller()
    wishes = Wishes(controller)
    assert [wishes.take(Wish("one-1", 3)) for _ in range(3)] == [True, False, False]
    assert controller.numbers == [3]
    assert wishes.last == "one-1"


def test_a_roll_happens_once_though_later_wishes_repeat_it() -> None:
    controller = Controller()
    wishes = Wishes(controller)
    wishes.take(Wish("one-1", sets_number=False, roll="one-1"))
    wishes.take(Wish("one-2", 2, roll="one-1"))
    assert (controller.rolls, controller.numbers) == (1, [2])
    wishes.take(Wish("one-3", sets_number=False, roll="one-3"))
    assert (controller.rolls, controller.numbers) == (2, [2])


def test_another_scheduler_that_knows_of_no_roll_asks_for_none() -> None:
    controller = Controller()
    wishes = Wishes(controller)
    wishes.take(Wish("one-1", sets_number=False, roll="one-1"))
    wishes.take(Wish("two-1", 1))
    assert (controller.rolls, controller.numbers) == (1, [1])


def test_a_refusal_is_that_of_the_last_wish() -> None:
    wishes = Wishes(Controller())
    wishes.take(Wish("one-1", 9))
    assert wishes.refusal == "the number of replicas must be from min_replicas 1 to max_replicas 4, got 9"
    wishes.take(Wish("one-2", 2))
    assert not wishes.refusal


def test_an_owner_that_goes_on_for_another_keeps_the_number_and_rolls_nothing_again() -> None:
    controller = Controller()
    wishes = Wishes(controller)
    wishes.resume(Wish("one-2", 3, roll="one-1"))
    assert (controller.rolls, controller.numbers) == (0, [3])
    assert not wishes.take(Wish("one-2", 3, roll="one-1"))
    wishes.take(Wish("one-3", sets_number=False, roll="one-3"))
    assert controller.rolls == 1


def test_a_split_holds_until_another_one_is_wished_for() -> None:
    wishes = Wishes(Controller(), Split(1, 1))
    wishes.take(Wish("one-1", 3))
    assert wishes.split == Split(1, 1)
    wishes.take(Wish("one-2", 4, split=Split(2, 2)))
    wishes.take(Wish("one-3", sets_number=False, roll="one-3"))
    assert wishes.split == Split(2, 2)
    wishes.take(Wish("one-4", 2, split=Split()))
    assert wishes.split == Split()


def test_a_split_with_a_number_that_is_refused_changes_nothing() -> None:
    wishes = Wishes(Controller(), Split(1, 1))
    wishes.take(Wish("one-1", 9, split=Split(4, 5)))
    assert wishes.refusal
    assert wishes.split == Split(1, 1)


def test_an_owner_that_goes_on_for_another_keeps_the_split() -> None:
    wishes = Wishes(Controller())
    wishes.resume(Wish("one-1", 3, split=Split(1, 2)))
    assert wishes.split == Split(1, 2)


def test_a_split_that_later_wishes_repeat_does_not_undo_what_was_decided_since() -> None:
    wishes = Wishes(Controller(), Split(1, 3))
    wishes.take(Wish("one-1", sets_number=False, split=Split(2, 2), deal="one-1"))
    wishes.split = Split(3, 1)
    wishes.take(Wish("one-2", 5, split=Split(2, 2), deal="one-1"))
    assert wishes.split == Split(3, 1)
    wishes.take(Wish("one-3", sets_number=False, split=Split(2, 2), deal="one-3"))
    assert wishes.split == Split(2, 2)
