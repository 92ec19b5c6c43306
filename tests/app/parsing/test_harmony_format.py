"""What a grammar of gpt-oss's messages lets through, and what the parser reads of it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.formats.marked_format import MarkedFormat
from app.parsing.formats.model_format import message_format
from app.parsing.harmony.harmony_parser import MARKERS
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.tool_spec import AllowedTools, FreeformInput, NamedTool, ToolChoice, ToolSpec
from batching import InvalidRequest, choice_grammar, json_schema_grammar
from tests.support.harmony_model import harmony_tokenizer
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.rows import rows

TOKENIZER = harmony_tokenizer()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["day"],
    "additionalProperties": False,
}
TOOLS = [ToolSpec("weather", PARAMETERS), ToolSpec("now", PARAMETERS)]
STRICT = [ToolSpec("weather", PARAMETERS, strict=True), ToolSpec("now", PARAMETERS)]
ANSWER = GrammarSpec(json_schema_grammar(PARAMETERS), "response_format")

ANALYSIS = "<|channel|>analysis<|message|>Hm < {so}?<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def call(name: str = "weather", arguments: str = '{"day": 1}') -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def as_in_the_template(name: str = "weather", arguments: str = '{"day": 1}') -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}"


def output(
    prompt: str = PROMPT, *, tokenizer: MarkerTokenizer = TOKENIZER, **spec: Any
) -> OutputFormat:
    return message_format(tokenizer.model).output(MessageSpec(**spec), prompt)


def allows(
    text: str,
    prompt: str = PROMPT,
    *,
    tokenizer: MarkerTokenizer = TOKENIZER,
    spelt: bool = False,
    **spec: Any,
) -> bool:
    asked = output(prompt, tokenizer=tokenizer, **spec).grammar
    assert asked is not None
    return tokenizer.allows(text, asked.grammar, begun=asked.begun, spelt=spelt)


def events(of: OutputFormat, text: str) -> list[MessageEvent]:
    parser = of.new_parser()
    return join_pieces([*parser.add(text), *parser.flush()])


def test_a_model_is_recognised_by_the_tokens_of_the_markers() -> None:
    assert message_format(TOKENIZER.model).has_channels
    assert output().visible_special_ids == {TOKENIZER.encode(marker)[0] for marker in MARKERS}
    other = MarkerTokenizer(special=MARKERS[1:])
    assert isinstance(message_format(other.model), MarkedFormat)


def test_what_is_asked_for_nothing_is_free() -> None:
    assert output().grammar is None
    assert output(tools=TOOLS, tool_choice="auto").grammar is None


def test_a_required_call() -> None:
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    for text in (call(), as_in_the_template(), call("now")):
        assert allows(text, **spec)
        assert allows(ANALYSIS + text, **spec)
    plain = "<|channel|>commentary to=functions.now<|message|>"
    assert allows(plain + '{"day": 1}', **spec)
    wrong = ("", "Hi", FINAL + "Hi", PREAMBLE + call(), ANALYSIS, ANALYSIS + ANALYSIS + call())
    for text in (*wrong, call("other"), call(arguments='{"day": 0}'), call(arguments="{}")):
        assert not allows(text, **spec)
    assert output(**spec, content=ANSWER).grammar == output(**spec).grammar


@pytest.mark.parametrize(
    "choice", [NamedTool("now"), AllowedTools(frozenset({"now", "later"}), "required")]
)
def test_a_call_of_certain_tools(choice: ToolChoice) -> None:
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    assert allows(call("now"), **spec)
    assert not allows(call("weather"), **spec)
    assert not allows(FINAL + "Hi", **spec)


def test_under_auto_a_call_is_of_an_allowed_tool() -> None:
    choice = AllowedTools(frozenset({"now"}), "auto")
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    for text in (FINAL + "Hi", ANALYSIS + PREAMBLE + ANALYSIS + call("now", '{"x": 1}')):
        assert allows(text, **spec)
    assert not allows(call("weather"), **spec)
    assert not allows(as_in_the_template("weather"), **spec)
    assert output(tool_choice=choice).grammar is None


def test_under_auto_only_strict_arguments_are_bound() -> None:
    spec: dict[str, Any] = {"tools": STRICT, "tool_choice": "auto"}
    for text in (FINAL, FINAL + "It is <fine>.", call(), call("now", '{"x": [1]}')):
        assert allows(PREAMBLE + text, **spec)
    for text in (call(arguments='{"day": 0}'), as_in_the_template(arguments="{}"), call("other")):
        assert not allows(PREAMBLE + text, **spec)


def test_the_texts_of_freeform_tools_have_one_limit() -> None:
    rules = "".join(f"a{index}: a{index + 1} a{index + 1}\n" for index in range(11))
    doubled = FreeformInput("lark", f"{rules}a11: /x/\nstart: a0")
    tools = [ToolSpec(f"f{index}", {}, freeform=doubled) for index in range(20)]
    assert output(tools=tools[:5], tool_choice="required").grammar
    with pytest.raises(InvalidRequest, match="too large to be enforced"):
        output(tools=tools, tool_choice="required")


def test_the_text_of_a_freeform_tool_is_bound() -> None:
    digits = ToolSpec("dial", {}, freeform=FreeformInput("regex", "[0-9]+"))
    for choice in ("auto", "required"):
        spec: dict[str, Any] = {"tools": [*TOOLS, digits], "tool_choice": choice}
        assert allows(call("dial", '{"input": "12"}'), **spec)
        assert not allows(call("dial", '{"input": "a"}'), **spec)


def test_content_in_a_format() -> None:
    for text in (FINAL + '{"day": 1}', ANALYSIS + FINAL + '{"day": 1}'):
        assert allows(text, content=ANSWER)
    wrong = (PREAMBLE + FINAL + '{"day": 1}', FINAL + '{"day": 0}', '{"day": 1}', call())
    for text in (*wrong, ANALYSIS + ANALYSIS + FINAL + '{"day": 1}'):
        assert not allows(text, content=ANSWER)


def test_a_call_or_content_in_a_format() -> None:
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "content": ANSWER}
    for text in (FINAL + '{"day": 1}', call(), as_in_the_template("now")):
        assert allows(ANALYSIS + text, **spec)
    for text in (FINAL + "Hi", FINAL + "{}", call(arguments="{}"), PREAMBLE + call()):
        assert not allows(ANALYSIS + text, **spec)
    asked = output(**spec).grammar
    assert asked is not None and asked.param == "response_format"


@rows(
    ("ends", "after_call", "after_final"),
    [
        (("<|return|>", "<|call|>"), "", ""),
        (("<|return|>",), "<|call|>", ""),
        ((), "<|call|>", "<|return|>"),
    ],
)
def test_a_marker_that_is_no_end_token_ends_the_message_too(
    ends: tuple[str, ...], after_call: str, after_final: str
) -> None:
    tokenizer = harmony_tokenizer(ends=ends)
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "content": ANSWER}
    for text in (call() + after_call, FINAL + '{"day": 1}' + after_final):
        assert allows(text, tokenizer=tokenizer, **spec)
        assert not allows(text + "<|start|>assistant", tokenizer=tokenizer, **spec)
    parser = output(tokenizer=tokenizer, **spec).new_parser()
    parser.add(call() + "<|call|>")
    assert parser.is_finished


@rows(
    ("begun", "text"),
    [
        ("<|channel|>", 'final<|message|>{"day": 1}'),
        ("<|channel|>analysis", "<|message|>Hm.<|end|><|start|>assistant" + FINAL + '{"day": 1}'),
        ("<|channel|>analysis<|message|>So", "m.<|end|><|start|>assistant" + FINAL + '{"day": 1}'),
        (FINAL, '{"day": 1}'),
        # A grammar is that of the completion, not of the text before it.
        (FINAL + "So: ", '{"day": 1}'),
        ("<|end|>", "<|start|>assistant" + FINAL + '{"day": 1}'),
    ],
)
def test_a_prompt_may_end_inside_a_message(begun: str, text: str) -> None:
    assert allows(text, PROMPT + begun, content=ANSWER)
    assert not allows(text.replace("1", "0"), PROMPT + begun, content=ANSWER)
    read = events(output(PROMPT + begun, content=ANSWER), text)
    assert [e for e in read if isinstance(e, ContentPiece)] == [ContentPiece('{"day": 1}')]
    assert not any("So" in e.text for e in read if isinstance(e, ContentPiece | ReasoningPiece))


def test_a_prompt_may_end_inside_a_call() -> None:
    begun = PROMPT + as_in_the_template(arguments="")
    spec: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    assert allows('{"day": 1}', begun, **spec)
    start, arguments = events(output(begun, **spec), '{"day": 1}')
    assert isinstance(start, ToolCallStart) and start.name == "weather"
    assert arguments == ToolCallArguments(0, '{"day": 1}')
    (alone,) = events(output(begun, **spec), "")
    assert isinstance(alone, ToolCallStart)


def test_a_prompt_without_a_header_gets_a_whole_message() -> None:
    spec: dict[str, Any] = {"content": ANSWER}
    text = "<|start|>assistant" + FINAL + '{"day": 1}'
    assert allows(text, "Hi", **spec)
    assert not allows(FINAL + '{"day": 1}', "Hi", **spec)
    assert events(output("Hi", **spec), text) == [ContentPiece('{"day": 1}')]


def test_a_spelt_marker_is_no_way_out_of_free_text() -> None:
    prompt = f"{PROMPT}<|channel|>analysis<|message|>"
    assert allows("Hm.", prompt, tools=STRICT, tool_choice="auto") is False
    of = output(prompt, content=ANSWER).grammar
    assert of is not None
    walk = TOKENIZER.walk(of.grammar)
    assert all(walk.accept(token_id) for token_id in [*of.begun, *b"Hm. <|en"])
    assert walk.accept(ord("d")) and walk.accept(ord("|"))
    assert not walk.accept(ord(">"))


@settings(max_examples=10)
@given(st.data())
def test_whatever_the_model_prefers_it_calls(data: st.DataObject) -> None:
    of = output(tools=TOOLS, tool_choice="required")
    assert of.grammar is not None
    walk = TOKENIZER.walk(of.grammar.grammar)
    assert all(walk.accept(token_id) for token_id in of.grammar.begun)
    ids: list[int] = []
    analysis = TOKENIZER.encode("<|end|>")
    while not walk.may_end(TOKENIZER.end_token_ids):
        allowed = walk.allowed()
        # Analysis may go on for ever.
        ids.append(data.draw(st.sampled_from([i for i in analysis if i in allowed] or allowed)))
        walk.accept(ids[-1])
    read = events(of, TOKENIZER.decode(ids))
    (start,) = (e for e in read if isinstance(e, ToolCallStart))
    (arguments,) = (e for e in read if isinstance(e, ToolCallArguments))
    assert start.name in ("weather", "now")
    assert 1 <= json.loads(arguments.text)["day"] <= 9
    assert not any(isinstance(e, ContentPiece) for e in read)


def test_any_grammar_may_be_the_format() -> None:
    yes = GrammarSpec(choice_grammar(["yes", "no"]), "structured_outputs")
    assert allows(ANALYSIS + FINAL + "yes", content=yes)
    assert not allows(ANALYSIS + FINAL + "maybe", content=yes)
