"""`chat` with a text or a pipe: one answer on standard output."""

import io
import json
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from app.commands import chat
from app.commands.errors import CommandError
from tests.support.commands import run_command
from tests.support.fake_server import data, text_chunk
from tests.support.talking_server import COMMENT, Stream, TalkingServer, reasons, says

Capture = pytest.CaptureFixture[str]


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes = b"") -> None:
    """Let standard input be a pipe with some content."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


class Terminal(io.StringIO):
    """Takes what is typed as lines, and writes to the screen."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())


def test_only_the_answer_is_written(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(monkeypatch, b"Hello \xff\n")
    server.answers += [Stream([COMMENT, *reasons("Hm.", "Good", " day").events])]
    assert run_command(chat, "Translate:", "-", "--url", server.url) == 0
    assert capsys.readouterr() == ("Good day\n", "")
    (body,) = server.bodies
    assert body == {
        "model": "toy",
        "messages": [{"role": "user", "content": "Translate:\n\nHello \ufffd"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_flags_become_fields_of_the_request(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(monkeypatch, b"Hello")
    server.models = {"data": [{"id": "toy", "aliases": ["small"]}]}
    server.answers += [says("Yes.\n")]
    flags = ["--model", "small", "--system", "Be brief.", "--temperature", "0.5"]
    flags += ["--max-tokens", "7", "--api-key", "sk-one"]
    assert run_command(chat, "--url", server.url, *flags) == 0
    assert capsys.readouterr().out == "Yes.\n"
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("small", 0.5, 7)
    assert server.keys == ["Bearer sk-one"] * 2


@pytest.mark.usefixtures("terminal")
def test_a_text_is_answered_in_a_terminal(server: TalkingServer, capsys: Capture) -> None:
    server.answers += [says("Yes.")]
    assert run_command(chat, "Is", "it?", "--url", server.url) == 0
    assert capsys.readouterr().out == "Yes.\n"
    assert server.bodies[0]["messages"][0]["content"] == "Is it?"


def test_json_is_one_object(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(monkeypatch)
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    for reasoning in ("", "Hm."):
        answer = says("a", "b", model="toy-1")
        begin = reasons(reasoning).events[:1]
        server.answers += [Stream([*begin, *answer.events])]
        assert run_command(chat, "Hello", "--json", "--url", server.url) == 0
        found = json.loads(capsys.readouterr().out)
        assert found.pop("reasoning_content", "") == reasoning
        assert found == {
            "model": "toy-1",
            "content": "ab",
            "finish_reason": "stop",
            "usage": usage,
        }


def test_an_error_is_the_status_and_leaves_what_has_come(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(monkeypatch)
    server.answers += [Stream([text_chunk("Half"), data({"error": {"message": "it failed"}})])]
    assert run_command(chat, "Hello", "--url", server.url) == 1
    assert capsys.readouterr() == ("Half\n", "it failed\n")


@pytest.mark.parametrize("words", [[], ["-"], [" "]])
def test_no_message_is_an_error(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b" \n")
    with pytest.raises(CommandError, match=r"^chat: there is no message"):
        run_command(chat, *words)


@pytest.mark.usefixtures("terminal")
def test_a_conversation_has_no_json() -> None:
    with pytest.raises(CommandError, match=r"^chat: --json needs a message"):
        run_command(chat, "--json")


class Stopped(io.StringIO):
    """Gets Ctrl-C, or loses its reader, once something is written."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def write(self, text: str) -> int:
        if self._what == "reader":
            raise BrokenPipeError
        signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize(("what", "status"), [("reader", 1), ("program", 130)])
def test_an_answer_that_is_stopped_ends_the_request(
    what: str,
    status: int,
    server: TalkingServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    pipe(monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    server.answers += [Stream([text_chunk("One")], is_open=True)]
    with redirect_stdout(Stopped(what)):
        assert run_command(chat, "Count", "--url", server.url) == status
    server.wait_for_the_client_to_leave()
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) == before


def test_a_conversation_ends_with_the_input(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n/exit\n"))
    server.answers += [says("Yes.")]
    flags = ["--system", "Be brief.", "--temperature", "0"]
    assert run_command(chat, "--url", server.url, *flags) == 0
    history = tmp_path / "state" / "mlx-batch-server" / "chat_history"
    assert history.read_text() == "Hello\n/exit\n"
    out = capsys.readouterr().out
    assert out == f"toy at {server.url}; /help lists commands\n>>> Yes.\n>>> "
    (body,) = server.bodies
    assert body["temperature"] == 0
    assert [turn["content"] for turn in body["messages"]] == ["Be brief.", "Hello"]
