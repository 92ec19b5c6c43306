"""Tools that take text: their grammars, in formats with and without JSON."""

import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.parsing.tool_spec import FreeformInput, ToolSpec
from batching import InvalidRequest
from tests.support.rows import rows
from tests.support.tool_formats import FORMATS
from tests.support.tool_templates import written
from tests.support.tool_walks import calls_in, follows, walked

# Of the shape in which agents describe changes of files.
CHANGES = r"""
start: opening change+ closing
opening: "*** Open" LF
closing: "*** Close" LF?

change: added | removed | edited   // one file each
added: "*** New: " path LF plus+
removed: "*** Gone: " path LF
edited: "*** Edit: " path LF moved? hunk?
moved: "*** To: " path LF
hunk: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End" LF
plus: "+" /(.*)/ LF -> plus

path: /(.+)/
%import common.LF
"""
CHANGED = (
    '*** Open\n*** New: a "b".py\n+x = "\\n" <b> & \'c\'\n+\n*** Edit: c.py\n@@ def f\n-a\n+b\tc\n d\n'
    "*** End\n*** Gone: e\n*** Close"
)
SUMS = 'start: sum\nsum: part | sum "+" part\npart: /[0-9]+/ | "(" sum ")"\n%ignore " "'

LARK = FreeformInput("lark", CHANGES)
REGEX = FreeformInput("regex", r"^[a-z]+\d{2}/x\.y \"é\"\n$")
RECURSIVE = FreeformInput("lark", SUMS)
IN_JSON = ("general", "json_tools", "kimi_k2", "mistral", "mistral_args", "mistral_ids", "pythonic")
INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def tools(freeform: FreeformInput) -> list[ToolSpec]:
    return [ToolSpec("patch", INPUT, freeform=freeform), ToolSpec("now", {"properties": {}})]


def as_written(name: str, text: str) -> str:
    """Return a call in the format, in the spelling that the grammar asks for."""
    call = written(name, [("patch", {"input": text})])
    if name == "pythonic":
        return call.replace(repr(text), written("json_tools", [("f", {"a": text})])[45:-15])
    if name == "minicpm5" and "<![CDATA[" not in call:
        return call.replace(text, f"<![CDATA[{text}]]>")
    return call


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", FORMATS)
class TestFreeform:
    @pytest.mark.parametrize(
        ("freeform", "text", "wrong"),
        [
            (LARK, CHANGED, [CHANGED.replace("\n+b", "\n?b"), CHANGED[:-4], "no", CHANGED + "x"]),
            (REGEX, 'abc12/x.y "é"\n', ["abc12/x.y", 'abc1/x.y "é"\n']),
            (FreeformInput(), "any <b> & 'x' \"y\"\n", []),
        ],
        ids=["lark", "regex", "any"],
    )
    def test_the_text_follows_its_definition(
        self, name: str, choice: Any, freeform: FreeformInput, text: str, wrong: list[str]
    ) -> None:
        grammar = FORMATS[name].grammar(tools(freeform), choice, is_parallel=True)
        call = as_written(name, text)
        assert follows(call, grammar)
        assert calls_in(FORMATS[name], call, tools(freeform)) == [("patch", {"input": text})]
        assert not any(follows(as_written(name, each), grammar) for each in wrong)

    def test_a_grammar_that_refers_to_itself_is_for_text_without_quotes(
        self, name: str, choice: Any
    ) -> None:
        if name in IN_JSON:
            with pytest.raises(InvalidRequest, match=r"'patch'.*'sum' refers to itself") as caught:
                FORMATS[name].grammar(tools(RECURSIVE), choice, is_parallel=True)
            assert caught.value.param == "tools"
        else:
            grammar = FORMATS[name].grammar(tools(RECURSIVE), choice, is_parallel=True)
            assert follows(as_written(name, "(1 + 2)+3"), grammar)
            assert not follows(as_written(name, "(1 + 2"), grammar)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=2, deadline=None)
@given(st.integers(0))
def test_whatever_the_model_prefers_follows_the_definition(name: str, seed: int) -> None:
    freeform = FreeformInput(
        "lark", 'start: ("a" | "\\n" | "\\"" | "\\\\")~0..9 [/[<&x]/] END\nEND: "."'
    )
    wanted = tools(freeform)[:1]
    text = walked(FORMATS[name].grammar(wanted, "required", is_parallel=False), seed)
    ((called, arguments),) = calls_in(FORMATS[name], text, wanted)
    assert called == "patch"
    assert re.fullmatch(r'[a\n"\\]{0,9}[<&x]?\.', arguments["input"])


def test_a_grammar_that_would_be_written_for_ever_is_not() -> None:
    rules = "".join(f"a{index}: a{index + 1} a{index + 1}\n" for index in range(20))
    doubled = tools(FreeformInput("lark", f"{rules}a20: /x/\nstart: a0"))
    with pytest.raises(InvalidRequest, match=r"'patch' cannot be enforced .*: it is too long"):
        FORMATS["json_tools"].grammar(doubled, "required", is_parallel=True)


@rows(
    ("pattern", "text"),
    [("^a$", "a"), (r"a\$", "a$"), (r"\\$", "\\"), ("a/b\n", "a/b\n"), (r"\/[/]", "//")],
)
def test_all_of_a_text_matches_a_regular_expression(pattern: str, text: str) -> None:
    freeform = FreeformInput("regex", pattern)
    for name in ("json_tools", "glm47", "qwen3_coder"):
        grammar = FORMATS[name].grammar(tools(freeform), "required", is_parallel=True)
        assert follows(written(name, [("patch", {"input": text})]), grammar)
        assert not follows(written(name, [("patch", {"input": f"{text}?"})]), grammar)
