"""How many engines a deployment should have, and which one goes: decisions only. No I/O, no clock, no Ray.

`headwise.actors.fleet` acts on these decisions, and `benchmarks/autoscaling.py` on simulated engines.

base         the policy, what is observed, and the decision
observation  what the scheduler's reports say, as the controller takes it
forecast     the load to count on, from what has arrived lately
demand       how many engines a load needs, by the costs that requests are routed by
evidence     what was needed lately: up and down only after a time
leaving      which engines go: those whose caches are worth least
replica_set  the controller: from observations to decisions
exchange     what the scheduler and the owner of the engines tell each other
roles        what each engine is for, where prompts are computed apart from decoding
role_balance when one of them changes that by itself
requests     clients' requests for a number of engines, until the owner has taken them
"""

from headwise.runtime.frontend.scaling.base import (
    CacheWorth,
    Decision,
    EngineReport,
    Observation,
    Replica,
    ReplicaState,
    ScalingPolicy,
)
from headwise.runtime.frontend.scaling.exchange import Exchange, FleetState, SchedulerNews, Wish, Wishes
from headwise.runtime.frontend.scaling.observation import observe
from headwise.runtime.frontend.scaling.replica_set import ReplicaSet
from headwise.runtime.frontend.scaling.role_balance import RoleBalance, RoleDecision, RolePolicy
from headwise.runtime.frontend.scaling.roles import RankSizes, Split, deal

__all__ = [
    "CacheWorth",
    "Decision",
    "EngineReport",
    "Exchange",
    "FleetState",
    "Observation",
    "RankSizes",
    "Replica",
    "ReplicaSet",
    "ReplicaState",
    "RoleBalance",
    "RoleDecision",
    "RolePolicy",
    "ScalingPolicy",
    "SchedulerNews",
    "Split",
    "Wish",
    "Wishes",
    "deal",
    "observe",
]
