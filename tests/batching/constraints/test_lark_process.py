"""Lark grammars as regular expressions: what is understood, what is not, and what it costs."""

import json
from pathlib import Path

import pytest

from batching.constraints import lark_process
from batching.constraints.grammar_text import regex_grammar
from batching.constraints.lark_process import NotRegular, answer, written_pattern
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits
from tests.support.tool_walks import follows


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ('start: "a"i B? C*\nB: "b".."d"\nC: /x/i', ["a", "A", "Ad", "acxX"], ["B", "ae", ""]),
        ("start: /a.b/s /c/", ["a\nbc"], ["abc"]),
        ("start: A~2 B~1..3\nA: /a/\nB: /b/\n", ["aab", "aabbb"], ["ab", "aabbbb"]),
        ("start: [A] (B | C)\nA: /a/\nB: /b/\nC: /c/", ["b", "ac"], ["a", "bc"]),
        ("?start: a\n!a.2: /x/\n  | /y/ -> why\n  # that is it", ["x", "y"], ["xy"]),
        ("%import common.INT -> N\n%import common.CNAME\nstart: N+ CNAME?", ["12", "1a_2"], ["a"]),
        ("%import common.WS\n%ignore WS\n%ignore /#[^\\n]*/\nstart: A B\nA: /a/ /a/\nB: /b/",
         ["aab", " aa # b\n b\n"], ["a ab"]),
        ('start: "\\x41\\u00e9" "/" /\\//', ["Aé//"], ["A/"]),
        ('start: a_rule\na_rule: "+" | "\\t"', ["+", "\t"], ["++"]),
        ('start: (\n"a"\n|\n"b"\n)', ["a", "b"], ["ab"]),
        ("start: __a?\n!?__a: /x/", ["", "x"], ["xx"]),
    ],
)  # fmt: skip
def test_what_a_lark_grammar_may_have(definition: str, good: list[str], bad: list[str]) -> None:
    grammar = regex_grammar(written_pattern(definition))
    assert [text for text in good if not follows(text, grammar)] == []
    assert [text for text in bad if follows(text, grammar)] == []


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("start: a\na: b\nb: a", "its rule 'a' refers to itself"),
        ("start: a", "it has no rule 'a'"),
        ("", "it has no rule 'start'"),
        ("first: /a/", "it has no rule 'start'"),
        ("start: %json {}", "it has '%json' in a rule"),
        ('start: <[1]> "a"', "it has '<' in a rule"),
        ("start: /a/ & /b/", "it has '&' in a rule"),
        ('start: ("a"', "')' is missing in a rule"),
        ("start: /a/~n", "'n' is no number of repetitions"),
        ('start: "ab".."c"', "a range is between two characters"),
        ('start: "a"../b/', "/b/ is no string"),
        ('start: "\\Uffffffff"', "is no string"),
        ('start: "a', '" is not closed'),
        ("start: /a", "/ is not closed"),
        ('start: "\\x4"', "is no string"),
        ("%import common.SOMETHING\nstart: /a/", "it imports 'SOMETHING'"),
        ("%import python.NAME\nstart: /a/", "it has '%import python . NAME'"),
        ("%declare A\nstart: A", "it has '%declare A'"),
        ("start", "it has 'start'"),
    ],
)  # fmt: skip
def test_what_is_not_regular_says_why(definition: str, reason: str) -> None:
    with pytest.raises(NotRegular) as caught:
        written_pattern(definition)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (
            "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(20)) + "\na20: /x/\nstart: a0",
            "too long",
        ),
        ("start: " + "A " * 30_000 + "\nA: /a/", "too long"),
        ("start: " + "A | " * 30_000 + "A\nA: /a/", "too long"),
        ("start: " + "(" * 30_000, "groups are nested too deep"),
        (
            "\n".join(f"a{i}: a{i + 1}" for i in range(100)) + "\nstart: a0",
            "rules are nested too deep",
        ),
        ('start: "' + '\\"' * 200_000, "is not closed"),
    ],
    ids=["doubled", "sequence", "choice", "groups", "rules", "string"],
)
def test_a_grammar_that_would_be_written_for_ever_is_not(definition: str, reason: str) -> None:
    with pytest.raises(NotRegular, match=reason):
        written_pattern(definition)


def answered(definition: str) -> dict[str, str]:
    return dict(json.loads(answer(json.dumps(definition).encode())))


def test_the_answer_is_a_pattern_or_a_short_reason() -> None:
    assert answered("start: /a/") == {"pattern": "(?:(?:(?:a)))"}
    assert answered("start: a") == {"reason": "it has no rule 'a'"}
    assert len(answered(f"start: {'a' * 10_000}")["reason"]) == 200
    # Neither its groups nor its rules are too deep, but these in each other.
    rules = [f"a{i}: {'(' * 24}a{i + 1}{')' * 24}\n" for i in range(24)]
    nested = {"reason": "it is nested too deep"}
    assert answered(f"{''.join(rules)}a24: /x/\nstart: a0") == nested


def test_a_grammar_that_would_be_read_for_ever_ends_and_the_process_goes_on(tmp_path: Path) -> None:
    """Should the reader be as quadratic again as it once was."""
    source = Path(lark_process.__file__).read_text(encoding="utf-8")
    slow = source.replace("[!?]{0,2}[A-Za-z_]", "[!?]*[A-Za-z]")
    assert slow != source
    program = tmp_path / "slow.py"
    program.write_text(slow, encoding="utf-8")
    sandbox = Sandbox(str(program), SandboxLimits(cpu_seconds=0))
    with pytest.raises(SandboxExceeded):
        sandbox.ask(json.dumps("!" * 65_536).encode())
    assert json.loads(sandbox.ask(json.dumps("start:").encode())) == {"pattern": "(?:)"}
