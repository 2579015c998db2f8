"""Whose prompt is computed first: arithmetic against equal parts that are counted out, and engines that keep to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import continuation

from headwise.prompt_turns import Beside, Present, PromptTurns
from headwise.runtime.engine.core import EngineCore

# ---- the arithmetic ----


@dataclass
class Prompt:
    """tokens: to be computed; turn: its own; before: tokens of others that came later, computed before it was through;
    most: prompts that were there at a time until then"""

    number: int
    came: int
    tokens: int
    turn: float = 0.0
    left: int = 0
    before: int = 0
    most: int = 0


def serve(prompts: list[Prompt]) -> list[Prompt]:
    """Who is through, in this order: a token at a time, of whose turn it is."""
    turns, there, through = PromptTurns(), list[Prompt](), list[Prompt]()
    coming = deque(sorted(prompts, key=lambda prompt: prompt.came))
    for now in count():
        while coming and coming[0].came <= now:
            prompt = coming.popleft()
            prompt.turn, prompt.left = turns.turn(turns.now, prompt.tokens), prompt.tokens
            there.append(prompt)
        if not there:
            if not coming:
                return through
            continue
        first = min(there, key=lambda prompt: (prompt.turn, prompt.number))
        turns.computed(1, len(there))
        first.left -= 1
        for prompt in there:
            prompt.before += (first.came, first.number) > (prompt.came, prompt.number)
            prompt.most = max(prompt.most, len(there))
        if not first.left:
            there.remove(first)
            through.append(first)
    raise AssertionError


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=12))
def test_who_comes_later_puts_nobody_off_by_more_than_twice_its_length_for_each_that_is_there(
    arrivals: list[tuple[int, int]],
) -> None:
    prompts = [Prompt(number, came, tokens) for number, (came, tokens) in enumerate(arrivals)]
    assert len(serve(prompts)) == len(prompts)
    for prompt in prompts:
        assert prompt.before < 2 * prompt.tokens * prompt.most, prompt


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_of_those_that_come_at_once_the_shortest_goes_first(lengths: list[int]) -> None:
    served = serve([Prompt(number, 0, tokens) for number, tokens in enumerate(lengths)])
    assert [prompt.tokens for prompt in served] == sorted(lengths)


def test_who_lacks_less_than_is_left_of_others_goes_before_them() -> None:
    turns = PromptTurns()
    book = turns.turn(turns.now, 1000)
    turns.computed(600, 1)
    assert turns.turn(turns.now, 399) < book < turns.turn(turns.now, 401)


def test_four_short_ones_that_are_always_there_have_what_five_have_of_equal_parts() -> None:
    turns, done = PromptTurns(), 0
    book = turns.turn(turns.now, 1000)
    waiting = [turns.turn(turns.now, 10)] * 4
    while min(waiting) < book:
        waiting.remove(min(waiting))
        turns.computed(10, 5)
        done += 10
        waiting.append(turns.turn(turns.now, 10))
    assert done == pytest.approx(5 * 1000, rel=0.02)


def test_tenants_have_equal_parts_however_many_prompts_each_has() -> None:
    turns, there = PromptTurns(), Present()
    for tenant in ["a"] * 30 + ["b", "", ""]:
        there.add(tenant, 5)
    turns.computed(40, there.parts())
    assert turns.now == 10
    assert turns.turn(turns.now, 5, there.beside("a")) == 10 + 31 * 5
    assert turns.turn(turns.now, 5, there.beside("")) == 15
    for _ in range(30):
        there.remove("a", 5)
    turns.computed(40, there.parts())
    assert turns.now == 10 + 40 / 3


def test_a_long_prompt_waits_for_what_others_of_its_tenant_lack_and_a_short_one_for_its_own_length_of_each() -> None:
    turns = PromptTurns()
    assert turns.turn(0, 1000, Beside(100, 100 * 8)) == 1800
    assert turns.turn(0, 8, Beside(3, 3 * 1000)) == 32


def test_who_has_a_share_of_three_gets_three_times_as_much() -> None:
    turns, there = PromptTurns({"": 1.0, "a": 3.0, "b": 1.0}.__getitem__), Present()
    for tenant in ["a"] * 30 + ["b"] * 30 + [""]:
        there.add(tenant, 5)
    turns.computed(50, there.parts((), turns.share_of))
    assert turns.now == 10
    assert turns.turn(0, 6, Beside(2, 12), "a") == 6
    assert turns.turn(0, 6, Beside(2, 12), "b") == 18
    assert turns.turn(0, 6, tenant="") == 6


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 50))))
def test_who_is_there_is_what_came_and_did_not_go(prompts: list[tuple[str, int]]) -> None:
    there = Present()
    for number, (tenant, tokens) in enumerate(prompts):
        there.add(tenant, tokens)
        if number % 3 == 0:
            there.remove(tenant, tokens)
    left = [prompt for number, prompt in enumerate(prompts) if number % 3]
    assert there.parts([tenant for tenant, _ in prompts]) == there.with_more(prompts).parts()
    assert there.tenants == Present().with_more(left).tenants
    assert there.parts() == sum(not tenant for tenant, _ in left) + len({tenant for tenant, _ in left if tenant})


# ---- engines ----


def book(length: int, first: int = 1) -> list[int]:
    return [first + index % 7 for index in range(length)]


def ended(engine: EngineCore, steps: int = 1000) -> list[str]:
    """Who has ended, in this order."""
    found: list[str] = []
    for _ in range(steps):
        found += [delta.request_id for delta in engine.step(None) if delta.finish_reason is not None]
        if not engine.has_work():
            return found
    raise AssertionError(found)


def waiting_for_their_turn(**config: str) -> EngineCore:
    """Three steps into a prompt of 200 tokens, of which one computes 16, comes one of 10."""
    engine, _ = make_engine(num_blocks=256, max_rows=8, async_scheduling=False, **config)
    engine.add(request("book", book(200), 2))
    for _ in range(3):
        engine.step(None)
    engine.add(request("words", [20] * 10, 2))
    return engine


def test_a_few_words_do_not_wait_for_a_book() -> None:
    assert ended(waiting_for_their_turn()) == ["words", "book"]
    assert ended(waiting_for_their_turn(prompt_order="arrival")) == ["book", "words"]


def test_words_that_come_one_after_the_other_do_not_put_off_a_book_for_ever() -> None:
    engine, _ = make_engine(num_blocks=512, max_rows=4, async_scheduling=False)
    engine.add(request("book", book(160), 2))
    count, found = 0, list[str]()
    while "book" not in found:
        while engine.load().waiting < 2:
            count += 1
            engine.add(request(f"words {count}", [20 + count % 50] * 16, 2))
        found += [delta.request_id for delta in engine.step(None) if delta.finish_reason is not None]
        assert count < 50
    assert found.index("book") > 3


def test_a_prompt_that_is_cached_goes_before_others_of_its_length() -> None:
    engine, _ = make_engine(num_blocks=512, max_rows=8, async_scheduling=False)
    engine.add(request("first", book(100), 2))
    run(engine)
    engine.add(request("another", book(90, first=30), 2))
    engine.step(None)
    engine.add(request("again", [*book(100), 5, 5], 2))
    assert ended(engine) == ["again", "another"]


def test_a_priority_goes_before_any_turn() -> None:
    engine = waiting_for_their_turn()
    engine.add(request("later", [21] * 3, 2, priority=1))
    engine.add(request("sooner", book(60, first=40), 2, priority=-1))
    assert ended(engine) == ["sooner", "words", "book", "later"]


def test_who_computes_what_others_wait_for_goes_when_they_would() -> None:
    """Of a book 112 tokens of 200 are computed. A question about its first 160 lacks 50, and so would be through before
    a prompt of 70, and that before the book: which goes on at once, for the question waits for it."""
    engine, _ = make_engine(num_blocks=512, max_rows=8, async_scheduling=False)
    engine.add(request("book", book(200), 2))
    for _ in range(7):
        engine.step(None)
    engine.add(request("question", [*book(160), 9, 9], 2))
    engine.add(request("between", book(70, first=40), 2))
    engine.step(None)
    assert engine.load().held_back == 1
    assert ended(engine)[-1] == "between"


@pytest.mark.parametrize("told_by", ["salt", "key"])
def test_who_sends_many_prompts_has_no_more_of_an_engine_than_who_sends_one_after_the_other(told_by: str) -> None:
    """By a key, although salts differ."""
    engine, _ = make_engine(num_blocks=1024, max_rows=4, async_scheduling=False)

    def add(whose: str, number: int, token: int) -> None:
        salt = whose if told_by == "salt" else f"{whose}{number}"
        asked = request(f"{whose}{number}", [token] * 16, 2, salt=salt)
        engine.add(asked if told_by == "salt" else replace(asked, tenant=whose))

    for number in range(30):
        add("a", number, 10 + number)
    found, count = list[str](), 0
    while len(found) < 20:
        if f"b{count}" not in engine._live:
            count += 1
            add("b", count, 50 + count)
        found += [delta.request_id for delta in engine.step(None) if delta.finish_reason is not None]
    assert 6 <= sum(name.startswith("b") for name in found) <= 12, found
    rest = [name for name in ended(engine) if name.startswith("a")]
    assert rest == sorted(rest, key=lambda name: int(name[1:])), "of one tenant who came first"
    assert not engine.resources.waiting.present.tenants


def test_tenants_have_of_an_engine_what_their_shares_say() -> None:
    """Both have always ten prompts there."""
    engine, _ = make_engine(num_blocks=1024, max_rows=4, async_scheduling=False)
    engine.share_by({"a": 3.0, "b": 1.0}.__getitem__)
    numbers = count()

    def add(whose: str) -> None:
        number = next(numbers)
        asked = request(f"{whose}{number}", [1 + number % 50, 1 + number // 50, *[7] * 14], 1)
        engine.add(replace(asked, tenant=whose))

    for whose in "ab" * 10:
        add(whose)
    found = list[str]()
    while len(found) < 60:
        for delta in engine.step(None):
            if delta.finish_reason is not None:
                found.append(delta.request_id[0])
                add(found[-1])
    assert 41 <= found.count("a") <= 49, found


def test_what_is_given_up_while_it_waits_is_not_there_any_more() -> None:
    engine = waiting_for_their_turn()
    for number in range(5):
        engine.add(request(f"{number}", book(50, first=number), 2, salt="a"))
    engine.step(None)
    assert engine.resources.waiting.present.beside("a").prompts > 1
    for number in range(5):
        engine.abort(f"{number}")
    engine.abort("0")
    assert "a" not in engine.resources.waiting.present.tenants
    assert ended(engine)[-2:] == ["words", "book"]


def test_the_oldest_is_not_preempted_whoever_has_the_next_turn() -> None:
    """The pool has room for the book and two more blocks."""
    engine, _ = make_engine(num_blocks=16, max_rows=4, async_scheduling=False)
    engine.add(request("book", book(40), 16))
    engine.step(None)
    for name in ("a", "b"):
        engine.add(request(name, [20] * 3, 16))
    sequences = list(engine._live.values())
    results = run(engine)
    preempted = {sequence.id for sequence in sequences if sequence.preemptions}
    assert preempted
    assert "book" not in preempted
    assert results["book"].token_ids == continuation(book(40), 16)
