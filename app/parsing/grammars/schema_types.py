"""Which types of values a JSON Schema allows, for formats that write each type in its own way."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Schema = Mapping[str, Any]

TYPES: Final = ("string", "number", "boolean", "null", "object", "array")

_NAMES: Final[Mapping[type, str]] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}

# References and alternatives that are followed into each other, and in all.
_MAX_DEPTH: Final = 16
_MAX_STEPS: Final = 500
_DEFINITIONS: Final = ("$defs", "definitions")
# How Python writes JSON's literals, by their type: some models and templates write calls so.
PYTHON_WORDS: Final = {"boolean": ("True", "False"), "null": ("None",)}


def variants(schema: Any, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema, each of one `type`, or of any type where that is open.

    root: the schema that holds the definitions.
    """
    return list(_Variants(root).of(schema, _MAX_DEPTH))


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the types of the values; integers are numbers."""
    types = {variant.get("type") for variant in variants(schema, root)}
    if None in types:
        return frozenset(TYPES)
    return frozenset("number" if name == "integer" else str(name) for name in types)


def nested(schema: Any, root: Schema) -> Any:
    """Return a schema with the definitions of the one that it is a part of."""
    if not isinstance(schema, Mapping):
        return schema
    return {key: root[key] for key in _DEFINITIONS if key in root} | dict(schema)


def type_of(value: Any) -> str:
    """Return the type of a JSON value; an integer is a number."""
    return _NAMES.get(type(value), "null")


class _Variants:
    """Finds the alternatives of a schema, in a bounded number of steps."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_steps = 0

    def of(self, schema: Any, depth: int) -> Iterator[Schema]:
        self._num_steps += 1
        if not isinstance(schema, Mapping) or depth == 0 or self._num_steps > _MAX_STEPS:
            yield {}
            return
        for key in ("anyOf", "oneOf", "allOf", "$ref"):
            if key in schema:
                rest = {name: value for name, value in schema.items() if name != key}
                for part in _parts(schema[key], key, self._root):
                    yield from self.of(rest | dict(part), depth - 1)
                return
        yield from _typed(schema)


def _parts(value: Any, key: str, root: Schema) -> Sequence[Schema]:
    """Return what a keyword adds to its schema, as alternatives."""
    if key == "$ref":
        return [_definition(value, root)]
    parts = [part for part in value if isinstance(part, Mapping)]
    if key == "allOf":
        return [{name: v for part in parts for name, v in part.items()}]
    return parts or [{}]


def _definition(reference: Any, root: Schema) -> Schema:
    match str(reference).split("/"):
        case ["#", ("$defs" | "definitions") as key, name]:
            found = root.get(key, {}).get(name)
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
