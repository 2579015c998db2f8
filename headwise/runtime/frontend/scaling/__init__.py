"""How many engines a deployment should have, and which one goes: decisions only. No I/O, no clock, no Ray.

Nothing acts on these decisions in a deployment yet; `benchmarks/autoscaling.py` does, on simulated engines.

base         the policy, what is observed, and the decision
observation  what the scheduler's reports say, as the controller takes it
demand       how many engines a load needs, by the costs that requests are routed by
evidence     what was needed lately: up and down only after a time
leaving      which engines go: those whose caches are worth least
replica_set  the controller: from observations to decisions
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
from headwise.runtime.frontend.scaling.observation import observe
from headwise.runtime.frontend.scaling.replica_set import ReplicaSet

__all__ = [
    "CacheWorth",
    "Decision",
    "EngineReport",
    "Observation",
    "Replica",
    "ReplicaSet",
    "ReplicaState",
    "ScalingPolicy",
    "observe",
]
