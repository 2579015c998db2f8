"""README's section "Measured": which rows each benchmark has, and how a row is written from the script's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from figures_peers import drafts_tables, hybrid_tables, mixture_tables, peers_tables, state_space_tables

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    what: str
    result: Callable[[Figures], str]


def percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}".replace("%", " %")


def listed(*values: str) -> str:
    return "; ".join(values)


def _tiers(f: Figures) -> str:
    names = [name for name in ("device", "host", "file", "mooncake") if f"{name}_over_cold" in f]
    ratios = ", ".join(f"{name} {f[f'{name}_over_cold']:.3f}" for name in names)
    return f"{ratios} (without: {f['cold_s']:.1f} s for {f['prefix_tokens']:,} tokens)"


def _recycle(f: Figures) -> str:
    models = f["models"].items()
    return listed(*(f"{name} {m['throughput_ratio']:.2f} ({m['of_unlimited']:.2f})" for name, m in models))


def _policies(f: Figures) -> str:
    words = {"cache_aware": "by prefix", "round_robin": "in turn"}
    ttft, hits = f["ttft_p50_s"], f["hit_rate"]
    return listed(*(f"{words[policy]} {ttft[policy]:.2f} s, {percent(hits[policy])}" for policy in sorted(hits)))


def _pauses(f: Figures) -> str:
    pauses = ", ".join(f"{fault} {seen['pause_s']:.1f} s" for fault, seen in f["recovery"].items())
    return f"{pauses}; {f['lost']} of {f['served']} lost"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _peer_loads(f: Figures) -> str:
    hits, ttft, tbt = f["hit_rate"], f["ttft_p50_s"], f["tbt_p99_s"]
    fetching = f"{percent(hits['peer loads'])}, {ttft['peer loads']:.2f} s; {percent(hits['today'])}, "
    apart = f"{tbt['5 + 3'] * 1e3:.0f} ms, {ttft['5 + 3']:.2f} s; {tbt['today'] * 1e3:.0f} ms, {ttft['today']:.2f} s"
    return f"{fetching}{ttft['today']:.2f} s. {apart}"


def _not_paying(f: Figures) -> str:
    return listed(*(f"{case}: {', '.join(worse)}" for case, worse in f["does_not_pay"].items() if worse)) or "nothing"


def _routing(f: Figures) -> str:
    p50, p90 = f["ttft_p50_s"], f["ttft_p90_s"]
    policies = ("cache_aware", "by_arrival", "least_loaded", "round_robin", "oracle")
    seconds = (f"{p50[policy]:.2f} s, {p90[policy]:.1f} s" for policy in policies)
    return f"{listed(*seconds)} ({f['requests']:,} requests)"


def _kept(f: Figures) -> str:
    ratios = (f"{one['hit_rate_kept']:.2f}, {one['hit_rate_of_few']:.2f}" for one in (f, f["larger_storage"]))
    return listed(*ratios, f"{f['lost_requests']}")


def _elastic(f: Figures) -> str:
    p90 = ", ".join(f"{f['phases'][phase]['ttft_p90_s']:.1f} s" for phase in ("one", "growing", "all"))
    return f"{f['hit_rate_kept']:.2f}; {p90}; {f['lost_requests']}, {f['different']} of {f['served']:,}"


def _perplexity(f: Figures) -> str:
    variants = dict.fromkeys(("bfloat16", "int8", "gguf", "kv_int8"), "") | {"llamacpp": "llama.cpp "}
    models = {"smollm2-135m": f["smollm2-135m"], **f}
    ratios = (
        ", ".join(f"{word}{m[v]:.4f} ({percent(m['top1'][v], 1)})" for v, word in variants.items() if v in m)
        for m in models.values()
    )
    return listed(*(f"{name} {each}" for name, each in zip(models, ratios, strict=True)))


def _decode(f: Figures) -> str:
    rates = {one["workload"]: one["kv_gb_s"] for one in f["results"]}
    return f"{rates['decode 16 x 2048']:.0f} GB/s of KV"


def _guesses(f: Figures) -> str:
    found: dict[str, dict[str, list[str]]] = {}
    for case in f["cases"]:
        found.setdefault(case["weights"], {}).setdefault(case["task"], []).append(f"{case['ratio']:.2f}")
    return listed(*(listed(*(f"{task} {', '.join(each)}" for task, each in tasks.items())) for tasks in found.values()))


def _adapters(f: Figures) -> str:
    found: dict[str, list[str]] = {}
    for case in f["cases"]:
        words = f"{case['adapted']} of {case['requests']}"
        found.setdefault(case["weights"], []).append(
            f"{words} {case['adapted_ms']:.1f} ms, {case['plain_ms']:.1f} ms ({case['ratio']:.2f})"
        )
    return listed(*(f"{weights}: {', '.join(each)}" for weights, each in found.items()))


def _shared(f: Figures) -> str:
    told, rates = f["over_vllm"], f["rates"]["headwise"]
    if told["decode"] is None:  # as when nothing but the script itself is tried
        told = rates
    what = f"{f['requests']} of {f['answer']} tokens, behind {f['document']:,}"
    shown = f"{rates['decode']:.0f} and {rates['questions']:.0f} tokens a second"
    return f"{told['decode']:.2f}; {told['questions']:.2f} ({what}; {shown})"


def _prompt_order(f: Figures) -> str:
    others = [f[key] for key in ("over_arrival", "over_vllm") if key in f]  # what was measured
    told = (", ".join(f"{ratio:.2f}" for ratio in over[kind]) for kind in ("questions", "books") for over in others)
    load, seconds = f["load"], f["ttft_s"]
    shown = ", ".join(f"{times['questions'][1]:.1f} s" for times in seconds.values())
    sizes = f"{load['question']} tokens, and {load['together']} of {load['book']:,} at once"
    return f"{'; '.join(told)} (90th percentiles of the short ones {shown}; {sizes})"


def _tenants(f: Figures) -> str:
    others = [f[key] for key in ("over_together", "over_vllm") if key in f]  # what was measured
    told = [f"{', '.join(f'{ratio:.2f}' for ratio in over['ttft'])}" for over in others]
    crowd = ", ".join(f"{over['crowd']:.2f}" for over in others)
    load, seconds = f["load"], ", ".join(f"{times[0]:.1f} s" for times in f["ttft_s"].values())
    return f"{'; '.join(told)}; {crowd} (medians {seconds}; {load['crowd']} of {load['length']} tokens at once)"


def _pipeline(f: Figures) -> str:
    over_others = [f[key] for key in ("over_tensors", "over_vllm", "vllm_over_one") if key in f]  # what was measured
    return "; ".join(
        f"{ratios['prefill']:.2f}, " + ", ".join(f"{ratio:.2f} of {count}" for count, ratio in ratios["decode"].items())
        for ratios in (f["over_one"], *over_others)
    )


SHARED_CACHES = "random weights in half of Gemma 4 E2B's width, whose last 20 layers share caches"

ROWS: dict[str, tuple[Row, ...]] = {
    "roofline": (
        Row(
            "Bytes that a decode step must read, over its time and the memory's bandwidth; FLOP/s of prefill over the "
            "best matrix product's",
            lambda f: (
                f"{percent(f['decode_fraction'])} of {f['read_gb_s']:.0f} GB/s; {percent(f['prefill_fraction'])} of "
                f"{f['gemm_gflop_s']:.0f} GFLOP/s ({f['dtype']})"
            ),
        ),
        Row(
            "The same from the GGUF file's blocks",
            lambda f: f"{percent(f['gguf']['decode_fraction'])}; {percent(f['gguf']['prefill_fraction'])}",
        ),
    ),
    "perplexity": (
        Row(
            "Perplexity of a text over that in float32 (and how often the likeliest token is the same): bfloat16, int8 "
            "weights, weights as the GGUF file has them, int8 cache; llama.cpp from that file, where it is installed",
            _perplexity,
        ),
    ),
    "engine_overhead": (
        Row(
            "Engine's decode step over the bare model's",
            lambda f: (
                f"{f['overhead_ratio']:.2f} (batch {f['batch']}, context {f['context']}, {f['rounds']} rounds of "
                f"{f['steps']} steps)"
            ),
        ),
    ),
    "speculation": (
        Row(
            "Decode with drafts by prompt lookup (`speculation: 8`) over that without, one request and four: texts to "
            "be repeated, answers about a prompt of 1,800 tokens, stories; bfloat16, and from the GGUF file's blocks",
            _guesses,
        ),
    ),
    "adapters": (
        Row(
            "A decode step of requests of which some have a LoRA adapter, each another one, of rank 16 of all "
            "projections, and without (tokens a second, with over without)",
            _adapters,
        ),
    ),
    "wanted_rows": (
        Row(
            "Prompts of which wanted rows alone are computed where layers keep nothing any more, over all rows of all "
            "layers: tokens a second",
            lambda f: "; ".join(
                f"{SHARED_CACHES if case['model'] == 'shared' else case['model']}, {case['tokens']:,} tokens: "
                f"{case['ratio']:.2f}"
                for case in f["cases"]
            ),
        ),
    ),
    "context_parallel": (
        Row(
            "Two ranks that keep latents together, over two that keep all of them each: tokens that fit; requests a "
            "second of conversations whose prefixes fit in the cache of the former alone; a prompt; decodes",
            lambda f: (
                f"{f['fit_ratio']:.2f}; {f['requests_ratio']:.1f}; {f['prefill_ratio']:.2f}; "
                + ", ".join(f"{ratio:.2f} of {count}" for count, ratio in f["decode_ratio"].items())
            ),
        ),
    ),
    "pipeline": (
        Row(
            "Two stages of a pipeline on one machine, of one thread each, over one rank, over two tensor-parallel ones "
            "and over vLLM's two stages: a prompt, decodes (and vLLM's two stages over its one)",
            _pipeline,
        ),
    ),
    "prefix_cache": (
        Row(
            "TTFT with a cached prefix over that without",
            lambda f: (
                f"{f['ttft_ratio']:.2f} ({f['cached_ttft_s']:.2f} s, {f['cold_ttft_s']:.2f} s; {f['prefixes']} "
                f"prefixes of {f['prefix_tokens']} tokens)"
            ),
        ),
    ),
    "joint_reads": (
        Row(
            "Tokens a second of decodes that go on from one prefix and read it once for all, over each by itself",
            lambda f: "; ".join(
                f"{case['ratio']:.2f} ({case['requests']} of {case['prefix']}, {case['kv_dtype']})"
                for case in f["cases"]
            ),
        ),
    ),
    "peers_shared": (
        Row(
            "Answers to questions that come at once about one document, SmolLM2 in bfloat16, over vLLM's: while all "
            "are given, of a cached document; all output, of a new one",
            _shared,
        ),
    ),
    "prompt_order": (
        Row(
            "Short prompts that come while long ones are computed: median and 90th percentile of TTFT over those in "
            "the order of arrival, and over vLLM's; those of the long ones",
            _prompt_order,
        ),
    ),
    "tenants": (
        Row(
            "A prompt now and then beside a crowd of another tenant's: median and 90th percentile of TTFT over those "
            "where tenants are not told apart, and over vLLM's; until the crowd is answered",
            _tenants,
        ),
    ),
    "retention": (
        Row(
            "Documents that are asked about now and then, while more tokens of others come between than the cache "
            "holds: where they are kept (`retain_s`), TTFT and the time of all requests over those where they are not",
            lambda f: (
                f"{f['ttft_ratio']:.3f} ({f['ttft_s']['kept']:.2f} s, {f['ttft_s']['by recency']:.2f} s); "
                f"{f['time_ratio']:.2f} ({f['documents']} documents of {f['document_tokens']:,} tokens in a cache of "
                f"{f['cache_tokens']:,}, {f['between_tokens']:,} between two questions)"
            ),
        ),
    ),
    "new_weights": (
        Row(
            "Seconds that requests pause while a model gets other weights: with what was computed of them kept; "
            "computed anew; a start of the engine in its process",
            lambda f: (
                f"{f['kept']['pause_s']:.2f}; {f['anew']['pause_s']:.1f}; {f['start_s']:.1f} ({f['requests']} requests "
                f"of {f['prompt']:,} tokens)"
            ),
        ),
    ),
    "recycle": (
        Row(
            "Throughput with window blocks recycled over that without, same memory, same requests (over that with "
            "unlimited memory); 3 of 4 heads of SmolLM2 have a window",
            _recycle,
        ),
    ),
    "capacity": (
        Row(
            "Simulated ERNIE-4.5-21B-A3B on an A800, 10,600 tokens in and 4,000 out: throughput and mean TTFT with "
            "recycling over without (published: 1.76; 0.52)",
            lambda f: listed(f"{f['simulated_ratio_a800']:.2f}", f"{f['simulated_ttft_ratio_a800']:.2f}"),
        ),
    ),
    "tiers": (
        Row("TTFT with a long prefix on a tier over that without", _tiers),
        Row(
            "Time that forward passes waited for loads over the time of the loads; a decode step beside copies over a "
            "quiet one",
            lambda f: listed(f"{f['waited_over_load']:.2f}", f"{f['tpot_ratio']:.2f}"),
        ),
        Row(
            "Requests per second of conversations that take 4 times the device's cache, with a host tier over without",
            lambda f: f"{f['host_over_device_rate']:.1f}",
        ),
    ),
    "batch": (
        Row(
            "A file of questions about three times as many documents as the cache holds, by `headwise batch`: time "
            "over that in the file's order, prompt tokens from the cache, and from it in the file's order; one engine; "
            "two",
            lambda f: "; ".join(
                f"{of['time_ratio']:.2f}, {100 * of['cached_shared']:.0f} % "
                f"(of {100 * f['cached_most']:.0f} possible), {100 * of['cached_file']:.0f} %"
                for of in (f["one_engine"], f.get("two_engines"))
                if of
            ),
        ),
    ),
    "replicas": (
        Row(
            "Three engines, conversations that take twice one engine's cache: median TTFT, and prompt tokens served "
            "from the cache",
            _policies,
        ),
        Row("Longest pause of a stream when a process is killed (hung: stopped)", _pauses),
        Row(
            "A prompt of 4,000 tokens that only another engine has computed: TTFT over that of computing it",
            lambda f: _or_dash(f.get("peer_over_cold")),
        ),
    ),
    "pd": (
        Row(
            "Two engines, long prompts beside chats: p99 of a chat's time between tokens, both serving whole requests "
            "over one for prompts and one to decode; tokens per second of the latter over the former; bytes fetched "
            "with windows over without",
            lambda f: listed(*(_or_dash(f[key]) for key in ("p99_tbt_ratio", "throughput_ratio", "bytes_ratio"))),
        ),
    ),
    "openai_http": (
        Row(
            "64 streams by OpenAI's API over HTTP: tokens per second over those of our client; p50 TTFT of one request "
            "more than by our client",
            lambda f: listed(f"{f['throughput_over_zmq']:.2f}", f"{f['ttft_extra_ms']:.1f} ms"),
        ),
    ),
    "routing": (
        Row(
            "Simulated: a trace of conversations on 8 engines, p50 and p90 TTFT by prefix; likewise, with prompts in "
            "the order of arrival; by load; in turn; one shared cache",
            _routing,
        ),
    ),
    "peer_loads": (
        Row(
            "Simulated: that trace, engines that fetch from each other: hit rate, p50 TTFT; as today. 5 engines for "
            "prompts and 3 to decode: p99 time between tokens, p50 TTFT; as today",
            _peer_loads,
        ),
        Row(
            "Simulated: where neither pays, of fetching (also over a slow link, and without shared storage) and of "
            "engines for prompts + to decode: what is worse than today by more than 1 %",
            _not_paying,
        ),
    ),
    "autoscaling": (
        Row(
            "Simulated: that trace in waves, elastic replicas: engine-hours over scaling by queue length for the same "
            "p90 TTFT; over a schedule that knows the waves",
            lambda f: listed(
                f"{f['replica_hours_ratio']:.2f}", f"{f['hours']['headwise'] / f['hours']['foreseen']:.2f}"
            ),
        ),
        Row(
            "Simulated: 8 engines become 6: hit rate over that where none goes; over that of 6 engines from the start; "
            "the same with four times the storage; requests lost",
            _kept,
        ),
    ),
    "elastic_replicas": (
        Row(
            "Three real engines become one as the load goes: hit rate over that before; p90 TTFT of few users, of many "
            "until all serve, of many with all; requests lost, or with other tokens than undisturbed",
            _elastic,
        ),
    ),
    "index": (
        Row(
            "Index of 643,000 blocks on 64 nodes: 157-block stores; lookups; whole routing decisions, hashing "
            "included; memory",
            lambda f: listed(
                f"{f['stores_per_s']:,.0f} a second",
                f"{f['lookup_p50_us']:.1f} us",
                f"{f['decision_p50_us']:.0f} us",
                f"{f['bytes_per_block']:.0f} bytes a block",
            ),
        ),
    ),
    "block_copy": (
        Row(
            "Copying scattered blocks of 48 KiB and more; layers of blocks; over plain memcpy",
            lambda f: listed(f"{f['block_ratio']:.2f}", f"{f['layer_ratio']:.2f}"),
        ),
    ),
    "transports": (
        Row(
            "Blocks of 48 KiB and more from another process' host cache: by shared memory, over plain memcpy; by TCP, "
            "over a plain socket",
            lambda f: listed(f"{f['shm_over_memcpy']:.2f}", f"{f['tcp_over_socket']:.2f}"),
        ),
    ),
    "control_plane": (
        Row(
            "Admitting a 10,000-token request, half of it cached, into a full pool, hashing included; freeing it",
            lambda f: listed(f"{f['admit_us']:.0f} us", f"{f['free_us']:.0f} us"),
        ),
        Row(
            "Planning and committing a decode step of 256 sequences with 8 head groups, windows recycled",
            lambda f: f"{f['decode_step_us']:.0f} us",
        ),
    ),
    "embeddings": (
        Row(
            "First token of a prompt with 256 MiB of embeddings, which a worker reads in the engine's memory, or which "
            "come with each step; over that of as many tokens alone",
            lambda f: listed(f"{f['mapped_over_plain']:.2f}", f"{f['sent_over_plain']:.2f}"),
        ),
    ),
    "step_launches": (
        Row(
            "Python of a layer of a prefill step on a GPU, run without one: launch by launch, and in pieces of graphs: "
            "of a dense model; of a mixture of experts",
            lambda f: "; ".join(
                f"{f[f'{model}_prefill_launches_us']:.0f}, {f[f'{model}_prefill_graphs_us']:.0f} us"
                for model in ("llama", "moe")
            ),
        ),
    ),
    "kernels": (Row("Attention, decode, 16 sequences of 2,048 tokens, 9 query and 3 KV heads of 64", _decode),),
}
"""By script but `OF_PEERS`."""

OF_PEERS: dict[str, Callable[[Figures], list[str]]] = {
    "peers": peers_tables,
    "peers_mixture": mixture_tables,
    "peers_hybrid": hybrid_tables,
    "peers_state_space": state_space_tables,
    "peers_drafts": drafts_tables,
}
"""By script that has tables of its own."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Beside vLLM and llama.cpp": ("peers",),
    "A mixture of experts, beside them": ("peers_mixture",),
    "Gated delta-nets, beside llama.cpp": ("peers_hybrid",),
    "State space models, beside llama.cpp": ("peers_state_space",),
    "Models that draft for themselves, beside vLLM": ("peers_drafts",),
    "On one CPU": (
        "roofline",
        "speculation",
        "adapters",
        "wanted_rows",
        "perplexity",
        "engine_overhead",
        "kernels",
        "step_launches",
    ),
    "The cache": (
        "prefix_cache",
        "joint_reads",
        "peers_shared",
        "prompt_order",
        "tenants",
        "retention",
        "new_weights",
        "batch",
        "tiers",
        "recycle",
        "capacity",
        "context_parallel",
        "pipeline",
        "control_plane",
        "embeddings",
        "block_copy",
    ),
    "Several engines": ("replicas", "elastic_replicas", "pd", "openai_http", "index", "transports"),
    "Simulated clusters": ("routing", "peer_loads", "autoscaling"),
}
"""Scripts by README's section, in its order."""
SCRIPTS = tuple(name for names in SECTIONS.values() for name in names)


