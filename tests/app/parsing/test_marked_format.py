"""Messages that may be calls, or content in a format."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.parsing.formats.model_format import message_format
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec
from app.parsing.tool_spec import AllowedTools, NamedTool, ToolChoice, ToolSpec
from app.parsing.tools.tool_format import call_text
from batching import GrammarText, json_schema_grammar, lark_grammar
from tests.support.marker_tokenizer import MarkerTokenizer

TOKENIZER = MarkerTokenizer(plain=("<tool_call>", "</tool_call>"))
REASONING = MarkerTokenizer(
    plain=("<tool_call>", "</tool_call>", "<think>", "</think>"), think=("<think>", "</think>")
)


def schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "required": [name],
        "additionalProperties": False,
    }


TOOLS = [ToolSpec("weather", schema("day")), ToolSpec("now", schema("zone"), strict=True)]
ANSWER = GrammarSpec(json_schema_grammar(schema("degrees")), "response_format")
TEXT = '{"degrees": 21}'
WEATHER, NOW = call_text("weather", '{"day": 1}'), call_text("now", '{"zone": 2}')
WRONG = call_text("weather", '{"degrees": 1}')


def asked(
    choice: ToolChoice, tokenizer: MarkerTokenizer = TOKENIZER, **changes: Any
) -> tuple[GrammarText, str]:
    spec = {"tools": TOOLS, "tool_choice": choice, "content": ANSWER, **changes}
    grammar = message_format(tokenizer.model).output(MessageSpec(**spec), "assistant:").grammar
    assert grammar is not None
    return grammar.grammar, grammar.param


def test_a_completion_is_calls_or_an_answer_in_the_format() -> None:
    grammar, param = asked("auto")
    assert param == "response_format"
    for text in (TEXT, WEATHER, NOW, f"{WEATHER}\n{NOW}"):
        assert TOKENIZER.allows(text, grammar)
    wrong = ("", "Hm.", '{"degrees": "warm"}', WRONG, f"{TEXT}\n{WEATHER}", f"Hm. {WEATHER}")
    for text in (*wrong, f"{WEATHER}\n{TEXT}", call_text("other", "{}")):
        assert not TOKENIZER.allows(text, grammar)


def test_one_call_if_they_must_not_be_parallel() -> None:
    grammar, _ = asked("auto", is_parallel=False)
    assert TOKENIZER.allows(WEATHER, grammar)
    assert not TOKENIZER.allows(f"{WEATHER}\n{NOW}", grammar)


@pytest.mark.parametrize("choice", ["required", NamedTool("weather")])
def test_where_a_call_is_required_there_is_no_answer(choice: ToolChoice) -> None:
    grammar, param = asked(choice)
    assert param == "tools"
    assert TOKENIZER.allows(WEATHER, grammar)
    assert TOKENIZER.allows(NOW, grammar) is (choice == "required")
    assert not TOKENIZER.allows(TEXT, grammar)


def test_the_call_is_of_an_allowed_tool() -> None:
    names = frozenset({"now"})
    for choice, has_answer in (
        (AllowedTools(names, "auto"), True),
        (AllowedTools(names, "required"), False),
    ):
        grammar, _ = asked(choice)
        assert TOKENIZER.allows(NOW, grammar)
        assert not TOKENIZER.allows(WEATHER, grammar)
        assert TOKENIZER.allows(TEXT, grammar) is has_answer
        assert not TOKENIZER.allows("Hm.", grammar)


def test_without_tools_to_call_there_is_the_format_alone() -> None:
    assert asked("required", tools=()) == asked("none", tools=()) == (ANSWER.grammar, ANSWER.param)


def test_reasoning_comes_before_either() -> None:
    grammar, _ = asked("auto", REASONING)
    for text in (TEXT, WEATHER, f"{WEATHER}\n{NOW}"):
        assert REASONING.allows(f"<think>Hm.</think>\n\n{text}", grammar)
    assert not REASONING.allows("<think>Hm.</think>\n\nHm.", grammar)


def test_any_kind_of_grammar_may_be_the_format() -> None:
    own = GrammarSpec(lark_grammar('start: "a" calls\ncalls: "b" | answer\nanswer: /[0-9]+/'), "g")
    grammar, _ = asked("auto", content=own)
    for text in ("ab", "a12", WEATHER):
        assert TOKENIZER.allows(text, grammar)
    assert not TOKENIZER.allows("a", grammar)


def test_a_message_has_to_be_a_call_where_one_is_required() -> None:
    names = frozenset({"now"})
    required: list[ToolChoice] = ["required", NamedTool("now"), AllowedTools(names, "required")]
    free: list[ToolChoice] = ["none", "auto", AllowedTools(names, "auto")]
    assert all(MessageSpec(tools=TOOLS, tool_choice=choice).is_call for choice in required)
    assert not any(MessageSpec(tools=TOOLS, tool_choice=choice).is_call for choice in free)
    assert not MessageSpec(tool_choice="required").is_call


def test_the_parser_reads_both() -> None:
    spec = MessageSpec(tools=TOOLS, tool_choice="auto", content=ANSWER)
    for text, has_calls in ((TEXT, False), (WEATHER, True)):
        parser = message_format(TOKENIZER.model).output(spec, "assistant:").new_parser()
        events = [*parser.add(text), *parser.flush()]
        assert parser.has_calls is has_calls
        assert json.loads("".join(getattr(event, "text", "") for event in events))


def test_a_models_format_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = MarkerTokenizer(plain=("<tool_call>", "</tool_call>"))
    model = tokenizer.model
    found = message_format(model)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it tokenizes"))
        assert message_format(model) is found
    # As with the template of a request.
    assert message_format(replace(model)) is not found
