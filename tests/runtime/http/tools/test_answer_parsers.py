"""Parsers of answers find calls and reasoning, lose no text, and find the same wherever the text is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.runtime.http.tools.base import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Part,
    PlainText,
    Reasoning,
    Text,
    joined,
)
from headwise.runtime.http.tools.forced import OneCall, SomeCalls
from headwise.runtime.http.tools.harmony import Harmony
from headwise.runtime.http.tools.marked_calls import (
    GraniteCalls,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    NemotronCalls,
)
from headwise.runtime.http.tools.section_calls import DeepseekCalls, KimiCalls
from headwise.runtime.http.tools.tagged_calls import (
    DeepseekTaggedCalls,
    DeepseekV4Calls,
    GlmCalls,
    MinimaxCalls,
    Qwen3CoderCalls,
    SeedCalls,
)
from headwise.runtime.http.tools.thinking import Thinking

NAMES = frozenset(("add", "look_up"))
Make = Callable[[], AnswerParser]


def hermes() -> AnswerParser:
    return HermesCalls(NAMES)


def llama() -> AnswerParser:
    return LlamaCalls(NAMES)


def mistral() -> AnswerParser:
    return MistralCalls(NAMES)


def nemotron() -> AnswerParser:
    return NemotronCalls(NAMES)


def granite() -> AnswerParser:
    return GraniteCalls(NAMES)


SCHEMAS = {
    "add": {"properties": {"a": {"type": "number"}, "text": {"type": "string"}, "unit": {"enum": ["m", "km"]}}},
    "look_up": None,
}


def qwen3_coder() -> AnswerParser:
    return Qwen3CoderCalls(SCHEMAS)


def glm45() -> AnswerParser:
    return GlmCalls(SCHEMAS)


def minimax() -> AnswerParser:
    return MinimaxCalls(SCHEMAS)


def seed() -> AnswerParser:
    return SeedCalls(SCHEMAS)


def kimi() -> AnswerParser:
    return KimiCalls(NAMES)


def deepseek() -> AnswerParser:
    return DeepseekCalls(NAMES)


def deepseek_v32() -> AnswerParser:
    return DeepseekTaggedCalls(SCHEMAS)


def deepseek_v4() -> AnswerParser:
    return DeepseekV4Calls(SCHEMAS)


def harmony() -> AnswerParser:
    return Harmony(NAMES)


def thinking() -> AnswerParser:
    return Thinking(HermesCalls(NAMES), has_begun=False)


def thinking_already() -> AnswerParser:
    return Thinking(HermesCalls(NAMES), has_begun=True)


def some() -> AnswerParser:
    return SomeCalls(NAMES)


TAGGED = (qwen3_coder, glm45, minimax, seed, deepseek_v32, deepseek_v4)
IN_SECTIONS = (kimi, deepseek)
MAKERS = (
    hermes,
    llama,
    mistral,
    granite,
    nemotron,
    *TAGGED,
    *IN_SECTIONS,
    harmony,
    thinking,
    thinking_already,
    some,
    PlainText,
)


def parts_of(parser: AnswerParser, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish()])


def call(name: str, arguments: str) -> list[Part]:
    return [CallBegin(name), CallArguments(arguments)]


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]\\"\\\\"}]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2, {"c": "}]\\"\\\\"}]}'
LOOK = '{"name":"look_up","parameters":{}}'

TWO = '{"a": 1, "text": "5"}'
DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"


def deepseek_tokens(text: str) -> str:
    """``<tool_sep>`` and the like as DeepSeek writes them."""
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        written = f"tool_{name}".replace("_", chr(0x2581))
        text = text.replace(f"<{name}>", f"<\N{FULLWIDTH VERTICAL LINE}{written}\N{FULLWIDTH VERTICAL LINE}>")
    return text


WORKED: list[tuple[Make, str, list[Part]]] = [
    (
        qwen3_coder,
        "So:\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\n5\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=look_up>\n</function>\n</tool_call>",
        [Text("So:"), *call("add", TWO), *call("look_up", "{}")],
    ),
    (
        qwen3_coder,
        '<tool_call><function=add><parameter=text>\n if a < "b":\n\tgo </param\n\n</parameter></function></tool_call>!',
        [*call("add", '{"text": " if a < \\"b\\":\\n\\tgo </param\\n"}'), Text("!")],
    ),
    (qwen3_coder, "<tool_call><function=look_up><parameter=a>\n</parameter></function>", call("look_up", '{"a": ""}')),
    (
        qwen3_coder,
        "<tool_call><function=look_up><parameter=x>[1, 2]</parameter><parameter=y>True</parameter><parameter=z>[1,"
        "</parameter><parameter=w>None</parameter></function></tool_call>",
        call("look_up", '{"x": [1, 2], "y": true, "z": "[1,", "w": null}'),
    ),
    (qwen3_coder, "<tool_call><function=add><parameter=text>\nso lo\n", call("add", '{"text": "so lo')),
    (qwen3_coder, "<tool_call><function=add><parameter=a>1</parameter> or", [*call("add", '{"a": 1}'), Text("or")]),
    (
        glm45,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>"
        "\n</tool_call>\n<tool_call>look_up</tool_call>",
        [*call("add", TWO), *call("look_up", "{}")],
    ),
    (
        glm45,
        "I add.<tool_call>add<arg_key>unit</arg_key><arg_value>km</arg_value></tool_call> Done",
        [Text("I add."), *call("add", '{"unit": "km"}'), Text("Done")],
    ),
    (glm45, "<tool_call>add<arg_key>a</arg_key>1</arg_value></tool_call>", call("add", '{"a": 1}')),
    (
        minimax,
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="text">5</parameter>\n</invoke>\n<invoke name="look_up">\n</invoke>\n</minimax:tool_call>',
        [*call("add", TWO), *call("look_up", "{}")],
    ),
    (
        seed,
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=text>5</parameter>\n</function>\n"
        "</seed:tool_call>",
        call("add", TWO),
    ),
    (
        deepseek_v32,
        f'<{DSML}function_calls>\n<{DSML}invoke name="look_up">\n<{DSML}parameter name="a" string="false">1'
        f'</{DSML}parameter>\n<{DSML}parameter name="text" string="true">5</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>",
        call("look_up", TWO),
    ),
    (
        deepseek_v4,
        f'Yes.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="look_up">\n<{DSML}parameter name="a" string="false">1'
        f'</{DSML}parameter>\n<{DSML}parameter name="text" string="true">5</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}tool_calls>",
        [Text("Yes."), *call("look_up", TWO)],
    ),
    (
        kimi,
        "Yes. <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        + ADD_ARGUMENTS
        + "<|tool_call_end|><|tool_call_begin|>look_up<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [Text("Yes."), *call("add", ADD_ARGUMENTS), *call("look_up", "{}")],
    ),
    (
        deepseek,
        deepseek_tokens(
            f"<calls_begin><call_begin>add<sep>{ADD_ARGUMENTS}<call_end><call_begin>look_up<sep>{{}}<call_end>"
        )
        + deepseek_tokens("<calls_end>"),
        [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")],
    ),
    (
        deepseek,
        deepseek_tokens("<calls_begin><call_begin>function<sep>add\n```json\n" + ADD_ARGUMENTS + "\n```<call_end>\n")
        + deepseek_tokens("<call_begin>function<sep>look_up\n```json\n{}\n```<call_end><calls_end>\n"),
        [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")],
    ),
    (
        lambda: Thinking(SeedCalls(SCHEMAS), False, ("<seed:think>", "</seed:think>")),
        "<seed:think>Hm.</seed:think><seed:tool_call><function=look_up></function></seed:tool_call>",
        [Reasoning("Hm."), *call("look_up", "{}")],
    ),
    (hermes, f"<tool_call>\n{ADD}\n</tool_call>", call("add", ADD_ARGUMENTS)),
    (hermes, f"I look.\n\n<tool_call>\n{ADD}\n</tool_call>\n", [Text("I look."), *call("add", ADD_ARGUMENTS)]),
    (
        hermes,
        f"<tool_call>{ADD}</tool_call>\n<tool_call>{LOOK}</tool_call>\nDone.\n",
        [*call("add", ADD_ARGUMENTS), *call("look_up", "{}"), Text("Done.\n")],
    ),
    (hermes, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', call("add", '{"a": 1}')),
    (hermes, '<tool_call>{"id": 7, "name": "add", "x": [1], "arguments": {}}', call("add", "{}")),
    (hermes, '<tool_call>{"name": "add"}</tool_call>', call("add", "{}")),
    (hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', call("add", '{"a": 1}')),
    (hermes, '<tool_call>{"name": "add", "arguments": {"a": }</tool_call>!', [*call("add", '{"a": }'), Text("!")]),
    (hermes, '<tool_call>{"name": "add", "arguments": {"a": "1', call("add", '{"a": "1')),
    (hermes, '<tool_call>{"name": "add", "arguments": {"a": 1]}', [*call("add", '{"a": 1'), Text("]}")]),
    (llama, '{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
    (llama, f"\n<|python_tag|>{LOOK}; {ADD}", [*call("look_up", "{}"), *call("add", ADD_ARGUMENTS)]),
    (llama, f"Let me see.\n<|python_tag|>{LOOK}", [Text("Let me see."), *call("look_up", "{}")]),
    (mistral, f"[TOOL_CALLS] [{ADD}, {LOOK}]", [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")]),
    (granite, f"<|tool_call|>[{ADD}, {LOOK}]", [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")]),
    (nemotron, f"<TOOLCALL>[{ADD}, {LOOK}]</TOOLCALL>", [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")]),
    (
        nemotron,
        f"First <TOOLCALL> [{ADD}] </TOOLCALL> then",
        [Text("First"), *call("add", ADD_ARGUMENTS), Text(" then")],
    ),
    (nemotron, f"<TOOLCALL>[{ADD}]</TOOL", call("add", ADD_ARGUMENTS)),
    (nemotron, f"<TOOLCALL>[{ADD}]] is", [*call("add", ADD_ARGUMENTS), Text("] is")]),
    (mistral, 'So: [TOOL_CALLS]add[ARGS]{"a": 1}', [Text("So:"), *call("add", '{"a": 1}')]),
    (
        mistral,
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": "["}[TOOL_CALLS]look_up{}',
        [*call("add", '{"a": "["}'), *call("look_up", "{}")],
    ),
    (thinking, "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
    (thinking, "\n<think></think>Yes. ", [Text("Yes. ")]),
    (thinking, "Yes. <think>no</think>", [Text("Yes. <think>no</think>")]),
    (thinking, "<think>so long", [Reasoning("so long")]),
    (thinking, f"<think>a < b</think><tool_call>{LOOK}", [Reasoning("a < b"), *call("look_up", "{}")]),
    (thinking_already, f"Hm. <tool_call>{LOOK}</think>Yes.", [Reasoning(f"Hm. <tool_call>{LOOK}"), Text("Yes.")]),
    (thinking_already, "<think>Hm.</think>", [Reasoning("Hm.")]),
    (
        harmony,
        "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        [Reasoning("I see."), *call("add", '{"a": 1}')],
    ),
    (
        harmony,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        [Reasoning("One.\nTwo."), Text("Yes.")],
    ),
    (
        harmony,
        "<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|><|call|>",
        call("look_up", "{}"),
    ),
    (
        harmony,
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
        '<|message|>{"a": 1}<|call|>',
        [Text("I add."), *call("add", '{"a": 1}')],
    ),
    (harmony, "<|channel|>commentary to=functions.other<|message|>{}<|call|>", [Text("{}")]),
    (harmony, "<|channel|>final<|message|>It <|ra", [Text("It <|ra")]),
    (harmony, "<|channel|>final", []),
    (harmony, '{"a": 1}', [Text('{"a": 1}')]),
    (some, f"[{ADD},{LOOK}]", [*call("add", ADD_ARGUMENTS), *call("look_up", "{}")]),
    (some, '[{"name":"add","arguments":{"a":', call("add", '{"a":')),
    (lambda: OneCall("add"), '{"a":1}', call("add", '{"a":1}')),
    (lambda: OneCall("add"), "", [CallBegin("add")]),
    (PlainText, "<tool_call>", [Text("<tool_call>")]),
]

NO_CALLS = [
    (qwen3_coder, "<tool_call>\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    (qwen3_coder, "<tool_call>\n<function=add"),
    (qwen3_coder, "<tool_call>\n<function=add>\n"),
    (qwen3_coder, "<tool_call><function=add> the function"),
    (qwen3_coder, "<tool_call>" + " " * 300 + "<function=add></function>"),
    (qwen3_coder, '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    (glm45, "<tool_call>other</tool_call>"),
    (glm45, "<tool_call>add two numbers"),
    (glm45, "<tool_call>add\nup</tool_call>"),
    (glm45, "<tool_call>" + "x" * 300 + "\n"),
    (minimax, '<minimax:tool_call><invoke name="add"'),
    (minimax, "<minimax:tool_call>add</minimax:tool_call>"),
    (seed, "<seed:tool_call>"),
    (deepseek_v32, f'<{DSML}function_calls><{DSML}invoke name="other"></{DSML}invoke>'),
    (deepseek_v4, f'<{DSML}tool_calls><{DSML}invoke name="other"></{DSML}invoke>'),
    (kimi, "<|tool_calls_section_begin|><|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}"),
    (kimi, "<|tool_calls_section_begin|>add {}"),
    (deepseek, deepseek_tokens("<calls_begin><call_begin>function<sep>add\n{}")),
    (deepseek, deepseek_tokens("<calls_begin><call_begin>other<sep>{}")),
    (hermes, "A <tool_call> is no call.\n"),
    (hermes, "<tool_call>\n"),
    (hermes, "5 < 6 <tool"),
    (hermes, '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>'),
    (hermes, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (hermes, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (hermes, '<tool_call>{"name": }</tool_call>'),
    (hermes, '<tool_call>{"na\\'),
    (hermes, "<tool_call>[1]</tool_call> "),
    (hermes, " \n"),
    (llama, '{"answer": 42}'),
    (llama, " " * 100 + LOOK),
    (llama, 'Say {"name": "add", "parameters": {}}'),
    (llama, '<|python_tag|>brave_search.call(query="a")'),
    (mistral, "[TOOL_CALLS] hello"),
    (mistral, "[TOOL_CALLS]\n"),
    (mistral, "[TOOL_CALLS]" + " " * 100 + f"[{ADD}]"),
    (mistral, "[TOOL_CALLS]add[ARGS]" + "x" * 300 + "{}"),
    (mistral, "[TOOL_CALLS] [5]"),
    (mistral, "[TOOL_"),
    (granite, "<|tool_call|> none"),
    (nemotron, "<TOOLCALL> none </TOOLCALL>"),
]


@pytest.mark.parametrize(("make", "text", "expected"), WORKED)
def test_an_answer_has_the_parts_that_its_text_says(make: Make, text: str, expected: list[Part]) -> None:
    assert parts_of(make(), [text]) == expected


@pytest.mark.parametrize(("make", "text"), NO_CALLS)
def test_what_is_no_call_stays_text_to_the_letter(make: Make, text: str) -> None:
    assert parts_of(make(), [text]) == [Text(text)]


LONGEST_MARK = len("<|tool_calls_section_begin|>")


@pytest.mark.parametrize(("make", "text"), [*((make, text) for make, text, _ in WORKED), *NO_CALLS])
def test_parts_are_the_same_at_every_cut(make: Make, text: str) -> None:
    """Two cuts, too, of which both may lie within one mark: those that lie further apart are as one cut and another."""
    expected = parts_of(make(), [text])
    assert parts_of(make(), text) == expected
    for first, second in itertools.combinations(range(len(text) + 1), 2) if len(text) < 120 else ():
        if second - first < LONGEST_MARK:
            assert parts_of(make(), (text[:first], text[first:second], text[second:])) == expected
    for first in range(len(text) + 1):
        assert parts_of(make(), (text[:first], text[first:])) == expected


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<think>",
            "</think>",
        ),
        *(
            "<function=add>",
            "<parameter=text>",
            "</parameter>",
            "</function>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
        ),
        *("</arg_value>", "<minimax:tool_call>", '<invoke name="add">', '<parameter name="a">', "</invoke>"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>"),
        *(deepseek_tokens(part) for part in ("<calls_begin>", "<call_begin>add<sep>", "<call_end>", "<calls_end>")),
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "final", "to=functions.add"),
        *(ADD, LOOK, '{"name": "add"', '"arguments": ', '{"a"', "add", "other", '"name"', "tool_call", "|>", "<|", "<"),
        *('"', "\\", "{", "}", "[", "]", ":", ",", ";", " ", "\n", " " * 70, "1", "null", "é", "x"),
    ]
)


@settings(max_examples=400)
@given(
    make=st.sampled_from(MAKERS),
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_parts_of_any_text_are_the_same_at_any_cut(make: Make, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = parts_of(make(), [text])
    assert parts_of(make(), (text[start:end] for start, end in itertools.pairwise(at))) == whole
    assert parts_of(make(), text) == whole


@settings(max_examples=300)
@given(
    make=st.sampled_from((hermes, llama, mistral, *TAGGED, *IN_SECTIONS)), fragments=st.lists(FRAGMENTS, max_size=12)
)
def test_answers_without_calls_keep_all_their_text(make: Make, fragments: list[str]) -> None:
    text = "".join(fragments)
    parts = parts_of(make(), [text])
    if not any(isinstance(part, CallBegin) for part in parts):
        assert parts == ([Text(text)] if text else [])


@pytest.mark.parametrize("make", [hermes, llama, mistral, *TAGGED, *IN_SECTIONS, harmony, thinking, PlainText])
def test_text_is_told_as_it_comes(make: Make) -> None:
    parser, told = make(), 0
    for count in range(1, 100):
        told += sum(len(part.text) for part in parser.push("the <| ") if isinstance(part, Text))
        assert told >= 7 * count - 3


def test_arguments_are_told_as_they_come() -> None:
    parser = hermes()
    parser.push('<tool_call>{"name": "add", "arguments": {"a": "')
    assert parser.push("some ") == [CallArguments("some ")]
    assert parser.push("words") == [CallArguments("words")]


def test_strings_between_tags_are_told_as_they_come() -> None:
    parser = qwen3_coder()
    parser.push("<tool_call><function=add><parameter=text>\n")
    assert parser.push('some "') == [CallArguments('some \\"')]
    assert parser.push("words\n") == [CallArguments("words")]
    assert parser.push("more</para") == [CallArguments("\\nmore")]
    assert parser.push("meter></function>") == [CallArguments('"'), CallArguments("}")]
