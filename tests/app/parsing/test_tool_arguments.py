"""Types of arguments: what each format enforces of a schema, and how it reads a value."""

import ast
import json
from io import StringIO
from token import ERRORTOKEN, STRING
from tokenize import TokenError, generate_tokens
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from app.parsing.events import ContentPiece, ToolCallArguments, join_pieces
from app.parsing.grammars.schema_types import TYPES, keyword_budget, parameter_types
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_call_literals import json_of
from batching import InvalidRequest
from tests.support.rows import rows
from tests.support.tool_formats import FORMATS
from tests.support.tool_templates import written
from tests.support.tool_walks import calls_in, follows, walked

TAGS = (
    *("glm47", "glm46", "laguna", "longcat", "kimi_k3", "minicpm5", "minimax_m2", "muse_spark"),
    "qwen3_coder",
)
GEMMA = ("gemma4", "function_gemma")
QUOTED = ("general", "json_tools", "kimi_k2", "mistral", "mistral_args", "mistral_ids", "pythonic")


def tool(
    properties: dict[str, Any], *, strict: bool = False, defs: Any = None, **others: Any
) -> ToolSpec:
    others |= {"$defs": defs} if defs else {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return ToolSpec("f", schema | others, strict=strict)


SHAPES: dict[str, Any] = {
    "color": {"$ref": "#/$defs/color"},
    "count": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
    "deep": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "text": {"type": "string"}},
        "required": ["on", "text"],
        "additionalProperties": False,
    },
    "mode": {"enum": ["fast", "", 2, None, True]},
    "name": {"type": ["string", "null"]},
    "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
}
DEFS = {"color": {"allOf": [{"type": "string"}, {"enum": ["red", "green"]}]}}
RIGHT: dict[str, list[Any]] = {
    "color": ["red", "green"],
    "count": [3, None],
    "deep": [{"on": True, "text": 'a "b"'}],
    "mode": ["fast", "", 2, None, True],
    "name": ["Ann", None],
    "sizes": [[1], [0.5, 2]],
}
WRONG: dict[str, list[Any]] = {
    "color": ["blue", 3],
    "count": [10, 2.5],
    "deep": [{"on": 1, "text": "a"}, {"on": True}, {"on": True, "text": "a", "x": 1}],
    "mode": ["slow", 3],
    "sizes": [[], [1, 2, 3], ["a"]],
}
FIRST = {name: values[0] for name, values in RIGHT.items()}
STRICT = tool(SHAPES, strict=True, required=list(SHAPES), defs=DEFS)


@pytest.mark.parametrize("name", FORMATS)
class TestSchema:
    @pytest.mark.parametrize("key", SHAPES)
    def test_values_that_follow_the_schema_are_read_as_such(self, name: str, key: str) -> None:
        grammar = FORMATS[name].grammar([STRICT], "auto", is_parallel=True)
        for value in RIGHT[key]:
            arguments = FIRST | {key: value}
            text = call(name, arguments)
            assert follows(text, grammar) or is_python_word(name, key, value)
            assert calls_in(FORMATS[name], text, [STRICT]) == [("f", arguments)]

    @rows("key", WRONG)
    def test_no_other_values_are_possible(self, name: str, key: str) -> None:
        grammar = FORMATS[name].grammar([STRICT], "auto", is_parallel=True)
        for value in WRONG[key]:
            assert not follows(call(name, FIRST | {key: value}), grammar)

    def test_a_parameter_that_is_not_required_may_be_left_out(self, name: str) -> None:
        spec = tool({key: {"type": "integer"} for key in "abc"}, required=["b"])
        grammar = FORMATS[name].grammar([spec], "required", is_parallel=True)
        for keys in ("b", "ab", "bc", "abc"):
            assert follows(written(name, [("f", dict.fromkeys(keys, 1))]), grammar)
        for keys in ("", "a", "ac", "abcd"):
            assert not follows(written(name, [("f", dict.fromkeys(keys, 1))]), grammar)

    @settings(max_examples=2, deadline=None)
    @given(st.integers(0))
    def test_whatever_the_model_prefers_follows_the_schema(self, name: str, seed: int) -> None:
        shapes = {key: value for key, value in SHAPES.items() if key not in ("name", "deep")}
        spec = tool(shapes, required=list(shapes), defs=DEFS)
        text = walked(FORMATS[name].grammar([spec], "required", is_parallel=False), seed)
        ((_, arguments),) = calls_in(FORMATS[name], text, [spec])
        assert set(arguments) == set(shapes)
        assert arguments["color"] in ("red", "green")
        assert arguments["count"] is None or arguments["count"] <= 9
        assert arguments["mode"] in ("fast", "", 2, None, True)
        assert 1 <= len(arguments["sizes"]) <= 2


