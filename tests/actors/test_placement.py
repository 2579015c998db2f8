"""What a deployment takes of a Ray cluster's resources."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from headwise.actors import placement
from headwise.actors.restarts import Life
from headwise.runtime.config.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("resources", "options", "fits"),
    [
        ({"CPU": 2.0}, {"tp_size": 3}, True),
        ({"CPU": 2.0}, {"replicas": 3, "tp_size": 3}, True),
        ({"CPU": 0.5}, {"tp_size": 3}, False),
        ({"CPU": 64.0}, {"device": "cuda"}, False),
        ({"CPU": 64.0, "GPU": 8.0}, {"device": "cuda", "replicas": 4, "tp_size": 2}, True),
        ({"CPU": 64.0, "GPU": 1.0}, {"device": "cuda", "replicas": 4, "tp_size": 2}, False),
        ({}, {}, False),
    ],
)
def test_a_cluster_is_large_enough_if_it_has_what_one_engine_with_its_workers_takes(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], options: dict[str, object], fits: bool
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    assert placement.could_fit(EngineConfig(**options)) is fits


@pytest.mark.parametrize(("way", "target"), [("spread", "c"), ("pack", "a")])
def test_an_engine_asks_for_the_node_that_its_placement_prefers_among_those_with_room(
    monkeypatch: pytest.MonkeyPatch, way: str, target: str
) -> None:
    """Node d has no engine, but not the label; b has two, and no room."""
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 0.0}, "c": {"CPU": 1.0}, "d": {"CPU": 1.0}}
    nodes = [{"NodeID": name, "Alive": True, "Labels": {"zone": "y" if name == "d" else "x"}} for name in free]
    asked: list[str] = []
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(placement, "_request", lambda demand, node, name: asked.append(node))
    site = placement.EngineSite(EngineConfig(placement=way, node_labels="zone=x"), lambda: ["a", "b", "b"])
    site.choose(Life())
    assert asked == [target]
    assert site.node == target


def test_nodes_of_equal_host_names_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's id of a node is what counts: for room, for how many engines it has, and for whether it is about to go."""
    free = {"id-1": {"CPU": 1.0}, "id-2": {"CPU": 1.0}, "id-3": {"CPU": 1.0}}
    nodes = [
        {"NodeID": each, "Alive": True, "NodeManagerHostname": "node", "NodeManagerAddress": each} for each in free
    ]
    asked: list[str] = []
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(placement.state, "get_draining_nodes", lambda: {"id-2": 0})
    monkeypatch.setattr(placement, "_request", lambda demand, node, name: asked.append(node))
    assert placement.nodes_with_room(EngineConfig()) == {"id-1", "id-3"}
    site = placement.EngineSite(EngineConfig(), lambda: ["id-1"])
    site.choose(Life())
    assert asked == ["id-3"]
    nodes[2]["Alive"] = False
    site.node = "id-3"
    assert not site.is_alive()


def node(name: str, alive: bool = True, head: bool = False) -> dict[str, Any]:
    resources = {"node:__internal_head__": 1.0} if head else {}
    return {"NodeID": f"id-{name}", "NodeManagerAddress": name, "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("host", "is_detached", "others", "chosen"),
    [
        ("0.0.0.0", True, [node("b"), node("head", head=True)], "id-head"),
        ("0.0.0.0", True, [node("leaving", head=True)], ""),
        ("0.0.0.0", False, [node("b")], ""),
        ("a", True, [node("b")], ""),
    ],
)
def test_a_front_leaves_a_node_that_lives_if_it_can_listen_elsewhere_and_does_not_end_with_it(
    monkeypatch: pytest.MonkeyPatch, host: str, is_detached: bool, others: list[dict[str, Any]], chosen: str
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node("a"), *others])
    monkeypatch.setattr(placement, "draining_nodes", lambda: {"id-a": 0.0, "id-leaving": 0.0})
    monkeypatch.setattr(placement, "this_node", lambda: "id-a")
    monkeypatch.setattr(placement, "node_address", lambda: "a")
    site = placement.FrontendSite(host, is_detached)
    assert site.leave() is bool(chosen)
    assert site.node == (chosen or "id-a")


@pytest.mark.parametrize(
    ("host", "others", "chosen"),
    [
        ("0.0.0.0", [node("b"), node("head", head=True)], "id-head"),
        ("0.0.0.0", [node("b"), node("head", head=True), {**node("a"), "NodeID": "id-a-again"}], "id-a-again"),
        ("0.0.0.0", [node("leaving", head=True), node("b")], "id-b"),
        ("a", [node("b"), node("head", head=True)], ""),
        ("a", [node("b"), {**node("a"), "NodeID": "id-a-again"}], "id-a-again"),
    ],
)
def test_a_front_whose_node_has_died_goes_where_it_can_be_reached(
    monkeypatch: pytest.MonkeyPatch, host: str, others: list[dict[str, Any]], chosen: str
) -> None:
    nodes = [node("a")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "draining_nodes", lambda: {"id-leaving": 0.0})
    monkeypatch.setattr(placement, "this_node", lambda: "id-a")
    monkeypatch.setattr(placement, "node_address", lambda: "a")
    site = placement.FrontendSite(host)
    site.choose(Life())
    assert (site.node, site.is_placed()) == ("id-a", True)
    nodes[:] = [node("a", alive=False), *others]
    site.choose(Life())
    assert site.node == (chosen or "id-a")
    assert site.is_placed() is bool(chosen)
