"""Benchmarks that need no model run and say what README shows of them; README's table is what was measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import autoscaling
import figures
import pd
import pytest
from figures_peers import PICTURE, SCENARIOS, WIDTH, peers_picture
from figures_table import SCRIPTS, rows, table
from runtimes import random_hybrid, random_mixture, random_state_space
from support.benchmark_runs import quick_figures

BENCHMARKS = Path(figures.__file__).parent
KEYS = {
    "block_copy": {"block_ratio", "layer_ratio"},
    "control_plane": {"admit_us", "free_us", "decode_step_us"},
    "index": {
        "stores_per_s", "lookup_p50_us", "zmq_stores_per_s", "decisions_per_s", "decision_p50_us", "bytes_per_block",
    },
    "transports": {"shm_over_memcpy", "tcp_over_socket", "bytes_per_s"},
    "embeddings": {"plain_ttft_s", "mapped_over_plain", "sent_over_plain", "mib"},
    "kernels": {"memcpy_gb_s", "results", "latents", "states"},
    "capacity": {"bytes_per_token_ratio", "simulated_ratio_a800", "simulated_ttft_ratio_a800"},
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_benchmark_runs_and_ends_with_its_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures(name, capsys)
    assert KEYS[name] <= set(found)
    assert all(value > 0 for value in found.values() if isinstance(value, int | float))


def test_bytes_per_token_of_windowed_heads_follow_from_the_planner_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = quick_figures("capacity", capsys, "--pattern", "no-such-file.tsv")
    assert found["bytes_per_token_ratio"] == pytest.approx(3.647)
    assert found["simulated_ratio_a800"] > 1.0


def conversations(path: Path, turns: int = 10) -> Path:
    """A trace of six conversations whose prompts grow by two blocks a turn."""
    lines, ids = [], iter(range(10_000))
    histories: list[list[int]] = [[next(ids) for _ in range(4)] for _ in range(6)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history += [next(ids), next(ids)]
            record = {"timestamp": 4000 * turn + 300 * number, "input_length": 512 * len(history), "output_length": 20}
            lines.append(json.dumps({**record, "hash_ids": history}))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def test_routing_is_compared_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = conversations(tmp_path / "trace.jsonl.gz")
    found = quick_figures("routing", capsys, "--trace", str(trace))
    hits = found["hit_rate"]
    assert found["requests"] == 60
    assert set(hits) == {"cache_aware", "by_arrival", "least_loaded", "round_robin", "guessed_prefixes", "oracle"}
    assert hits["oracle"] >= hits["cache_aware"] > hits["round_robin"]
    served = quick_figures("capacity", capsys, "--trace", str(trace))
    assert 0 < served["trace_hit_rate_on"] <= 1


def test_peer_loads_are_compared_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = conversations(tmp_path / "trace.jsonl.gz")
    found = quick_figures("peer_loads", capsys, "--trace", str(trace))
    assert set(found["hit_rate"]) == set(found["does_not_pay"]) > {"today", "peer loads", "5 + 3"}
    assert found["moved_gb"]["today"] == 0 < found["moved_gb"]["5 + 3"]
    assert found["hit_rate"]["peer loads"] >= found["hit_rate"]["today"]


def test_elastic_replicas_are_compared_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = conversations(tmp_path / "trace.jsonl.gz", turns=5)
    found = quick_figures("autoscaling", capsys, "--trace", str(trace))
    assert found["lost_requests"] == 0
    assert set(found["hours"]) == {"headwise", "ray_ongoing", "ray_ttft", "queue_length", "foreseen", "fixed"}
    assert found["replica_hours_ratio"] == pytest.approx(
        found["hours"]["headwise"] / found["hours"]["queue_length"], 1e-2
    )
    assert found["goal_missed"] == []
    assert len(found["ratio_of_parts"]) == len(found["ttft_p90_s"]["headwise"]) == 2
    assert 0 < found["larger_storage"]["hit_rate_kept"] <= 1.5


def test_without_its_trace_autoscaling_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    autoscaling.main(["--quick", "--trace", str(tmp_path / "none.jsonl.gz")])
    assert "none.jsonl.gz is not there: nothing was served" in capsys.readouterr().out


# ---- README's table ----


def test_prefill_apart_is_compared_by_what_clients_saw() -> None:
    mixed = pd.Seen([0.1] * 50 + [0.8] * 50, [1.0, 2.0, 9.0], {"chat": [1, 2, 3], "prompt": [4]}, seconds=2.0)
    apart = pd.Seen([0.1] * 90 + [0.2] * 10, [3.0], {"chat": [1, 2, 3], "prompt": [4]}, seconds=4.0)
    found = pd.compared({"mixed": mixed, "apart": apart})
    assert (found["p99_tbt_ratio"], found["throughput_ratio"]) == (4.0, 0.5)
    assert found["ttft_p50_s"] == {"mixed": 2.0, "apart": 3.0}
    assert found["same_tokens"]
    apart.answers["prompt"] = [5]
    assert not pd.compared({"mixed": mixed, "apart": apart})["same_tokens"]


def test_every_benchmark_is_run_by_make_figures() -> None:
    with_quick = {path.stem for path in BENCHMARKS.glob("*.py") if "--quick" in path.read_text(encoding="utf-8")}
    assert with_quick - {"figures"} == set(SCRIPTS)


PLACES = f"{figures.BEGIN}\n{figures.END}\n\n{figures.BEGIN_GPU}\n{figures.END_GPU}\n"
"""Where README has its tables."""


def test_readme_shows_what_was_measured() -> None:
    figures.check()


def test_a_figure_changed_by_hand_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "cpu.json"
    results.write_text(json.dumps(kept("block_copy", {"block_ratio": 1.5, "layer_ratio": 0.5})))
    monkeypatch.setattr(figures, "README", readme)
    monkeypatch.setattr(figures, "RESULTS", results)
    text = figures.with_table(f"# name\n\n{PLACES}\nafter\n", figures.read(results))
    readme.write_text(text, encoding="utf-8")
    figures.check()
    for figure, another in (("| 1.50;", "| 1.60;"), (", of 128 | 128 |", ", of 128 | 127 |")):
        assert figure in text
        readme.write_text(text.replace(figure, another), encoding="utf-8")
        with pytest.raises(SystemExit, match=r"README's tables differ from benchmarks/results/cpu\.json and gpu-h200"):
            figures.check()
    figures.write_readme()
    assert readme.read_text(encoding="utf-8") == text


def test_a_readme_without_a_place_for_the_table_is_told() -> None:
    with pytest.raises(SystemExit, match=r"README\.md must have one line"):
        figures.with_table("# name\n", {})


def kept(name: str, found: dict[str, Any], commit: str = "abc") -> dict[str, Any]:
    machine = {"cpu": "CPU", "cores": 2, "python": "3.11"}
    return {name: {"date": "2026-01-02", "commit": commit, "machine": machine, "figures": found}}


def test_the_table_names_day_commit_and_machine_once_if_they_are_the_same() -> None:
    free, copy = {"admit_us": 1.0, "free_us": 2.0, "decode_step_us": 3.0}, {"block_ratio": 1.5, "layer_ratio": 0.5}
    same = table({**kept("control_plane", free), **kept("block_copy", copy)})
    assert same.startswith(
        "### The cache\n\n| What | Result | Command |\n| --- | --- | --- |\n| Admitting a 10,000-token"
    )
    assert same.endswith("\n\nMeasured on 2026-01-02, commit abc, 2 cores of CPU, Python 3.11.")
    assert "| 1.50; 0.50 | `benchmarks/block_copy.py` |" in same
    two = table({**kept("control_plane", free), **kept("block_copy", copy, "def")})
    assert "- 2026-01-02, commit abc, 2 cores of CPU, Python 3.11: control_plane\n" in two
    assert two.endswith("- 2026-01-02, commit def, 2 cores of CPU, Python 3.11: block_copy")


# ---- running them ----


def test_a_script_that_fails_is_named_and_keeps_its_former_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results, former = tmp_path / "cpu.json", {"block_ratio": 1.0, "layer_ratio": 1.0}
    results.write_text(json.dumps(kept("block_copy", former)))
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    new = {"admit_us": 1.0, "free_us": 2.0, "decode_step_us": 3.0}
    (tmp_path / "benchmarks" / "control_plane.py").write_text(f"print('rounds')\nprint({json.dumps(new)!r})\n")
    (tmp_path / "benchmarks" / "block_copy.py").write_text("print('{}')\nraise SystemExit(1)\n")
    (tmp_path / "benchmarks" / "kernels.py").write_text("print('{}')\n")
    assert figures.run_all(["control_plane", "block_copy", "kernels"], quick=False) == ["block_copy", "kernels"]
    found = figures.read(results)
    assert found["control_plane"]["figures"] == new
    assert found["block_copy"]["figures"] == former
    assert set(found) == {"block_copy", "control_plane"}
    assert "kernels gave no figures that README can show: KeyError" in capfd.readouterr().out


def test_a_script_that_lacks_what_it_needs_is_left_out_and_keeps_its_former_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results, former = tmp_path / "cpu.json", {"headwise": {"decode1": 1.0}}
    results.write_text(json.dumps(kept("peers", former)))
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.run_all(["peers"], quick=False) == []
    assert figures.read(results)["peers"]["figures"] == former
    assert "which `make peers` makes" in capfd.readouterr().out


def test_a_script_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LIMIT_S", 0.2)
    assert figures.run(["sleep", "600"]) is None


def peers_found() -> dict[str, Any]:
    """What `peers.py` prints where vLLM in bfloat16 and llama.cpp were there."""
    own, blocks = ({**dict.fromkeys(SCENARIOS, rate), "prefill": 4000.0} for rate in (20.0, 80.0))
    theirs = {"vllm_bf16": dict.fromkeys(SCENARIOS, 10.0), "llamacpp": dict.fromkeys(SCENARIOS, 40.0)}
    ratios = {"vllm_bf16": dict.fromkeys(SCENARIOS, 2.0), "llamacpp": dict.fromkeys(SCENARIOS, 8.0)}
    model = {"rates": {"headwise": own, "headwise_gguf": blocks, **theirs}, **ratios}
    half = {"llamacpp": {"prefill": 7.0, "decode": 9.0}}
    rates = {name: {"prefill": 5.0, "decode": 6.0} for name in ("headwise", "headwise_half", "llamacpp")}
    return {
        "models": {"one": model, "two": model},
        "long_context": {"rates": rates, "half_over": half, "rounds": 3},
        "about": {"llamacpp": {"isa": "SSE3 AVX AVX2 FMA"}},
        "rounds": 3,
    }


def test_tables_of_peers_have_a_column_for_each_that_was_there_and_the_ratio_of_ours() -> None:
    found = rows("peers", peers_found())
    assert "| one | headwise, bfloat16 | vLLM, bfloat16 | headwise, GGUF | llama.cpp (AVX2), GGUF |" in found
    assert "| Decode of one request | 20 | 10 (2.00) | 80 | 40 (8.00) |" in found
    assert "| Prefill of 1,800 tokens | 4,000 | 10 (2.00) | 4,000 | 40 (8.00) |" in found
    assert "| Decode after them | 6 | 6 | 6 (9.00) |" in found
    assert sum(line.startswith("| two |") for line in found) == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("peers_mixture", f"{random_mixture.FULL.experts} experts"),
        ("peers_hybrid", f"of which {random_hybrid.FULL.layers // random_hybrid.INTERVAL} have attention"),
        ("peers_state_space", f"(Mamba-2) of {random_state_space.FULL.state_heads} heads"),
    ],
)
def test_a_model_of_random_numbers_has_a_table_below_a_line_that_says_what_it_is(script: str, told: str) -> None:
    found, peers = rows(script, peers_found()), rows("peers", peers_found())
    assert told in found[0]
    assert found[1:] == peers[3 : 3 + len(found) - 1]
    assert sum(line.startswith("| Decode of one request |") for line in found) == 2, "one of each model"


@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_table_of_drafts_has_vllm_where_it_was_there(has_vllm: bool) -> None:
    names = ["headwise", *(["vllm"] if has_vllm else [])]
    rates = {f"{name}{kind}": 100.0 for name in names for kind in ("", "_mtp")}
    case = {"right": 0.85, "scenario": "decode4", "rates": rates, "over_plain": {"headwise": 1.5, "vllm": 1.25}}
    found = rows("peers_drafts", {"drafts": 3, "rounds": 2, "cases": [case], "about": dict.fromkeys(names)})
    theirs = " 100 (1.25) |" if has_vllm else ""
    assert found[-1] == f"| 85 % | 4 requests at 256 tokens | 100 (1.50) |{theirs}"


def test_the_picture_of_peers_has_a_bar_for_each_rate_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = peers_found()
    picture = fromstring(peers_picture(found))
    texts = [element.text for element in picture if element.tag.endswith("text")]
    assert texts.count("80") == 2 * 3, "of two models"
    bars = [element for element in picture if element.tag.endswith("rect")]
    assert len(bars) == 1 + 2 * (4 + 4 * 4), "the ground; of each model its legend and four rows of four"
    assert max(float(bar.attrib["width"]) + float(bar.attrib.get("x", 0)) for bar in bars[1:]) < WIDTH
    results = tmp_path / "cpu.json"
    results.write_text(json.dumps(kept("peers", found)))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(PLACES)
    monkeypatch.setattr(figures, "README", tmp_path / "README.md")
    monkeypatch.setattr(figures, "RESULTS", results)
    figures.write_readme()
    figures.check()
    (tmp_path / PICTURE).write_text(peers_picture(found).replace(">80<", ">90<"))
    with pytest.raises(SystemExit, match=r"peers\.svg differs from benchmarks/results/cpu\.json"):
        figures.check()


def test_the_row_of_perplexity_has_llamacpp_where_it_was_there() -> None:
    model = dict.fromkeys(("bfloat16", "int8", "gguf", "kv_int8"), 1.001)
    model["top1"] = dict.fromkeys([*model, "llamacpp"], 0.9974)
    (row,) = rows("perplexity", {"smollm2-135m": model, "gemma3-270m": {**model, "llamacpp": 1.02}})
    first, second = row.split("gemma3-270m ")
    assert "llama.cpp 1" not in first
    assert second.startswith("1.0010 (99.7 %), ")
    assert "llama.cpp 1.0200 (99.7 %) |" in second


@pytest.mark.parametrize("name", SCRIPTS)
def test_figures_that_lack_what_readme_shows_are_refused(name: str) -> None:
    with pytest.raises(LookupError):
        rows(name, {})
