"""`warm` sends each line of a file to a running server, and says what became of it."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from app.commands import warm
from app.commands.errors import CommandError
from app.server.uvicorn_server import Server, bind
from tests.support.batches import json_lines
from tests.support.commands import run_command
from tests.support.fake_server import DONE, data, usage_chunk
from tests.support.speaker import MODEL_ID, speaking_app
from tests.support.talking_server import COMMENT, Stream, TalkingServer, says

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
REFUSED = Stream([json.dumps({"error": {"message": "no such model"}})], status=404)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "warm.jsonl"


def answers(num_prompt: int, num_cached: int | None = None) -> Stream:
    return Stream([COMMENT, usage_chunk(num_prompt, 1, num_cached), DONE])


def untimed(text: str) -> list[str]:
    return re.sub(r"\d+\.\d s", "… s", text).splitlines()


def test_each_line_is_sent_with_low_priority_and_to_be_kept(
    server: TalkingServer, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"prompt_cache_key": "mine", "prompt_cache_retention": "in_memory", "max_tokens": 50}
    surrogate = {"messages": [{"role": "user", "content": "\ud800"}]}
    path.write_bytes(
        json_lines([CHAT, {"custom_id": "a", "body": {**CHAT, **own}}, b"", surrogate])
    )
    server.answers = [answers(40, 8), answers(30), says("Hi")]
    assert run_command(warm, str(path), "--url", server.url) == 0
    assert untimed(capsys.readouterr().out) == [
        "line 1: 40 tokens, 8 of them cached, … s",
        "line 2: 30 tokens, 0 of them cached, … s",
        "line 4: 5 tokens, 0 of them cached, … s",
        "3 lines: 75 tokens, 8 of them cached, … s",
    ]
    kept = {"prompt_cache_key": "warm", "prompt_cache_retention": "24h"}
    sent = {"max_tokens": 1, "stream": True, "priority": "low"}
    options = {"stream_options": {"include_usage": True}}
    assert server.bodies == [
        {**CHAT, **kept, **sent, **options},
        {**CHAT, **own, **sent, **options},
        {**surrogate, **kept, **sent, **options},
    ]


def test_the_others_are_sent_if_a_line_fails(
    server: TalkingServer, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(json_lines([b"{", CHAT, CHAT]))
    server.answers = [REFUSED, Stream([data({"object": "chunk"}), DONE])]
    assert run_command(warm, str(path), "--url", server.url) == 1
    out, err = capsys.readouterr()
    assert untimed(out) == [
        "line 3: 0 tokens, 0 of them cached, … s",
        "1 lines: 0 tokens, 0 of them cached, … s; 2 failed",
    ]
    assert [text.partition("http")[0] for text in err.splitlines()] == [
        "line 1: this is not JSON: Expecting property name enclosed in double quotes",
        "line 2: ",
    ]
    assert err.endswith("answers 404: no such model\n")


def test_a_file_that_cannot_be_read_is_one_line(server: TalkingServer, path: Path) -> None:
    with pytest.raises(CommandError) as failed:
        run_command(warm, str(path), "--url", server.url)
    assert str(failed.value) == f"cannot read {path}: No such file or directory"


@contextmanager
def standard_input(path: Path) -> Iterator[None]:
    kept, file = os.dup(0), os.open(path, os.O_RDONLY)
    try:
        os.dup2(file, 0)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(file)


def test_a_dash_is_standard_input(
    server: TalkingServer, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(json_lines([CHAT]))
    server.answers = [answers(3, 1)]
    with standard_input(path):
        assert run_command(warm, "-", "--url", server.url) == 0
    assert "line 1: 3 tokens, 1 of them cached" in capsys.readouterr().out


@contextmanager
def listening() -> Iterator[str]:
    """Serve a speaker over a socket; the signals stay the test's."""
    with bind("127.0.0.1", 0) as sock, speaking_app() as app:
        app.state.service.manager.get(MODEL_ID)
        sock.listen()
        server = Server(app, app.state.service)
        thread = Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join()


def test_a_server_has_the_prompts_then(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(json_lines([{"messages": [{"role": "user", "content": "a" * 79}]}] * 2))
    with listening() as url:
        assert run_command(warm, str(path), "--url", url) == 0
    assert untimed(capsys.readouterr().out) == [
        "line 1: 96 tokens, 0 of them cached, … s",
        "line 2: 96 tokens, 64 of them cached, … s",
        "2 lines: 192 tokens, 64 of them cached, … s",
    ]
