"""The words of the command line."""

import io
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from app.commands import parser
from app.commands.errors import CommandError
from app.commands.parser import MODULES, SUMMARIES, main
from tests.support.rows import rows

ROOT: Final = Path(__file__).parents[3]
# What takes longer to import than all the rest.
HEAVY: Final = {"fastapi", "gguf", "httpx", "huggingface_hub", "mlx", "numpy", "pydantic", "transformers"}  # fmt: skip


def command(run: Any) -> ModuleType:
    """Return a module of a command that takes `--json` and a number."""
    module: Any = ModuleType("fake")
    module.SUMMARY = "do it"
    module.run = run

    def add_arguments(parser: Any) -> None:
        parser.add_argument("--number", type=int)

    module.add_arguments = add_arguments
    found: ModuleType = module
    return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the arguments that the server gets."""
    found: list[list[str]] = []

    def serve(arguments: list[str]) -> int:
        found.append(arguments)
        return 7

    monkeypatch.setattr("app.cli.main", serve)
    return found


@pytest.fixture(autouse=True)
def same_handler() -> Any:
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@rows(
    "arguments",
    [[], ["--port", "1"], ["serve"], ["serve", "--port=1"], ["run-batch", "IN", "OUT"], ["-p"]],
)
def test_the_server_gets_what_names_no_other_command(
    arguments: list[str], served: list[list[str]]
) -> None:
    assert main(arguments) == 7
    assert served.pop() == arguments


def test_the_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main(["-h"]) == 0
    text = capsys.readouterr().out
    for word in ("serve", "run-batch", *MODULES):
        assert f"\n  {word} " in text
    assert max(map(len, text.splitlines())) < 120


def test_the_help_of_what_serves_has_the_settings(
    served: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--help"]) == main(["--port=1", "-h"]) == 0
    text = capsys.readouterr().out
    assert text.count("usage: mlx-batch-server [serve] [flags]") == 2
    assert text.count("  --port N ") == 2
    assert main(["run-batch", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: mlx-batch-server run-batch IN OUT [flags]")
    assert served == []


def test_a_pager_that_is_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    assert main(["--help"]) == 0


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "mlx-batch-server 0.1.0\n"


def test_the_summaries_are_those_of_the_modules() -> None:
    of_modules = {word: import_module(name).SUMMARY for word, name in MODULES.items()}
    assert {word: SUMMARIES[word] for word in MODULES} == of_modules


@rows(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["serve", "--help"], {"pydantic"}),
        (["models", "--help"], set()),
        (["cache", "--help"], set()),
        (["doctor", "--help"], set()),
        # They read settings.
        *(([word, "--help"], {"pydantic"}) for word in ("ps", "warm", "chat", "launch")),
    ],
)
def test_help_imports_nothing_that_takes_time(arguments: list[str], allowed: set[str]) -> None:
    code = (
        "import sys\n"
        "from app.commands.parser import main\n"
        f"status = main({arguments!r})\n"
        "print(status, *{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: mlx-batch-server")
    status, *imported = done.stderr.splitlines()[-1].split()
    assert status == "0"
    assert HEAVY & set(imported) <= allowed


@rows(
    ("word", "line"),
    [
        ("modls", "there is no command modls; did you mean models?"),
        ("srve", "there is no command srve; did you mean serve?"),
        ("qqq", "there is no command qqq; mlx-batch-server --help lists them"),
    ],
)
def test_an_unknown_word_is_one_line(
    word: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"mlx-batch-server: {line}\n"


@rows(
    ("arguments", "line"),
    [
        (["--number"], "--number: expected one argument"),
        (["--number", "x"], "--number: invalid int value: 'x'"),
        (["--num", "1"], "unrecognized arguments: --num 1"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parser, "import_module", lambda _: command(lambda _: 0))
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == f"mlx-batch-server doctor: {line}\n"


def raises(error: BaseException) -> Any:
    def run(_: Any) -> int:
        raise error

    return run


@rows(
    ("run", "status", "error"),
    [
        (lambda arguments: arguments.number, 3, ""),
        (raises(CommandError("it cannot run")), 2, "it cannot run\n"),
        (raises(KeyboardInterrupt()), 130, ""),
        (raises(BrokenPipeError()), 141, ""),
        (raises(SystemExit(4)), 4, ""),
        (raises(SystemExit()), 0, ""),
    ],
)
def test_a_command_ends_with_a_status(
    run: Any,
    status: int,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parser, "import_module", lambda _: command(run))
    assert main(["doctor", "--number=3"]) == status
    assert capsys.readouterr().err == error
