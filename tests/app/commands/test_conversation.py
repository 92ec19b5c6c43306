"""A conversation in a terminal: turns, commands, what is shown and what is remembered."""

import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.commands.conversation.lines import History, MessageReader, recall
from app.commands.conversation.screen import Screen
from app.commands.conversation.session import Session
from app.commands.server.server_address import Server
from tests.support.fake_server import data, text_chunk
from tests.support.rows import rows
from tests.support.talking_server import COMMENT, Stream, TalkingServer, reasons, says

ERASED = "\r\x1b[K"


class Terminal(io.StringIO):
    """A terminal; `on_text` is called for all that is written."""

    def __init__(self, on_text: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._on_text = on_text

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        self._on_text(text)
        return written


@pytest.fixture(autouse=True)
def a_terminal_with_colors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def reader(*typed: str | type[BaseException], history: History | None = None) -> MessageReader:
    """Read lines as if they were typed; an exception is a key of control."""
    keys = iter(typed)

    def read(_: str) -> str:
        key = next(keys, EOFError)
        if isinstance(key, str):
            return key
        raise key

    return MessageReader(history, read)


def talk(
    server: TalkingServer, *typed: str | type[BaseException], out: io.StringIO | None = None
) -> str:
    """Return what is shown after the first line; without `out` there are no colors."""
    out = out or io.StringIO()
    Session(Server(server.url), "toy", reader(*typed), Screen(out)).run()
    return out.getvalue().partition("\n")[2]


def turns(server: TalkingServer) -> list[list[str]]:
    """Return the contents of the messages of each request."""
    return [[turn["content"] for turn in body["messages"]] for body in server.bodies]


def test_each_message_has_the_turns_before_it(server: TalkingServer) -> None:
    server.answers += [says("A", " man."), says("A plan.")]
    assert talk(server, "Who?", "", "What?") == "A man.\nA plan.\n\n"
    assert turns(server) == [["Who?"], ["Who?", "A man.", "What?"]]


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(server: TalkingServer) -> None:
    def stop(text: str) -> None:
        if text == "half":
            signal.raise_signal(signal.SIGINT)

    server.answers += [Stream([text_chunk("half")], is_open=True), says("Well.")]
    shown = talk(server, "Count", "Why?", out=Terminal(stop))
    server.wait_for_the_client_to_leave()
    assert shown == "half\n\x1b[2m(stopped)\x1b[0m\nWell.\n\n"
    assert turns(server)[1] == ["Count", "half", "Why?"]


def test_ctrl_c_that_is_pressed_again_and_again_does_not_end_the_conversation(
    server: TalkingServer,
) -> None:
    server.answers += [Stream([text_chunk("half")], is_open=True), says("Well.")]

    def press(text: str) -> None:
        if text in ("half", "\n") or "stopped" in text:
            signal.raise_signal(signal.SIGINT)

    assert "Well." in talk(server, "Count", "Why?", out=Terminal(press))


def test_a_question_without_an_answer_is_forgotten(server: TalkingServer) -> None:
    refused = Stream(['{"error": {"message": "full"}}'], status=503)
    server.answers += [refused, says("Yes.", finish_reason="length")]
    shown = talk(server, "One", "Two")
    assert shown.splitlines() == [
        f"{server.url}/v1/chat/completions answers 503: full",
        "Yes.",
        "(the answer is cut off at the limit of tokens)",
        "",
    ]
    assert turns(server) == [["One"], ["Two"]]


def test_keys_of_control_at_the_prompt(server: TalkingServer) -> None:
    assert talk(server, KeyboardInterrupt, "/help", EOFError).splitlines()[0] == ""
    assert server.bodies == []


def test_a_message_that_only_looks_like_a_command_is_one(server: TalkingServer) -> None:
    server.answers += [says("A file.")]
    assert talk(server, "/etc/hosts is what?", "/nothing") == (
        "A file.\nthere is no command /nothing; /help lists them\n\n"
    )


def test_models_are_listed_and_changed(server: TalkingServer) -> None:
    loading = {"value": "loading", "progress": 0.5}
    server.models = {"data": [{"id": "toy", "aliases": ["t"]}, {"id": "large", "status": loading}]}
    server.answers += [says("Yes.")]
    shown = talk(server, "/model", "/model gpt", "/model large", "/model", "Hi", "/exit", "Not me")
    assert shown.splitlines() == [
        "* toy",
        "  large  loading 50 %",
        "the server has no model gpt; it has toy, large",
        "now with large",
        "  toy",
        "* large  loading 50 %",
        "Yes.",
    ]
    assert [body["model"] for body in server.bodies] == ["large"]


def test_the_system_message_is_shown_set_and_dropped(server: TalkingServer) -> None:
    server.answers += [says("Yes."), says("No.")]
    typed = ["/system", "/system Be brief.", "One", '/system ""', "/clear", "Two"]
    assert talk(server, *typed).splitlines() == [
        "system message: none",
        "system message: Be brief.",
        "Yes.",
        "system message: none",
        "the conversation is forgotten",
        "No.",
        "",
    ]
    assert turns(server) == [["Be brief.", "One"], ["Two"]]


def test_help_lists_all_commands(server: TalkingServer) -> None:
    shown = talk(server, "/help")
    assert all(f"/{name}" in shown for name in ("model", "system", "clear", "help", "exit"))


def test_a_model_that_loads_is_shown_until_the_answer_comes(server: TalkingServer) -> None:
    states = iter(
        [
            {"data": [{"id": "toy", "status": {"value": "loading", "progress": 0.42}}]},
            {"data": [{"id": "toy", "status": {"value": "loaded"}}]},
            {"data": [{"id": "other"}]},
        ]
    )

    def advance() -> None:
        server.models = next(states)

    server.on_models = advance
    events = [*[COMMENT] * 3, text_chunk("Yes"), COMMENT, *says(".").events]
    server.answers += [Stream(events)]
    dim, plain = "\x1b[2m", "\x1b[0m"
    assert talk(server, "Hi", out=Terminal()) == (
        f"{dim}loading toy 42 % ...{plain}{ERASED}{dim}waiting ...{plain}"
        f"{ERASED}{dim}waiting ...{plain}{ERASED}Yes.\n\n"
    )


def test_a_file_gets_no_status(server: TalkingServer) -> None:
    server.answers += [Stream([COMMENT, *says("Yes.").events])]
    assert talk(server, "Hi") == "Yes.\n\n"


def test_a_status_is_erased_if_no_answer_comes(server: TalkingServer) -> None:
    server.answers += [Stream([COMMENT, data({"error": "full"})])]
    assert talk(server, "Hi", out=Terminal()).endswith(f"{ERASED}\x1b[2mfull\x1b[0m\n\n")


@rows(
    ("variables", "shown"),
    [
        ({}, "\x1b[2mHm.\x1b[0m\n\nYes.\n\n"),
        ({"NO_COLOR": "1"}, "(reasoning) Hm.\n\nYes.\n\n"),
        ({"TERM": "dumb"}, "(reasoning) Hm.\n\nYes.\n\n"),
    ],
)
def test_reasoning_is_set_apart(
    variables: dict[str, str],
    shown: str,
    server: TalkingServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.answers += [reasons("Hm.", "\n\nYes.")]
    with monkeypatch.context() as changed:
        for name, value in variables.items():
            changed.setenv(name, value)
        assert talk(server, "Hi", out=Terminal()) == shown


def test_reasoning_in_pieces_that_ends_a_line_or_the_answer() -> None:
    out = Terminal()
    screen = Screen(out)
    for text in ("Hm.", "\n"):
        screen.show_reasoning(text)
    screen.show_text("Yes.")
    screen.end_answer()
    screen.show_reasoning("Hm.")
    screen.end_answer()
    assert out.getvalue() == "\x1b[2mHm.\n\x1b[0m\nYes.\n\x1b[2mHm.\x1b[0m\n"


def test_a_text_does_not_control_the_terminal() -> None:
    out = Terminal()
    screen = Screen(out)
    for text in ("a\x1b]0;title\x07\x9b2J\r\tb", "\x00"):
        screen.show_text(text)
    assert out.getvalue() == "a]0;title2J\tb"


@rows(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "", 'two"""'], "one\n\ntwo"),
        ([' """one"""'], "one"),
        (['"""one', '"""'], "one"),
    ],
)
def test_a_message_of_several_lines(typed: list[str], message: str) -> None:
    assert reader(*typed).read_message() == message


def test_lines_are_kept_for_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = History(path)
    messages = reader("one\\", "two", " ", history=history)
    assert messages.read_message() == "one\ntwo"
    assert messages.read_message() == ""
    assert path.stat().st_mode & 0o777 == 0o600
    assert History(path).read() == ["one\\", "two"]


def test_the_last_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % number for number in range(1000)))
    assert History(path).read()[0] == "line 0"
    assert len(path.read_text().splitlines()) == 1000


def test_a_history_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "history")
    history.add("line")
    assert history.read() == []


def test_a_python_without_readline_reads_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    recall(["one", "two"])
    assert readline.get_history_item(2) == "two"
    recall([])
    monkeypatch.setitem(sys.modules, "readline", None)
    recall(["three"])
    assert readline.get_current_history_length() == 0
