"""``headwise status`` and ``headwise index match``: a deployment's statistics as tables for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

TIERS = ("device", "host", "storage")
SOURCES = {"device": "device", "host": "host", "peer": "another engine", "storage": "storage"}
"""Where the router expects prefixes, and how that is said."""
SHOWN_FAULTS = 5

Stats = Mapping[str, Any]


def render(stats: Stats) -> Group:
    """What `Client.stats` tells, to look at: engines and their tiers, encoders, the index, the last faults."""
    from rich.console import Group

    parts: list[Any] = [_headline(stats), *_fleet(stats), _engines(stats), *_encoders(stats), _tiers(stats)]
    parts += _tenants(stats)
    parts.append(_index(stats))
    faults = list(stats.get("faults", ()))[-SHOWN_FAULTS:]
    parts += [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}" for at, text in reversed(faults)]
    return Group(*parts if faults else [*parts, "no faults"])


def _headline(stats: Stats) -> str:
    scheduler = stats["scheduler"]
    text = (
        f"{stats['model']}: {scheduler['routed']} requests routed ({scheduler['policy']}), "
        f"{scheduler['rerouted']} of them again, {scheduler['queued']} waiting for an engine, "
        f"{scheduler['refused']} refused"
    )
    weights = stats.get("weights")
    if weights and weights["version"]:
        text += f"\nweights {weights['version']}"
    tokens = scheduler.get("expected_tokens")
    if not tokens or not tokens["all"]:
        return text
    sources = ", ".join(f"{_share(tokens[key], tokens['all'])} {name}" for key, name in SOURCES.items())
    return f"{text}\nof their prompts expected in caches: {sources}"


def _fleet(stats: Stats) -> Iterator[Text]:
    """How many engines there are to be and why, and what is said of those that do not report."""
    from rich.text import Text

    fleet = stats.get("fleet")
    if not fleet:
        return
    yield Text(f"replicas {fleet['reason']}")
    for name, state in sorted(fleet["replicas"].items()):
        if name not in stats["engines"]:
            yield Text(f"  {name}: {state}")


def _engines(stats: Stats) -> Table:
    table = _table("engines", "state", "running", "waiting", "finished", "tokens", "held", "hits")
    wanted = stats.get("weights", {}).get("version", "")
    are_alike = len({engine.get("tp_size") for engine in stats["engines"].values()}) < 2
    for name, engine in sorted(stats["engines"].items()):
        if "requests" not in engine:  # its workers are being started
            table.add_row(name, "starting", *["-"] * 6)
            continue
        requests, cache = engine["requests"], engine["cache"]
        table.add_row(
            name,
            _state(engine, wanted) if are_alike else f"{_state(engine, wanted)}, TP {engine['tp_size']}",
            *(str(requests[key]) for key in ("running", "waiting", "finished")),
            str(engine["output_tokens"]),
            f"{cache['held_blocks'] / cache['total_blocks']:.0%}",
            _share(cache["hit_tokens"], cache["queried_tokens"]),
        )
    return table


def _state(engine: Stats, weights: str) -> str:
    """weights: the deployment's version; of an engine that has others these are told"""
    silent_s = engine.get("silent_s", 0.0)
    if engine.get("is_leaving"):
        return "draining"
    if silent_s > 2.0:
        return f"silent for {silent_s:.0f} s"
    role, own = engine.get("role", "mixed"), engine.get("weights", "")
    more = ([] if role == "mixed" else [role]) + ([f"weights {own or 'of the start'}"] if own != weights else [])
    return ", ".join([engine["state"], *more])


def _tenants(stats: Stats) -> Iterator[Table]:
    """What became of each one's requests; nothing where there are none."""
    tenants = stats["scheduler"].get("tenants")
    if not tenants:
        return
    table = _table("tenants", "waiting", "routed", "refused", "prompt tokens")
    for name, counts in sorted(tenants.items()):
        table.add_row(name, *(str(counts[key]) for key in ("waiting", "routed", "refused", "prompt_tokens")))
    yield table


