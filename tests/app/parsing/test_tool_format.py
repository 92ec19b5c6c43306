"""What a grammar of tool calls lets through, the parser of the same format reads."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tool_parsers import glm47, json_tools

from app.parsing.events import ContentPiece, ToolCallArguments, ToolCallStart
from app.parsing.reasoning_grammar import after_reasoning
from app.parsing.tool_format import ToolFormat, call_text, tool_format
from app.parsing.tool_grammar import Marker
from app.parsing.tool_spec import NamedTool, ToolChoice, ToolSpec
from batching import (
    GrammarText,
    InvalidRequest,
    ModelInfo,
    choice_grammar,
    json_schema_grammar,
)
from batching.constraints.grammar import Grammar
from tests.support.tool_formats import (
    CODER,
    COMPILER,
    END_ID,
    END_OF_CALL,
    GENERAL,
    JSON,
    MISTRAL,
    MISTRAL_ARGS,
    START_OF_CALL,
    VOCAB_SIZE,
    VOCABULARY,
    TemplateTokenizer,
    format_of,
)

ENFORCED = [GENERAL, JSON, CODER, MISTRAL, MISTRAL_ARGS]
IDS = ["general", "json", "coder", "mistral", "mistral-args"]

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


TOOLS = [tool("weather", PARAMETERS), tool("now")]
STRICT = [tool("weather", PARAMETERS, strict=True), tool("now")]
WEATHER = NamedTool("weather")


def written(format_: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as a model of this format writes them."""
    if format_ is CODER:
        return "\n".join(coder_call(name, arguments) for name, arguments in calls)
    if format_ is MISTRAL_ARGS:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in calls)
    if format_ is MISTRAL:
        return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])
    return "\n".join(call_text(name, json.dumps(arguments)) for name, arguments in calls)


