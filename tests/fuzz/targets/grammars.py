"""Grammars that a client writes: of custom tools (Lark, patterns), and of llama.cpp (GBNF)."""

from typing import Final

from app.parsing.grammars.freeform import pattern_of
from app.parsing.tool_spec import FreeformInput
from batching import InvalidRequest
from batching.constraints.gbnf import gbnf_grammar
from batching.constraints.grammar_text import (
    GrammarText,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
)
from batching.constraints.lark_process import NotRegular
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target
from tests.support.tool_formats import COMPILER

_WORDS: Final = (
    *(b"start: ", b"\n", b"a: ", b"A: ", b"/[a-z]+/", b"/a/i", b'"a"', b'"a"i', b'"a".."z"'),
    *(b" | ", b"%ignore ", b"%import common.WS", b"%regex", b"%json {}", b"~ 2", b"~ 1..3", b"->"),
    *(b"(", b")", b"*", b"+", b"?", b"[", b"]", b"!", b"//", b"#", b"\\", b"\\x41", b"root ::= "),
    *(b"{1,3}", b"<[1]>", b"[^a-z]", b"(?i:a)", b"\\d", b"$", b"^", b"lazy", b"@a", b"INT"),
    *(b"ESCAPED_STRING"),
)

# Its process is started before there are limits.
COMPILER.compile(json_object_grammar(), param="tools")


def run(data: bytes) -> None:
    """Each reader accepts it or says why not, and so does the compiler of what they make of it."""
    text = data.decode(errors="replace")
    _compile(lark_grammar(text))
    for syntax in ("lark", "regex"):
        try:
            _compile(regex_grammar(pattern_of(FreeformInput(syntax, text))))
        except NotRegular:
            continue
    try:
        _compile(gbnf_grammar(text))
    except InvalidRequest:
        return


def _compile(grammar: GrammarText) -> None:
    try:
        COMPILER.compile(grammar, param="tools")
    except InvalidRequest:
        return


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS))
