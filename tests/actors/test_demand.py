"""What an engine asks Ray for, and which node it takes."""

from __future__ import annotations

import pytest

from headwise.actors.demand import Demand, NodeHas, Places, in_order, ranks_in
from headwise.errors import ConfigError
from headwise.runtime.config.engine_config import EngineConfig


def demand(**fields: object) -> Demand:
    return Demand.of(EngineConfig(**fields))


def test_bundles_have_in_all_what_the_engine_asks_for() -> None:
    asked = demand(tp_size=3, engine_cpus=6.0, engine_resources="license=1, disk=0.5", device="cuda")
    bundles = asked.bundles()
    assert len(bundles) == 4
    sums = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in asked.total}
    assert sums == pytest.approx(asked.total, abs=1e-3)
    assert asked.total == {"CPU": 6.0, "GPU": 3.0, "license": 1.0, "disk": 0.5}


def test_what_is_asked_for_without_being_told() -> None:
    assert demand(tp_size=3).bundles() == [{"CPU": 0.1}, *[{"CPU": 0.2}] * 3]


def test_a_node_has_room_if_it_has_everything_and_the_labels() -> None:
    asked = demand(engine_cpus=2.0, engine_resources="license=1", node_labels="zone=a,ray.io/accelerator-type=H100")
    labels = {"zone": "a", "ray.io/accelerator-type": "H100", "other": "b"}
    assert asked.fits({"CPU": 2.0, "license": 1.0}, labels)
    assert not asked.fits({"CPU": 1.9, "license": 1.0}, labels)
    assert not asked.fits({"CPU": 2.0}, labels)
    assert not asked.fits({"CPU": 2.0, "license": 1.0}, {**labels, "zone": "b"})
    assert not asked.fits({"CPU": 2.0, "license": 1.0}, {})


def test_it_says_in_words_what_it_needs() -> None:
    assert str(demand()) == "0.3 CPUs"
    assert str(demand(device="cuda", tp_size=2)) == "0.5 CPUs and 2 GPUs"
    in_words = "2 CPUs, 1 license and the label zone=a"
    assert str(demand(engine_cpus=2.0, engine_resources="license=1", node_labels="zone=a")) == in_words


def gpus(*counts: int, zone: str = "a") -> list[NodeHas]:
    """Nodes with so many GPUs each."""
    return [NodeHas({"CPU": 64.0, "GPU": float(count)}, {"zone": zone}) for count in counts]


@pytest.mark.parametrize(
    ("options", "nodes", "places"),
    [
        ({"tp_size": 16}, gpus(8, 8), "ranks"),
        ({"tp_size": 8}, gpus(8, 8), "node"),
        ({"tp_size": 8}, gpus(4, 4, 8), "node"),
        ({"tp_size": 8}, gpus(4, 4), "ranks"),
        ({"tp_size": 8, "tp_placement": "any"}, gpus(8, 8), "ranks"),
        ({"tp_size": 16, "tp_placement": "node"}, gpus(8, 8), "node"),
        ({"tp_size": 16}, [NodeHas({"CPU": 64.0})], "node"),  # those to come may have 16
        ({"tp_size": 16, "tp_placement": "any"}, [], "ranks"),
        ({"tp_size": 1, "tp_placement": "any"}, gpus(8, 8), "node"),
        ({"tp_size": 8, "node_labels": "zone=b"}, [*gpus(8), *gpus(4, 4, zone="b")], "ranks"),
        ({"tp_size": 4, "device": "cpu"}, [NodeHas({"CPU": 0.5})] * 2, "node"),
    ],
)
def test_ranks_are_on_one_node_unless_none_has_so_many_gpus(
    options: dict[str, object], nodes: list[NodeHas], places: Places
) -> None:
    assert demand(**{"device": "cuda", **options}).places(nodes) == places


@pytest.mark.parametrize(
    ("options", "nodes", "places"),
    [
        ({"tp_size": 8}, gpus(8, 8), "stages"),
        ({"tp_size": 4}, gpus(8, 8), "node"),
        ({"tp_size": 4}, gpus(4, 4, 8), "node"),
        ({"tp_size": 4, "node_labels": "zone=b"}, [*gpus(8), *gpus(4, 4, zone="b")], "stages"),
        ({"tp_size": 8, "tp_placement": "node"}, gpus(8, 8), "stages"),
        ({"tp_size": 4, "tp_placement": "any"}, gpus(8, 8), "ranks"),
        ({"tp_size": 1, "tp_placement": "any"}, gpus(8, 8), "stages"),  # a rank each
        ({"tp_size": 8}, gpus(4, 4, 4, 4), "ranks"),
        ({"tp_size": 8, "tp_placement": "node"}, gpus(4, 4, 4, 4), "stages"),  # waits for larger ones
        ({"tp_size": 8}, [], "stages"),
        ({"tp_size": 8}, [NodeHas({"CPU": 64.0})], "stages"),
        ({"tp_size": 4, "engine_cpus": 65.0}, gpus(8, 8), "stages"),
        ({"tp_size": 2, "device": "cpu"}, [NodeHas({"CPU": 0.5})] * 2, "stages"),
        ({"tp_size": 2, "device": "cpu"}, [NodeHas({"CPU": 0.9})] * 2, "node"),
        ({"tp_size": 2, "device": "cpu", "engine_resources": "disk=1"}, [NodeHas({"CPU": 0.9})], "stages"),
    ],
)
def test_an_engine_of_two_stages_is_on_one_node_that_has_all_of_it_else_each_stage_is(
    options: dict[str, object], nodes: list[NodeHas], places: Places
) -> None:
    assert demand(**{"device": "cuda", "pipeline_parallel_size": 2, **options}).places(nodes) == places


