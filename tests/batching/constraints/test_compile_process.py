"""What a grammar may take before it is compiled in the server."""

from typing import Final

import pytest

from batching.constraints.compile_process import SpecialTokens, answer
from batching.constraints.grammar import _SANDBOX
from batching.constraints.grammar_text import json_object_grammar, lark_grammar
from batching.sandbox.sandbox import SandboxExceeded

TOKENS: Final = SpecialTokens(300, {298: "<|end|>", 299: "<|im_end|>"})
GRAMMAR: Final = json_object_grammar()


def test_what_overflows_the_stack_ends_the_process() -> None:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    with pytest.raises(SandboxExceeded):
        _SANDBOX.ask(TOKENS.line(lark_grammar(f'start: r0\n{rules}r4000: "a"\n')))
    assert _SANDBOX.ask(TOKENS.line(GRAMMAR)) == b""


@pytest.mark.parametrize(
    "grammar", [GRAMMAR, lark_grammar("start: <|im_end|>"), lark_grammar("start: foo"), "\ud800"]
)
def test_a_grammar_that_can_be_tried_has_an_empty_answer(grammar: str) -> None:
    assert answer(TOKENS.line(grammar)) == b""
