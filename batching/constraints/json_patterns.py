"""The patterns of JSON schemas, such that llguidance enforces them.

A class of characters that has all control characters but not `"` or `\\`, such as `[^"]`, matches
these two as well in llguidance's JSON, as escapes.  So NUL, which is hardly ever meant, is left
out of negated classes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

# Directly after the ^ a bracket or a hyphen stands for itself.
_NEGATED: Final = re.compile(r"(\\.)|\[\^([\]-]?)", re.DOTALL)
# Keywords whose values are schemas by name, and those whose values are no schemas.
_NAMED: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})


def with_enforced_patterns(schema: Any) -> Any:
    """Return a schema that allows the same JSON, except for NUL in negated classes of patterns."""
    if isinstance(schema, list):
        return [with_enforced_patterns(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _enforced(key, value) for key, value in schema.items()}


def _enforced(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key == "pattern" and isinstance(value, str):
        return _without_nul(value)
    if key in _NAMED and isinstance(value, Mapping):
        name: Callable[[str], str] = _without_nul if key == "patternProperties" else str
        return {name(each): with_enforced_patterns(inner) for each, inner in value.items()}
    return with_enforced_patterns(value)


def _without_nul(pattern: str) -> str:
    return _NEGATED.sub(lambda found: found[1] or rf"[^\x00{_escaped(found[2])}", pattern)


def _escaped(member: str) -> str:
    return f"\\{member}" if member else ""
