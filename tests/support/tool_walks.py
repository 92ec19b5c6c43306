"""Texts that follow a grammar of tool calls, and the calls in them."""

import json
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

from app.parsing.events import ContentPiece, ToolCallArguments, ToolCallStart
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_format import ToolFormat
from batching import GrammarText
from batching.constraints.grammar import Grammar
from tests.support.token_walk import TokenWalk
from tests.support.tool_formats import COMPILER, END_ID, VOCAB_SIZE, VOCABULARY


@cache
def compiled(grammar: GrammarText) -> Grammar:
    return COMPILER.compile(grammar, param="tools")


def walk_of(grammar: GrammarText | None) -> TokenWalk:
    """Return a walk through a grammar, at its beginning."""
    assert grammar is not None
    return TokenWalk(compiled(grammar).matcher(), VOCAB_SIZE)


def follows(text: str, grammar: GrammarText | None, *, spelt: bool = False) -> bool:
    """True if the whole text may be the answer; `spelt` has no tokens for the markers."""
    ids = [*text.encode()] if spelt else VOCABULARY.encode(text).ids
    walk = walk_of(grammar)
    return all(walk.accept(token_id) for token_id in ids) and walk.may_end([END_ID])


def calls_in(
    format_: ToolFormat, text: str, tools: Sequence[ToolSpec] = ()
) -> list[tuple[str, Any]]:
    parser = format_.parsers(tools)()
    events = [*parser.add(text), *parser.flush()]
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = ["" for _ in names]
    for event in events:
        assert not isinstance(event, ContentPiece), event
        if isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
    return [(n, json.loads(a)) for n, a in zip(names, arguments, strict=True)]


def walked(grammar: GrammarText | None, seed: int) -> str:
    """Return a text that follows a grammar, of any tokens that it allows."""
    walk, model = walk_of(grammar), Random(seed)
    ids: list[int] = []
    while END_ID not in (allowed := walk.allowed()):
        ids.append(model.choice(allowed))
        assert walk.accept(ids[-1])
    return VOCABULARY.decode(ids, False)
