"""`response_format` and `structured_outputs`: what they ask for, and what they must not say."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.api.openai.schemas.structured_outputs import ResponseFormat, StructuredOutputs
from batching import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from tests.support.rows import rows

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def fault(kind: type[ResponseFormat | StructuredOutputs], body: Any) -> tuple[str, str]:
    """Return the first fault's place and what is said of it."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    error = caught.value.errors()[0]
    named_by_rule = error.get("ctx", {}).get("param")
    where = [*error["loc"], *([named_by_rule] if named_by_rule else [])]
    return ".".join(map(str, where)), error["msg"]


# response_format


def test_text_is_any_text() -> None:
    assert ResponseFormat.model_validate({"type": "text"}).grammar() is None


def test_any_json_object() -> None:
    body = {"type": "json_object"}
    assert ResponseFormat.model_validate(body).grammar() == json_object_grammar()


@rows("extra", [{}, {"strict": False}, {"strict": True}, {"description": "d"}])
def test_a_schema_is_enforced_strict_or_not(extra: dict[str, Any]) -> None:
    body = ResponseFormat.model_validate(named(schema=SCHEMA, **extra))
    assert body.grammar() == json_schema_grammar(SCHEMA)


@rows(
    "body",
    [
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA, "json_schema": None},
    ],
)
def test_a_schema_needs_no_name(body: dict[str, Any]) -> None:
    assert ResponseFormat.model_validate(body).grammar() == json_schema_grammar(SCHEMA)


@pytest.mark.parametrize("schema", [{}, {"schema": None}])
def test_a_name_alone_means_a_json_object(schema: dict[str, Any]) -> None:
    assert ResponseFormat.model_validate(named(**schema)).grammar() == json_object_grammar()


def test_a_name_has_64_letters_digits_dashes_and_lines() -> None:
    ResponseFormat.model_validate(named(name="aZ09_-" * 10 + "abcd"))
    for name in ("", "a b", "é", "a" * 65, "a\n", 1):
        assert fault(ResponseFormat, named(name=name))[0] == "json_schema.name"


@rows(
    ("body", "param"),
    [
        ({}, "type"),
        ({"type": "structural_tag"}, "type"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": None}, "json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "json_schema"),
        ({"type": "text", "schema": SCHEMA}, "schema"),
        (named(schema=SCHEMA) | {"schema": SCHEMA}, "schema"),
        ({"type": "json_object", "schema": "{}"}, "schema"),
        (named(schema="{}"), "json_schema.schema"),
        (named(schema=[]), "json_schema.schema"),
        (named(strict="yes"), "json_schema.strict"),
        (named(description="\ud800"), "json_schema.description"),
    ],
)
def test_a_format_that_says_too_little_or_nonsense(body: Any, param: str) -> None:
    assert fault(ResponseFormat, body)[0] == param


@pytest.mark.parametrize(
    ("schema", "message"),
    [(nested(100_000), "deeper than 100"), ({"title": 200_000 * "a"}, "longer than")],
    ids=["deep", "long"],
)
def test_a_schema_has_a_size(schema: dict[str, Any], message: str) -> None:
    param, reported = fault(ResponseFormat, named(schema=schema))
    assert param == "json_schema.schema"
    assert message in reported


# structured_outputs


@rows(
    ("body", "grammar"),
    [
        ({"json": SCHEMA}, json_schema_grammar(SCHEMA)),
        ({"json": '{"type": "integer"}'}, json_schema_grammar({"type": "integer"})),
        ({"json": {}}, json_schema_grammar({})),
        ({"regex": "[ab]+"}, regex_grammar("[ab]+")),
        ({"regex": ""}, regex_grammar("")),
        ({"choice": ["yes", "no"]}, choice_grammar(["yes", "no"])),
        ({"grammar": 'start: "a"'}, lark_grammar('start: "a"')),
        ({"json_object": True}, json_object_grammar()),
        ({"json_object": False, "regex": "a", "choice": None}, regex_grammar("a")),
    ],
)
def test_each_way_to_ask(body: dict[str, Any], grammar: str) -> None:
    assert StructuredOutputs.model_validate(body).grammar() == grammar


@rows(
    "body", [{}, {"json_object": False}, {"regex": "a", "choice": ["a"]}, {"json": {}, "regex": ""}]
)
def test_exactly_one_way_is_asked_for(body: dict[str, Any]) -> None:
    assert "exactly one of" in fault(StructuredOutputs, body)[1]


@rows(
    ("body", "param"),
    [
        ({"json": "{"}, "json"),
        ({"json": "[" * 100_000}, "json"),
        ({"json": "[]"}, "json"),
        ({"json": 1}, "json"),
        ({"json": nested(101)}, "json"),
        ({"regex": 1}, "regex"),
        ({"regex": "a" * 16_385}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"choice": ["a", ""]}, "choice.1"),
        ({"choice": ["a", 1]}, "choice.1"),
        ({"choice": ["a" * 1025]}, "choice.0"),
        ({"choice": ["a"] * 1025}, "choice"),
        ({"grammar": "a" * 65_537}, "grammar"),
        ({"json_object": "true"}, "json_object"),
        ({"json": {}, "structural_tag": "{}"}, "structural_tag"),
        ({"json": {}, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": True}, "disable_any_whitespace"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(body: dict[str, Any], param: str) -> None:
    assert fault(StructuredOutputs, body)[0] == param
