"""`/metrics` of a deployment whose engine has all tiers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.scripted_http import Served, serving
from support.waiting import eventually
from support.whole_deployment import PROMPT, whole_deployment


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with whole_deployment() as deployment, serving(deployment) as served:
        served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()
        yield served


def samples(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, without those of the server."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        (sample.name, frozenset(item for item in sample.labels.items() if item[0] not in ("server", "engine"))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "what", ["time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"]
)
def test_requests_are_timed_in_histograms(served: Served, what: str) -> None:
    found = samples(served)
    assert found[f"headwise_{what}_seconds_count", frozenset()] > 0
    assert found[f"headwise_{what}_seconds_bucket", frozenset({("le", "+Inf")})] > 0


def test_what_the_engine_has_done_is_counted(served: Served) -> None:
    def count(name: str, **labels: str) -> float:
        return samples(served)[f"headwise_{name}", frozenset(labels.items())]

    eventually(lambda: count("engine_requests_total", outcome="finished") == 3)
    eventually(lambda: count("kv_transfer_blocks_total", direction="put") > 0)
    assert count("scheduler_requests_total", outcome="routed") == 3
    assert count("routing_decisions_total", reason="no_hit") == 3
    assert count("routing_expected_tokens_total", source="all") > count("routing_expected_tokens_total", source="peer")
    assert count("engine_generation_tokens_total") == 12
    assert (
        count("speculation_tokens_total", state="drafted") >= count("speculation_tokens_total", state="accepted") >= 0
    )
    assert count("decode_context_tokens_total", state="tokens") > 0
    assert count("decode_context_tokens_total", state="spared") == 0
    assert count("prefix_cache_queried_tokens_total") >= count("prefix_cache_hit_tokens_total", tier="device") > 0
    assert (
        count("prefix_cache_hit_tokens_total", tier="host")
        == count("prefix_cache_hit_tokens_total", tier="storage")
        == 0
    )
    assert count("kv_cache_recycled_blocks_total") > 0
    assert count("kv_transfer_blocks_total", direction="store") > 0
    assert count("kv_transfer_bytes_total", direction="store") > 0
    assert (
        count("kv_transfer_blocks_total", direction="load")
        == count("kv_transfer_failed_blocks_total", direction="load")
        == 0
    )
    for name in ("evicted_blocks_total", "blocks"):
        for tier in ("device", "host"):
            state = {"state": "free"} if name == "blocks" else {}
            assert count(f"kv_cache_{name}", tier=tier, **state) >= 0
    assert sum(count("kv_cache_blocks", tier="device", state=state) for state in ("free", "cached", "held")) == 32
    assert count("engine_restarts_total") == count("num_preemptions_total") == count("num_requests_waiting") == 0
