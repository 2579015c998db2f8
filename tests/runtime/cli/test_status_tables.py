"""What `headwise status` and `headwise index match` show of statistics."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from headwise.runtime.cli.app import app
from headwise.runtime.cli.status_tables import prefix_table, render

SCHEDULER = {"routed": 12, "refused": 1, "rerouted": 2, "queued": 3, "policy": "cache_aware"}


def text_of(shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(shown)
    return out.getvalue()


def engine(**changes: Any) -> dict[str, Any]:
    cache = {"held_blocks": 25, "cached_blocks": 50, "free_blocks": 25, "total_blocks": 100, "retained_blocks": 9}
    return {
        "state": "awake",
        "silent_s": 0.1,
        "requests": {"running": 4, "waiting": 5, "finished": 6},
        "output_tokens": 789,
        "cache": {**cache, "hit_tokens": 640, "host_hit_tokens": 0, "queried_tokens": 1000},
        "host": None,
        "storage": None,
        "transfers": {},
        **changes,
    }


def stats(**changes: Any) -> dict[str, Any]:
    nodes = {"engine-0": {"blocks": {"device": 31, "host": 32, "storage": 33}, "behind": False}}
    return {
        "model": "tiny",
        "scheduler": SCHEDULER,
        "engines": {"engine-0": engine()},
        "index": {"nodes": nodes, "distinct_blocks": 40, "silent": False},
        "faults": [],
        **changes,
    }


def line_with(shown: str, *words: str) -> str:
    return next(line for line in shown.splitlines() if all(word in line for word in words))


def test_encoders_are_shown_with_what_they_made_and_keep() -> None:
    cache = {"images": 3, "bytes": 5 << 20, "hits": 1, "misses": 3}
    encoder = {"encoded": 17, "refused": 1, "overloaded": 20, "malformed": 300, "waiting": 4, "cache": cache}
    shown = text_of(render(stats(encoders={"encoder-0": encoder})))
    line = line_with(shown, "encoder-0")
    assert line.split() == ["encoder-0", "4", "17", "321", "3,", "5", "MiB", "25%"]
    assert "encoders" not in text_of(render(stats(encoders={})))


def test_an_engine_is_shown_with_its_load_and_hit_rate() -> None:
    shown = text_of(render(stats()))
    line = line_with(shown, "engine-0", "awake")
    assert [word for word in line.split() if word not in "│┃"] == [
        "engine-0",
        "awake",
        "4",
        "5",
        "6",
        "789",
        "25%",
        "64%",
    ]
    assert "12 requests routed (cache_aware), 2 of them again, 3 waiting for an engine, 1 refused" in shown
    assert "no faults" in shown


def test_an_engine_that_has_no_workers_yet_is_starting() -> None:
    shown = text_of(render(stats(engines={"engine-0": engine(), "engine-1": {"silent_s": 0.1, "server": {}}})))
    assert "starting" in line_with(shown, "engine-1")


def test_the_number_of_engines_its_reason_and_those_that_do_not_serve_yet_are_shown() -> None:
    states = {"engine-0": "serves on node 10.0.0.1", "engine-1": "waits for a node with 0.3 CPUs after it failed: [/x]"}
    fleet = {"number": 2, "reason": "1 -> 2: set by hand", "replicas": states}
    shown = text_of(render(stats(fleet=fleet, engines={"engine-0": engine(is_leaving=True)})))
    assert "replicas 1 -> 2: set by hand" in shown
    assert "engine-1: waits for a node with 0.3 CPUs after it failed: [/x]" in shown
    assert "serves on node" not in shown
    assert "draining" in line_with(shown, "engine-0")


def test_an_engine_that_says_nothing_is_shown_as_silent() -> None:
    shown = text_of(render(stats(engines={"engine-0": engine(silent_s=7.2)})))
    assert "silent for 7 s" in line_with(shown, "engine-0")


def test_tokens_are_counted_for_the_tier_that_served_them() -> None:
    cache = {**engine()["cache"], "hit_tokens": 900, "host_hit_tokens": 500}
    host = {"cached_blocks": 7, "held_blocks": 1, "retained_blocks": 3, "free_blocks": 2, "loaded_blocks": 11}
    storage = {"put_blocks": 21, "fetched_blocks": 22, "hit_tokens": 200}
    load = {"bytes_per_s": 3 * 2**30, "waited_s": 0.25}
    tiered = engine(cache=cache, host=host, storage=storage, transfers={"load": load})
    shown = text_of(render(stats(engines={"engine-0": tiered})))
    assert {"400", "9"} <= set(line_with(shown, "device", "75").split())
    host_line = line_with(shown, "host", "3 GiB/s", "0.25 s").split()
    assert {"8", "3", "2", "300", "11"} <= set(host_line)
    assert {"21", "200", "22"} <= set(line_with(shown, "storage", "21", "22").split())


def test_the_index_tells_whether_it_agrees_with_each_engine() -> None:
    nodes = {
        "engine-0": {"blocks": {"device": 31, "host": 32, "storage": 33}, "behind": False},
        "engine-1": {"blocks": {"device": 1, "host": 2, "storage": 3}, "behind": True},
    }
    shown = text_of(render(stats(index={"nodes": nodes, "distinct_blocks": 40, "silent": False})))
    assert "yes" in line_with(shown, "31", "32", "33")
    assert "no" in line_with(shown, "engine-1").split()
    assert "40 distinct blocks" in shown


def test_an_index_that_is_away_is_told_and_the_rest_is_shown() -> None:
    shown = text_of(render(stats(index={"silent": True})))
    assert "index does not answer" in shown
    assert "awake" in shown


def test_the_last_faults_come_first() -> None:
    faults = [(1000.0 + at, f"fault {at}") for at in range(9)]
    shown = text_of(render(stats(faults=faults)))
    assert "fault 3" not in shown
    assert shown.index("fault 8") < shown.index("fault 4")


def test_the_engine_that_has_most_of_a_prompt_comes_first() -> None:
    engines = {
        "engine-0": {"device": 64, "host": 64, "storage": 640},
        "engine-1": {"device": 128, "host": 320, "storage": 640},
    }
    shown = text_of(prefix_table(700, engines))
    assert "of 700 tokens" in shown
    assert shown.index("engine-1") < shown.index("engine-0")
    assert "320" in line_with(shown, "engine-1")


@pytest.mark.parametrize(
    ("engines", "tiers"),
    [
        ({"engine-0": engine()}, ["device"]),
        ({"engine-0": engine(host={"free_blocks": 1})}, ["device", "host"]),
        ({"engine-0": engine(), "engine-1": engine(host={"a": 1}, storage={"a": 1})}, ["device", "host", "storage"]),
        ({"engine-0": {"state": "starting"}}, ["device"]),
    ],
)
def test_index_match_shows_only_tiers_that_there_are(
    engines: dict[str, Any], tiers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deployment:
        def __init__(self, *given: Any) -> None:
            assert given == ("127.0.0.1:1", "auto", None)

        def __enter__(self) -> Deployment:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def find_prefix(self, prompt: str, cache_salt: str) -> dict[str, Any]:
            return {"tokens": 700, "engines": {"engine-0": {"device": 64, "host": 64, "storage": 64}}}

        def stats(self) -> dict[str, Any]:
            return stats(engines=engines)

    monkeypatch.setattr("headwise.runtime.client.client.Client", Deployment)
    shown = CliRunner().invoke(app, ["index", "match", "--address", "127.0.0.1:1", "text"]).stdout
    assert [tier for tier in ("device", "host", "storage") if tier in shown] == tiers
    assert line_with(shown, "engine-0").split() == ["engine-0", *["64"] * len(tiers)]


def test_where_prefixes_are_expected_is_shown_and_what_came_from_other_engines() -> None:
    expected = {"device": 500, "host": 200, "peer": 100, "storage": 0, "all": 1000}
    copied = {"blocks": 7, "bytes_per_s": 2.0e9, "waited_s": 0.0}
    shown = text_of(
        render(
            stats(
                scheduler={**SCHEDULER, "expected_tokens": expected},
                engines={"engine-0": engine(transfers={"peer": copied})},
            )
        )
    )
    assert "of their prompts expected in caches: 50% device, 20% host, 10% another engine, 0% storage" in shown
    assert "7" in line_with(shown, "engine-0", "engines").split()


def test_what_became_of_tenants_requests_is_shown_where_there_are_some() -> None:
    tenants = {"search": {"routed": 7, "refused": 1, "prompt_tokens": 900, "waiting": 3}}
    shown = text_of(render(stats(scheduler={**SCHEDULER, "tenants": tenants})))
    assert line_with(shown, "search").split() == ["search", "3", "7", "1", "900"]
    assert "tenants" not in text_of(render(stats(scheduler={**SCHEDULER, "tenants": {}})))


def test_ranks_are_shown_where_engines_have_different_ones() -> None:
    engines = {"engine-0": engine(role="decode", tp_size=3), "engine-1": engine(role="prefill", tp_size=1)}
    assert "awake, decode, TP 3" in text_of(render(stats(engines=engines)))
    assert "TP" not in text_of(render(stats(engines={"engine-0": engine(tp_size=3)})))


def test_other_weights_than_those_of_the_start_are_shown_and_who_has_not_those_of_the_deployment() -> None:
    engines = {"engine-0": engine(weights="step-9"), "engine-1": engine(weights="")}
    shown = text_of(render(stats(engines=engines, weights={"version": "step-9"})))
    assert "\nweights step-9\n" in shown
    assert "weights" not in line_with(shown, "engine-0", "awake")
    assert "awake, weights of the start" in line_with(shown, "engine-1")
    assert "weights" not in text_of(render(stats(engines={"engine-0": engine(weights="")}, weights={"version": ""})))
