"""Nodes that Ray is told to drain."""

from __future__ import annotations

import subprocess
import sys

from support.waiting import PATIENCE_S


def drain_node(address: str, node: str, left_s: int = 600) -> None:
    """As autoscalers do when a machine is about to be taken away."""
    notice = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test", "--deadline-remaining-seconds"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node]
    done = subprocess.run([*command, *notice, str(left_s)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
