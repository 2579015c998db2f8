"""Where an engine's processes run: one placement group per engine, all of it on one node if neither its stages nor its
ranks may be on several."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headwise.actors.addresses import EVERY_INTERFACE
from headwise.actors.demand import Demand, NodeHas, Places, in_order, ranks_in
from headwise.actors.restarts import Life
from headwise.errors import DeploymentError
from headwise.runtime.config.device import resolve_device
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.host_cache import NodeRoom, resolve_host_cache

_HEAD = "node:__internal_head__"
"""Resource that Ray gives to a cluster's head."""
_ray: Any = ray
"""Ray's functions that have no types are called through this."""


def could_fit(config: EngineConfig) -> bool:
    """Whether the cluster has room for one engine, in use or not: else it must grow before it can serve."""
    total = _ray.cluster_resources()
    return all(amount <= total.get(name, 0.0) for name, amount in _least(config).total.items())


def could_hold_encoder(config: EngineConfig) -> bool:
    """Whether the cluster has what an encoder of images asks for, in use or not."""
    total = _ray.cluster_resources()
    asked = {"CPU": config.image_encoder_cpus, "GPU": config.image_encoder_gpus}
    return all(amount <= total.get(name, 0.0) for name, amount in asked.items())


def _least(config: EngineConfig) -> Demand:
    """Of an engine with the fewest ranks."""
    return Demand.of(config.of_ranks(min(config.tp_sizes)))


def no_room(config: EngineConfig, waited_s: float) -> DeploymentError:
    """The error of a deployment none of whose engines got a place."""
    demand, free = _least(config), _ray.available_resources()
    left = " and ".join(f"{free.get(name, 0.0):.4g} {name}" for name in demand.total)
    places = demand.places(_nodes())
    if places != "node":
        where, remedy = "on nodes together" + _with_stages(demand, places), ""
    else:
        where = "on one node" + (", where its ranks share memory" if demand.ranks > 1 and not demand.on_gpu else "")
        remedy = ", or let ranks span nodes by tp_placement any" if demand.ranks > 1 and demand.on_gpu else ""
    return DeploymentError(
        f"the Ray cluster has no room for engine 0 of {config.first_replicas}: it needs {demand} {where}, "
        f"{left} are free in all (waited {waited_s:g} s); lower replicas or tp_size, or add nodes{remedy}"
    )


def _with_stages(demand: Demand, places: Places) -> str:
    """What is to be said of an engine's stages besides."""
    return f", each of its {demand.stages} stages on one" if places == "stages" else ""


def release(groups: list[PlacementGroup]) -> None:
    from ray.util.placement_group import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def cluster_gpus() -> int:
    """GPUs of the Ray cluster, in use or not."""
    return int(_ray.cluster_resources().get("GPU", 0))


def gpus_here() -> int:
    """GPUs that a local Ray instance would have: of this machine, those that this process may see."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    found = int(manager.get_current_node_num_accelerators())
    return found if visible is None else min(found, len(visible))


def resolve(config: EngineConfig) -> EngineConfig:
    """What is ``auto`` and depends on the cluster, as what it stands for here.

    Raises `ConfigError` if something that is configured does not go with that.
    """
    return resolve_host_cache(resolve_device(config, cluster_gpus()), _rooms())


def _rooms() -> list[NodeRoom]:
    """Of the nodes that can run engines; of all that there are, where none can yet."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [
        NodeRoom(int(each.get("memory", 0)), each.get("CPU", 0.0), each.get("GPU", 0.0))
        for each in found
        if each.get("memory", 0)
    ]
    return [node for node in nodes if node.cpus] or nodes


def in_bundle(group: PlacementGroup, index: int, sharers: int = 1) -> dict[str, Any]:
    """Actor options: run in this bundle, with its part of what that has for so many actors."""
    resources = {name: amount / sharers for name, amount in group.bundle_specs[index].items()}
    return {
        "num_cpus": resources.pop("CPU"),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
    }


def on_node(node: str, *, or_another: bool = False) -> dict[str, Any]:
    """Actor options: run on this node, or if it is dead, on any, taking next to nothing.

    What takes nothing at all, and need not be on the node, Ray puts anywhere: so it takes a byte.
    """
    least = {"memory": 1} if or_another else {}
    return {"num_cpus": 0, **least, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=or_another)}


