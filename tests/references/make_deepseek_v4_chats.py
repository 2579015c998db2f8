"""Writes deepseek_v4_chats.json: conversations as vLLM encodes them for DeepSeek-V4.

Needs the environment of `make peers`:

.venv-peers/bin/python tests/references/make_deepseek_v4_chats.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.tokenizers.deepseek_v4_encoding import encode_messages

ADD = {"name": "add", "description": "Adds “two”.", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "x", "b": [1, {"c": None}]}}}
CALLED = said("assistant", "", tool_calls=[CALL, {**CALL, "id": "2", "function": {"name": "now", "arguments": {}}}])
TURNS = [said("user", "Hi"), said("assistant", "Hello!", reasoning="They greet."), said("user", "2 + 2?")]
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "one turn": ([said("user", "Hi")], False),
    "a system's word": ([said("system", "Be terse."), *TURNS], False),
    "turns": (TURNS, False),
    "after an answer": ([*TURNS, said("assistant", "4", reasoning="Add."), said("user", "Sure?")], False),
    "tools": (TURNS, True),
    "tools and a system's word": ([said("system", "Be terse."), *TURNS], True),
    "results": ([*TURNS, CALLED, said("tool", "4", tool_call_id="1"), said("tool", "12", tool_call_id="2")], True),
    "results and a word": ([*TURNS, CALLED, said("tool", "4", tool_call_id="1"), said("user", "And?")], True),
    "two words": ([said("user", "Hi"), said("user", "there")], False),
}


def with_tools(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As vLLM's tokenizer gives them to the first system message."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system"}, *messages]
    return [{**messages[0], "tools": TOOLS}, *messages[1:]]


def main() -> None:
    found = []
    for name, (messages, has_tools) in CHATS.items():
        for thinks in (True, False):
            given = with_tools(messages) if has_tools else messages
            text = encode_messages(given, thinking_mode="thinking" if thinks else "chat")
            found.append(
                {
                    "name": name,
                    "messages": messages,
                    "tools": TOOLS if has_tools else [],
                    "thinks": thinks,
                    "text": text,
                }
            )
    path = Path(__file__).with_name("deepseek_v4_chats.json")
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {len(found)} chats")


if __name__ == "__main__":
    main()
