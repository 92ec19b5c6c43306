"""Rules for the parameters of a call that are written as literals."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from app.parsing.grammars.schema_types import PYTHON_WORDS, Property, Schema, Schemas, is_any_text
from app.parsing.grammars.tool_grammar import TEXT_KEYWORDS, Rules, check_key, literal, text_schema
from app.parsing.tool_spec import FreeformInput, ToolSpec
from batching import InvalidRequest

_KEY: Final = re.compile(r"[^\W\d]\w*")
_STRUCTURE: Final = frozenset(
    {"properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
)
_PLAIN: Final = TEXT_KEYWORDS | _STRUCTURE

# Text between single quotes as Python has it.
_PYTHON_STRING: Final = r"/'([^'\\\x00-\x1f]|\\['\\nrt])*'/"

# Schemas that are nested deeper are not followed.
_MAX_DEPTH: Final = 8


class LiteralRules:
    """Writes the rules of one tool's parameters.

    quote: on both sides of a text; "" for Python, which has JSON's literals and some more here.
    """

    def __init__(
        self, rules: Rules, tool: ToolSpec, *, assign: str, comma: str, quote: str
    ) -> None:
        self._rules = rules
        self._tool = tool
        self._assign = assign
        self._comma = rules.spell(comma)
        self._quote = quote

    def parameters(self, name: str) -> str:
        """Return the expression of all parameters."""
        schemas = self._rules.schemas(self._tool.parameters)
        properties = schemas.properties(self._tool.parameters)
        return self._pairs(name, properties, schemas, self._assign, _MAX_DEPTH)

    def _pairs(
        self, name: str, properties: Iterable[Property], schemas: Schemas, assign: str, depth: int
    ) -> str:
        """Return pairs in the schema's order, or sorted, as Gemma's templates have them."""
        pairs = list(properties)
        if self._quote:
            pairs.sort(key=lambda pair: pair.key.lower())
        first = rest = self._rules.add(f"{name}_end", '""')
        for index, (key, schema, is_required) in reversed(list(enumerate(pairs))):
            check_key(key, _KEY)
            values = self._value(f"{name}_{index}", schema, schemas, depth)
            pair = self._rules.choice(f"{name}_{index}", values, before=literal(key + assign))
            firsts = [f"{pair} {rest}", *([] if is_required else [first])]
            rests = [f"{self._comma} {pair} {rest}", *([] if is_required else [rest])]
            first = self._rules.add(f"{name}_first_{index}", " | ".join(firsts))
            rest = self._rules.add(f"{name}_rest_{index}", " | ".join(rests))
        return first

    def _value(self, name: str, schema: Any, schemas: Schemas, depth: int) -> Iterator[str]:
        """Yield the ways to write a value."""
        if (freeform := self._tool.freeform) is not None:
            yield self._text(name, freeform)
            return
        schemas = schemas.inside(schema)
        for index, variant in enumerate(schemas.variants(schema)):
            if self._quote:
                yield from self._quoted(f"{name}_{index}", variant, schemas, depth)
            else:
                yield from self._python(f"{name}_{index}", variant, schemas)

    def _text(self, name: str, freeform: FreeformInput) -> str:
        if not self._quote:
            return self._rules.json(f"{name}_json", text_schema(self._tool.name, freeform))
        quote = self._rules.spell(self._quote)
        return f"{quote} {self._rules.freeform(f'{name}_text', freeform, self._quote)}"

    def _python(self, name: str, variant: Schema, schemas: Schemas) -> Iterator[str]:
        yield self._rules.json(f"{name}_json", schemas.with_definitions(variant))
        kind = variant.get("type")
        if "enum" in variant and kind == "string":
            yield from (literal(repr(text)) for text in variant["enum"] if repr(text)[0] == "'")
        elif kind in PYTHON_WORDS and "enum" not in variant:
            yield from map(literal, PYTHON_WORDS[kind])
        elif kind is None or (is_any_text(variant) and set(variant) <= TEXT_KEYWORDS):
            yield _PYTHON_STRING

    def _quoted(self, name: str, variant: Schema, schemas: Schemas, depth: int) -> Iterator[str]:
        if self._tool.strict and (kept := sorted(set(variant) - _PLAIN)) and not _is_json(variant):
            message = (
                f"{kept[0]!r} of a {variant.get('type')} cannot be enforced in this model's format"
            )
            raise InvalidRequest("tools", message)
        if self._tool.strict and not depth:
            raise InvalidRequest("tools", "the schema is nested too deep to be enforced")
        quote = self._rules.spell(self._quote)
        match variant.get("type") if depth else None:
            case "string" if "enum" in variant:
                yield from (f"{quote} {self._rules.spell(t)} {quote}" for t in variant["enum"])
            case "string":
                yield f"{quote} {self._rules.text(f'{name}_text', self._quote)}"
            case "array":
                yield self._array(name, variant, schemas, depth)
            case "object" if variant.get("properties"):
                yield self._object(name, variant, schemas, depth)
            case "object":
                self._add_any()
                yield "any_object"
            case None:
                yield self._add_any()
            case _:
                yield self._rules.json(f"{name}_json", schemas.with_definitions(variant))

    def _object(self, name: str, variant: Schema, schemas: Schemas, depth: int) -> str:
        properties = schemas.properties(variant)
        return f'"{{" {self._pairs(f"{name}_pair", properties, schemas, ":", depth - 1)} "}}"'

    def _array(self, name: str, variant: Schema, schemas: Schemas, depth: int) -> str:
        values = self._value(f"{name}_item", variant.get("items", {}), schemas, depth - 1)
        item = self._rules.choice(f"{name}_item", values)
        least, most = variant.get("minItems", 0), variant.get("maxItems")
        more = f"({self._comma} {item}){{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
        items = f"{item} {more}"
        if most == 0:
            return '"[" "]"'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _add_any(self) -> str:
        """Return the rule of any value, whose parts are added once."""
        quote = self._rules.spell(self._quote)
        comma = self._comma
        if not self._rules.has("any_value"):
            json = self._rules.json("any_json", {"type": ["number", "boolean", "null"]})
            text = f"{quote} {self._rules.text('any_text', self._quote)}"
            self._rules.add("any_pair", r"/[A-Za-z_]\w*/ " + '":" any_value')
            self._rules.add("any_object", f'"{{" (any_pair ({comma} any_pair)*)? "}}"')
            array = f'"[" (any_value ({comma} any_value)*)? "]"'
            self._rules.add("any_value", f"{text} | {json} | any_object | {array}")
        return "any_value"


def _is_json(variant: Schema) -> bool:
    """True for a value that is written as in JSON, so all of its schema can be enforced."""
    return variant.get("type") in ("number", "integer", "boolean", "null")
