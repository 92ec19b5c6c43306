"""Which types of values a JSON Schema allows, for formats that write each type in its own way."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from app.parsing.grammars.budget import Budget, ToolsTooLarge

Schema = Mapping[str, Any]

TYPES: Final = ("string", "number", "boolean", "null", "object", "array")
ANY_TYPE: Final = frozenset(TYPES)

_NAMES: Final[Mapping[type, str]] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}

# The limit of all schemas of a request.  As written they have less, but a definition is read again wherever it is used.
_MAX_KEYWORDS: Final = 256 * 1024
# References and alternatives that are followed into each other.
_MAX_DEPTH: Final = 16
_DEFINITIONS: Final = ("$defs", "definitions")
# A reference, and what changes nothing beside one.
_REFERENCE: Final = frozenset({"$ref", "title", "description", "default", "examples"})
# How Python writes JSON's literals, by their type: some models and templates write calls so.
PYTHON_WORDS: Final = {"boolean": ("True", "False"), "null": ("None",)}


def keyword_budget() -> Budget:
    """Return how many keywords of schemas, and items of their lists, may be read for a request."""
    return Budget(_MAX_KEYWORDS, "keywords, counted wherever a definition is used")


class Property(NamedTuple):
    key: str
    schema: Any
    is_required: bool


class Schemas:
    """Reads schemas that share definitions, such as those of a tool's parameters.

    Reading takes time in proportion to what it takes from the budget, which all tools of a request share.  A reference
    is followed once; what it leads to is counted for each use, since the caller goes through it again.

    Each method raises ToolsTooLarge.
    """

    def __init__(self, root: Schema, budget: Budget) -> None:
        self._definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        self._budget = budget
        self._by_reference: dict[tuple[str, int], list[Schema]] = {}

    def inside(self, schema: Any) -> "Schemas":
        """Return what reads the parts of a schema, which may have definitions of its own."""
        if not isinstance(schema, Mapping) or not any(key in schema for key in _DEFINITIONS):
            return self
        return Schemas({**self._definitions, **schema}, self._budget)

    def with_definitions(self, schema: Schema) -> Schema:
        """Return a schema that can be read alone."""
        return {**self._definitions, **schema}

    def properties(self, schema: Schema) -> list[Property]:
        """Return the properties of an object."""
        properties: Mapping[str, Any] = schema.get("properties", {})
        required: Sequence[str] = schema.get("required", ())
        self._budget.take(len(properties) + len(required))
        names = frozenset(required)
        return [Property(key, value, key in names) for key, value in properties.items()]

    def variants(self, schema: Any) -> list[Schema]:
        """Return the alternatives of a schema, each of one `type`, or of any type where that is open."""
        return self._variants(schema, _MAX_DEPTH)

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types of the values; integers are numbers."""
        types = {variant.get("type") for variant in self.variants(schema)}
        if None in types:
            return ANY_TYPE
        return frozenset("number" if name == "integer" else str(name) for name in types)

    def _variants(self, schema: Any, depth: int) -> list[Schema]:
        if not isinstance(schema, Mapping) or depth == 0:
            self._budget.take(1)
            return [{}]
        self._budget.take(_size(schema))
        if isinstance(schema.get("$ref"), str) and schema.keys() <= _REFERENCE:
            return self._referenced(schema["$ref"], depth)
        for key in ("anyOf", "oneOf", "allOf", "$ref"):
            if key in schema:
                rest = {name: value for name, value in schema.items() if name != key}
                return self._merged(rest, self._parts(key, schema[key]), depth)
        return self._counted(_typed(schema))

    def _referenced(self, reference: str, depth: int) -> list[Schema]:
        if (found := self._by_reference.get((reference, depth))) is None:
            found = self._variants(_definition(reference, self._definitions), depth - 1)
            self._by_reference[reference, depth] = found
            return found
        return self._counted(found)

    def _parts(self, key: str, value: Any) -> Sequence[Schema]:
        """Return what a keyword adds to its schema, as alternatives."""
        if key == "$ref":
            return [_definition(value, self._definitions)]
        parts = [part for part in value if isinstance(part, Mapping)]
        if key == "allOf":
            self._budget.take(sum(map(len, parts)))
            return [{name: v for part in parts for name, v in part.items()}]
        return parts or [{}]

    def _merged(self, rest: Schema, parts: Sequence[Schema], depth: int) -> list[Schema]:
        """Return the alternatives of each part beside the rest of its schema."""
        found: list[Schema] = []
        for part in parts:
            self._budget.take(len(rest) + len(part))
            found += self._variants({**rest, **part}, depth - 1)
        return found

    def _counted(self, variants: Iterable[Schema]) -> list[Schema]:
        counted: list[Schema] = []
        for variant in variants:
            self._budget.take(_size(variant))
            counted.append(variant)
        return counted


def parameter_types(parameters: Schema, budget: Budget) -> dict[str, frozenset[str]]:
    """Return the types of each of a tool's parameters; once the budget is used up, that is any type."""
    schemas = Schemas(parameters, budget)
    properties: Mapping[str, Any] = parameters.get("properties", {})
    return {key: _types_in(schemas, schema) for key, schema in properties.items()}


def _types_in(schemas: Schemas, schema: Any) -> frozenset[str]:
    try:
        return schemas.inside(schema).types(schema)
    except ToolsTooLarge:
        return ANY_TYPE


def type_of(value: Any) -> str:
    """Return the type of a JSON value; an integer is a number."""
    return _NAMES.get(type(value), "null")


def _size(schema: Schema) -> int:
    """Count the keywords, and the items of those that are lists."""
    return 1 + len(schema) + sum(len(v) for v in schema.values() if isinstance(v, list))


def _definition(reference: Any, definitions: Schema) -> Schema:
    match reference.split("/", 3) if isinstance(reference, str) else ():
        case ["#", ("$defs" | "definitions") as key, name]:
            found = definitions.get(key, {}).get(name)
            return found if isinstance(found, Mapping) else {}
    return {}


def _typed(schema: Schema) -> Iterator[Schema]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if values is not None:
        for name in dict.fromkeys(map(type_of, values)):
            if names is None or name in names or (name == "number" and "integer" in names):
                same = [value for value in values if type_of(value) == name]
                yield {**schema, "type": name, "enum": same}
    elif isinstance(names, list):
        for name in names:
            yield {**schema, "type": name}
    elif names is None and "properties" in schema:
        yield {**schema, "type": "object"}
    else:
        yield schema


def is_any_text(variant: Schema) -> bool:
    """True for a string that may be any text, or nearly."""
    return variant.get("type") == "string" and "enum" not in variant
