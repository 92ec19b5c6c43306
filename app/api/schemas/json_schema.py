"""The form of JSON Schemas that clients send.

What reads a schema relies on the types that the standard gives to keywords:
https://json-schema.org/draft/2020-12/json-schema-validation
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from app.api.schemas.fields import field_error


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_array(value: Any) -> bool:
    return isinstance(value, list)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or _are_strings(value)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and value == int(value)


# Keywords whose values are schemas by name, lists of them, or one.
_NAMED: Final = ("properties", "$defs", "definitions")
_LISTED: Final = ("anyOf", "oneOf", "allOf")
_SINGLE: Final = ("items", "additionalProperties")
_COUNTS: Final = ("minItems", "maxItems")
# Keywords whose value may be null.
_NULLABLE: Final = ("const", "default")

_FORMS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(_NAMED, (_is_object, "an object")),
    **dict.fromkeys((*_LISTED, "enum"), (_is_array, "an array")),
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number of at least 0")),
    "required": (_are_strings, "an array of strings"),
    "type": (_is_type, "a string or an array of strings"),
}


# The names that lead to a schema: joined for an error only, since each may be long.
_Path = tuple[str, ...]


def well_formed(schema: Mapping[str, Any], path: _Path = ()) -> dict[str, Any]:
    """Return a schema without those of its keywords that are null, as some clients write none.

    Raises:
        PydanticCustomError: a keyword has another type than it may have; `path` and it are named.
    """
    kept = {key: value for key, value in schema.items() if value is not None or key in _NULLABLE}
    for key, (is_formed, what) in _FORMS.items():
        if key in kept and not is_formed(kept[key]):
            raise field_error(f"{'.'.join((*path, key))} must be {what}")
    return {key: _read(key, value, (*path, key)) for key, value in kept.items()}


def _read(key: str, value: Any, path: _Path) -> Any:
    if key in _COUNTS:
        # Serializers that know one kind of number write 1.0.
        return int(value)
    if key in _NAMED:
        return {name: _inner(schema, (*path, name)) for name, schema in value.items()}
    if key in _LISTED:
        return [_inner(schema, (*path, str(index))) for index, schema in enumerate(value)]
    return _inner(value, path) if key in _SINGLE else value


def _inner(value: Any, path: _Path) -> Any:
    """Return a schema in a schema; what is none may be `true`, or is of an older draft."""
    return well_formed(value, path) if isinstance(value, dict) else value
