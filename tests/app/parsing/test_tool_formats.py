"""Calls in the formats of mlx-lm: read as it arrives, as mlx-lm reads it, and written back."""

import json
from collections.abc import Sequence
from itertools import chain
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.tool_spec import ToolSpec
from app.prompts.chat_history import template_messages
from app.prompts.conversation import ChatMessage, ToolCall
from tests.support.rows import rows
from tests.support.tool_formats import FORMATS, parse_by_mlx_lm
from tests.support.tool_templates import rendered, written

Calls = list[tuple[str, dict[str, Any]]]

keys = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
strings = st.text("ab 1\"'\\\n\t<&{}[](),:=|é😀", max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, width=32) | strings
values = st.recursive(
    scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
many_arguments = st.dictionaries(keys, values, max_size=4)
some_calls = st.lists(
    st.tuples(st.sampled_from(["get_weather", "now-2"]), many_arguments), min_size=1, max_size=3
)


def type_of(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names[type(value)]


def tools_for(calls: Calls) -> list[ToolSpec]:
    """Return tools whose parameters have the types of the arguments."""
    return [
        ToolSpec(name, {"properties": {k: {"type": type_of(v)} for k, v in arguments.items()}})
        for name, arguments in calls
    ]


def events_of(name: str, pieces: Sequence[str], tools: Sequence[ToolSpec]) -> list[MessageEvent]:
    parser = FORMATS[name].parsers(tools, new_id=lambda: "id")()
    events = [event for piece in pieces for event in parser.add(piece)]
    return join_pieces([*events, *parser.flush()])


def calls_of(events: Sequence[MessageEvent]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def content_of(events: Sequence[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))


def is_read_alike_by_mlx_lm(name: str, calls: Calls) -> bool:
    """False where mlx-lm's functions lose what the templates write."""
    arguments = [value for _, values in calls for value in values.values()]
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "mistral_ids":
        return False  # the id is taken for the name
    if name == "qwen3_coder" and any(is_long_integer(value) for value in arguments):
        return False  # numbers are read as floats
    if name in ("function_gemma", "pythonic") and any("-" in called for called, _ in calls):
        return False
    if name == "pythonic" and any(map(iskeyword, chain.from_iterable(v for _, v in calls))):
        return False  # `f(as=1)` is no call in Python
    if name == "longcat" and not all(values for _, values in calls):
        return False
    if name == "function_gemma":
        nested = any(isinstance(value, list | dict) for value in arguments)
        return not nested and not any("}" in text for text in texts)
    if name == "muse_spark" and any(is_json(text) for text in texts):
        return False
    strips = name not in ("general", "json_tools", "gemma4", "kimi_k2", "kimi_k3", "qwen3_coder")
    return not (strips and any(text != text.strip() for text in texts))


def is_long_integer(value: object) -> bool:
    return isinstance(value, int) and int(float(value)) != value


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cut(text: str, places: Sequence[int]) -> list[str]:
    stops = [*sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


@pytest.mark.parametrize("name", FORMATS)
class TestFormat:
    @settings(max_examples=12, deadline=None)
    @given(some_calls, st.lists(st.integers(0, 10**6), max_size=5))
    def test_calls_are_what_was_written_and_what_mlx_lm_reads(
        self, name: str, calls: Calls, places: list[int]
    ) -> None:
        # One tool has one schema.
        calls = list({called: (called, arguments) for called, arguments in calls}.values())
        tools = tools_for(calls)
        text = f"Let me see.\n{written(name, calls)}"
        events = events_of(name, [text], tools)
        assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls
        assert content_of(events) == "Let me see."
        assert events_of(name, cut(text, places), tools) == events
        if name != "general" and is_read_alike_by_mlx_lm(name, calls):
            assert parse_by_mlx_lm(name, text, tools) == calls

    @settings(max_examples=8, deadline=None)
    @given(some_calls)
    def test_a_history_holds_what_the_model_wrote(self, name: str, calls: Calls) -> None:
        """So that the next turn finds all of it in the prefix cache."""
        text = written(name, calls)
        parser = FORMATS[name].parsers(tools_for(calls), new_id=lambda: "abcdefghi")()
        events = join_pieces([*parser.add(text), *parser.flush()])
        ids = [event.call_id for event in events if isinstance(event, ToolCallStart)]
        made = [ToolCall(i, n, a) for i, (n, a) in zip(ids, calls_of(events), strict=True)]
        message = ChatMessage(role="assistant", content="", tool_calls=made)
        (turn,) = template_messages([message], FORMATS["json_tools"])
        again = rendered(name, turn)
        if name == "mistral":
            # The model wrote its id after the arguments, which were on their way then.
            again = again.replace("abcdefghi", "abcdefg00", 1).replace("abcdefghi", "abcdefg01", 1)
            again = again.replace("abcdefghi", "abcdefg02", 1)
        # Of a name with two schemas only the last one counts.
        if len({called for called, _ in calls}) == len(calls):
            assert again == text

    def test_a_name_comes_before_its_arguments_and_these_piece_by_piece(self, name: str) -> None:
        tools = [ToolSpec("write", {"properties": {"text": {"type": "string"}}})]
        text = written(name, [("write", {"text": "one two"})])
        parser = FORMATS[name].parsers(tools)()
        before, after = text.split("one two")
        assert next(type(event) for event in parser.add(before)) is ToolCallStart
        assert parser.add("one ") == [ToolCallArguments(0, "one ")]
        parser.add(f"two{after}")
        assert (parser.has_calls and not parser.is_in_call) or name == "mistral"
        assert parser.flush() == []

    def test_a_call_that_is_cut_short_leaks_nothing(self, name: str) -> None:
        tools = [ToolSpec("write", {"properties": {"text": {"type": "string"}}})]
        text = written(name, [("write", {"text": 'a "b" c'}), ("write", {"text": "d"})])
        for end in range(len(FORMATS[name].start), len(text)):
            events = events_of(name, [f"Hi {text[:end]}"], tools)
            # A marker that is not whole may be no marker.
            content = content_of(events)
            assert content == "Hi" or FORMATS[name].start.startswith(
                content.removeprefix("Hi").strip()
            )
            assert all(called == "write" for called, _ in calls_of(events))

    def test_without_its_end_marker_a_call_is_not_complete(self, name: str) -> None:
        tools = [ToolSpec("write", {"properties": {"text": {"type": "string"}}})]
        text = written(name, [("write", {"text": "abc def"})])
        parser = FORMATS[name].parsers(tools)()
        parser.add(text[: text.index("def")])
        parser.flush()
        assert not parser.has_calls

    def test_what_is_no_call_is_content(self, name: str) -> None:
        format_ = FORMATS[name]
        for rest in ("{ that is it }", "{", '"a" > {"b"} '):
            text = f"It is {format_.start} {rest}{format_.end} and so on."
            if name == "minicpm5" and rest.startswith('"a"'):
                continue  # this is a call of `a`
            events = events_of(name, [text], [])
            assert content_of(events) == text, events


SPEC = ToolSpec("f", {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})
_KIMI = "<|tool_calls_section_begin|>"
_KIMI_END = "<|tool_calls_section_end|>"


def kimi_call(call_id: str, arguments: str, end: str = "<|tool_call_end|>") -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}{end}"


@rows(
    ("name", "text", "calls"),
    [
        # Something is missing in a call, which swallows no other.
        (
            "kimi_k2",
            _KIMI
            + kimi_call("functions.f:0", '{"a": {"b": 1')
            + kimi_call("functions.g:1", "{}")
            + _KIMI_END,
            [("f", '{"a": {"b": 1}}'), ("g", "{}")],
        ),
        (
            "mistral_args",
            '[TOOL_CALLS]f[ARGS]{"a": [{"b": 1}[TOOL_CALLS]g[ARGS]{}',
            [("f", '{"a": [{"b": 1}]}'), ("g", "{}")],
        ),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=f>\n<parameter=s>\nx\n</function>\n</tool_call>\n"
                "<tool_call>\n<function=g>\n</function>\n</tool_call>"
            ),
            [("f", '{"s": "x"}'), ("g", "{}")],
        ),
        (
            "glm47",
            "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call><tool_call>g<arg_key>a</tool_call>",
            [("f", '{"s": "x"}'), ("g", "{}")],
        ),
        (
            "kimi_k3",
            (
                '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"'
                '<|sep|>{"a": [1<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
            ),
            [("f", '{"a": [1]}')],
        ),
        (
            "gemma4",
            "<|tool_call>call:f{a:{b:1<tool_call|><|tool_call>call:g{}<tool_call|>",
            [("f", '{"a": {"b": 1}}'), ("g", "{}")],
        ),
        (
            "pythonic",
            "<|tool_call_start|>[f(a=[1, 'it's'<|tool_call_end|><|tool_call_start|>[g()]<|tool_call_end|>",
            [("f", '{"a": [1, "it\'s"]}'), ("g", "{}")],
        ),
        # The end of a call is missing before the next one.
        (
            "glm47",
            (
                "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n"
                "<tool_call>g\n</tool_call>"
            ),
            [("f", '{"s": "x"}'), ("g", "{}")],
        ),
        (
            "glm47",
            "<tool_call>f\n<arg_key>s<tool_call>g\n</tool_call>",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=f>\n</function>\n<tool_call>\n<function=g>\n</function>\n"
                "</tool_call>"
            ),
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n'
                '<minimax:tool_call>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
            ),
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "json_tools",
            (
                '<tool_call>\n{"name": "f", "arguments": {}}\n'
                '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
            ),
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "json_tools",
            (
                '<tool_call>{"name": "f", "arguments": {"a": [1'
                '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
            ),
            [("f", '{"a": [1]}'), ("g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]{"name":"f","arguments":{}}[TOOL_CALLS]{"name":"g","arguments":{}}',
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "kimi_k2",
            _KIMI + kimi_call("f:0", "{}") + _KIMI + kimi_call("g:1", "{}") + _KIMI_END,
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "kimi_k2",
            _KIMI + kimi_call("f:0", '{"a": 1', "") + kimi_call("g:1", "{}", "") + _KIMI_END,
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (
            "kimi_k2",
            _KIMI + kimi_call("f:0", "") + kimi_call("g:1", "{}") + _KIMI_END,
            [("f", "{}"), ("g", "{}")],
        ),
    ],
)
def test_what_is_missing_in_a_call_swallows_no_other(
    name: str, text: str, calls: list[tuple[str, str]]
) -> None:
    events = events_of(name, [text, " ok"], [SPEC])
    assert calls_of(events) == calls
    assert content_of(events) == " ok"
    assert events_of(name, [*text, " ok"], [SPEC]) == events


@rows("name", FORMATS)
def test_a_start_marker_that_begins_no_call_hides_none(name: str) -> None:
    start = FORMATS[name].start
    text = f"It is {start} or{start}{written(name, [('f', {'s': 'x'})])}"
    events = events_of(name, [text], [SPEC])
    assert [(called, json.loads(a)) for called, a in calls_of(events)] == [("f", {"s": "x"})]
    assert content_of(events) == f"It is {start} or{start}"
    assert events_of(name, list(text), [SPEC]) == events


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=8, deadline=None)
@given(some_calls, st.lists(st.integers(0, 10**6), max_size=6), st.randoms(use_true_random=False))
def test_the_pieces_of_damaged_calls_do_not_matter(
    name: str, calls: Calls, places: list[int], random: Any
) -> None:
    pieces = cut(written(name, calls), places)
    damaged = [random.choice(pieces) for _ in pieces]
    tools = tools_for(calls)
    events = events_of(name, ["".join(damaged)], tools)
    assert events_of(name, damaged, tools) == events
    assert events_of(name, list("".join(damaged)), tools) == events


@rows(
    ("inner", "calls"),
    [
        # The end of a value is missing, and so may be the value.
        ("{n}3\n{s}x{/s}\n{/f}", [("f", '{"n": 3, "s": "x"}')]),
        ("{s}x\n{n}3{/s}\n{/f}", [("f", '{"s": "x", "n": 3}')]),
        ("{s}x\n{/f}\n{g}{/f}", [("f", '{"s": "x"}'), ("g", "{}")]),
        ("{n}3\n{/f}\n{g}{/f}", [("f", '{"n": 3}'), ("g", "{}")]),
        ("{s}\n{/f}\n{g}{/f}", [("f", '{"s": ""}'), ("g", "{}")]),
        # In the middle of a line, and of what is no other part, a tag is text.
        ("{s}a\n{/f}\nb\n<parameters>{/s}\n{/f}", [("f", '{"s": "a\\n{/f}\\nb\\n<parameters>"}')]),
        ("{s}a\n{other} b{/s}\n{/f}", [("f", '{"s": "a\\n{other} b"}')]),
        ("{s}a {n} b {/f} c\n {n}{/s}\n{/f}", [("f", '{"s": "a {n} b {/f} c\\n {n}"}')]),
    ],
)
@rows("name", ["qwen3_coder", "minimax_m2"])
def test_a_value_without_an_end_swallows_neither_parameters_nor_calls(
    name: str, inner: str, calls: list[tuple[str, str]]
) -> None:
    tags = {"f": "<function=f>", "g": "<function=g>", "/f": "</function>", "/s": "</parameter>"}
    tags |= {"n": "<parameter=n>", "s": "<parameter=s>", "other": "<parameter=other>"}
    if name == "minimax_m2":
        tags |= {"f": '<invoke name="f">', "g": '<invoke name="g">', "/f": "</invoke>"}
        tags |= {key: f'<parameter name="{key}">' for key in ("n", "s", "other")}
    text = f"{FORMATS[name].start}\n{tags['f']}\n{with_tags(inner, tags)}\n{FORMATS[name].end} ok"
    quoted = {key: tag.replace('"', '\\"') for key, tag in tags.items()}
    events = events_of(name, [text], [SPEC])
    assert calls_of(events) == [(called, with_tags(read, quoted)) for called, read in calls]
    assert content_of(events) == " ok"
    assert events_of(name, list(text), [SPEC]) == events


def with_tags(text: str, tags: dict[str, str]) -> str:
    for key, tag in tags.items():
        text = text.replace(f"{{{key}}}", tag)
    return text


def test_the_tags_of_the_section_end_a_value_together_on_any_line() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\nx</function>\n</tool_call> ok"
    events = events_of("qwen3_coder", [text], [SPEC])
    assert calls_of(events) == [("f", '{"s": "x"}')]
    assert content_of(events) == " ok"


def test_a_model_that_repeats_an_id_gets_a_new_one_for_the_second_call() -> None:
    text = _KIMI + kimi_call("functions.f:0", "{}") * 2 + _KIMI_END
    events = events_of("kimi_k2", [text], [])
    ids = [event.call_id for event in events if isinstance(event, ToolCallStart)]
    assert ids == ["functions.f:0", "id"]


K3_ARGUMENT = '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
K3_JSON = '<|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|>'


@rows(
    ("arguments", "read"),
    [
        (K3_JSON + K3_ARGUMENT, '{"n": 1}'),
        # What was read first is on its way already.
        (K3_ARGUMENT + K3_JSON, '{"a": "x"}'),
        (K3_JSON.replace('{"n": 1}', ""), "{}"),
    ],
)
def test_a_call_of_kimi_k3_has_one_object_or_single_arguments(arguments: str, read: str) -> None:
    call = f'<|open|>call tool="f" index="1"<|sep|>{arguments}<|close|>call<|sep|>'
    text = f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|> ok"
    events = events_of("kimi_k3", [text], [])
    assert calls_of(events) == [("f", read)]
    assert content_of(events) == " ok"
    assert events_of("kimi_k3", list(text), []) == events


@rows(
    ("name", "text", "calls", "content"),
    [
        ("mistral_args", '[TOOL_CALLS][{"name": "f"}]', [("f", "{}")], ""),
        ("mistral_args", "[TOOL_CALLS]f[ARGS][1]", [], "[TOOL_CALLS]f[ARGS][1]"),
        (
            "kimi_k2",
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{"
                "<|tool_calls_section_end|> ok"
            ),
            [("f", "{}")],
            " ok",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|> <|tool_call_argument_begin|>{}",
            [],
            "<|tool_calls_section_begin|><|tool_call_begin|> <|tool_call_argument_begin|>{}",
        ),
        ("glm47", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], ""),
        (
            "qwen3_coder",
            "<tool_call><function=></function>",
            [],
            "<tool_call><function=></function>",
        ),
        (
            "muse_spark",
            "<atem:function_calls><atem:invoke><atem:parameter",
            [],
            "<atem:function_calls><atem:invoke><atem:parameter",
        ),
    ],
)
def test_other_spellings_and_what_is_none(
    name: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = events_of(name, [text], [])
    assert calls_of(events) == calls
    assert content_of(events) == content


def test_a_tag_without_an_end_is_no_tag() -> None:
    long = "x" * 1000
    text = f"<tool_call><function={long}"
    assert content_of(events_of("qwen3_coder", [text], [])) == text


def test_the_name_of_a_parameter_may_be_long() -> None:
    long = "x" * 1000
    begun = f"<tool_call>\n<function=f>\n<parameter={long}"
    text = f"{begun}>\n1\n</parameter>\n</function>\n</tool_call> ok"
    events = events_of("qwen3_coder", [text], [])
    assert calls_of(events) == [("f", f'{{"{long}": 1}}')]
    assert content_of(events) == " ok"
    parser = FORMATS["qwen3_coder"].parsers([])()
    parser.add(begun)
    assert parser.flush() == []
    assert not parser.has_calls
