"""A grammar that allows reasoning before the constrained content."""

import json
from typing import Any

from app.parsing.tool_grammar import Marker
from batching import GrammarText


def after_reasoning(
    grammar: GrammarText, start: Marker, end: Marker, *, is_open: bool
) -> GrammarText:
    """Return a grammar of reasoning, then line breaks, then `grammar`.

    With `is_open` the prompt ended inside the reasoning; without, reasoning is optional and begins
    with the start marker.
    """
    grammars: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    content, *others = grammars
    reasoning = "thought" if is_open else f"({start.symbol} thought)?"
    rules = [
        f"start: {reasoning} @content",
        f"thought: TEXT {end.symbol} BREAKS"
        if end.token_id is not None
        else "thought: spelt BREAKS",
        f"spelt[lazy]: TEXT {Marker(end.text).symbol}",
        "TEXT: /(.|\\n)*/",
        "BREAKS: /\\n*/",
    ]
    first = {"lark_grammar": "\n".join(rules)}
    return GrammarText(json.dumps({"grammars": [first, content | {"name": "content"}, *others]}))
