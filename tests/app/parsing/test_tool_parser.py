"""Tool calls in the text of a model: found, separated, and no text lost."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, strategies as st

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.formats.message_parser import MessageParser
from app.parsing.reasoning.reasoning_parser import ReasoningParser
from app.parsing.tools.tool_call_json import JsonSyntax
from app.parsing.tools.tool_format import ToolFormat, call_text
from app.parsing.tools.tool_parser import ToolCallParser, new_call_id
from tests.support.rows import rows

START, END = "<tool_call>", "</tool_call>"
CALL = call_text("f", '{"a": 1}')

# All that a call consists of, whole and broken, and what stands around it.
fragments = st.sampled_from(
    [
        *[START, END, CALL, "{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "x", "<", "0"],
        *['{"name": "f"', '"name": "g"', '"arguments": {', ', "arguments": ', "null", '"{}"'],
        *["<think>", "</think>", "[t]", "[/t]", "</tool"],
    ]
)
texts = st.lists(fragments, max_size=20).map("".join)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
# A marker inside a string is no marker.
strings = st.text() | st.sampled_from([START, END, "}}", '"', "<think>", "\n"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(strings, values, max_size=4)


def ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def json_parser(*, is_parallel: bool = True) -> ToolCallParser:
    return ToolFormat(JsonSyntax(), START, END).parsers([], is_parallel=is_parallel, new_id=ids())()


def events_of(
    pieces: Sequence[str], parser: ToolCallParser | MessageParser | None = None
) -> list[MessageEvent]:
    parser = parser or json_parser()
    events = [event for piece in pieces for event in parser.add(piece)]
    return join_pieces([*events, *parser.flush()])


def content_of(events: Sequence[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))


def calls_of(events: Sequence[MessageEvent]) -> list[tuple[str, str]]:
    """Return the name and the text of the arguments of each call."""
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.call_id for start in starts}) == len(starts)
    return [
        (
            start.name,
            "".join(
                e.text
                for e in events
                if isinstance(e, ToolCallArguments) and e.index == start.index
            ),
        )
        for start in starts
    ]


def cut(text: str, places: Sequence[int]) -> Iterator[str]:
    stops = [*sorted(place % (len(text) + 1) for place in places), len(text)]
    for start, stop in zip([0, *stops], stops, strict=False):
        yield text[start:stop]


@given(texts, st.lists(st.integers(0, 10**6)), st.booleans())
def test_the_pieces_do_not_matter(text: str, places: list[int], is_parallel: bool) -> None:
    whole = events_of([text], json_parser(is_parallel=is_parallel))
    assert events_of(list(cut(text, places)), json_parser(is_parallel=is_parallel)) == whole


@given(texts)
def test_a_text_without_calls_is_content_unchanged(text: str) -> None:
    """But for one that ends where a call may be going to follow."""
    events = events_of([text])
    if not calls_of(events):
        assert text.startswith(content_of(events))
        rest = text.removeprefix(content_of(events))
        assert not rest or rest.startswith(START)


@given(
    st.lists(st.tuples(st.text("ab <\n"), names, objects), min_size=1, max_size=3), st.booleans()
)
def test_calls_are_parsed(parts: list[tuple[str, str, dict[str, Any]]], is_ascii: bool) -> None:
    dumped = [json.dumps(arguments, ensure_ascii=is_ascii) for _, _, arguments in parts]
    text = "".join(
        f"{before}{call_text(name, arguments)}"
        for (before, name, _), arguments in zip(parts, dumped, strict=True)
    )
    events = events_of([text, "\n"])
    assert calls_of(events) == [(p[1], d) for p, d in zip(parts, dumped, strict=True)]
    assert content_of(events) == "".join(before.rstrip() for before, _, _ in parts)


def test_arguments_are_streamed() -> None:
    parser = json_parser()
    assert parser.add(f'Wait.\n\n{START}\n{{"name": "f", "arguments": ') == [ContentPiece("Wait.")]
    assert parser.add('{"a": [1') == [
        ToolCallStart(0, "id0", "f"),
        ToolCallArguments(0, '{"a": [1'),
    ]
    assert parser.add("]}") == [ToolCallArguments(0, "]}")]
    assert parser.is_in_call
    assert parser.add(f"}}\n{END}\n") == []
    assert parser.has_calls and not parser.is_in_call
    assert parser.flush() == []


@rows(
    ("text", "calls", "content"),
    [
        ('{"name": "f"}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": null}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": ""}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')], ""),
        ('{"name": "f", "arguments": [1]}', [("f", "[1]")], ""),
        ('{"name": "f", "arguments": 7 }', [("f", "7")], ""),
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')], ""),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')], ""),
        ('{"id": 3, "x": {"name": "g"}, "name": "f", "arguments": {}}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": {}, "arguments": {"b": 1}, "y": 2}', [("f", "{}")], ""),
        (
            '[{"name": "f"}, {"name": "g", "arguments": {"a": {}}}]',
            [("f", "{}"), ("g", '{"a": {}}')],
            "",
        ),
        ('{"name": "f", "arguments": {"a": "b\nc\td"}}', [("f", '{"a": "b\\nc\\td"}')], ""),
        ('{"name": "f", "arguments": {"a": "x\\\\"}}', [("f", '{"a": "x\\\\"}')], ""),
        ('{"name": "f", "x": {"b": 2}, "arguments": {}}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": {"a": 1} oops', [("f", '{"a": 1}')], f" oops{END}"),
        ('{"name": "f"}</ tool_call>', [("f", "{}")], f"</ tool_call>{END}"),
        ('{"name": "f", "arguments": {}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": {}}}', [("f", "{}")], ""),
        ('{"name": "f", "arguments": {"a": [}}', [("f", '{"a": [}}')], ""),
        ('{"name": "f", "arguments": {}} oops', [("f", "{}")], f" oops{END}"),
        ('{"name": "f"}{"name": 5}', [("f", "{}")], f'{{"name": 5}}{END}'),
    ],
)
def test_frequent_errors_of_models_are_corrected(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = events_of([START, text, END])
    assert calls_of(events) == calls
    assert content_of(events) == content


@rows(
    "text",
    [
        "",
        "oops",
        "}",
        '{"name": ""}',
        '{"name": 5}',
        '{"name": "\\x"}',
        '{"arguments": {}}',
        '{"name"}',
        '{"name": }',
        '{"name": "f", oops',
        '{"name": "f", "x": [}',
        '{"x": [}',
        '{"x": [}, "name": "f"}',
        '{"x": 7}, "name": "f"}',
        '{"x": , "name": "f"}',
        '}{"name": "f"}',
        "{]",
        "</tool_coll>",
    ],
)
def test_what_is_not_a_call_is_content(text: str) -> None:
    events = events_of(["a ", START, text, END, " b"])
    assert events == [ContentPiece(f"a {START}{text}{END} b")]


@rows("length", range(len(START), len(CALL)))
def test_a_truncated_call_is_no_content(length: int) -> None:
    parser = json_parser()
    events = events_of([CALL[:length]], parser)
    has_name = CALL.index(', "arg') <= length
    assert [name for name, _ in calls_of(events)] == ["f"] * has_name
    assert all('{"a": 1}'.startswith(arguments) for _, arguments in calls_of(events))
    assert content_of(events) == ""
    assert parser.has_calls is (CALL.index("}") < length)


def test_truncated_broken_arguments_are_kept_without_what_may_be_the_end_marker() -> None:
    events = events_of([f'{START}{{"name": "f", "arguments": {{"a": ]</tool'])
    assert calls_of(events) == [("f", '{"a": ]')]


def test_a_truncated_second_call_is_dropped() -> None:
    events = events_of([f'{CALL}\n{START}{{"na'])
    assert calls_of(events) == [("f", '{"a": 1}')]
    assert content_of(events) == ""


def test_missing_brackets_swallow_neither_the_end_marker_nor_the_next_call() -> None:
    """Instead they are added, where the arguments end between two values."""
    broken = f'{START}\n{{"name": "f", "arguments": {{"a": {{"b": [1\n{END}'
    events = events_of([f"{broken}\n{CALL} fine"])
    assert calls_of(events) == [("f", '{"a": {"b": [1\n]}}'), ("f", '{"a": 1}')]
    assert content_of(events) == " fine"


def test_after_one_call_none_is_searched_for() -> None:
    parser = json_parser(is_parallel=False)
    assert calls_of(events_of([f"{START}{CALL}{CALL}"], parser)) == [("f", '{"a": 1}')]
    parser = json_parser(is_parallel=False)
    assert content_of(events_of([f"{START} a {CALL} b"], parser)) == f"{START} a"


def test_whitespace_without_a_call_is_content() -> None:
    assert events_of(["a\n", "\n"]) == [ContentPiece("a\n\n")]


def test_without_parallel_calls_one_call_ends_the_generation() -> None:
    parser = json_parser(is_parallel=False)
    parser.add(CALL[: CALL.index("}")])
    assert not parser.is_finished
    parser.add("}")
    assert parser.is_finished
    assert parser.add(f"}}{END} and {CALL}") == []
    assert parser.flush() == []


def test_ids_look_like_openais() -> None:
    call_id = new_call_id()
    assert call_id.startswith("call_") and len(call_id) == 29
    assert int(call_id.removeprefix("call_"), 16) >= 0
    assert new_call_id() != call_id


# Reasoning and calls together.


def message_parser(
    *, is_open: bool = False, markers: tuple[str, str] = ("<think>", "</think>")
) -> MessageParser:
    reasoning = ReasoningParser(*markers, is_open=is_open)
    return MessageParser(reasoning, json_parser())


def test_a_message_has_reasoning_content_and_calls() -> None:
    call = call_text("f", '{"a": "<think>"}')
    text = f"<think>\nI could {CALL}.\n</think>\n\nLet me see.\n{call}\n<think>Done?</think>"
    parser = message_parser()
    assert events_of([text], parser) == [
        ReasoningPiece(f"I could {CALL}."),
        ContentPiece("Let me see."),
        ToolCallStart(0, "id0", "f"),
        ToolCallArguments(0, '{"a": "<think>"}'),
        ReasoningPiece("Done?"),
    ]
    assert parser.has_calls and not parser.is_finished


@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("[t]", "[/t]")])
@given(text=texts, places=st.lists(st.integers(0, 10**6)), is_open=st.booleans())
def test_the_pieces_of_a_message_do_not_matter(
    text: str, places: list[int], is_open: bool, markers: tuple[str, str]
) -> None:
    parsers = [message_parser(is_open=is_open, markers=markers) for _ in range(3)]
    whole = events_of([text], parsers[0])
    assert events_of(list(cut(text, places)), parsers[1]) == whole
    assert events_of(list(text), parsers[2]) == whole


@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("[t]", "[/t]")])
def test_neither_hides_the_marker_of_the_other(markers: tuple[str, str]) -> None:
    start, end = markers
    events = events_of([f"a {start}b{end}c {CALL}"], message_parser(markers=markers))
    assert [type(event) for event in events[:3]] == [ContentPiece, ReasoningPiece, ContentPiece]
    assert calls_of(events) == [("f", '{"a": 1}')]
    call = call_text("f", json.dumps({"a": start}))
    events = events_of([call[:-20], call[-20:]], message_parser(markers=markers))
    assert calls_of(events) == [("f", json.dumps({"a": start}))]


def test_a_message_may_have_neither() -> None:
    parser = MessageParser(None, None)
    assert parser.add(f"<think>{CALL}") == [ContentPiece(f"<think>{CALL}")]
    assert parser.flush() == []
    assert not parser.has_calls and not parser.is_finished


def test_a_message_may_have_one_of_them() -> None:
    reasoning = ReasoningParser("<think>", "</think>", is_open=True)
    events = events_of([f"hm</think>{CALL}"], MessageParser(reasoning, None))
    assert events == [ReasoningPiece("hm"), ContentPiece(CALL)]
    parser = MessageParser(None, json_parser(is_parallel=False))
    assert content_of(events_of(["<think>", CALL], parser)) == "<think>"
    assert parser.has_calls and parser.is_finished
