"""Lark grammars that another process reads."""

from pathlib import Path

import pytest

from batching.constraints import lark_pattern as caller
from batching.constraints.kept_process import KeptProcesses
from batching.constraints.lark_pattern import lark_pattern
from batching.constraints.lark_process import NotRegular
from batching.errors import RequestFailed


def test_a_grammar_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lark_pattern.cache_clear()
    assert lark_pattern('start: "a"') == "(?:(?:(?:a)))"
    monkeypatch.setattr(caller, "_PROCESSES", None)
    assert lark_pattern('start: "a"') == "(?:(?:(?:a)))"


def test_what_is_not_regular_says_why() -> None:
    with pytest.raises(NotRegular, match="it has no rule 'a'"):
        lark_pattern("start: a")


def test_a_process_that_is_ended_says_nothing_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ends.py"
    program.write_text("")
    monkeypatch.setattr(caller, "_PROCESSES", KeptProcesses(str(program)))
    with pytest.raises(RequestFailed, match="please try again"):
        lark_pattern('start: "ended"')
