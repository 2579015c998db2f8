"""Operations over HTTP, as vLLM's clients ask for them: of operators, where they are served at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.engine.changing_weights import World
from support.scripted_http import Served, serving

from headwise.runtime.http.guard import ApiKeys
from headwise.runtime.protocol.users import Tenant, Users

KEYS = ApiKeys(Users({"operator": None, "tenant": Tenant("search")}))
PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights", "/sleep", "/wake_up")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    with serving(world, keys=KEYS, has_operations=True) as served:
        served.http.headers["authorization"] = "Bearer operator"
        yield served


def load(served: Served, name: str, path: str = "/adapters/it", **more: Any) -> httpx.Response:
    return served.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(served: Served, name: str) -> httpx.Response:
    return served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def models(served: Served) -> list[str]:
    return [each["id"] for each in served.http.get("/v1/models").json()["data"]]


def test_adapters_come_beside_others_and_go_and_requests_find_them_at_once(served: Served, world: World) -> None:
    for name in ("sql", "chat"):
        answer = load(served, name, f"/adapters/{name}")
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        said = served.http.post("/v1/completions", json={"model": name, "prompt": [1, 2], "max_tokens": 2})
        assert said.status_code == 200, said.text
    assert models(served) == ["scripted", "sql", "chat"]
    again = load(served, "sql", "/adapters/sql-2")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert load(served, "sql", "/adapters/sql-2", load_inplace=True).status_code == 200
    assert world.nodes[0].follower.weights.adapters == "sql=/adapters/sql-2,chat=/adapters/chat"
    assert unload(served, "sql").text == "Success: LoRA adapter 'sql' removed successfully."
    gone = served.http.post("/v1/completions", json={"model": "sql", "prompt": [1, 2], "max_tokens": 2})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert models(served) == ["scripted", "chat"]
    assert unload(served, "sql").status_code == 404
    assert unload(served, "chat").status_code == 200
    assert {node.follower.weights.adapters for node in world.nodes} == {""}


def test_weights_are_changed_and_what_cannot_be_had_is_said(served: Served, world: World) -> None:
    answer = served.http.post("/update_weights", json={"model": "7", "version": "seven", "keep_running": True})
    assert (answer.status_code, answer.json()) == (200, {"version": "seven"})
    assert [node.number for node in world.nodes] == [7, 7]
    for node in world.nodes:
        node.lacks = "no such directory"
    refused = load(served, "sql")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "no such directory; nothing has changed" in refused.json()["error"]["message"]
    for node in world.nodes:
        node.lacks = ""


def test_engines_sleep_and_wake_and_forget(served: Served) -> None:
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert served.http.post("/sleep?level=1").status_code == 200
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.http.post("/wake_up").status_code == 200
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert set(served.http.post("/reset_prefix_cache").json()["blocks"]) == {"engine-0", "engine-1"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "sql"}),
        ("/v1/load_lora_adapter", {"lora_name": "a,b", "lora_path": "/adapters/sql"}),
        ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": ""}),
        ("/v1/load_lora_adapter", {"lora_name": 7, "lora_path": "/adapters/sql"}),
        ("/v1/unload_lora_adapter", {}),
        ("/update_weights", {}),
        ("/update_weights", {"model": "8", "adapters": {}, "drop_adapters": ["sql"]}),
        ("/update_weights", {"drop_adapters": ["nobody"]}),
        ("/update_weights", {"weights": "8"}),
        ("/reset_prefix_cache?tier=moon", None),
        ("/reset_prefix_cache?tier=storage", None),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    served: Served, world: World, path: str, body: dict[str, Any] | None
) -> None:
    before = [node.follower.weights for node in world.nodes]
    answer = served.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert [node.follower.weights for node in world.nodes] == before


@pytest.mark.parametrize("path", [*PATHS, "/reset_prefix_cache"])
def test_a_tenant_s_key_is_refused(served: Served, path: str) -> None:
    answer = served.http.post(path, headers={"authorization": "Bearer tenant"}, json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


def test_without_a_key_there_is_no_answer(served: Served) -> None:
    assert httpx.post(f"{served.base_url}/sleep").status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_where_they_are_not_served_there_is_no_such_path(world: World, path: str) -> None:
    with serving(world, keys=KEYS) as served:
        assert served.http.post(path, headers={"authorization": "Bearer operator"}).status_code == 404
