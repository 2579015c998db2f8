"""Encoders of images of a detached deployment outlive its owner: the next one takes them over, with what they keep."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.commands import as_flags
from support.tiny_images import image_model, picture, references
from support.waiting import PATIENCE_S, eventually

from headwise import Client, EngineConfig
from headwise.actors.found import find_actor
from headwise.actors.names import OWNER

pytestmark = [pytest.mark.ray, pytest.mark.soak]  # `test_detached` and `test_images_on_ray` have its parts

CONFIG = EngineConfig(
    model=str(image_model()),
    name="images",
    port=0,
    image_encoders=1,
    dtype="float32",
    kv_cache="8MiB",
    cpu_threads=1,
    tokenizer_processes=1,
    index_timeout_s=5.0,
    engine_timeout_s=60.0,
    front_timeout_s=60.0,
    owner_timeout_s=10.0,
)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "headwise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def client(cluster: str) -> Iterator[Client]:
    run("serve", "--detach", "--address", cluster, *as_flags(CONFIG))
    try:
        with Client(f"ray:{cluster}/{CONFIG.name}") as client:
            yield client
    finally:
        run("stop", "--ray", cluster, "--name", CONFIG.name)


def pid_of(role: str) -> int:
    handle: Any = find_actor(CONFIG.name, role)
    return int(ray.get(handle.__ray_call__.remote(lambda actor: os.getpid())))


def call(role: str, method: str) -> Any:
    return ray.get(getattr(find_actor(CONFIG.name, role), method).remote())


def said(client: Client) -> list[int]:
    parts = [{"type": "image", "image": picture("odd")}, {"type": "text", "text": "Look at one, the image."}]
    return client.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=8, ignore_eos=True).token_ids


def misses(client: Client) -> int:
    stats = client.stats()["encoders"]
    return int(stats["encoder-0"]["cache"]["misses"]) if stats else -1


def test_a_new_owner_takes_over_the_encoders(client: Client) -> None:
    expected = next(each for each in references()["prompts"] if each["name"] == "one")["output_ids"][:8]
    assert said(client) == expected
    eventually(lambda: misses(client) == 1)
    owner, encoder = pid_of(OWNER), pid_of("encoder-0")
    os.kill(owner, signal.SIGKILL)

    def serves_again() -> bool:
        with contextlib.suppress(ray.exceptions.RayError):  # it is being started
            return pid_of(OWNER) != owner and bool(call(OWNER, "serves"))
        return False

    eventually(serves_again)
    assert pid_of("encoder-0") == encoder
    assert said(client) == expected
    eventually(lambda: misses(client) == 1)
    os.kill(encoder, signal.SIGKILL)  # and looks after them

    def is_back() -> bool:
        found: Any = find_actor(CONFIG.name, "encoder-0")
        return found is not None and misses(client) == 0

    eventually(is_back)
    assert said(client) == expected
