"""The input of tools that take text: its definition as one regular expression.

Inside a JSON string the text is escaped.  llguidance does that to a regular expression, so a
grammar whose rules do not refer to themselves is written as one.
"""

import re
from typing import Final

from app.parsing.tool_spec import FreeformInput
from batching import lark_pattern

ANY_TEXT: Final = r"(?s:.*)"


def pattern_of(freeform: FreeformInput) -> str:
    """Return the regular expression of the texts that follow a definition; blocking.

    Raises:
        NotRegular, RequestFailed: see `lark_pattern`.
    """
    if freeform.syntax is None:
        return ANY_TEXT
    if freeform.syntax == "regex":
        return _written_regex(freeform.definition)
    return lark_pattern(freeform.definition)


def _written_regex(pattern: str) -> str:
    """Return a client's expression as it stands between slashes; all of a text has to match."""
    whole = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", pattern.removeprefix("^"))
    slashed = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", whole, flags=re.DOTALL)
    return slashed.replace("\n", r"\n")
