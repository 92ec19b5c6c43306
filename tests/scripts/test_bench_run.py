"""Whole runs against servers with canned answers."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench import cli
from scripts.bench.__main__ import main
from scripts.bench.load.servers import server_by_command
from tests.support.fake_server import (
    DONE,
    Body,
    FakeServer,
    Reply,
    canned,
    fake_server,
    text_chunk,
)

FAKE = Path(__file__).parents[1] / "support" / "fake_server.py"
SMALL = ["--rounds", "2", "--clients", "2", "--max-tokens", "3", "--warmup", "1"]


@pytest.fixture(scope="module")
def ours() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def peer() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--json", "-"])
    written: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, written


def test_two_servers_side_by_side(
    ours: FakeServer, peer: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "r.json"
    urls = ["--url", f"ours={ours.url}", "--vs", f"peer={peer.url}#other"]
    assert main([*urls, *SMALL, "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    for title in ("output tok/s", "requests/s", "TTFT p50", "ITL p99"):
        assert title in out
    for server in ("ours", "peer"):
        assert re.search(rf"^short, 2 clients  {server}( +[\d.]+){{7}}$", out, re.MULTILINE)
    written = json.loads(numbers.read_text())
    assert written["machine"]["python"]
    assert [server["model"] for server in written["servers"]] == ["fake-model", "other"]
    first = written["results"][0]
    assert first["load"] == {"label": "2 clients", "num_clients": 2, "requests_per_client": 2}
    assert (first["median"]["num_requests"], len(first["rounds"])) == (8, 2)
    assert first["median"]["values"]["output_tokens"] == 12
    assert first["median"]["values"]["prompt_tokens"] == 76


def test_our_server_and_a_peer_are_started_and_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} {FAKE} {{port}}"
    monkeypatch.setattr(cli, "our_server", lambda model: server_by_command(f"ours={command}"))
    status, written = run_json(capsys, "--vs-command", f"peer={command} #other", *SMALL)
    assert status == 0
    assert [(server["name"], server["model"]) for server in written["servers"]] == [
        ("ours", "fake-model"),
        ("peer", "other"),
    ]
    assert [result["median"]["num_requests"] for result in written["results"]] == [8, 8]
    for server in written["servers"]:
        with pytest.raises(httpx.ConnectError):
            httpx.get(server["url"], trust_env=False)


def test_servers_get_the_same_prompts_in_turns_and_never_one_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = []

    def noting(name: str, body: Body) -> Reply:
        order.append(name)
        return canned(body)

    with (
        fake_server(lambda body: noting("a", body)) as a,
        fake_server(lambda body: noting("b", body)) as b,
    ):
        words = ["--url", f"a={a.url}", "--vs", f"b={b.url}", *SMALL, "--clients", "1"]
        assert run_json(capsys, *words)[0] == 0
    asked = [[body["messages"][-1]["content"] for body in server.bodies] for server in (a, b)]
    # A warm-up and two requests in each turn of a round with 1 client, then with 2.
    assert order[:6] == list("aaabbb")
    assert sorted(asked[0]) == sorted(asked[1])
    assert len(set(asked[0])) == len(asked[0])


def test_a_conversation_carries_its_completions(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        words = ["--url", server.url, "--scenario", "multi-turn", "--clients", "1"]
        run_json(capsys, *words, "--rounds", "1", "--warmup", "0", "--max-tokens", "2")
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [(["user", "assistant"] * 4)[: 2 * turn + 1] for turn in range(4)]
    assert server.bodies[3]["messages"][1]["content"] == "word0 word1 "


def test_failed_requests_are_counted_and_the_first_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(lambda body: Reply(('{"error": "no such model"}',), status=404)) as server:
        assert main(["--url", f"x={server.url}", *SMALL]) == 1
    out = capsys.readouterr().out
    first = "the first: HTTP 404: no such model"
    assert f"short, 2 clients: 8 of 8 requests to x failed; {first}" in out


def test_oddities_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(lambda body: Reply((text_chunk("word"), DONE))) as mute:
        written = run_json(capsys, "--url", f"x={mute.url}", *SMALL)[1]
    assert written["notes"] == ["x sends no usage: its chunks are counted as tokens"]
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    hit = {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": 9}}}
    lines = (text_chunk("word"), f"data: {json.dumps(hit)}\n", DONE)
    with fake_server(lambda body: Reply(lines)) as warm:
        written = run_json(capsys, "--url", f"x={warm.url}", *SMALL)[1]
    assert [note.partition(":")[0] for note in written["notes"]] == [
        "x had more than 25% of the prompt tokens of short in its cache"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    gate = threading.Event()

    def interrupt(body: Body) -> Reply:
        os.kill(os.getpid(), number)
        gate.wait()
        return canned(body)

    before = signal.getsignal(signal.SIGTERM)
    with fake_server(interrupt) as server:
        assert main(["--url", server.url, "--clients", "1", "--warmup", "0"]) == 130
        gate.set()
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_cannot_be_reached_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        pass
    assert main(["--url", f"x={server.url}"]) == 2
    assert capsys.readouterr().err.startswith(f"x at {server.url} cannot be asked for its models")
