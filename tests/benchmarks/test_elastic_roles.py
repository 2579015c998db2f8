"""Roles that follow a load which shifts, on the simulated cluster."""

from __future__ import annotations

import elastic_roles


def test_engines_go_over_to_prompts_while_these_are_long_and_back_when_answers_are() -> None:
    elastic, fixed = elastic_roles.run(None, 50.0), elastic_roles.run(4, 50.0)
    prefill = [4, *(count for _, count in elastic.changes)]
    assert prefill[:2] == [4, 5], "long prompts come first"
    assert prefill[-1] < max(prefill), "and long answers later"
    assert elastic.ttft_p99_s["all"] < fixed.ttft_p99_s["all"] / 2
