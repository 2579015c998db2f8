"""Chats with tools, calls and variables, as chat templates get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer_directory

from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.runtime.loader.chat import chat_of, check_template, plain_chat
from headwise.runtime.loader.tokenizer import Tokenizer

ALL = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}{{ day }}|"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content if m.content is not none else '-' }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}<|im_end|>{% endfor %}"
)
TOKENIZER = Tokenizer(byte_level_tokenizer(), {}, ALL, None, ())
HELLO = [{"role": "user", "content": "hi"}]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **function}}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "tool_calls": [call]}]


def test_templates_get_tools_and_variables() -> None:
    chat = chat_of(HELLO, [tool(description="é")], {"day": "Monday"})
    text = TOKENIZER.render_chat(chat, add_generation_prompt=False)
    assert text == '{"name": "add", "description": "é"}\nMonday|<|im_start|>user:hi<|im_end|>'


def test_a_chat_without_them_is_its_messages() -> None:
    assert chat_of(HELLO) is HELLO
    assert TOKENIZER.render_chat(HELLO) == TOKENIZER.render_chat({"messages": HELLO, "tools": []})


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_are_an_object_to_templates(arguments: Any) -> None:
    assert '(add {"a": 1})' in TOKENIZER.render_chat(called(arguments))


@pytest.mark.parametrize("arguments", ['{"a": ', "7", "[" * 50_000])
def test_arguments_that_a_model_wrote_wrong_stay_as_they_are(arguments: str) -> None:
    chat = plain_chat(called(arguments))
    assert chat["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


BEGUN = {"role": "assistant", "content": "so <|im_end|>\U0010ffff "}


def test_a_message_may_be_gone_on_with() -> None:
    chat = chat_of([*HELLO, BEGUN], continue_final_message=True)
    rendered = TOKENIZER.render(chat)
    assert rendered.text == "|<|im_start|>user:hi<|im_end|><|im_start|>assistant:so <|im_end|>\U0010ffff "
    assert plain_chat({"messages": HELLO, "continue_final_message": False}) == plain_chat(HELLO)


def test_a_template_that_leaves_the_last_message_out_says_so() -> None:
    silent = Tokenizer(byte_level_tokenizer(), {}, "{{ messages[0].content }}", None, ())
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        silent.render(chat_of([*HELLO, BEGUN], continue_final_message=True))


def test_arguments_that_are_nothing_are_none() -> None:
    assert "(add {})" in TOKENIZER.render_chat(called(""))


def test_a_message_with_calls_needs_no_content() -> None:
    assert "assistant:-(add" in TOKENIZER.render_chat(called("{}"))


def test_a_checked_chat_is_checked_again_to_the_same() -> None:
    chat = plain_chat(chat_of(called('{"a": 1}'), [tool()], {"day": 1}))
    assert plain_chat(chat) == chat


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({"messages": HELLO, "documents": []}, "no 'documents'"),
        ({"messages": []}, "non-empty list"),
        ({"messages": HELLO, "tools": {"a": 1}}, "tools must be a list"),
        ({"messages": HELLO, "chat_template_kwargs": "x"}, "must be a mapping"),
        ({"messages": HELLO, "continue_final_message": True}, "which must be the assistant's, with text"),
        ({"messages": called(""), "continue_final_message": True}, "with text and without calls"),
        ({"messages": [*HELLO, BEGUN], "continue_final_message": "yes"}, "must be true or false, got 'yes'"),
        ({"messages": HELLO, "chat_template_kwargs": {"x": object()}}, "plain data"),
        ({"messages": HELLO, "tools": [tool(parameters={"x": object()})]}, "plain data"),
        ({"messages": HELLO, "tools": [tool(description="\ud800")]}, "surrogate"),
    ],
)
def test_what_is_no_chat_is_told_in_one_line(chat: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        plain_chat(chat)


PIECES = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", ">", " ", "a"])).map("".join)


@settings(max_examples=60)
@given(described=PIECES, variable=PIECES, argument=PIECES)
def test_what_users_write_of_tools_never_becomes_control_tokens(described: str, variable: str, argument: str) -> None:
    tools = [tool(description=described, parameters={"properties": {f"a{described}": {"type": "string"}}})]
    chat = chat_of(called({argument: argument}), tools, {"day": variable})
    rendered = TOKENIZER.render(chat, add_generation_prompt=False)
    assert [token for token in TOKENIZER.encode_chat(rendered) if token < 3] == [1, 2, 1, 2]


def test_control_tokens_that_are_asked_for_are_part_of_the_text() -> None:
    ids = TOKENIZER.encode("a<|im_start|>b<|im_end|>")
    hidden, shown = TOKENIZER.detokenizer(), TOKENIZER.detokenizer(("<|im_start|>", "unknown"))
    assert hidden.push(ids) + hidden.flush() == "ab"
    assert shown.push(ids) + shown.flush() == "a<|im_start|>b"
    assert TOKENIZER.written(ids) == "a<|im_start|>b<|im_end|>"


def test_a_file_may_have_the_template(tmp_path: Path) -> None:
    directory = write_tokenizer_directory(tmp_path / "model", byte_level_tokenizer(), {"chat_template": CHAT_TEMPLATE})
    file = tmp_path / "chat.jinja"
    file.write_text("Mine: {{ messages[0].content }}")
    assert Tokenizer.from_directory(directory, str(file)).render_chat(HELLO) == "Mine: hi"


def test_a_file_that_is_no_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    check_template("")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        check_template(str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="must have 1 to"):
        check_template(str(tmp_path / "empty"))
    (tmp_path / "broken").write_text("{% if %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        check_template(str(tmp_path / "broken"))
