"""What a grammar of tool calls lets through, the parser of the same format reads."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tool_parsers import json_tools

from app.parsing.events import ToolCallArguments, ToolCallStart
from app.parsing.tool_spec import AllowedTools, NamedTool, ToolSpec
from app.parsing.tools.tool_format import ToolFormat, tool_format
from batching import (
    ModelInfo,
)
from tests.support.rows import rows
from tests.support.tool_formats import (
    CODER,
    END_ID,
    END_OF_CALL,
    FORMATS,
    GENERAL,
    JSON,
    MISTRAL,
    START_OF_CALL,
    VOCAB_SIZE,
    VOCABULARY,
    TemplateTokenizer,
    format_of,
)
from tests.support.tool_templates import written
from tests.support.tool_walks import calls_in, follows, walked

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_rainy": {"type": "boolean"},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> ToolSpec:
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    return ToolSpec(name, parameters or no_arguments, strict=strict)


def parse_tool_call(text: str, tools: Any) -> Any:
    raise AssertionError("mlx-lm's functions are not called")


# A parser of a later mlx-lm.
coming = SimpleNamespace(
    parse_tool_call=parse_tool_call, tool_call_start="<calling>", tool_call_end="</calling>"
)

TOOLS = [tool("weather", PARAMETERS), tool("now")]
STRICT = [tool("weather", PARAMETERS, strict=True), tool("now")]
WEATHER = NamedTool("weather")


RAIN = ("weather", {"unit": "C", "days": 3, "is_rainy": True})
SUN = ("weather", {"unit": "F", "days": 9})
NOW: tuple[str, dict[str, Any]] = ("now", {})


@pytest.mark.parametrize("name", FORMATS)
class TestEnforced:
    def test_required_lets_calls_through_and_nothing_else(self, name: str) -> None:
        format_ = FORMATS[name]
        grammar = format_.grammar(TOOLS, "required", is_parallel=True)
        for calls in ([RAIN], [SUN], [NOW], [RAIN, NOW, SUN]):
            assert follows(written(name, calls), grammar)
            assert calls_in(format_, written(name, calls), TOOLS) == calls
        assert not follows("", grammar)
        assert not follows("No.", grammar)
        assert not follows(f"Yes: {written(name, [RAIN])}", grammar)
        assert not follows(f"{written(name, [RAIN])} Done.", grammar)
        assert not follows(written(name, [("other", {})]), grammar)
        assert not follows(written(name, [("weather", {"unit": "K", "days": 3})]), grammar)
        assert not follows(written(name, [("weather", {"unit": "C", "days": 10})]), grammar)
        assert not follows(written(name, [("weather", {"unit": "C", "days": True})]), grammar)
        assert not follows(written(name, [("weather", {"unit": "C"})]), grammar)
        assert not follows(written(name, [("now", {"x": 1})]), grammar)

    def test_one_call_if_they_must_not_be_parallel(self, name: str) -> None:
        grammar = FORMATS[name].grammar(TOOLS, "required", is_parallel=False)
        assert follows(written(name, [RAIN]), grammar)
        assert not follows(written(name, [RAIN, NOW]), grammar)

    def test_a_named_tool_is_the_only_one(self, name: str) -> None:
        grammar = FORMATS[name].grammar(TOOLS, WEATHER, is_parallel=True)
        assert follows(written(name, [RAIN]), grammar)
        assert not follows(written(name, [NOW]), grammar)

    def test_under_auto_only_strict_arguments_are_bound(self, name: str) -> None:
        format_ = FORMATS[name]
        grammar = format_.grammar(STRICT, "auto", is_parallel=True)
        call = written(name, [RAIN])
        for text in ("", "It is <fine>, {really}.", f"Let me see.\n\n{call}", call):
            assert follows(text, grammar)
        wrong = written(name, [("weather", {"unit": "K", "days": 3})])
        assert not follows(wrong, grammar)
        assert not follows(f"Let me see. {wrong}", grammar)
        assert not follows(wrong, grammar, spelt=True)
        single = format_.grammar(STRICT, "auto", is_parallel=False)
        assert follows(call, single) and follows("Fine.", single)
        assert not follows(f"{call}\n{call}", single)

    @rows("mode", ["auto", "required"])
    def test_of_allowed_tools_no_other_is_called(
        self, name: str, mode: Literal["auto", "required"]
    ) -> None:
        choice = AllowedTools(frozenset({"now"}), mode)
        grammar = FORMATS[name].grammar(TOOLS, choice, is_parallel=True)
        assert follows(written(name, [NOW, NOW]), grammar)
        assert follows("Fine.", grammar) is (mode == "auto")
        assert not follows(written(name, [RAIN]), grammar)
        assert not follows(written(name, [RAIN]), grammar, spelt=True)
        assert not follows(f"Let me see. {written(name, [RAIN])}", grammar)

    def test_without_a_choice_or_a_strict_tool_all_is_free(self, name: str) -> None:
        format_ = FORMATS[name]
        assert format_.grammar(TOOLS, "auto", is_parallel=True) is None
        assert format_.grammar(STRICT, "none", is_parallel=True) is None

    @settings(max_examples=5, deadline=None)
    @given(st.integers(0))
    def test_whatever_the_model_prefers_it_calls(self, name: str, seed: int) -> None:
        grammar = FORMATS[name].grammar(TOOLS, "required", is_parallel=False)
        (called, arguments), *others = calls_in(FORMATS[name], walked(grammar, seed), TOOLS)
        assert not others
        assert called in ("weather", "now")
        if called == "weather":
            assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 9
            assert isinstance(arguments.get("is_rainy", True), bool)


@rows("name", ["general", "mistral", "mistral_args", "kimi_k2"])
def test_arguments_in_json_of_tools_that_are_not_strict_are_any_object(name: str) -> None:
    grammar = FORMATS[name].grammar(STRICT, "auto", is_parallel=True)
    assert follows(written(name, [("now", {"x": [1]})]), grammar)
    assert not follows(written(name, [("other", {"x": [1]})]), grammar)


def coder_call(name: str, arguments: dict[str, Any]) -> str:
    return written("qwen3_coder", [(name, arguments)])


CODER_PARAMETERS: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "mode": {"type": "string", "const": "w"},
        "place": {"$ref": "#/$defs/place"},
        "anything": {"description": "any JSON"},
        "more": True,
    },
    "required": ["text"],
    "$defs": {"place": {"type": "array", "items": {"type": "integer"}}},
}


def test_parameters_of_qwen3_coder_are_text_or_json() -> None:
    tools = [tool("f", CODER_PARAMETERS)]
    grammar = CODER.grammar(tools, "required", is_parallel=True)
    text = 'a "quoted"\n\n<b> & </parameter\n'
    arguments = {"text": text, "mode": "w", "place": [1, 2], "anything": {"a": 1}}
    assert follows(coder_call("f", arguments), grammar)
    assert calls_in(CODER, coder_call("f", arguments), tools) == [("f", arguments)]
    assert follows(coder_call("f", {"text": ""}), grammar)
    assert follows(coder_call("f", {"text": "", "more": [None]}), grammar)
    assert not follows(coder_call("f", {"mode": "w"}), grammar)
    assert not follows(coder_call("f", {"text": "a", "mode": "r"}), grammar)
    assert not follows(coder_call("f", {"text": "a", "place": ["b"]}), grammar)


@rows(
    ("format_", "is_native", "num_id_characters"),
    [
        (GENERAL, False, None),
        (JSON, True, None),
        (MISTRAL, True, 9),
        (format_of(json_tools, None), True, None),
        (format_of(json_tools, "a template without a place for them"), False, None),
        (format_of(coming), False, None),
    ],
)
def test_a_model_has_the_format_of_its_template(
    format_: ToolFormat, is_native: bool, num_id_characters: int | None
) -> None:
    assert format_.is_native is is_native
    assert format_.num_id_characters == num_id_characters
    if not is_native:
        assert format_.start == GENERAL.start and format_.syntax == GENERAL.syntax


def test_all_that_the_parser_has_to_see_is_named() -> None:
    assert set(GENERAL.markers) == {START_OF_CALL, END_OF_CALL}
    assert {"[TOOL_CALLS]", "[ARGS]"} < set(MISTRAL.markers)
    assert "<arg_key>" in FORMATS["glm47"].markers


def test_a_marker_that_is_no_token_is_spelt_in_the_grammar() -> None:
    tokenizer = TemplateTokenizer(VOCABULARY, "{{ tools }}", "[CALL]", "[/CALL]")
    tokenizer.tool_parser = json_tools.parse_tool_call
    format_ = tool_format(ModelInfo("m", tokenizer, frozenset({END_ID}), VOCAB_SIZE, 1024))
    call = '[CALL]\n{"name": "now", "arguments": {}}\n[/CALL]'
    assert follows(call, format_.grammar(TOOLS, "required", is_parallel=True))
    assert calls_in(format_, call) == [NOW]
    strict = format_.grammar(STRICT, "auto", is_parallel=True)
    assert follows(f"Hi {call} there", strict)
    assert not follows("Hi [CALL] there", strict)


@rows("name", FORMATS)
def test_ids_and_the_number_of_calls_are_up_to_the_caller(name: str) -> None:
    parser = FORMATS[name].parsers(TOOLS, is_parallel=False, new_id=lambda: "own")()
    events = [*parser.add(written(name, [NOW, RAIN])), *parser.flush()]
    call_id = {"mistral_ids": "abcdefg00", "kimi_k2": "functions.now:0"}.get(name, "own")
    assert events == [ToolCallStart(0, call_id, "now"), ToolCallArguments(0, "{}")]
    assert parser.is_finished
