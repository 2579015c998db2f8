"""Commands of detached deployments, and the processes that these are."""

from __future__ import annotations

import os
import subprocess
import sys

import ray
from support.waiting import PATIENCE_S

from headwise.actors.found import find_actor, find_parts
from headwise.actors.names import OWNER, STANDBY


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and last error line of a command."""
    done = ran(*arguments)
    return done.returncode, done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def pids(name: str) -> dict[str, int]:
    """Of a deployment's actors, by role, but for a scheduler that stands by."""
    found = find_parts(name)
    roles = {role.removesuffix(STANDBY) for role in found.actors}
    handles = {**{role: found.actors[found.name_of(role)] for role in roles}, OWNER: find_actor(name, OWNER)}
    return {role: ray.get(handle.__ray_call__.remote(lambda actor: os.getpid())) for role, handle in handles.items()}
