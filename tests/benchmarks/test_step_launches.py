"""What the host enqueues for a layer of a prefill step on a GPU."""

from __future__ import annotations

import importlib
import json

import pytest

pytest.importorskip("triton", reason="the emulated GPU's modules need it")


def test_a_layer_of_prefill_is_one_graph_and_its_attention(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("step_launches").main(["--quick"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gpt_oss_graph_of_layer"] == 12, "biases are added by kernels that are launched anyway"
    assert found["decode_64_calls"] == 4, "what is new, the graph, tokens that are kept, and tokens that are told"
    assert (found["llama_prefill_launches_calls"], found["llama_prefill_graphs_calls"]) == (10, 4)
    assert (found["llama_mixed_launches_calls"], found["llama_mixed_graphs_calls"]) == (10, 4)