def coder_call(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@cache
def compiled(grammar: GrammarText) -> Grammar:
    return COMPILER.compile(grammar, param="tools")


class Walk:
    """Follows a grammar token by token."""

    def __init__(self, grammar: GrammarText | None) -> None:
        assert grammar is not None
        self._matcher = compiled(grammar).matcher()

    def allowed(self) -> list[int]:
        row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
        self._matcher.fill_mask(row)
        assert self._matcher.error is None
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        return [int(token_id) for token_id in np.flatnonzero(bits)]

    def accept(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self._matcher.accept(token_id)
        return True


def follows(text: str, grammar: GrammarText | None, *, spelt: bool = False) -> bool:
    """True if the whole text may be the answer; `spelt` has no tokens for the markers."""
    ids = [*text.encode()] if spelt else VOCABULARY.encode(text).ids
    if spelt:
        symbols = VOCABULARY.pre_tokenizer.pre_tokenize_str(text)
        ids = [VOCABULARY.token_to_id(c) for piece, _ in symbols for c in piece]
    walk = Walk(grammar)
    return all(walk.accept(token_id) for token_id in ids) and END_ID in walk.allowed()


def calls_in(
    format_: ToolFormat, text: str, tools: Sequence[ToolSpec] = TOOLS
) -> list[tuple[str, Any]]:
    parser = format_.parser(tools)
    events = [*parser.add(text), *parser.flush()]
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = ["" for _ in names]
    for event in events:
        assert not isinstance(event, ContentPiece), event
        if isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
    return [(n, json.loads(a)) for n, a in zip(names, arguments, strict=True)]


RAIN = ("weather", {"unit": "C", "days": 3, "is_rainy": True})
SUN = ("weather", {"unit": "F", "days": 9})
NOW: tuple[str, dict[str, Any]] = ("now", {})


@pytest.mark.parametrize("format_", ENFORCED, ids=IDS)
class TestEnforced:
    def test_required_lets_calls_through_and_nothing_else(self, format_: ToolFormat) -> None:
        grammar = format_.grammar(TOOLS, "required", is_parallel=True)
        for calls in ([RAIN], [SUN], [NOW], [RAIN, NOW, SUN]):
            assert follows(written(format_, *calls), grammar)
            assert calls_in(format_, written(format_, *calls)) == calls
        assert not follows("", grammar)
        assert not follows("No.", grammar)
        assert not follows(f"Yes: {written(format_, RAIN)}", grammar)
        assert not follows(f"{written(format_, RAIN)} Done.", grammar)
        assert not follows(written(format_, ("other", {})), grammar)
        assert not follows(written(format_, ("weather", {"unit": "K", "days": 3})), grammar)
        assert not follows(written(format_, ("weather", {"unit": "C"})), grammar)
        assert not follows(written(format_, ("now", {"x": 1})), grammar)

    def test_one_call_if_they_must_not_be_parallel(self, format_: ToolFormat) -> None:
        grammar = format_.grammar(TOOLS, "required", is_parallel=False)
        assert follows(written(format_, RAIN), grammar)
        assert not follows(written(format_, RAIN, NOW), grammar)

    def test_a_named_tool_is_the_only_one(self, format_: ToolFormat) -> None:
        grammar = format_.grammar(TOOLS, WEATHER, is_parallel=True)
        assert follows(written(format_, RAIN, SUN), grammar)
        assert not follows(written(format_, NOW), grammar)

    def test_under_auto_only_strict_arguments_are_bound(self, format_: ToolFormat) -> None:
        grammar = format_.grammar(STRICT, "auto", is_parallel=True)
        call = written(format_, RAIN)
        for text in ("", "It is <fine>, {really}.", f"Let me see.\n\n{call}", call):
            assert follows(text, grammar)
        wrong = written(format_, ("weather", {"unit": "K", "days": 3}))
        assert not follows(wrong, grammar)
        assert not follows(f"Let me see. {wrong}", grammar)
        assert not follows(wrong, grammar, spelt=True)
        single = format_.grammar(STRICT, "auto", is_parallel=False)
        assert follows(call, single) and follows("Fine.", single)
        assert not follows(f"{call}\n{call}", single)

    def test_without_a_choice_or_a_strict_tool_all_is_free(self, format_: ToolFormat) -> None:
        assert format_.grammar(TOOLS, "auto", is_parallel=True) is None
        assert format_.grammar(STRICT, "none", is_parallel=True) is None

    @settings(max_examples=30)
    @given(st.data())
    def test_whatever_the_model_prefers_it_calls(
        self, format_: ToolFormat, data: st.DataObject
    ) -> None:
        walk = Walk(format_.grammar(TOOLS, "required", is_parallel=False))
        ids: list[int] = []
        while END_ID not in (allowed := walk.allowed()):
            ids.append(data.draw(st.sampled_from(allowed)))
            walk.accept(ids[-1])
        (name, arguments), *others = calls_in(format_, VOCABULARY.decode(ids, False))
        assert not others
        assert name in ("weather", "now")
        if name == "weather":
            assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 9
            assert isinstance(arguments.get("is_rainy", True), bool)


@pytest.mark.parametrize("format_", [GENERAL, MISTRAL, MISTRAL_ARGS])
def test_arguments_of_tools_that_are_not_strict_are_any_object(format_: ToolFormat) -> None:
    grammar = format_.grammar(STRICT, "auto", is_parallel=True)
    assert follows(written(format_, ("now", {"x": [1]})), grammar)
    assert not follows(written(format_, ("other", {"x": [1]})), grammar)


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


def test_a_text_that_must_match_a_pattern_is_rejected_if_it_is_strict() -> None:
    schema = {"properties": {"day": {"type": "string", "pattern": "^[0-9]+$"}}}
    with pytest.raises(InvalidRequest, match="'pattern' of a string cannot") as caught:
        CODER.grammar([tool("f", schema, strict=True)], "auto", is_parallel=True)
    assert caught.value.param == "tools"
    assert CODER.grammar([tool("f", schema)], "required", is_parallel=True) is not None


def test_a_format_that_cannot_be_enforced_says_so() -> None:
    format_ = format_of(glm47)
    text = "<tool_call>now<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert calls_in(format_, text) == [("now", {"x": 1})]
    assert format_.grammar(TOOLS, "auto", is_parallel=True) is None
    rejected: list[tuple[list[ToolSpec], ToolChoice, str]] = [
        (TOOLS, "required", "tool_choice"),
        (STRICT, "auto", "tools"),
    ]
    for tools, choice, param in rejected:
        with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
            format_.grammar(tools, choice, is_parallel=True)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("format_", "is_native", "is_blocking", "num_id_characters"),
    [
        (GENERAL, False, False, None),
        (JSON, True, False, None),
        (CODER, True, True, None),
        (MISTRAL, True, True, 9),
        (format_of(json_tools, None), True, False, None),
        (format_of(json_tools, "a template without a place for them"), False, False, None),
    ],
)
def test_a_model_has_the_format_of_its_template(
    format_: ToolFormat, is_native: bool, is_blocking: bool, num_id_characters: int | None
) -> None:
    assert format_.is_native is is_native
    assert format_.is_blocking is is_blocking
    assert format_.num_id_characters == num_id_characters


def test_all_that_the_parser_has_to_see_is_named() -> None:
    assert GENERAL.markers == JSON.markers == CODER.markers == (START_OF_CALL, END_OF_CALL)
    assert MISTRAL.markers == ("[TOOL_CALLS]", "[ARGS]")
    assert "<arg_key>" in format_of(glm47).markers


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


def test_ids_and_the_number_of_calls_are_up_to_the_caller() -> None:
    for format_ in (JSON, MISTRAL):
        parser = format_.parser(TOOLS, is_parallel=False, new_id=lambda: "own")
        events = [*parser.add(written(format_, NOW, RAIN)), *parser.flush()]
        assert events == [ToolCallStart(0, "own", "now"), ToolCallArguments(0, "{}")]


THINK, THOUGHT = Marker("<think>"), Marker("</think>")
# Any token will do: here two that occur in no answer.
THINK_TOKEN = Marker("[ARGS]", VOCABULARY.get_vocab()["[ARGS]"])
THOUGHT_TOKEN = Marker("[TOOL_CALLS]", VOCABULARY.get_vocab()["[TOOL_CALLS]"])


@pytest.mark.parametrize("markers", [(THINK, THOUGHT), (THINK_TOKEN, THOUGHT_TOKEN)])
@pytest.mark.parametrize("answer", [written(GENERAL, RAIN), '{"a": 1}', "yes"])
def test_reasoning_may_come_before_what_a_grammar_asks_for(
    markers: tuple[Marker, Marker], answer: str
) -> None:
    start, end = markers
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
    asked = {
        "<": GENERAL.grammar(TOOLS, "required", is_parallel=True),
        "{": json_schema_grammar(schema),
        "y": choice_grammar(["yes", "no"]),
    }[answer[0]]
    assert asked is not None
    grammar = after_reasoning(asked, start, end, is_open=False)
    assert follows(answer, grammar)
    assert follows(f"{start.text}\nI {{could}} < say.\n{end.text}\n\n{answer}", grammar)
    assert not follows(f"{start.text}hm{end.text}oops", grammar)
    assert not follows(f"{start.text}hm", grammar)
    assert not follows(f"hm{end.text}{answer}", grammar)
    inside = after_reasoning(asked, start, end, is_open=True)
    assert follows(f"hm\n{end.text}\n\n{answer}", inside)
    assert not follows(f"hm{end.text}oops", inside)
    assert not follows(f"hm {answer}", inside)
