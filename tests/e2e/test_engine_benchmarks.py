"""Benchmarks of real engines run in their quick mode and say what README shows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import perplexity
import pytest
from figures_peers import SCENARIOS
from peers import PEERS_PYTHON
from perplexity import LIMITS
from support.benchmark_runs import figures_of, quick_figures
from support.free_ports import free_ports
from support.small_engine import SMALL
from support.waiting import eventually

from headwise import Client
from headwise.actors.deployment import Deployment

pytestmark = pytest.mark.model


def test_the_overhead_of_the_engine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("engine_overhead", capsys)
    assert found["engine_step_ms"] > 0 < found["bare_step_ms"]


def test_decodes_with_and_without_guesses_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("speculation", capsys)
    assert [case["task"] for case in found["cases"]] == ["repeats", "answers", "stories"]
    assert all(case["plain"] > 0 < case["guessed"] for case in found["cases"])
    assert found["cases"][0]["right"] > 0.1, "what is to be repeated can be guessed"


def test_decodes_of_a_model_that_drafts_are_compared_with_those_without(capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = quick_figures("peers_drafts", capsys)["cases"]
    assert set(case["rates"]) == {"headwise", "headwise_mtp"}
    assert min(case["rates"].values()) > 0
    assert case["over_plain"]["headwise"] > 0
    assert case["over_vllm"] == {"plain": None, "drafting": None}


def test_decodes_with_and_without_adapters_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("adapters", capsys)
    assert [(case["requests"], case["adapted"]) for case in found["cases"]] == [(1, 1), (4, 4), (4, 2)]
    assert all(case["plain_ms"] > 0 < case["adapted_ms"] for case in found["cases"])


def test_prompts_are_computed_with_and_without_the_rows_that_nobody_wants(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("wanted_rows", capsys)
    assert [case["model"] for case in found["cases"]] == ["smollm2-135m", "shared"]
    assert all(case["wanted"] > 0 < case["all_rows"] for case in found["cases"])


def test_narrow_weights_cost_no_more_perplexity_than_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """Over 128 tokens chosen so that both leave at least 0.4 % of their limits: what a text of this length gives
    besides is as much as the limits, one way or the other, but the same on every machine. The whole text is the
    benchmark's.
    """
    variants = ("int8", "gguf")
    options = [option for variant in variants for option in ("--variant", variant)]
    perplexity.main(["--model", "smollm2-135m", "--first", "1200", "--tokens", "128", *options])
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1]).values()
    assert found["tokens"] == 128
    assert {name: found[name] <= LIMITS[name] for name in variants} == dict.fromkeys(variants, True), found
    assert min(found["top1"][name] for name in variants) > 0.9, found


@pytest.mark.soak
def test_perplexity_is_measured_and_within_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = quick_figures("perplexity", capsys).values()
    assert found["tokens"] == 512
    assert 1 < found["perplexity"] < 100, "this is English"
    for variant, limit in LIMITS.items():
        assert found[variant] <= limit, variant
        assert found["top1"][variant] > (0.8 if variant == "kv_int4" else 0.9), variant


@pytest.mark.soak
@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="`make peers` installs llama.cpp")
def test_a_gguf_file_costs_no_more_than_in_llamacpp(capsys: pytest.CaptureFixture[str]) -> None:
    perplexity.main(["--model", "smollm2-135m", "--tokens", "256", "--variant", "gguf", "--llamacpp"])
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1]).values()
    assert 0.99 < found["llamacpp"] < 1.05, "the same text, the same model"
    assert found["gguf_over_llamacpp"] <= 1 + 2 * found["error"]["gguf_over_llamacpp"]


def test_a_cached_prefix_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("prefix_cache", capsys)
    assert found["cached_tokens"] == found["prefix_tokens"]


def test_what_it_brings_to_keep_documents_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("retention", capsys)
    assert found["cached"]["kept"] == {"documents": 1.0, "visitors": 1.0}
    assert found["cached"]["by recency"]["documents"] == 0.0, "as much comes between as the cache holds"
    assert found["ttft_ratio"] > 0 < found["time_ratio"]


def test_prompts_in_both_orders_are_compared_without_peers(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("prompt_order", capsys)
    assert list(found["ttft_s"]) == ["fair", "arrival"]
    for times in found["ttft_s"].values():
        assert all(0 < median <= high for median, high in times.values())
    assert "over_vllm" not in found


def test_decodes_that_read_a_prefix_together_are_compared_with_those_that_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = quick_figures("joint_reads", capsys)["cases"]
    assert [(case["prefix"], case["requests"]) for case in cases] == [(600, 2), (600, 4)]
    assert all(case["alone"] > 0 < case["joint"] for case in cases)


def test_questions_about_one_document_are_answered_without_peers(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("peers_shared", capsys)
    assert min(found["rates"]["headwise"].values()) > 0
    assert found["over_vllm"] == {"decode": None, "questions": None}


def test_the_pause_while_weights_change_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("new_weights", capsys)
    for how in ("kept", "anew"):
        assert 0 < found[how]["pause_s"] < found[how]["update_s"] + found[how]["pause_s"]
    assert min(found["start_over_kept"], found["anew_over_kept"]) > 0


def test_recycling_is_measured_and_lets_more_requests_run(capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = quick_figures("recycle", capsys)["models"].values()
    assert model["on"]["pool_blocks"] == model["off"]["pool_blocks"]
    assert model["on"]["peak_running"] > model["off"]["peak_running"]


def test_tiers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("tiers", capsys)
    assert {"device_over_cold", "host_over_cold", "file_over_cold", "tpot_ratio", "waited_over_load"} <= set(found)


@pytest.mark.parametrize(
    "script", [pytest.param("peers", marks=pytest.mark.soak), "peers_mixture", "peers_hybrid", "peers_state_space"]
)
def test_what_peers_are_compared_with_is_measured_without_them(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All are the same script, of another model."""
    found = figures_of(script, capsys, "--smoke")
    assert set(found["headwise"]) == set(SCENARIOS)
    assert min(found["headwise"].values()) > 0
    assert set(found["rates"]) <= {"headwise", "headwise_gguf"}