def this_node() -> str:
    """Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def node_address() -> str:
    """The address under which other nodes reach this one."""
    return str(_ray.util.get_node_ip_address())


def nodes_with_room(config: EngineConfig) -> set[str]:
    """Nodes that have room for one more engine, whatever its ranks, and are not about to be taken away."""
    return _nodes_with_room(_most(config))


def has_room(config: EngineConfig) -> bool:
    """Whether one more engine, whatever its ranks, would find a place now: a node, or nodes where it may span some."""
    demand = _most(config)
    places = demand.places(_nodes())
    if places == "node":
        return bool(_nodes_with_room(demand))
    leaving = draining_nodes()
    return demand.fits_apart([has for node, has in _free().items() if node not in leaving], places)


def _most(config: EngineConfig) -> Demand:
    """Of an engine with the most ranks."""
    return Demand.of(config.of_ranks(max(config.tp_sizes)))


def nodes_of(group: PlacementGroup) -> list[str]:
    """Ray's ids of the nodes that the bundles of a placement group have, in their order; empty: some have none."""
    table = placement_group_table(group)
    if table.get("state") != "CREATED":
        return []
    return [str(table["bundles_to_node_id"][index]) for index in range(len(group.bundle_specs))]


def ranks_of(group: PlacementGroup) -> int:
    """Of the engine that a placement group is for."""
    return ranks_in(group.bundle_specs)


def nodes_of_ranks(config: EngineConfig, group: PlacementGroup) -> list[str]:
    """Ray's ids of the nodes of an engine's ranks, by rank; empty: some have none."""
    _, *nodes = nodes_of(group) or [""]
    return [nodes[_bundle(config, len(nodes), rank)] for rank in range(config.ranks)] if nodes else []


def as_rank(config: EngineConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Actor options: run where this rank of the engine is to be."""
    bundles = len(group.bundle_specs) - 1
    return in_bundle(group, 1 + _bundle(config, bundles, rank), config.ranks // bundles)


def _bundle(config: EngineConfig, bundles: int, rank: int) -> int:
    """Which bundle behind the engine's is this rank's: its own, or that of all of its stage."""
    return rank // (config.ranks // bundles)


def address_of(node: str) -> str:
    """The address of the node of this id of Ray's; empty: there is no such node any more."""
    return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), "")


class EngineSite:
    """Where an engine runs: a placement group. It is replaced by one on another node when its node is dead or bad, or
    one of its nodes is dead. While no node has room for it the group is pending, so that Ray's autoscaler adds a node.

    node:    Ray's id of the engine's node; while there is none, of the node that was asked for; empty: any
    nodes:   that node, and those of its ranks
    address: the engine's node's address
    others:  the nodes of the deployment's other engines
    name:    by which the group is found again if it outlives this process; empty: it does not
    group:   that there is; None: it is yet to be asked for
    """

    def __init__(
        self,
        config: EngineConfig,
        others: Callable[[], Collection[str]] = lambda: (),
        name: str = "",
        group: PlacementGroup | None = None,
    ) -> None:
        self.group = group
        self._name = name
        self.node = self.address = ""
        self._of_ranks: frozenset[str] = frozenset()
        self._demand, self._placement = Demand.of(config), config.placement
        self._places: Places = "node" if group is None else self._places_of(group)
        self._others = others
        self.is_placed()

    def _places_of(self, group: PlacementGroup) -> Places:
        """What was to be on one node when this group was asked for."""
        if placement_group_table(group).get("strategy") != "PACK":
            return "node"
        return "stages" if 1 < self._demand.stages == len(group.bundle_specs) - 1 else "ranks"

    def choose(self, life: Life) -> None:
        """Keep the placement group, or ask Ray for one on the node to try next, if any has room."""
        with_room = in_order(_nodes_with_room(self._demand), self._others(), self._placement)
        target = life.next_node(self.node, _alive_nodes(), with_room)
        if target and target == self.node and self.group is not None and self.is_alive():
            return
        self._ask(target)

    def _ask(self, node: str) -> None:
        """For a new place, on this node if all of it is to be on one."""
        if self.group is not None:
            release([self.group])
        self._places = self._demand.places(_nodes())
        self.node, self._of_ranks = node if self._places == "node" else "", frozenset()
        self.group = _request(self._demand, self.node, self._name, self._places)

    @property
    def nodes(self) -> frozenset[str]:
        return self._of_ranks | ({self.node} if self.node else set())

    def is_alive(self) -> bool:
        """Whether all of its nodes live, as far as Ray knows by now."""
        return bool(self.nodes) and self.nodes <= _alive_nodes()

    def is_placed(self) -> bool:
        """Whether there is room now."""
        if self.group is None:
            return False
        state = placement_group_table(self.group).get("state")
        is_lost = state == "REMOVED"
        if is_lost or (state == "PENDING" and self._places != self._demand.places(_nodes())):
            self.group = None if is_lost else self.group
            self._ask("")
            return False
        nodes = nodes_of(self.group)
        if not nodes:
            return False
        self.node, self._of_ranks = nodes[0], frozenset(nodes[1:])
        self.address = address_of(self.node)
        return True

    def options(self) -> dict[str, Any]:
        """Actor options of the engine."""
        assert self.group is not None
        return {**in_bundle(self.group, 0), **_lifetime(bool(self._name))}

    def needs(self) -> str:
        if self._places == "node":
            return f"a node with {self._demand}"
        return f"nodes that have {self._demand} together{_with_stages(self._demand, self._places)}"

    def release(self) -> None:
        if self.group is not None:
            release([self.group])
            self.group = None


