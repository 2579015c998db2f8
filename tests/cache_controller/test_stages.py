"""How layers are dealt to the stages of a pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cache_controller.stages import deal_layers


@st.composite
def models(draw: st.DrawFn) -> list[int]:
    """Of each layer, whose cache it uses: its own, or that of an earlier one that has its own."""
    used: list[int] = []
    for layer in range(draw(st.integers(1, 24))):
        own = [other for other in range(layer) if used[other] == other]
        used.append(draw(st.one_of(st.just(layer), st.sampled_from([layer, *own]))))
    return used


@given(st.integers(1, 130), st.integers(1, 64))
def test_layers_are_dealt_in_order_and_the_first_stages_have_one_more(layers: int, stages: int) -> None:
    stages = min(layers, stages)
    dealt = deal_layers(range(layers), stages)
    assert [layer for stage in dealt for layer in stage] == list(range(layers))
    fewest, more = divmod(layers, stages)
    assert [len(stage) for stage in dealt] == [fewest + 1] * more + [fewest] * (stages - more)


@given(models(), st.integers(1, 8))
def test_layers_that_use_the_cache_of_an_earlier_one_stay_with_it(used: list[int], stages: int) -> None:
    most = max(count for count in range(1, len(used) + 1) if _can_be_dealt(used, count))
    if stages > most:
        with pytest.raises(
            ValueError,
            match=f"pipeline_parallel_size {stages} is too much: {len(used)} layers can be dealt to {most} stages at ",
        ):
            deal_layers(used, stages)
        return
    dealt = deal_layers(used, stages)
    assert len(dealt) == stages
    assert all(dealt), "none is without layers"
    assert [layer for stage in dealt for layer in stage] == list(range(len(used)))
    assert all(used[layer] in stage for stage in dealt for layer in stage)


def _can_be_dealt(used: list[int], stages: int) -> bool:
    """Whether there are so many runs of layers of which none uses the cache of another one."""
    runs = [layer for layer in range(len(used)) if all(other >= layer for other in used[layer:])]
    return len(runs) >= stages


@pytest.mark.parametrize(
    ("used", "stages", "sizes"),
    [
        ([0, 1, 2, 3, 2, 3, 2, 3], 2, [2, 6]),  # the nearest place where nothing is torn apart
        ([0, 0, 0, 0, 4, 5], 2, [4, 2]),
        ([0, 0, 0, 0, 4, 5], 3, [4, 1, 1]),
        ([0, 1, 2, 3, 3, 3], 3, [2, 1, 3]),
        ([0, 1, 2, 2], 3, [1, 1, 2]),  # a layer that drafts stays with the last
    ],
)
def test_cuts_are_the_nearest_ones_to_equal_parts(used: list[int], stages: int, sizes: list[int]) -> None:
    assert [len(stage) for stage in deal_layers(used, stages)] == sizes
