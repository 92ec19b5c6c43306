"""`run-batch`: what it writes, how it ends, and that it goes on where it was stopped."""

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pytest

from app.cli import main, run_batch
from app.run_batch import BatchFailed, BatchPaths
from app.settings import Settings
from tests.support.batches import chat_line, chat_lines, full_disk, json_lines
from tests.support.speaker import Gate, speaking_manager

LONG: Final = 20


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore what belongs to the process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    # Tests that run under `nohup` test the same.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    root = logging.getLogger()
    level, logged = root.level, root.handlers[:]
    raises = logging.raiseExceptions
    yield
    root.setLevel(level)
    root.handlers[:] = logged
    logging.raiseExceptions = raises
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def paths(tmp_path: Path) -> BatchPaths:
    return BatchPaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def run(
    paths: BatchPaths, lines: list[Any] | None = None, gate: Gate | None = None, **settings: Any
) -> int:
    if lines is not None:
        paths.source.write_bytes(json_lines(lines))
    manager = speaking_manager(b"Hello!", gate=gate)
    return run_batch(Settings.model_construct(**settings), manager, paths)


def written(paths: BatchPaths) -> list[Any]:
    """Return the lines of the output, beside which nothing is left."""
    assert {path.name for path in paths.target.parent.iterdir()} == {"in.jsonl", "out.jsonl"}
    return [json.loads(line) for line in paths.target.read_text(encoding="utf-8").splitlines()]


def test_results_are_in_the_order_of_the_lines(
    paths: BatchPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(paths, chat_lines(30)) == 0
    found = written(paths)
    assert [record["custom_id"] for record in found] == [f"id-{i}" for i in range(30)]
    content = found[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert content == "Hello!"
    assert capsys.readouterr().err.splitlines()[-1] == "30 of 30 lines, 0 of them failed"


def test_the_status_tells_of_failed_lines(
    paths: BatchPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [chat_line("a"), chat_line("b", temperature=9), {"custom_id": "c"}]
    assert run(paths, lines) == 1
    assert [record["custom_id"] for record in written(paths)] == ["a", "b", "c"]
    assert capsys.readouterr().err.splitlines()[-1] == "3 of 3 lines, 2 of them failed"


def test_it_goes_on_where_it_was_stopped(
    paths: BatchPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate(is_open=False)

    def stop() -> None:
        assert gate.reached.wait(LONG)
        os.kill(os.getpid(), signal.SIGTERM)
        gate.open()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop)
        status = run(paths, [{"custom_id": "bad"}, *chat_lines(300)], gate)
        stopping.result()
    assert status == 128 + signal.SIGTERM
    assert not paths.target.exists()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "stopped; the same command goes on from here"
    assert run(paths) == 1
    assert len(written(paths)) == 301


def test_an_output_of_before_is_replaced(paths: BatchPaths) -> None:
    paths.target.write_text("old", encoding="ascii")
    paths.draft.write_text("half", encoding="ascii")
    assert run(paths, chat_lines(1)) == 0
    assert len(written(paths)) == 1


def failure(paths: BatchPaths, lines: list[Any] | None = None) -> str:
    with pytest.raises(BatchFailed) as caught:
        run(paths, lines)
    return str(caught.value)


def test_what_is_no_json_lines_is_refused_and_leaves_nothing(paths: BatchPaths) -> None:
    message = failure(paths, [chat_line("a"), b"{"])
    assert message.startswith(f"{paths.source}: line 2: this is not JSON: ")
    assert [path.name for path in paths.target.parent.iterdir()] == ["in.jsonl"]


def test_files_that_cannot_be_what_they_are_named_as(paths: BatchPaths) -> None:
    assert "No such file" in failure(paths)
    paths.source.write_bytes(json_lines(chat_lines(1)))
    assert failure(BatchPaths(paths.source, paths.source)).endswith("is what is read")


def test_results_of_another_input_are_not_mixed(paths: BatchPaths) -> None:
    gate = Gate(is_open=False)
    with ThreadPoolExecutor(1) as pool:

        def stop() -> None:
            assert gate.reached.wait(LONG)
            os.kill(os.getpid(), signal.SIGHUP)
            gate.open()

        stopping = pool.submit(stop)
        run(paths, chat_lines(300), gate)
        stopping.result()
    assert "of another input; delete it" in failure(paths, chat_lines(3))


def test_two_do_not_write_the_same_output(paths: BatchPaths) -> None:
    gate = Gate(is_open=False)

    def second() -> str:
        assert gate.reached.wait(LONG)
        try:
            return failure(paths)
        finally:
            gate.open()

    with ThreadPoolExecutor(1) as pool:
        message = pool.submit(second)
        assert run(paths, chat_lines(3), gate) == 0
    assert message.result().endswith("is in use by another process")


def test_a_full_disk_is_reported_and_leaves_no_output(paths: BatchPaths) -> None:
    paths.source.write_bytes(json_lines(chat_lines(3)))
    with full_disk(1000):
        message = failure(paths)
    assert "disk" in message or "too large" in message
    assert not paths.target.exists()
    assert run(paths) == 0


def test_it_ends_when_the_model_has_failed(paths: BatchPaths) -> None:
    gate = Gate(is_open=False)
    paths.source.write_bytes(json_lines(chat_lines(3)))
    manager = speaking_manager(b"Hello!", gate=gate)

    def fail() -> None:
        assert gate.reached.wait(LONG)
        manager.close(0)
        gate.open()

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        with pytest.raises(BatchFailed):
            run_batch(Settings.model_construct(), manager, paths)
        failing.result()
    assert not paths.target.exists()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(paths: BatchPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run(paths, chat_lines(5)) == 0
    assert "100%" in terminal.getvalue()
    assert "5/5" in terminal.getvalue()


def test_a_log_gets_a_line_now_and_then(
    paths: BatchPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.run_batch._REPORT_INTERVAL", 0.0)
    assert run(paths, chat_lines(5), log_level="info") == 0
    lines = capsys.readouterr().err.splitlines()
    assert "3 of 5 lines, 0 of them failed" in lines


def test_the_command_names_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "in.jsonl"]) == 2
    assert capsys.readouterr().err == "mlx-batch-server: run-batch needs OUT\n"


def test_the_command_reports_a_file_that_it_cannot_read(
    paths: BatchPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.chdir(paths.source.parent)
    assert main(["run-batch", "nothing.jsonl", "out.jsonl", "--device=cpu"]) == 2
    assert "nothing.jsonl" in capsys.readouterr().err
