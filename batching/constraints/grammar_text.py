"""The texts of grammars, which need no model.

JSON departs from JSON Schema where llguidance does: properties come in the order of the schema,
numbers and literals have one spelling, what `additionalProperties` or `patternProperties` let in
may come twice under one name, and negated classes of patterns let no NUL in.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NewType

from llguidance import LLMatcher

from batching.constraints.json_patterns import with_enforced_patterns
from batching.errors import InvalidRequest

GrammarText = NewType("GrammarText", str)

# llguidance reads 127 levels, its own included.
MAX_SCHEMA_DEPTH: Final = 100

# Between two JSON tokens: nothing, a space, or a line break and an indentation.  Unbounded, a
# small model can write blanks until its tokens are used up.
_JSON_OPTIONS: Final = {"whitespace_pattern": r" |\n[ \t]{0,32}"}

# Negated classes as a whole, and escapes outside of them.
_ESCAPES: Final = re.compile(r"\[\^\]?(?:\\.|[^\]\\])*\\?(?:\]|\Z)|\\.", re.DOTALL)


class InvalidGrammar(InvalidRequest):
    """A grammar that is malformed, too large, or beyond what can be enforced."""


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """Return the rule for JSON of a schema inside a lark grammar."""
    return "%json " + json.dumps(_with_options(schema))


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> GrammarText:
    """Return the grammar of JSON that follows a schema.

    Raises:
        InvalidGrammar: the schema is nested too deep to be written down.
    """
    grammar = {"json_schema": _with_options(schema)}
    return GrammarText(json.dumps({"grammars": [grammar]}))


def json_object_grammar() -> GrammarText:
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> GrammarText:
    r"""Return the grammar of texts that a pattern matches from beginning to end.

    As in the patterns of JSON schemas `\d` is an ASCII digit: one of another script begins with a
    byte that many models prefer to digits.
    """
    ascii_digits = _ESCAPES.sub(lambda m: "[0-9]" if m[0] == r"\d" else m[0], pattern)
    return GrammarText(LLMatcher.grammar_from_regex(ascii_digits))


def choice_grammar(choices: Sequence[str]) -> GrammarText:
    """Return the grammar of these texts; there must be at least one."""
    literals = " | ".join(map(json.dumps, choices))
    return lark_grammar(f"start: CHOICE\nCHOICE: {literals}")


def lark_grammar(text: str) -> GrammarText:
    return GrammarText(json.dumps({"grammars": [{"lark_grammar": text}]}))


def _with_options(schema: Mapping[str, Any] | bool) -> Any:
    """Return a schema with our options; the client's could switch off what cannot be enforced."""
    if isinstance(schema, bool):
        return schema
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidGrammar(
            "schema", f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels"
        )
    return {**with_enforced_patterns(schema), "x-guidance": _JSON_OPTIONS}


def _depth(value: Any) -> int:
    """Count the levels of a JSON value, one more than allowed at most."""
    level = [value]
    for depth in range(MAX_SCHEMA_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return depth
        level = below
    return MAX_SCHEMA_DEPTH + 1