def call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call, with JSON where the template of MiniCPM writes objects as Python does."""
    text = written(name, [("f", arguments)])
    for value in arguments.values():
        if name == "minicpm5" and isinstance(value, dict):
            text = text.replace(str(value), json.dumps(value))
    return text


def is_python_word(name: str, key: str, value: Any) -> bool:
    """True for a word of an enum that the template writes as Python does, and the grammar not."""
    is_word = key == "mode" and (value is None or value is True)
    return is_word and name in ("qwen3_coder", "minicpm5", "pythonic")


def test_any_value_of_gemma_is_in_its_own_spelling() -> None:
    spec = tool({"any": {}, "free": {"type": "object"}, "none": {"type": "array", "maxItems": 0}})
    value = {"a": [1, True, None, "x"], "b": {}, "c": []}
    calls = [("f", {"any": value, "free": value, "none": []})]
    for name in GEMMA:
        grammar = FORMATS[name].grammar([spec], "required", is_parallel=True)
        assert follows(written(name, calls), grammar)
        assert not follows(written(name, [("f", {"free": "x"})]), grammar)
        assert calls_in(FORMATS[name], written(name, calls), [spec]) == calls


def test_a_value_of_any_type_names_its_type_in_kimi_k3() -> None:
    spec = tool({"any": True, "text": {"type": ["string", "null"]}})
    for value in (None, True, 1.5, "x", [1], {"a": "b"}):
        calls = [("f", {"any": value, "text": None})]
        grammar = FORMATS["kimi_k3"].grammar([spec], "required", is_parallel=True)
        assert follows(written("kimi_k3", calls), grammar)
        assert calls_in(FORMATS["kimi_k3"], written("kimi_k3", calls), [spec]) == calls


@rows(
    ("schema", "refused", "message"),
    [
        ({"type": "string", "pattern": "^a$"}, (*TAGS, *GEMMA), "'pattern' of a string"),
        ({"type": ["string", "null"], "minLength": 1}, (*TAGS, *GEMMA), "'minLength' of a string"),
        ({"type": "array", "uniqueItems": True}, GEMMA, "'uniqueItems' of a array"),
    ],
)
def test_what_cannot_be_enforced_is_refused_if_it_is_strict(
    schema: dict[str, Any], refused: tuple[str, ...], message: str
) -> None:
    for name in refused:
        with pytest.raises(InvalidRequest, match=message) as caught:
            FORMATS[name].grammar([tool({"a": schema}, strict=True)], "auto", is_parallel=True)
        assert caught.value.param == "tools"
        assert FORMATS[name].grammar([tool({"a": schema})], "required", is_parallel=True)
    for name in QUOTED if refused != GEMMA else ():
        spec = tool({"a": schema}, strict=True)
        grammar = FORMATS[name].grammar([spec], "auto", is_parallel=True)
        text = written(name, [("f", {"a": "a"})]).replace("'a'", '"a"')
        assert follows(text, grammar)
        assert not follows(text.replace('"a"}', '""}').replace('"a")', '"")'), grammar)


@rows("name", [*TAGS, *GEMMA, "pythonic"])
def test_the_name_of_a_parameter_that_a_format_cannot_hold_is_refused(name: str) -> None:
    for key in ("a>b", "", " a"):
        with pytest.raises(InvalidRequest, match="a parameter named"):
            FORMATS[name].grammar([tool({key: {}})], "required", is_parallel=True)


def types_of(schema: Any, definitions: Any) -> frozenset[str]:
    return parameter_types({"properties": {"a": schema}, "$defs": definitions}, keyword_budget())[
        "a"
    ]


@rows(
    ("schema", "types"),
    [
        (None, TYPES),
        ({}, TYPES),
        ({"$ref": "#/$defs/a"}, ["string"]),
        ({"$ref": "#/definitions/b"}, TYPES),
        ({"$ref": "#/$defs/loop"}, TYPES),
        ({"$ref": 5}, TYPES),
        ({"anyOf": []}, TYPES),
        ({"oneOf": [{"type": "integer"}, {"const": "x"}]}, ["number", "string"]),
        ({"allOf": [{"type": "array"}]}, ["array"]),
        ({"properties": {}}, ["object"]),
        ({"type": "integer", "enum": [1, "a"]}, ["number"]),
    ],
)
def test_types_of_a_schema(schema: Any, types: list[str]) -> None:
    definitions = {"a": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert types_of(schema, definitions) == frozenset(types)


ANY = frozenset(TYPES)
NULLABLE = frozenset({"string", "null"})


@rows(
    ("text", "types", "value"),
    [
        (" 5 ", ANY, 5),
        ("5", NULLABLE, "5"),
        ("null", NULLABLE, None),
        ("None", NULLABLE, None),
        ('"a"', NULLABLE, '"a"'),
        ('"a"', ANY, "a"),
        ("'a'", ANY, "a"),
        ("['a', None, {'b': (1, True)}]", ANY, ["a", None, {"b": [1, True]}]),
        ("[see below]", ANY, "[see below]"),
        ("{a: 1}", ANY, "{a: 1}"),
        ("{1: 2}", ANY, "{1: 2}"),
        ("[1", ANY, "[1"),
        ("[1] x", ANY, "[1] x"),
        ("NaN", ANY, "NaN"),
        ("", ANY, ""),
        ("[" * 5000, ANY, "[" * 5000),
        ("[(" * 5000, ANY, "[(" * 5000),
        ("9" * 5000, ANY, "9" * 5000),
    ],
)
def test_a_value_is_json_or_a_literal_of_python_or_else_text(
    text: str, types: frozenset[str], value: Any
) -> None:
    read = json_of(text, types)
    assert (text if read is None else json.loads(read)) == value


@rows(
    ("written_string", "value"),
    [
        (r"'\n\t\\\'\"\d'", "\n\t\\'\"\\d"),
        (r"'\x41\u00e9\U0001f600\ud83d\ude00'", "Aé😀😀"),
        (r"'\xzz\U99999999'", "\\xzz\\U99999999"),
        (r"'\101\7\08'", "A\a\08"),
        ("'it's'", "it's"),
        ("'say ' again'", "say ' again"),
        ("'a' ", "a"),
        # Not those of Python, but of models.
        ('"echo "hi""', 'echo "hi"'),
        ('"say "a" "b" c"', 'say "a" "b" c'),
        ('"it\'s"', "it's"),
    ],
)
def test_strings_of_python(written_string: str, value: str) -> None:
    text = f"<|tool_call_start|>[f(a={written_string}, b=bare word, c=[1,], d=1)]<|tool_call_end|>"
    calls = calls_in(FORMATS["pythonic"], text)
    assert calls == [("f", {"a": value, "b": "bare word", "c": [1], "d": 1})]


# Literals of Python, in all of their spellings.
numbers = st.sampled_from(
    [
        *[
            "1_000",
            "0x1F",
            "-0X_f",
            "0o17",
            "0b11",
            "+1",
            ".5",
            "1.",
            "+.5e-3",
            "1E5",
            "1_0.5",
            "00",
        ],
        *["007", "1__0", "1e999", "0x", "True", "None"],
    ]
)
bodies = st.lists(
    st.sampled_from(
        [*"a \"',)(]ru={\\", *["\\n", "\\\\", "\\101", "\\7", "\\x41", "\\u00e9", '\\"', "\\\n"]]
    ),
    max_size=6,
).map("".join)


def is_one_string(text: str) -> bool:
    """Strings that follow each other directly are those of models, which leave quotes in a text as they are."""
    try:
        tokens = [token.type for token in generate_tokens(StringIO(text).readline)]
    except (TokenError, SyntaxError):
        return False
    return tokens.count(STRING) == 1 and ERRORTOKEN not in tokens


one_string = st.builds(
    lambda prefix, quote, body: f"{prefix}{quote}{body}{quote}",
    st.sampled_from(["", "", "r", "R", "u"]),
    st.sampled_from(['"', "'", '"""', "'''"]),
    bodies,
).filter(is_one_string)
adjacent = st.builds(
    lambda blanks, parts: blanks.join(parts),
    st.sampled_from([" ", "\n"]),
    st.lists(one_string, min_size=1, max_size=3),
)
literals = st.recursive(
    numbers | adjacent,
    lambda inner: st.builds(
        lambda brackets, items, comma: brackets[0] + ", ".join(items) + comma + brackets[1],
        st.sampled_from(["[]", "()", "( )"]).map(lambda text: (text[:-1], text[-1])),
        st.lists(inner, max_size=3),
        st.sampled_from(["", "", ","]),
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(literals)
def test_a_literal_is_what_python_reads(literal: str) -> None:
    try:
        value = json.loads(json.dumps(ast.literal_eval(literal), allow_nan=False))
    except (SyntaxError, ValueError):
        assume(False)
    text = f"<|tool_call_start|>[f(a={literal}, b=1)]<|tool_call_end|>"
    assert calls_in(FORMATS["pythonic"], text) == [("f", {"a": value, "b": 1})]
    parser = FORMATS["pythonic"].parsers([], new_id=lambda: "id")()
    events = [event for character in text for event in parser.add(character)]
    assert join_pieces(events) == FORMATS["pythonic"].parsers([], new_id=lambda: "id")().add(text)
    assert json.loads(json_of(f" {literal} ", ANY) or "0") == value


@rows(
    ("text", "read"),
    [
        # Not whole, so brackets that may mean nothing do.
        ('[f(a=("x"', '{"a": "x"}'),
        ('[f(a=((1, "x"', '{"a": [1, "x"]}'),
        ('[f(a=["x", (', '{"a": ["x", ]}'),
        # A comma at the end.
        ('[f(a="x"),]', '{"a": "x"}'),
        ('[f(a="x",) , ]', '{"a": "x"}'),
    ],
)
def test_what_is_read_of_an_unusual_call_in_python(text: str, read: str) -> None:
    parser = FORMATS["pythonic"].parsers([])()
    events = [*parser.add(f"<|tool_call_start|>{text}<|tool_call_end|> ok"), *parser.flush()]
    assert "".join(e.text for e in events if isinstance(e, ToolCallArguments)) == read
    assert events[-1] == ContentPiece(" ok")


def test_a_string_in_triple_quotes_is_streamed() -> None:
    parser = FORMATS["pythonic"].parsers([])()
    parser.add('<|tool_call_start|>[f(a="""')
    assert parser.add('one "two"\n') == [ToolCallArguments(0, 'one \\"two\\"\\n')]


def test_a_schema_that_would_be_followed_for_ever_is_not() -> None:
    again = {"$ref": "#/$defs/tree"}
    tree = {"type": "object", "properties": {f"p{i}": again for i in range(20)}}
    spec = tool({"tree": again}, defs={"tree": tree})
    with pytest.raises(InvalidRequest, match="too large to be enforced"):
        FORMATS["gemma4"].grammar([spec], "required", is_parallel=True)
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 20}
    assert types_of({"$ref": "#/$defs/loop"}, {"loop": loop}) == frozenset(TYPES)
    none = {"anyOf": [{"$ref": "#/$defs/none"}] * 20 + [{"type": "null", "enum": ["a"]}]}
    assert types_of({"$ref": "#/$defs/none"}, {"none": none}) == frozenset(TYPES)


@pytest.mark.parametrize("name", ["glm47", "minicpm5", "qwen3_coder"])
def test_all_schemas_of_a_request_have_one_limit(name: str) -> None:
    """Each of the tools alone has less, and a definition counts wherever it is used."""
    choices = {"anyOf": [{"type": "string"}] * 100}
    properties = {f"p{index}": {"$ref": "#/$defs/choices"} for index in range(300)}
    parameters = tool(properties, defs={"choices": choices}).parameters
    specs = [ToolSpec(f"f{index}", parameters) for index in range(8)]
    assert FORMATS[name].grammar(specs[:1], "required", is_parallel=True)
    with pytest.raises(InvalidRequest, match="too large to be enforced") as caught:
        FORMATS[name].grammar(specs, "required", is_parallel=True)
    assert caught.value.param == "tools"


def test_types_beyond_the_limit_are_any() -> None:
    budget = keyword_budget()
    large = {"properties": {"a": {"anyOf": [{"enum": ["x"] * 1000}] * 1000}}}
    small = {"properties": {"a": {"type": "string"}}}
    assert parameter_types(small, budget) == {"a": frozenset({"string"})}
    assert parameter_types(large, budget) == {"a": ANY}
    assert parameter_types(small, budget) == {"a": ANY}


class Counted(dict[str, Any]):
    num_lookups = 0

    def get(self, *args: Any) -> Any:
        self.num_lookups += 1
        return super().get(*args)


def test_a_reference_is_followed_once() -> None:
    definitions = Counted(a={"$ref": "#/$defs/b", "title": "A"}, b={"type": "null"})
    references = {f"p{index}": {"$ref": "#/$defs/a", "description": "x"} for index in range(50)}
    types = parameter_types({"properties": references, "$defs": definitions}, keyword_budget())
    assert types == dict.fromkeys(references, frozenset({"null"}))
    assert definitions.num_lookups == 2


def test_a_parameter_may_have_definitions_of_its_own() -> None:
    own = {"$ref": "#/$defs/b", "$defs": {"b": {"type": "null"}}}
    properties = {"own": own, "other": {"$ref": "#/$defs/b"}}
    definitions = {"b": {"type": "array"}}
    types = parameter_types({"properties": properties, "$defs": definitions}, keyword_budget())
    assert types == {"own": frozenset({"null"}), "other": frozenset({"array"})}


@pytest.mark.parametrize("name", ["kimi_k3", "gemma4"])
def test_a_text_of_many_markers_is_written(name: str) -> None:
    marker = {"kimi_k3": "<|sep|>", "gemma4": "<tool_call|>"}[name]
    spec = tool({"a": {"enum": [marker * 5000]}}, required=["a"])
    assert FORMATS[name].grammar([spec], "required", is_parallel=True)


def test_a_schema_that_refers_to_itself_is_enforced_as_far_as_it_is_followed() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"list": {"next": {"next": {}}}})]
    for name in FORMATS:
        properties = {"list": {"$ref": "#/$defs/node"}}
        spec = tool(properties, defs={"node": node})
        grammar = FORMATS[name].grammar([spec], "required", is_parallel=True)
        text = call(name, calls[0][1])
        assert follows(text, grammar)
        assert calls_in(FORMATS[name], text, [spec]) == calls
        strict = tool(properties, defs={"node": node}, strict=True)
        if name in GEMMA:
            with pytest.raises(InvalidRequest, match="nested too deep to be enforced"):
                FORMATS[name].grammar([strict], "auto", is_parallel=True)


@rows(
    ("name", "text"),
    [
        ("pythonic", "<|tool_call_start|>[f(a=" + "[" * 5000 + "<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{a:" + "{a:" * 5000 + "<tool_call|>"),
        ("json_tools", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5000 + "</tool_call>"),
        (
            "json_tools",
            '<tool_call>{"name": "f", "a": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>",
        ),
    ],
)
def test_values_that_are_nested_for_ever_are_not_followed(name: str, text: str) -> None:
    parser = FORMATS[name].parsers([])()
    events = [*parser.add(f"{text} ok"), *parser.flush()]
    assert events[-1] == ContentPiece(" ok")
    assert parser.has_calls is True
