"""Which parser a chat template asks for, and what forced calls look like."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headwise.runtime.http.tools.forced import schema_of_one, schema_of_some
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.grammar import check_grammar

# What tells the forms apart in the templates that these models come with.
HERMES = 'return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>}'
LLAMA = '{%- if message.role == "ipython" %}... Respond in the format {"name": function name, "parameters": {}}'
MISTRAL = "{{- '[TOOL_CALLS] [' }}{{- tool_call.function|tojson }}"
GPT_OSS = '"<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>"'
QWEN3 = HERMES + "{%- set content = content.split('</think>')[-1] %}"
QWEN3_CODER = "<tool_call>\n<function=example_function_name>"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
DEEPSEEK = "<|tool calls begin|>".replace("|", "\N{FULLWIDTH VERTICAL LINE}").replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", "none"),
        (LLAMA, "llama3", "none"),
        ("<|python_tag|>", "llama3", "none"),
        (MISTRAL, "mistral", "none"),
        (GPT_OSS, "gpt_oss", "gpt_oss"),
        (QWEN3, "hermes", "think"),
        (QWEN3_CODER, "qwen3_coder", "none"),
        (GLM + "<think></think>", "glm45", "think"),
        ("<minimax:tool_call>\\n<invoke name=... <think>", "minimax_m2", "think"),
        ("<seed:tool_call>\\n<function=... <seed:think>", "seed_oss", "seed_oss"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "none"),
        (DEEPSEEK + "</think>", "deepseek_v3", "think"),
        ("Use <TOOLCALL>[{...}]</TOOLCALL>; reason within <think></think>", "nemotron", "think"),
        ("respond with <|tool_call|> followed by a JSON list of tools", "granite", "none"),
        ("<|im_start|>{{ message.content }}", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_auto_is_what_the_template_contains(template: str | None, tools: str, reasoning: str) -> None:
    parsers = Parsers.choose("auto", "auto", template, lambda tokens: "")
    assert (parsers.tools, parsers.reasoning) == (tools, reasoning)
    said = Parsers.choose("mistral", "none", template, lambda tokens: "")
    assert (said.tools, said.reasoning) == ("mistral", "none")


@pytest.mark.parametrize(
    ("parsers", "shown"),
    [
        (Parsers("hermes"), {"<tool_call>", "</tool_call>"}),
        (Parsers("llama3"), {"<|python_tag|>"}),
        (Parsers("hermes", "think"), {"<tool_call>", "</tool_call>", "<think>", "</think>"}),
        (Parsers(), set()),
    ],
)
def test_the_tokens_that_a_parser_reads_are_shown(parsers: Parsers, shown: set[str]) -> None:
    assert set(parsers.shown_tokens(("add",))) == shown


def test_harmony_is_read_without_tools_too() -> None:
    assert "<|channel|>" in Parsers("gpt_oss", "gpt_oss").shown_tokens(())
    assert Parsers("hermes").shown_tokens(()) == ()


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "properties": {
        "root": {"$ref": "#/$defs/node"},
        "enum": {"$ref": "#/$defs/node"},
        "x": {"enum": [{"$ref": "#/a"}]},
    },
    "required": ["root"],
}
TOOLS = [tool("tree", TREE), tool("none", None), tool("self", {"properties": {"again": {"$ref": "#"}}})]


@pytest.mark.parametrize("is_one", [False, True])
def test_references_of_each_tool_are_led_to_its_own_definitions(is_one: bool) -> None:
    schema = json.loads(schema_of_some(TOOLS, is_one))
    check_grammar("json_schema", json.dumps(schema))
    tree = {"name": "tree", "arguments": {"root": {"next": {"next": {}}}, "enum": {}, "x": {"$ref": "#/a"}}}
    jsonschema.validate([tree], schema)
    jsonschema.validate([{"name": "self", "arguments": {"again": {"again": {}}}}], schema)
    for wrong in (
        [],
        [{"name": "tree", "arguments": {}}],
        [{"name": "other", "arguments": {}}],
        [{"name": "none", "arguments": {"a": 1}}],
        [{"name": "tree", "arguments": {"root": {"next": 5}}}],
        *([[tree, tree]] if is_one else []),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("each", TOOLS)
def test_a_named_tool_has_its_schema(each: dict[str, Any]) -> None:
    schema = schema_of_one(each)
    check_grammar("json_schema", schema)
    assert json.loads(schema)["type"] == "object"