def rows(name: str, figures: Figures) -> list[str]:
    """A script's lines of Markdown; raises LookupError where its figures lack one that README shows."""
    if name in OF_PEERS:
        return OF_PEERS[name](figures)
    return [f"| {row.what} | {row.result(figures)} | `benchmarks/{name}.py` |" for row in ROWS[name]]


def table(results: Mapping[str, Any]) -> str:
    """What was measured, by section, and below it when, of which commit and on what."""
    measured = {name: results[name] for name in SCRIPTS if name in results}
    if not measured:
        return "Nothing is measured yet: `make figures` does."
    lines = list[str]()
    for title, names in SECTIONS.items():
        if shown := [name for name in names if name in measured]:
            head = [] if {*shown} <= OF_PEERS.keys() else ["| What | Result | Command |", "| --- | --- | --- |"]
            lines += [f"### {title}", "", *head]
            lines += [line for name in shown for line in rows(name, measured[name]["figures"])] + [""]
    return "\n".join([*lines, *_sources(measured)])


def _sources(results: Mapping[str, Any]) -> list[str]:
    """One line for all scripts that ran alike: the same day, commit and machine."""
    alike: dict[str, list[str]] = {}
    for name, one in results.items():
        machine = one["machine"]
        where = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}"
        alike.setdefault(f"{one['date']}, commit {one['commit']}, {where}", []).append(name)
    if len(alike) == 1:
        return [f"Measured on {next(iter(alike))}."]
    return ["Measured on", "", *(f"- {source}: {', '.join(names)}" for source, names in alike.items())]
