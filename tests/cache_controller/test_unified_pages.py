"""Pages of one layer: the arithmetic that head groups are compared with, on cases that can be counted by hand."""

from __future__ import annotations

from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.unified_pages import LayerMemory, UnifiedPages, planned_bytes, unified_pages

WINDOW = HeadPolicy(window=128)


def test_equal_layers_take_what_their_blocks_take() -> None:
    plan = plan_head_groups([[FULL] * 2] * 6, sizes=[64 * 8] * 6)
    pages = unified_pages(plan, [[FULL] * 2] * 6, 64, in_flight=1)
    assert pages.padded_bytes(100) == pages.lengthened_bytes(100) == 2 * 6 * 2 * 64 * 8
    assert planned_bytes(plan, plan.policies, 100, 64, 1) == pages.padded_bytes(100)


def test_a_small_page_is_padded_to_the_largest_or_has_more_tokens() -> None:
    pages = UnifiedPages([LayerMemory(FULL, 100), LayerMemory(WINDOW, 200)], [], block_size=64, in_flight=1)
    assert pages.padded_bytes(640) == 200 * (10 + 3)
    assert pages.page_tokens() == {LayerMemory(FULL, 100): 128, LayerMemory(WINDOW, 200): 64}
    assert pages.lengthened_bytes(640) == 200 * (5 + 3)


def test_a_page_whose_size_does_not_divide_the_largest_is_padded() -> None:
    pages = UnifiedPages([LayerMemory(FULL, 150), LayerMemory(FULL, 200)], [], block_size=64, in_flight=1)
    assert pages.lengthened_bytes(640) == pages.padded_bytes(640) == 200 * 20


def test_groups_have_as_many_layers_as_the_rarest_kind_and_the_last_is_filled_up() -> None:
    full, windowed = LayerMemory(FULL, 64), LayerMemory(WINDOW, 64)
    assert UnifiedPages([full] * 5 + [windowed] * 29, [], 64, 1).padded_bytes(640) == 64 * (5 * 10 + 30 * 3)
    assert UnifiedPages([full] * 4 + [windowed] * 4, [], 64, 1).padded_bytes(640) == 64 * (4 * 10 + 4 * 3)
    many = [LayerMemory(HeadPolicy(64), 64)] * 9  # less than a quarter more than 8
    assert UnifiedPages([full] * 8 + many, [], 64, 1).padded_bytes(640) == 64 * (9 * 10 + 9 * 2)


def test_beside_states_pages_have_so_many_tokens_that_a_state_fits() -> None:
    pages = UnifiedPages([LayerMemory(FULL, 64 * 10)] * 2, [1000] * 2, block_size=64, in_flight=1)
    assert set(pages.page_tokens().values()) == {112}  # 100 tokens, to a multiple of 16
    assert pages.lengthened_bytes(300) == 112 * 10 * (2 * 3 + 2)
    assert pages.padded_bytes(300) == 1000 * (2 * 5 + 2)
