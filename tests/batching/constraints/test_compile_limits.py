"""The process in which grammars are tried: what ends it, and what that says of the grammar."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import pytest
from llguidance import LLTokenizer

from batching.constraints.compile_limits import CompileInterrupted, CompileLimits
from batching.constraints.compile_process import (
    SpecialTokens,
    byte_tokenizer,
    compile_with_little_stack,
    limit,
)
from batching.constraints.grammar import json_object_grammar, json_schema_grammar, lark_grammar
from scripts.server_process import wait_until

TOKENS: Final = SpecialTokens(300, {298: "<|end|>", 299: "<|im_end|>"})
GRAMMAR: Final = json_object_grammar()
TAKES_MINUTES: Final = json_schema_grammar(
    {"patternProperties": {f"^p{i}x[a-z]*$": {"type": "string"} for i in range(900)}}
)


if not Path("/proc/self/task").exists():
    pytest.skip("processes are counted in /proc", allow_module_level=True)


@pytest.fixture
def limits() -> CompileLimits:
    return CompileLimits(TOKENS)


def processes(parent: int | None = None) -> set[int]:
    """Return the processes that one has started, by default this one."""
    children: list[str] = []
    for thread in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
        with suppress(OSError):
            children += (thread / "children").read_text().split()
    return set(map(int, children))


def test_all_grammars_are_tried_in_one_process(limits: CompileLimits) -> None:
    before = processes()
    assert limits.allow(GRAMMAR)
    started = processes() - before
    assert limits.allow(lark_grammar('start: "a"'))
    assert processes() - before == started
    assert len(started) == 1


def test_what_tries_no_more_grammars_leaves_no_process() -> None:
    before = processes()
    limits = CompileLimits(TOKENS)
    assert limits.allow(GRAMMAR)
    del limits
    assert processes() <= before


def test_what_computes_too_long_or_overflows_the_stack_is_not_allowed(
    limits: CompileLimits,
) -> None:
    assert not limits.allow(TAKES_MINUTES)
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    assert not limits.allow(lark_grammar(f'start: r0\n{rules}r4000: "a"\n'))
    assert limits.allow(GRAMMAR)


def test_an_invalid_grammar_costs_little(limits: CompileLimits) -> None:
    assert limits.allow(lark_grammar("start: foo"))
    assert limits.allow("start: \ud800")


def test_grammars_of_several_threads_do_not_wait_for_one_that_takes_long(
    limits: CompileLimits,
) -> None:
    before = processes()
    ends: list[bool] = []
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: ends.append(limits.allow(TAKES_MINUTES)))
        threads.submit(lambda: ends.append(limits.allow(GRAMMAR)))
    assert ends == [True, False]
    assert len(processes() - before) == 1


def test_a_process_that_does_not_answer_is_ended() -> None:
    before = processes()
    with pytest.raises(CompileInterrupted):
        CompileLimits(TOKENS, wall_seconds=1e-6).allow(GRAMMAR)
    assert processes() <= before


@pytest.mark.parametrize("script", ["kill -9 $$", "kill -15 $$", "exit 0", None])
def test_a_process_that_does_not_start_says_nothing_of_the_grammar(
    script: str | None, limits: CompileLimits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    if script is not None:
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(interpreter))
        with pytest.raises(CompileInterrupted):
            limits.allow(GRAMMAR)
    assert limits.allow(GRAMMAR)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_ended_from_outside_is_started_again(
    limits: CompileLimits, number: signal.Signals
) -> None:
    before = processes()
    assert limits.allow(GRAMMAR)
    (process,) = processes() - before
    os.kill(process, number)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert limits.allow(GRAMMAR)


@pytest.mark.parametrize("is_child", [False, True])
def test_what_is_killed_while_it_compiles_says_nothing_of_the_grammar(
    limits: CompileLimits, is_child: bool
) -> None:
    before = processes()
    assert limits.allow(GRAMMAR)
    (process,) = processes() - before
    with ThreadPoolExecutor() as threads:
        trial = threads.submit(limits.allow, TAKES_MINUTES)
        wait_until(lambda: bool(processes(process)), "nothing is compiled")
        os.kill(processes(process).pop() if is_child else process, signal.SIGKILL)
        with pytest.raises(CompileInterrupted):
            trial.result()
    assert limits.allow(GRAMMAR)


def test_the_work_is_compiling() -> None:
    before = threading.stack_size()
    assert compile_with_little_stack(GRAMMAR, byte_tokenizer(TOKENS))
    assert threading.stack_size() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_raises_is_not_done() -> None:
    assert not compile_with_little_stack(GRAMMAR, cast(LLTokenizer, None))


def test_a_limit_that_the_system_does_not_know_is_left_out() -> None:
    limit(10_000, 1)
