"""Constraints of the content: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import MAX_SCHEMA_LENGTH, JsonSchema, Text, field_error
from batching import (
    GrammarText,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

_MAX_CHOICES: Final = 1024
_MAX_CHOICE_LENGTH: Final = 1024
_MAX_PATTERN_LENGTH: Final = 16 * 1024
MAX_GRAMMAR_LENGTH: Final = 64 * 1024
# A schema that is sent as text may have line breaks and indentations besides.
_MAX_SCHEMA_TEXT_LENGTH: Final = 4 * MAX_SCHEMA_LENGTH

# Further fields of vLLM's object.
_STRUCTURED_OUTPUTS: Final[Defaults] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}


def _parsed(value: Any) -> Any:
    """Return a schema that was sent as text."""
    if not isinstance(value, str):
        return value
    if len(value) > _MAX_SCHEMA_TEXT_LENGTH:
        raise field_error(f"it is longer than {_MAX_SCHEMA_TEXT_LENGTH} characters")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise field_error("the text is not valid JSON") from None


JsonSchemaOrText = Annotated[
    JsonSchema, BeforeValidator(_parsed, json_schema_input_type=dict[str, Any] | str)
]
Choice = Annotated[Text, Field(min_length=1, max_length=_MAX_CHOICE_LENGTH)]


class NamedSchema(RequestModel):
    """`strict: false` is enforced all the same; without a schema it is any JSON object."""

    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: JsonSchema = Field(alias="schema", default_factory=lambda: {"type": "object"})
    strict: bool = False


class ResponseFormat(RequestModel):
    """`schema` stands beside `json_object`, or for `json_schema`, with llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        has_schema = self.json_schema is not None or self.schema_ is not None
        if self.type == "json_schema" and not has_schema:
            raise field_error("the type json_schema needs it", "json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise field_error("this needs the type json_schema", "json_schema")
        if self.schema_ is not None and (self.type == "text" or self.json_schema is not None):
            raise field_error("this needs the type json_object, or no json_schema", "schema")
        return self

    def grammar(self) -> GrammarText | None:
        """Return the grammar of the content; None if any text is allowed."""
        if self.json_schema is not None:
            return json_schema_grammar(self.json_schema.schema_)
        if self.schema_ is not None:
            return json_schema_grammar(self.schema_)
        return json_object_grammar() if self.type == "json_object" else None


class StructuredOutputs(RequestModel):
    """Exactly one of its fields is set."""

    defaults = _STRUCTURED_OUTPUTS

    json_: JsonSchemaOrText | None = Field(default=None, alias="json")
    regex: Text | None = Field(default=None, max_length=_MAX_PATTERN_LENGTH)
    choice: list[Choice] | None = Field(default=None, min_length=1, max_length=_MAX_CHOICES)
    grammar_: Text | None = Field(default=None, alias="grammar", max_length=MAX_GRAMMAR_LENGTH)
    json_object: bool = False

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        if len(self._given()) != 1:
            message = "give exactly one of json, regex, choice, grammar and json_object: true"
            raise field_error(message)
        return self

    def _given(self) -> list[Callable[[], GrammarText]]:
        """Return how to build the grammar of each field that is set."""
        ways: list[Callable[[], GrammarText]] = []
        if (schema := self.json_) is not None:
            ways.append(lambda: json_schema_grammar(schema))
        if (pattern := self.regex) is not None:
            ways.append(lambda: regex_grammar(pattern))
        if (choices := self.choice) is not None:
            ways.append(lambda: choice_grammar(choices))
        if (text := self.grammar_) is not None:
            ways.append(lambda: lark_grammar(text))
        if self.json_object:
            ways.append(json_object_grammar)
        return ways

    def grammar(self) -> GrammarText:
        """Return the grammar of the content."""
        return self._given()[0]()
