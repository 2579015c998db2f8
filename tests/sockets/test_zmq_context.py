"""A ZeroMQ context that is forgotten stops nobody."""

from __future__ import annotations

import subprocess
import sys

import zmq

from headwise.sockets.context import close_context, num_open, open_context

FORGETS_ONE = """
import gc, zmq
from headwise.sockets.context import open_context
class Owner: pass
owner = Owner()
owner.itself, owner.context = owner, open_context()
owner.socket = owner.context.socket(zmq.DEALER)
owner.socket.connect("tcp://127.0.0.1:9")
del owner
gc.collect()
print("went on", flush=True)
import os
os._exit(0)
"""


def test_the_garbage_collector_goes_on_past_a_context_with_an_open_socket() -> None:
    done = subprocess.run([sys.executable, "-c", FORGETS_ONE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "went on\n", done.stderr


def test_a_closed_context_is_forgotten() -> None:
    before = num_open()
    context = open_context()
    context.socket(zmq.DEALER).connect("tcp://127.0.0.1:9")
    assert num_open() == before + 1
    close_context(context)
    close_context(context)
    assert context.closed
    assert num_open() == before
