"""What goes wrong with a request is one line for the user."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.commands.errors import CommandError, RequestFailed
from app.commands.server.server_address import Server
from app.commands.server.server_client import fetch_models, stream_chat
from tests.support.fake_server import data, text_chunk
from tests.support.rows import rows
from tests.support.talking_server import COMMENT, Stream, TalkingServer, says

ROOT = Path(__file__).parents[4]


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_without_a_server_the_line_says_how_to_start_one() -> None:
    with pytest.raises(CommandError) as failed:
        fetch_models(Server(f"http://127.0.0.1:{closed_port()}"))
    assert str(failed.value).endswith(" (Connection refused); mlx-batch-server starts one")


def test_a_key_is_sent_and_proxies_are_not_asked_for_this_machine(
    server: TalkingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{closed_port()}")
    assert fetch_models(Server(server.url, "sk-one")) == [{"id": "toy"}]
    fetch_models(Server(server.url.replace("127.0.0.1", "localhost")))
    assert server.keys == ["Bearer sk-one", None]


@rows(
    "models",
    ["no JSON", [], {"data": 5}, {"data": [{"id": 1}]}, {"data": [{"name": "x"}]}, {"data": ["x"]}],
)
def test_another_kind_of_server_is_named(models: Any, server: TalkingServer) -> None:
    server.models = models
    with pytest.raises(RequestFailed, match=r"is no server of OpenAI's API"):
        fetch_models(Server(server.url))


@rows(
    ("status", "body", "ending"),
    [
        (503, {"error": {"message": "the queue\nis full"}}, "503: the queue is full"),
        (500, {"error": "flat"}, "500: flat"),
        (500, {"message": "bare"}, "500: bare"),
        (500, {"error": {"code": 5}}, '500: {"code": 5}'),
        (500, "[1]", "500: [1]"),
        (502, "<html>bad gateway</html>", "502: <html>bad gateway</html>"),
        (302, "", "302: "),
    ],
)
def test_a_refusal_is_shown_in_one_line(
    status: int, body: Any, ending: str, server: TalkingServer
) -> None:
    server.models, server.status = body, status
    with pytest.raises(RequestFailed) as failed:
        fetch_models(Server(server.url))
    assert str(failed.value) == f"{server.url}/v1/models answers {ending}"


def test_a_key_that_is_missing_is_asked_for(server: TalkingServer) -> None:
    server.status = 401
    with pytest.raises(RequestFailed, match=r"wants a key: --api-key or MLX_SERVER_API_KEY gives"):
        fetch_models(Server(server.url, "wrong"))


def chunks(server: TalkingServer, answer: Stream) -> list[Any]:
    server.answers.append(answer)
    return list(stream_chat(Server(server.url), {"messages": []}))


def test_comments_come_between_chunks_and_texts_keep_their_line_ends(server: TalkingServer) -> None:
    events = [COMMENT, "event: x\n", data({"text": "a\u2028b"}).replace("\\u2028", "\u2028")]
    found = chunks(server, Stream([*events, *says("c").events]))
    assert found[:2] == [None, {"text": "a\u2028b"}]
    assert found[2]["choices"][0]["delta"] == {"content": "c"}
    assert server.bodies == [{"messages": [], "stream": True}]


@rows(
    ("events", "message"),
    [
        ([text_chunk("a")], "the answer breaks off"),
        (["data: {\n"], "the answer is no stream of JSON"),
        (["data: 5\n"], "the answer is no stream of JSON objects"),
    ],
)
def test_a_bad_stream_is_named(events: list[str], message: str, server: TalkingServer) -> None:
    with pytest.raises(RequestFailed) as failed:
        chunks(server, Stream(events))
    assert str(failed.value) == f"{server.url}: {message}"


def test_an_error_within_a_stream_is_shown(server: TalkingServer) -> None:
    with pytest.raises(RequestFailed, match=r"^the model failed$"):
        chunks(server, Stream([text_chunk("a"), data({"error": {"message": "the model failed"}})]))


@rows(
    ("error", "kind", "message"),
    [
        (httpx.ReadTimeout("timed out"), RequestFailed, "http://host is silent"),
        (httpx.ConnectTimeout(""), CommandError, "no server at http://host (no answer); "),
        (
            httpx.ConnectError("unknown name"),
            CommandError,
            "no server at http://host (unknown name)",
        ),
        (httpx.RemoteProtocolError(""), RequestFailed, "http://host: RemoteProtocolError"),
    ],
)
def test_a_connection_that_fails_is_named(
    error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(httpx.Client, "get", fail)
    with pytest.raises(kind) as failed:
        fetch_models(Server("http://host"))
    assert str(failed.value).startswith(message)


def test_a_url_that_httpx_rejects_is_named() -> None:
    with pytest.raises(CommandError, match=r"^--url: "):
        fetch_models(Server("http://a\x00b"))


@rows("command", ["ps", "chat", "launch", "warm"])
def test_a_command_starts_without_the_server(command: str) -> None:
    heavy = "{'fastapi', 'starlette', 'mlx', 'mlx_lm', 'transformers', 'httpx'}"
    code = f"import sys, app.commands.{command}; print({heavy} & {{*sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "set()\n"
