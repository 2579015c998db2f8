"""What an engine asks Ray for, and which node it takes."""

from __future__ import annotations

import pytest

from headwise.actors.demand import Demand, in_order
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
