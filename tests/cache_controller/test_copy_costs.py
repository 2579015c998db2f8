"""Copy speeds: what was measured decides what is copied, and what is not copied is measured again later."""

import pytest

from headwise.cache_controller.copy_costs import RETRY_S, CopyCosts


def make_costs() -> CopyCosts:
    return CopyCosts(groups=2, block_size=16)


def test_copies_that_were_not_measured_are_worth_it() -> None:
    costs = make_costs()
    costs.observe(token_s=1e-6)
    assert costs.is_worth_loading(100, 1)
    assert costs.is_worth_fetching(100, 1)


def test_a_fetch_is_worth_it_only_if_the_load_behind_it_is_too() -> None:
    costs = make_costs()
    costs.observe(load_s=0.6, fetch_s=0.6, token_s=1.0)
    assert costs.is_worth_loading(10, 10)
    assert not costs.is_worth_fetching(10, 10)


def test_one_slow_copy_does_not_make_copies_slow() -> None:
    costs = make_costs()
    costs.observe(load_s=1e-4, fetch_s=1e-4)
    costs.observe(load_s=60.0)
    costs.observe(fetch_s=60.0)
    assert costs.host_token_s < 2e-4 * 2 / 16
    assert costs.storage_token_s < 2e-4 * 2 / 16


def test_the_load_report_is_told_of_tokens_not_of_blocks() -> None:
    costs = make_costs()
    assert (costs.host_token_s, costs.storage_token_s) == (0.0, 0.0)
    costs.observe(load_s=0.8, fetch_s=1.6)
    assert (costs.host_token_s, costs.storage_token_s) == (pytest.approx(0.1), pytest.approx(0.2))


@pytest.mark.parametrize(("load_s", "fetch_s"), [(1e3, None), (1e-6, 1e3)])
def test_copies_that_were_too_slow_are_tried_again_after_a_while(load_s: float, fetch_s: float | None) -> None:
    costs = make_costs()
    costs.observe(load_s=load_s, fetch_s=fetch_s, token_s=1e-3)
    costs.retry(now=5.0)
    costs.retry(now=5.0 + RETRY_S)
    assert not costs.is_worth_fetching(2, 16)
    costs.retry(now=5.1 + RETRY_S)
    assert costs.is_worth_loading(2, 16)
    assert costs.is_worth_fetching(2, 16)
    assert (costs.host_token_s > 0) == (load_s == 1e-6)  # what was fast enough is not forgotten
