"""The input of a custom tool: the same, however its JSON is split."""

import itertools
import json

from hypothesis import example, given, strategies as st

from app.api.openai.custom_input import CustomInput
from tests.support.rows import rows


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join([*(reader.push(piece) for piece in pieces), reader.flush()])


def split(text: str, cuts: list[int]) -> list[str]:
    ends = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


TEXTS = st.text(st.characters(codec="utf-8")) | st.text('\\"nu0😊\n')


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 200), max_size=8))
@example("😊", True, list(range(30)))
@example('\\"\\\\', False, list(range(30)))
def test_a_text_comes_out_as_it_was(text: str, escapes: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escapes)
    assert read(split(arguments, cuts)) == text


def test_text_is_read_as_it_arrives() -> None:
    reader = CustomInput()
    pieces = ['{"in', 'put": "a', "b\\", "n\\u00", "e9\\ud83d", "\\ude0a", 'c"', "}", " "]
    assert [reader.push(p) for p in pieces] == ["", "a", "b", "\n", "é", "😊", "c", "", ""]
    assert reader.flush() == ""


@rows(
    ("arguments", "text"),
    [
        ('{"a": 1, "input": "x"}', "x"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("[1]", "[1]"),
        ('{"in put', ""),
        ('{"inputs": "x', '{"inputs": "x'),
        ('{"patch', '{"patch'),
        ("{}", "{}"),
        ("*** Begin", "*** Begin"),
        ("", ""),
        ('{"input":' + " " * 400 + '"x"}', "x"),
        ("[" * 100_000, "[" * 100_000),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{"input": "bad \\x"}', "bad \\x"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "line\nbreak"}', "line\nbreak"),
    ],
)
def test_what_is_no_such_object_is_not_lost(arguments: str, text: str) -> None:
    assert read([arguments]) == text
    assert read([*list(arguments)[:2000], arguments[2000:]]) == text


@given(st.integers(1), st.text(" \n\t\r", max_size=5), st.lists(st.integers(0, 200), max_size=3))
def test_a_call_that_is_cut_before_its_text_has_no_input(
    length: int, blanks: str, cuts: list[int]
) -> None:
    begin = f'{blanks}{{{blanks}"input"{blanks}:{blanks}"'
    assert read(split(begin[: length % (len(begin) + 1)], cuts)) == ""
