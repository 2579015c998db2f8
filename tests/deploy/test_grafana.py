"""deploy/grafana/headwise.json asks for nothing that `/metrics` does not tell, in the words that Grafana knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families
from support.scripted_http import serving
from support.whole_deployment import PROMPT, whole_deployment

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "headwise.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
VARIABLES = {"${source}": "headwise", "$window": "5m", "$__range": "1h", "$engine": "engine-0"}

Exposed = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def exposed() -> Exposed:
    """The labels of every sample, by its name."""
    with whole_deployment() as deployment, serving(deployment) as served:
        served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()
        served.http.get("/no/such/path")
        text = served.http.get("/metrics").text
    found: Exposed = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def filled(text: str) -> str:
    for name, value in VARIABLES.items():
        text = text.replace(name, value)
    assert "$" not in text, f"{text} has a variable that nobody sets"
    return text


def parts(expression: Any) -> Iterator[Any]:
    """The expression and all that it is made of."""
    yield expression
    children = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in [*children, *getattr(expression, "args", ())]:
        if child is not None:
            yield from parts(child)


def selectors(expression: Any) -> list[Any]:
    return [part for part in parts(expression) if isinstance(part, promql.VectorSelector)]


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_panel_finds_what_it_asks_for(title: str, target: dict[str, Any], exposed: Exposed) -> None:
    parsed = promql.parse(filled(target["expr"]))
    found = selectors(parsed)
    assert found
    for selector in found:
        assert selector.name in exposed, f"{title}: /metrics has no {selector.name}"
        samples = exposed[selector.name]
        for matcher in selector.matchers.matchers:
            values = {sample.get(matcher.name) for sample in samples}
            assert None not in values, f"{title}: {selector.name} has no label {matcher.name}"
            if matcher.op == promql.MatchOp.Equal:
                assert matcher.value in values, f"{title}: {selector.name} is never {matcher.name}={matcher.value!r}"
    for part in parts(parsed):
        labels = part.modifier.labels if isinstance(part, promql.AggregateExpr) and part.modifier else ()
        for selector in selectors(part) if labels else ():
            assert set(labels) <= set(exposed[selector.name][0]), f"{title}: {selector.name} has not {labels}"


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_legend_names_labels_that_are_left(title: str, target: dict[str, Any], exposed: Exposed) -> None:
    parsed = promql.parse(filled(target["expr"]))
    left = {label for part in parts(parsed) if isinstance(part, promql.AggregateExpr) for label in _kept(part)}
    if not any(isinstance(part, promql.AggregateExpr) for part in parts(parsed)):
        left = set(exposed[selectors(parsed)[0].name][0])
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, title


def _kept(aggregate: Any) -> list[str]:
    return list(aggregate.modifier.labels) if aggregate.modifier else []


def test_every_engine_s_metric_is_in_some_panel(exposed: Exposed) -> None:
    parsed = [promql.parse(filled(target["expr"])) for _, target in QUERIES]
    asked = {selector.name for expression in parsed for selector in selectors(expression)}
    told = {name for name, samples in exposed.items() if "engine" in samples[0]}
    assert told - asked == {"headwise_kv_transfer_blocks_total"}, "which their bytes show"


def test_the_list_of_engines_is_asked_of_a_metric_that_is_there(exposed: Exposed) -> None:
    (engines,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "engine"]
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", filled(engines["query"])).groups()
    assert label in exposed[name][0]
    sources = {each["value"] for each in _variable("source")["options"]}
    assert sources == {"headwise", "ray_headwise"}, "the names of /metrics, and those of Ray"


def _variable(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in DASHBOARD["templating"]["list"] if each["name"] == name)
    return found


def test_grafana_s_own_types_know_every_field() -> None:
    """What they do not know is lost on the way through them."""
    register_default_plugins()
    through = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert list(_lost(DASHBOARD, through, "")) == []


def _lost(given: Any, left: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(left, dict):
        yield from (f"{path}.{key}" for key in given.keys() - left.keys())
        for key in given.keys() & left.keys():
            yield from _lost(given[key], left[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(left, list) and len(given) == len(left):
        for place, (one, other) in enumerate(zip(given, left, strict=True)):
            yield from _lost(one, other, f"{path}[{place}]")
    elif given != left:
        yield path


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
