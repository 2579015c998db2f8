"""What vLLM refuses is refused: requests, and what its own checks said of them (`references/make_vllm_refusals.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import Served, serving

REQUESTS = json.loads((Path(__file__).parents[2] / "references" / "vllm_refusals.json").read_text())["requests"]
REFUSED = [request for request in REQUESTS if request["vllm"] is not None]
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    deployment = Deployment()
    deployment.add_engine(ScriptedCore())
    with serving(deployment) as served:
        yield served
    deployment.close()


@pytest.mark.parametrize("request_", REFUSED, ids=lambda each: f"{each['path'][4:]} {json.dumps(each['body'])}")
def test_what_vllm_refuses_is_refused(served: Served, request_: dict[str, Any]) -> None:
    answer = served.http.post(request_["path"], json={**BASE[request_["path"]], **request_["body"]})
    assert answer.status_code in (400, 404), answer.text  # 404: another model
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] in {*request_["body"], None}
