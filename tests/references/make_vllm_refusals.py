"""Writes vllm_refusals.json: requests, and what vLLM's own checks of a request say of them.

    PYTHONPATH=tests python tests/references/make_vllm_refusals.py

Needs vLLM (`make peers`), no model. Only what vLLM checks without one is here: bodies, and sampling parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": 2},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": -1},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"presence_penalty": 2.1},
    {"presence_penalty": -2.1},
    {"frequency_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"n": 0},
    {"n": -1},
    {"n": "two"},
    {"n": 2, "temperature": 0},
    {"n": 2, "temperature": 0.5},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": 5},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": 5},
    {"seed": "x"},
    {"seed": 2**64},
    {"logit_bias": 5},
    {"logit_bias": {"a": 1}},
    {"cache_salt": ""},
    {"cache_salt": 5},
    {"priority": "high"},
    {"ignore_eos": "maybe"},
    {"stream": "maybe"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 5},
    {"prompt_logprobs": -2},
    {"prompt_logprobs": "x"},
    {"stream": True, "prompt_logprobs": 1},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": "json"},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"regex": "a", "json": {"type": "object"}}},
    {"model": 5},
]
CHATS: list[dict[str, Any]] = [
    {"messages": None},
    {"messages": 5},
    {"messages": [{"content": "no role"}]},
    {"messages": ["text"]},
    {"logprobs": "yes please"},
    {"top_logprobs": 1},
    {"logprobs": True, "top_logprobs": -2},
    {"logprobs": True, "top_logprobs": "x"},
    {"tools": []},
    {"tools": [5]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "auto"},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": [TOOL], "tool_choice": "sometimes"},
    {"tools": [TOOL], "tool_choice": {"type": "function"}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": ""}}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "structured_outputs": {"regex": "a"},
    },
    {"continue_final_message": True, "add_generation_prompt": True},
    {"chat_template_kwargs": 5},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": None},
    {"prompt": ""},
    {"prompt": {"text": "x"}},
    {"prompt": [["a"]]},
    {"logprobs": -2},
    {"logprobs": "x"},
    {"echo": "maybe"},
]


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """What vLLM says of a request; None: it goes on."""
    try:
        if path == "/v1/chat/completions":
            chat = ChatCompletionRequest(**body)
            chat.to_sampling_params(16 if chat.max_tokens is None else chat.max_tokens, {})
        else:
            completion = CompletionRequest(**body)
            completion.to_sampling_params(16 if completion.max_tokens is None else completion.max_tokens)
    except (VLLMValidationError, ValueError, TypeError) as error:
        return str(error).partition("\n  ")[0][:160]
    return None


def main() -> None:
    bases = {
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, CHATS),
        "/v1/completions": ({"prompt": "Hi"}, COMPLETIONS),
    }
    rows = []
    for path, (base, own) in bases.items():
        rows += [{"path": path, "body": said, "vllm": refusal(path, {**base, **said})} for said in [*SAMPLING, *own]]
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"vllm": "{vllm.__version__}", "requests": [\n{lines}\n]}}\n'
    Path(__file__).with_name("vllm_refusals.json").write_text(text)


if __name__ == "__main__":
    main()