class FrontendSite:
    """Where the scheduler and the store run: at first on this process's node. When that dies, or is about to be taken
    away, they move to another one: the first, if it comes back under its address, else the cluster's head, else any.
    Where only this node has the address at which they listen, they wait for it.

    host: at which they listen
    """

    def __init__(self, host: str, is_detached: bool = False) -> None:
        self.node = this_node()
        self.address = node_address()
        self._may_move = host == EVERY_INTERFACE
        self._is_detached = is_detached

    def adopt(self, address: str) -> None:
        """They are on the node of this address, or were."""
        self.address = address
        alive = (str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and _has_address(node, address))
        self.node = next(alive, "")

    def choose(self, life: Life) -> None:
        if not self.is_alive():
            self._go_elsewhere()

    def next(self) -> FrontendSite | None:
        """Where they may go to, as this node is about to be taken away; None: they stay, since there is none, or since
        they end with this node in any case."""
        site = copy.copy(self)
        return site if site.leave() else None

    def leave(self) -> bool:
        """Choose another node; False: there is none, as of `next`."""
        return self._may_move and self._is_detached and self._go_elsewhere()

    def go_to(self, site: FrontendSite) -> None:
        """They are there now."""
        self.node, self.address = site.node, site.address

    def _go_elsewhere(self) -> bool:
        leaving = draining_nodes()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]
        if not self._may_move:
            nodes = [node for node in nodes if _has_address(node, self.address)]
        nodes.sort(key=lambda node: (not _has_address(node, self.address), _HEAD not in node["Resources"]))
        if nodes:
            self.node, self.address = str(nodes[0]["NodeID"]), str(nodes[0]["NodeManagerAddress"])
        return bool(nodes)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset((self.node,)) if self.node else frozenset()

    def is_alive(self) -> bool:
        """Whether the node lives, as far as Ray knows by now."""
        return self.node in _alive_nodes()

    def is_placed(self) -> bool:
        return self.is_alive()

    def options(self) -> dict[str, Any]:
        return {**on_node(self.node), **_lifetime(self._is_detached)}

    def needs(self) -> str:
        return f"the node with the address {self.address}"

    def release(self) -> None:
        pass


def _lifetime(is_detached: bool) -> dict[str, Any]:
    """Options of actors and placement groups."""
    return {"lifetime": "detached"} if is_detached else {}


def _has_address(node: dict[str, Any], address: str) -> bool:
    return bool(node["NodeManagerAddress"] == address)


def _request(demand: Demand, node: str, name: str, places: Places) -> PlacementGroup:
    """A placement group for an engine and its ranks, on ``node`` if that has room; empty: wherever there is.

    places: what is on one node; where that is not all, it is on as few as have room, whichever they are
    """
    bundles = demand.bundles(places)
    group: PlacementGroup = placement_group(
        bundles,
        name=name,
        strategy="STRICT_PACK" if places == "node" else "PACK",
        _soft_target_node_id=node or None,
        bundle_label_selector=[dict(demand.labels)] * len(bundles),
        **_lifetime(bool(name)),
    )
    return group


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def draining_nodes() -> dict[str, float]:
    """Nodes that Ray was told to drain, which are about to be taken away: by id, when, as `time.time` counts; infinity
    where nobody said when.
    """
    return {node: deadline_ms / 1e3 or math.inf for node, deadline_ms in state.get_draining_nodes().items()}


def _nodes() -> list[NodeHas]:
    """The cluster's nodes, by what they have in all."""
    return [NodeHas(node.get("Resources", {}), node.get("Labels", {})) for node in ray.nodes() if node["Alive"]]


def _free() -> dict[str, NodeHas]:
    """The cluster's nodes, by what they have left."""
    free = available_resources_per_node()
    labels = {node["NodeID"]: node.get("Labels", {}) for node in ray.nodes() if node["Alive"]}
    return {node: NodeHas(has, labels[node]) for node, has in free.items() if node in labels}


def _nodes_with_room(demand: Demand) -> set[str]:
    have_room = {node for node, has in _free().items() if demand.fits(has.amounts, has.labels)}
    return have_room - set(draining_nodes())
