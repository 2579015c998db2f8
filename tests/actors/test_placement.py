"""What a deployment takes of a Ray cluster's resources."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ray

from headwise.actors import placement
from headwise.actors.demand import Demand, Places
from headwise.actors.encoder import EncoderSite
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


@pytest.mark.parametrize(
    ("resources", "options", "fits"),
    [
        ({"CPU": 2.0}, {}, True),
        ({"CPU": 2.0}, {"image_encoder_cpus": 2.0}, True),
        ({"CPU": 2.0}, {"image_encoder_cpus": 3.0}, False),
        ({"CPU": 2.0}, {"image_encoder_gpus": 0.5}, False),
        ({"CPU": 2.0, "GPU": 1.0}, {"image_encoder_gpus": 0.5}, True),
    ],
)
def test_an_encoder_of_images_has_room_where_there_is_what_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], options: dict[str, Any], fits: bool
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    config = EngineConfig(image_encoders=1, **options)
    assert placement.could_hold_encoder(config) is fits
    site = EncoderSite(config, is_detached=True)
    assert site.options()["num_cpus"] == options.get("image_encoder_cpus", 0.1)
    assert site.options()["num_gpus"] == options.get("image_encoder_gpus", 0.0)
    assert site.options()["lifetime"] == "detached"


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
    monkeypatch.setattr(placement, "_request", lambda demand, node, name, places: asked.append(node))
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
    monkeypatch.setattr(placement, "_request", lambda demand, node, name, places: asked.append(node))
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


def test_an_owner_that_is_started_again_takes_a_node_that_came_back_for_the_one_with_that_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray gives it another id; what is known of its scheduler and store is the address."""
    nodes = [node("head", head=True), node("a", alive=False), {**node("a"), "NodeID": "id-a-again"}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(placement, "this_node", lambda: "id-head")
    monkeypatch.setattr(placement, "node_address", lambda: "head")
    site = placement.FrontendSite("0.0.0.0", is_detached=True)
    site.adopt("a")
    assert (site.node, site.is_placed()) == ("id-a-again", True)
    nodes.pop()
    site.adopt("a")
    assert not site.is_placed()
    site.choose(Life())
    assert site.node == "id-head"


def test_a_node_that_comes_back_is_a_new_one_to_an_engine_that_failed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, free, asked = [node("a"), node("b")], {"id-a": {"CPU": 9.0, "memory": 1e12}}, list[str]()
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(placement, "_request", lambda demand, node, name, places: asked.append(node))
    site, life = placement.EngineSite(EngineConfig()), Life()
    site.choose(life)
    life.created(0.0)
    life.ended(1.0, "id-a")
    assert life.avoided == {"id-a"}, "it did not start there"
    nodes[0] = {**node("a"), "NodeID": "id-a-again"}
    free["id-a-again"], free["id-b"] = free.pop("id-a"), {"CPU": 0.0, "memory": 0.0}
    site.choose(life)
    assert asked == ["id-a", "id-a-again"]


class Group:
    """A placement group of Ray's, with what its table says."""

    def __init__(self, *nodes: str, state: str = "CREATED", strategy: str = "PACK") -> None:
        self.bundle_specs = [{}] * len(nodes)
        self.table = {"state": state, "strategy": strategy, "bundles_to_node_id": dict(enumerate(nodes))}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The nodes a and b of 8 GPUs each, with what is asked of Ray, and given back to it."""
    nodes = [
        {"NodeID": name, "NodeManagerAddress": f"at {name}", "Alive": True, "Resources": {"CPU": 9.0, "GPU": 8.0}}
        for name in "ab"
    ]
    scene: dict[str, Any] = {"nodes": nodes, "asked": [], "next": Group(*"aab"), "released": []}

    def request(demand: Any, node: str, name: str, places: Places) -> Group:
        scene["asked"].append((node, places))
        return scene["next"]

    free = {each["NodeID"]: each["Resources"] for each in nodes}
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(placement, "draining_nodes", dict)
    monkeypatch.setattr(placement, "placement_group_table", lambda group: group.table)
    monkeypatch.setattr(placement, "_request", request)
    monkeypatch.setattr(placement, "release", scene["released"].extend)
    return scene


def test_an_engine_of_more_ranks_than_a_node_has_gpus_takes_several_and_is_dead_with_each_of_them(
    two_nodes: dict[str, Any],
) -> None:
    site = placement.EngineSite(EngineConfig(device="cuda", tp_size=16))
    assert not site.is_alive()
    life = Life()
    site.choose(life)
    assert site.is_placed()
    assert (site.node, site.address, site.nodes) == ("a", "at a", {"a", "b"})
    assert site.is_alive()
    site.choose(life)
    assert two_nodes["asked"] == [("", "ranks")], "it stays where it is"
    two_nodes["nodes"][1]["Alive"] = False
    assert not site.is_alive()
    site.choose(life)
    assert two_nodes["asked"] == [("", "ranks")] * 2
    assert two_nodes["released"] == [two_nodes["next"]]


def test_an_engine_that_fits_one_node_gets_one(two_nodes: dict[str, Any]) -> None:
    two_nodes["next"] = Group(*"bbb", strategy="STRICT_PACK")
    site = placement.EngineSite(EngineConfig(device="cuda", tp_size=8), lambda: ["a"])
    site.choose(Life())
    assert two_nodes["asked"] == [("b", "node")]
    assert site.is_placed()
    assert site.nodes == {"b"}


def test_a_place_on_one_node_that_none_can_have_is_given_up_once_nodes_with_gpus_have_come(
    two_nodes: dict[str, Any],
) -> None:
    late = [two_nodes["nodes"].pop(), two_nodes["nodes"].pop()]
    two_nodes["next"] = first = Group(*"???", state="PENDING", strategy="STRICT_PACK")
    site = placement.EngineSite(EngineConfig(device="cuda", tp_size=16))
    site.choose(Life())
    assert not site.is_placed()
    assert site.needs() == "a node with 3.3 CPUs and 16 GPUs"
    two_nodes["nodes"] += late
    two_nodes["next"] = Group(*"ba")
    assert not site.is_placed()
    assert (two_nodes["asked"], two_nodes["released"]) == ([("", "node"), ("", "ranks")], [first])
    assert site.needs() == "nodes that have 3.3 CPUs and 16 GPUs together"
    assert site.is_placed()
    assert site.nodes == {"a", "b"}


def test_an_engine_of_stages_that_no_node_has_room_for_takes_a_node_for_each_and_is_dead_with_each_of_them(
    two_nodes: dict[str, Any],
) -> None:
    config = EngineConfig(device="cuda", tp_size=8, pipeline_parallel_size=2)
    site = placement.EngineSite(config)
    site.choose(Life())
    assert two_nodes["asked"] == [("", "stages")]
    assert site.is_placed()
    assert site.nodes == {"a", "b"}
    assert site.needs() == "nodes that have 3.3 CPUs and 16 GPUs together, each of its 2 stages on one"
    two_nodes["nodes"][1]["Alive"] = False
    assert not site.is_alive()


def test_ranks_are_where_the_bundle_of_their_stage_is_and_share_what_that_has(two_nodes: dict[str, Any]) -> None:
    config = EngineConfig(device="cuda", tp_size=2, pipeline_parallel_size=2, engine_resources="disk=1")
    group: Any = Group(*"aab")
    group.bundle_specs = Demand.of(config).bundles("stages")
    assert placement.nodes_of_ranks(config, group) == ["a", "a", "b", "b"]
    assert placement.ranks_of(group) == 4
    of_ranks = [placement.as_rank(config, group, rank) for rank in range(4)]
    assert [options["scheduling_strategy"].placement_group_bundle_index for options in of_ranks] == [1, 1, 2, 2]
    assert all(options["num_gpus"] == 1.0 and options["num_cpus"] == pytest.approx(0.2) for options in of_ranks)
    assert placement.in_bundle(group, 0)["resources"] == {"disk": 1.0}
    group.bundle_specs = Demand.of(config).bundles("ranks")
    group.table["bundles_to_node_id"] = dict(enumerate("aabbb"))
    assert placement.nodes_of_ranks(config, group) == ["a", "b", "b", "b"]
    of_ranks = [placement.as_rank(config, group, rank) for rank in range(4)]
    assert [options["scheduling_strategy"].placement_group_bundle_index for options in of_ranks] == [1, 2, 3, 4]
    assert all(options["num_gpus"] == 1.0 for options in of_ranks)
    group.table["state"] = "RESCHEDULING"
    assert placement.nodes_of_ranks(config, group) == []


def test_an_engine_that_was_found_is_where_its_group_is(two_nodes: dict[str, Any]) -> None:
    site = placement.EngineSite(EngineConfig(device="cuda", tp_size=16), group=Group(*"ab"))
    assert site.nodes == {"a", "b"}
    assert site.needs() == "nodes that have 3.3 CPUs and 16 GPUs together"
    stages = EngineConfig(device="cuda", tp_size=2, pipeline_parallel_size=8)
    assert placement.EngineSite(stages, group=Group(*"aaaaabbbb")).needs().endswith("each of its 8 stages on one")
    assert placement.EngineSite(stages, group=Group(*"aaaaaaaaabbbbbbbb")).needs().endswith("together")


@pytest.mark.parametrize(
    ("ranks", "draining", "has_room"), [(16, "", True), (17, "", False), (16, "b", False), (8, "b", True)]
)
def test_there_is_room_for_one_more_engine_on_one_node_or_on_several(
    two_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int, draining: str, has_room: bool
) -> None:
    monkeypatch.setattr(placement, "draining_nodes", lambda: dict.fromkeys(draining, 0.0))
    assert placement.has_room(EngineConfig(device="cuda", tp_size=ranks)) is has_room
    stages = EngineConfig(device="cuda", tp_size=ranks // 2, pipeline_parallel_size=2)
    assert placement.has_room(stages) is (has_room or ranks == 17), "of which 8 are on each node"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda", "tp_size": 16}, "3.3 CPUs and 16 GPUs on nodes together, .* or add nodes$"),
        (
            {"device": "cuda", "tp_size": 8, "pipeline_parallel_size": 2},
            "16 GPUs on nodes together, each of its 2 stages on one, .* or add nodes$",
        ),
        ({"device": "cuda", "tp_size": 8}, "8 GPUs on one node, .* or let ranks span nodes by tp_placement any$"),
        ({"device": "cpu", "tp_size": 2}, "0.5 CPUs on one node, where its ranks share memory, .* or add nodes$"),
        ({"device": "cpu"}, "0.3 CPUs on one node, 9 CPU are free in all .* or add nodes$"),
    ],
)
def test_who_finds_no_room_is_told_where_it_would_be(
    two_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, object], said: str
) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 9.0, "GPU": 3.0})
    assert re.search(said, str(placement.no_room(EngineConfig(**options), 5.0)))