@pytest.mark.parametrize("cpus", [0.0, 7.0, 0.02])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("tp_size", "stages"), [(1, 1), (3, 1), (1, 4), (8, 2), (3, 5)])
def test_bundles_of_ranks_and_of_stages_ask_for_the_same_and_tell_how_many_ranks_there_are(
    tp_size: int, stages: int, device: str, cpus: float
) -> None:
    asked = demand(tp_size=tp_size, pipeline_parallel_size=stages, device=device, engine_cpus=cpus)
    of_ranks, of_stages = asked.bundles("ranks"), asked.bundles("stages")
    assert asked.bundles() == of_ranks
    assert (len(of_ranks), len(of_stages)) == (1 + tp_size * stages, 1 + stages)
    for name, amount in asked.total.items():
        for bundles in (of_ranks, of_stages):
            assert sum(bundle.get(name, 0.0) for bundle in bundles) == pytest.approx(amount, abs=1e-3)
    assert ranks_in(of_ranks) == tp_size * stages
    if cpus != 0.02 or device == "cuda":  # else the shares are too small to tell
        assert ranks_in(of_stages) == tp_size * stages


def test_stages_fit_apart_if_each_finds_a_node_that_has_room_for_all_of_it() -> None:
    asked = demand(tp_size=8, pipeline_parallel_size=2, device="cuda")
    assert asked.bundles("stages") == [{"CPU": 0.1}, *[{"CPU": 1.6, "GPU": 8.0}] * 2]
    assert asked.fits_apart(gpus(8, 8), "stages")
    assert asked.fits_apart(gpus(8, 4, 8), "stages")
    assert not asked.fits_apart(gpus(8, 4, 4), "stages")
    assert asked.fits_apart(gpus(8, 4, 4), "ranks")
    full = NodeHas({"CPU": 1.6, "GPU": 8.0})
    assert not asked.fits_apart([full, full], "stages"), "no room for the engine"
    assert asked.fits_apart([full, full, NodeHas({"CPU": 0.1})], "stages")


@pytest.mark.parametrize(
    ("free", "fits"),
    [
        (gpus(8, 8), True),
        (gpus(8, 7), False),
        (gpus(3, 5, 8), True),
        ([*gpus(8), *gpus(8, zone="b")], False),
        ([*gpus(15), NodeHas({"CPU": 0.2, "GPU": 1.0}, {"zone": "a"})], True),
        ([*gpus(15), NodeHas({"CPU": 0.1, "GPU": 1.0}, {"zone": "a"})], False),
        ([NodeHas({"CPU": 1.6, "GPU": 8.0}, {"zone": "a"})] * 2, False),  # none has room for the engine besides
        ([NodeHas({"CPU": 1.7, "GPU": 8.0}, {"zone": "a"}), NodeHas({"CPU": 1.6, "GPU": 8.0}, {"zone": "a"})], True),
    ],
)
def test_an_engine_fits_on_several_nodes_if_each_rank_finds_one(free: list[NodeHas], fits: bool) -> None:
    asked = demand(tp_size=16, device="cuda", tp_placement="any", node_labels="zone=a")
    assert asked.fits_apart(free, "ranks") is fits


def test_ranks_on_cpus_have_to_be_on_one_node() -> None:
    with pytest.raises(ConfigError, match=r"tp_placement any does not go with device cpu: .* share memory"):
        EngineConfig(tp_size=2, tp_placement="any", device="cpu")


def test_engines_spread_over_nodes_or_fill_them() -> None:
    engines = ["a", "b", "b", "c"]
    assert in_order({"a", "b", "c", "d"}, engines, "spread") == ["d", "a", "c", "b"]
    assert in_order({"a", "b", "c", "d"}, engines, "pack") == ["b", "a", "c", "d"]
    assert in_order((), engines, "spread") == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("engine_resources", "license", "'license' is not NAME=VALUE; write engine_resources such as"),
        ("engine_resources", "license=", "'license=' is not NAME=VALUE"),
        ("engine_resources", "=1", "'=1' is not NAME=VALUE"),
        ("engine_resources", "license=one", "has no numbers"),
        ("engine_resources", "license=1,license=2", "'license' is given twice"),
        ("engine_resources", "license=1,", "'' is not NAME=VALUE"),
        ("engine_resources", "license=0", "whole numbers, and fractions of one"),
        ("engine_resources", "license=nan", "whole numbers, and fractions of one"),
        ("engine_resources", "license=inf", "whole numbers, and fractions of one"),
        ("engine_resources", "license=1.5", "whole numbers, and fractions of one"),
        ("engine_resources", "CPU=4", "CPUs are engine_cpus"),
        ("node_labels", "zone", "'zone' is not NAME=VALUE; write node_labels such as"),
        ("engine_cpus", -1.0, "engine_cpus must be from 0"),
        ("placement", "anywhere", "placement must be one of spread, pack"),
    ],
)
def test_what_ray_would_not_take_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**{field: value})