def _encoders(stats: Stats) -> Iterator[Table]:
    """Images that each has encoded, and those that it keeps; nothing where there are none."""
    encoders = stats.get("encoders")
    if not encoders:
        return
    table = _table("encoders", "waiting", "encoded", "refused", "kept", "hits")
    for name, encoder in sorted(encoders.items()):
        cache, refused = encoder["cache"], encoder["refused"] + encoder["overloaded"] + encoder["malformed"]
        table.add_row(
            name,
            *(str(each) for each in (encoder["waiting"], encoder["encoded"], refused)),
            f"{cache['images']}, {format_bytes(cache['bytes'])}",
            _share(cache["hits"], cache["hits"] + cache["misses"]),
        )
    yield table


def _tiers(stats: Stats) -> Table:
    """Per engine and tier: blocks cached, those of them that are kept on request, tokens served from it, blocks loaded
    from it and how fast."""
    table = _table("tiers", "tier", "blocks", "kept", "free", "hits", "loaded", "speed", "waited")
    for name, engine in sorted(stats["engines"].items()):
        for row in _tier_rows(engine) if "cache" in engine else ():
            table.add_row(name, *row)
    return table


def _tier_rows(engine: Stats) -> Iterator[tuple[str, ...]]:
    cache, host, storage = engine["cache"], engine["host"], engine["storage"]
    of_host = cache["host_hit_tokens"]
    yield "device", *_blocks(cache), str(cache["hit_tokens"] - of_host), "-", "-", "-"
    if host:
        of_storage = storage["hit_tokens"] if storage else 0
        served = str(max(0, of_host - of_storage))
        yield "host", *_blocks(host), served, str(host["loaded_blocks"]), *_speed(engine, "load")
    if storage:
        served, fetched = str(storage["hit_tokens"]), str(storage["fetched_blocks"])
        yield "storage", str(storage["put_blocks"]), "-", "-", served, fetched, *_speed(engine, "fetch")
    if from_others := engine["transfers"].get("peer"):
        yield "engines", "-", "-", "-", "-", str(from_others["blocks"]), *_speed(engine, "peer")


def _blocks(tier: Stats) -> tuple[str, str, str]:
    blocks = tier["cached_blocks"] + tier["held_blocks"]
    return str(blocks), str(tier["retained_blocks"]), str(tier["free_blocks"])


def _speed(engine: Stats, direction: str) -> tuple[str, str]:
    transfer = engine["transfers"].get(direction)
    if not transfer:
        return "-", "-"
    return f"{format_bytes(transfer['bytes_per_s'])}/s", f"{transfer['waited_s']:.2f} s"


def _index(stats: Stats) -> Table:
    index = stats.get("index", {})
    silent = index.get("silent", not index)
    table = _table("index does not answer" if silent else "index", *TIERS, "agrees with the engine")
    for name, node in sorted(index.get("nodes", {}).items()):
        table.add_row(name, *(str(node["blocks"][tier]) for tier in TIERS), "no" if node["behind"] else "yes")
    if "distinct_blocks" in index:
        table.caption = f"{index['distinct_blocks']} distinct blocks"
    return table


def tiers_of(stats: Stats) -> tuple[str, ...]:
    """The tiers that a deployment's engines have, fastest first."""
    engines = stats["engines"].values()
    return tuple(tier for tier in TIERS if tier == "device" or any(engine.get(tier) for engine in engines))


def prefix_table(tokens: int, engines: Mapping[str, Mapping[str, int]], tiers: Sequence[str] = TIERS) -> Table:
    """Which engine holds how much of a prompt: tokens that each tier serves, together with faster ones."""
    table = _table(f"of {tokens} tokens", *tiers)
    for name, served in sorted(engines.items(), key=lambda item: [-item[1][tier] for tier in tiers]):
        table.add_row(name, *(str(served[tier]) for tier in tiers))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