def test_the_roofline_counts_the_weights_that_a_step_reads_as_they_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures_of("roofline", capsys, "--smoke", "--dtype", "bfloat16")
    as_in_file = found["gguf"]
    assert min(figures[name] for figures in (found, as_in_file) for name in ("decode_fraction", "prefill_fraction")) > 0
    weights, cache_mb = 134_515_008 - 61 * 576, (16 + 4 / 2) * 30 * 3 * 2 * 64 * 2 / 1e6
    assert found["decode_mb"] == pytest.approx(weights * 2 / 1e6 + cache_mb)
    assert (found["dtype"], found["weights_dtype"]) == ("bfloat16", "bfloat16")
    bytes_each = (as_in_file["decode_mb"] - cache_mb) * 1e6 / weights
    assert 0.5 + 4 / 32 < bytes_each < 1 + 2 / 32, "4 bits and minima, but for some matrices of 8"
    assert (as_in_file["dtype"], as_in_file["weights_dtype"]) == ("bfloat16", "gguf")


@pytest.mark.ray
def test_ranks_that_keep_latents_together_are_measured(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures_of("context_parallel", capsys, "--smoke", "--ray", cluster)
    assert found["same_tokens"]
    assert found["fit_ratio"] == pytest.approx(2, rel=0.05)
    assert min(found["requests_ratio"], found["prefill_ratio"], *found["decode_ratio"].values()) > 0


@pytest.mark.ray
def test_stages_of_a_pipeline_are_measured(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures_of("pipeline", capsys, "--smoke", "--ray", cluster)
    assert found["same_first"] == 1
    one = found["over_one"]
    assert one["fit"] == 2
    assert min(*one["decode"].values(), one["prefill"]) > 0


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.parametrize(
    ("script", "mode"),
    [
        ("replicas", "--smoke"),
        ("openai_http", "--quick"),
        ("batch", "--quick"),
        ("pd", "--smoke"),
        ("elastic_replicas", "--smoke"),
    ],
)
def test_these_start_what_they_measure(
    script: str, mode: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures_of(script, capsys, mode, "--ray", cluster)


@pytest.mark.soak
@pytest.mark.ray
def test_elastic_replicas_come_and_go_by_the_load_and_lose_nothing(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = quick_figures("elastic_replicas", capsys, "--ray", cluster)
    assert found["lost_requests"] == found["different"] == 0
    assert found["served"] > 0
    assert [number for _, number in found["decisions"]][:3] == [1, 2, 1]


@pytest.fixture(scope="module")
def running(cluster: str) -> Iterator[Deployment]:
    """Two engines, for benchmarks that would start two each. Last of all: others start a deployment of this name."""
    config = replace(
        SMALL,
        replicas=2,
        min_replicas=1,
        http=free_ports(1)[0],
        host_cache="64MiB",
        decode_prompt_tokens=64,
        engine_timeout_s=10.0,
    )
    with Deployment.start(config, cluster) as deployment:
        yield deployment


@pytest.mark.ray
def test_replicas_are_measured_and_lose_no_stream(running: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures_of("replicas", capsys, "--smoke", running=running)
    assert found["hit_rate"]["cache_aware"] > 0
    assert list(found["recovery"]) == ["scheduler"]
    assert found["served"] > 0
    assert found["lost"] == 0
    assert found["peer_over_cold"] > 0
    assert found["peer_hit_tokens"] > 0


@pytest.mark.ray
def test_what_http_costs_is_measured(running: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("openai_http", capsys, running=running)
    assert found["throughput_over_zmq"] > 0
    assert found["mask_us_per_token"] > 0
    assert min(found["ttft_p50_ms"].values()) > 0


@pytest.mark.ray
def test_what_the_order_of_a_file_saves_is_measured(running: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("batch", capsys, running=running)
    assert 0 <= found["one_engine"]["cached_file"] <= found["cached_most"]
    assert found["one_engine"]["time_ratio"] > 0


@pytest.mark.ray
def test_a_tenant_beside_a_crowd_is_measured(running: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("tenants", capsys, running=running)
    assert list(found["ttft_s"]) == ["apart", "together"]
    assert min(found["over_together"]["ttft"]) > 0 < found["over_together"]["crowd"]
    assert "over_vllm" not in found


@pytest.mark.ray
def test_prefill_and_decode_apart_are_measured(running: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the others: its engines keep the roles that they got."""
    found = figures_of("pd", capsys, "--smoke", running=running)
    assert {"p99_tbt_ratio", "throughput_ratio", "bytes_ratio", "shm_over_memcpy"} <= set(found)
    assert found["same_tokens"]
    assert found["throughput_ratio"] > 0
    assert found["fetched_mb"] > 0


@pytest.mark.ray
def test_what_requests_notice_of_elastic_replicas_is_measured(
    running: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last of these: one engine is left."""
    with Client(running.client_address) as client:
        client.scale(1, split=(0, 0))
        eventually(lambda: len(client.stats()["fleet"]["replicas"]) == 1, otherwise=client.stats)
    found = figures_of("elastic_replicas", capsys, "--smoke", running=running)
    assert found["lost_requests"] == found["different"] == 0
    assert found["served"] > 0
    assert [number for _, number in found["decisions"]] == [1]
