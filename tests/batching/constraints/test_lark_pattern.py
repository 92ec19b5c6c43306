"""Lark grammars that another process reads."""

from pathlib import Path

import pytest

from batching.constraints import lark_pattern as caller
from batching.constraints.lark_pattern import lark_pattern
from batching.constraints.lark_process import NotRegular
from batching.errors import RequestFailed
from batching.sandbox.sandbox import Sandbox, SandboxLimits


def test_a_grammar_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lark_pattern.cache_clear()
    assert lark_pattern('start: "a"') == "(?:(?:(?:a)))"
    monkeypatch.setattr(caller, "_SANDBOX", None)
    assert lark_pattern('start: "a"') == "(?:(?:(?:a)))"


def test_what_is_not_regular_says_why() -> None:
    with pytest.raises(NotRegular, match="it has no rule 'a'"):
        lark_pattern("start: a")


def test_a_process_that_is_ended_says_nothing_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(caller, "_SANDBOX", sandbox_that(tmp_path, "os.kill(os.getpid(), 9)"))
    with pytest.raises(RequestFailed, match="please try again"):
        lark_pattern('start: "ended"')


def test_a_grammar_that_takes_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(caller, "_SANDBOX", sandbox_that(tmp_path, "raise MemoryError"))
    with pytest.raises(NotRegular, match="it takes too much time or memory"):
        lark_pattern('start: "too much"')


def sandbox_that(folder: Path, does: str) -> Sandbox:
    program = folder / "worker.py"
    program.write_text(f"import os\ndef answer(line):\n    {does}\n")
    return Sandbox(str(program), SandboxLimits(cpu_seconds=1))
