"""Chat templates of models that were published without one say what vLLM's encoding says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import ChatTemplate, plain_chat, read_template

ROOT = Path(__file__).parents[2]
DEEPSEEK_V4 = str(ROOT / "deploy" / "templates" / "deepseek-v4.jinja")
CHATS = json.loads((ROOT / "tests" / "references" / "deepseek_v4_chats.json").read_text())
BEGIN = "<｜begin▁of▁sentence｜>"


def rendered(messages: Any, tools: Any, thinks: bool, **more: Any) -> str:
    given = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": thinks}, **more}
    template = ChatTemplate(read_template(DEEPSEEK_V4), {"bos_token": BEGIN})
    return template.render(plain_chat(given), add_generation_prompt=True)


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: f"{chat['name']}{' thinking' * chat['thinks']}")
def test_deepseek_v4_is_told_chats_as_it_was_trained_on(chat: dict[str, Any]) -> None:
    assert rendered(chat["messages"], chat["tools"], chat["thinks"]) == chat["text"]


def test_an_answer_of_deepseek_v4_can_be_gone_on_with() -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    text = rendered(begun, None, thinks=False, continue_final_message=True)
    assert text == f"{BEGIN}<｜User｜>Hi<｜Assistant｜></think>Hel"


def test_how_deepseek_v4_calls_tools_and_thinks_is_known_by_its_template() -> None:
    chosen = Parsers.choose("auto", "auto", read_template(DEEPSEEK_V4), written=lambda _: "")
    assert (chosen.tools, chosen.reasoning) == ("deepseek_v4", "think")
