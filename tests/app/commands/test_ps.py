"""`ps` shows what a server runs, whatever it tells of that."""

import json
import time
from typing import Any

import pytest

from app.commands import ps
from tests.support.commands import run_command
from tests.support.rows import rows
from tests.support.talking_server import TalkingServer

NOW = 1_000_000.0
GIB = 1 << 30
LOADED: dict[str, Any] = {
    "id": "qwen",
    "aliases": ["default"],
    "max_model_len": 40_960,
    "status": {"value": "loaded"},
    "memory": {"weights": 2 * GIB, "kv_cache": GIB // 2, "states": 0},
    "in_flight": 3,
    "pinned": False,
    "expires_at": NOW + 240,
}
LOADING = {"id": "gemma", "status": {"value": "loading", "progress": 0.42}, "memory": None}
ADAPTER = {"id": "cat", "parent": "bad", "status": {"value": "unloaded", "failed": True}}
FAILED = {
    "id": "bad",
    "status": {"value": "unloaded", "failed": True, "reason": "no weights:\nx.gguf"},
}
UNLOADED = {"id": "small", "status": {"value": "unloaded"}, "in_flight": 0}
OLD = {"id": "toy", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 8192}


@pytest.fixture(autouse=True)
def it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)


def shown(
    server: TalkingServer, capsys: pytest.CaptureFixture[str], models: list[Any], *flags: str
) -> list[str]:
    server.models = {"data": models}
    assert run_command(ps, "--url", server.url, *flags) == 0
    return capsys.readouterr().out.splitlines()


def test_models_in_memory_are_listed(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(server, capsys, [LOADED, LOADING, FAILED, ADAPTER, UNLOADED, OLD]) == [
        "NAME   STATE         MEMORY   CONTEXT  REQUESTS  UNTIL",
        "qwen   loaded        2.5 GiB  40960    3         in 4 min",
        "gemma  loading 42 %  -        -        -         -",
        "bad    failed        -        -        -         -",
        "  cat  -             -        -        -         -",
        "toy    -             -        8192     -         -",
        "bad: no weights: x.gguf",
    ]


def test_where_a_server_keeps_keys_and_values_their_size_is_listed(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [{**LOADED, "kv_store_bytes": 3 << 20}, LOADING]
    assert shown(server, capsys, models) == [
        "NAME   STATE         MEMORY   STORED  CONTEXT  REQUESTS  UNTIL",
        "qwen   loaded        2.5 GiB  3 MiB   40960    3         in 4 min",
        "gemma  loading 42 %  -        -       -        -         -",
    ]


def test_all_models_are_listed_if_asked_for(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(server, capsys, [LOADED, UNLOADED], "--all")
    assert [line.split()[:2] for line in lines[1:]] == [["qwen", "loaded"], ["small", "unloaded"]]


@rows(
    ("models", "line"),
    [
        ([UNLOADED], "no model is loaded; --all lists the 1 that can be"),
        ([], "no model is loaded"),
    ],
)
def test_without_a_model_in_memory_a_line_says_so(
    models: list[Any], line: str, server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(server, capsys, models) == [line]


def test_json_has_the_fields_of_the_server(
    server: TalkingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(server, capsys, [LOADED, UNLOADED], "--json")
    assert json.loads("\n".join(lines)) == [LOADED]
    assert shown(server, capsys, [UNLOADED], "--json") == ["[]"]


@rows(
    ("fields", "until"),
    [
        ({"expires_at": NOW + 90}, "in 90 s"),
        ({"expires_at": NOW - 5}, "in 0 s"),
        ({"expires_at": NOW + 7300}, "in 2 h"),
        ({"expires_at": None}, "-"),
        ({"pinned": True, "expires_at": NOW}, "pinned"),
        ({"memory": {"weights": 5 << 20}}, "5 MiB"),
        ({"status": {"value": "unloaded", "failed": True}}, "qwen: the load failed"),
        ({"status": "up"}, "-"),
    ],
)
def test_a_field_has_its_text(fields: dict[str, Any], until: str) -> None:
    table = "\n".join(ps.table([{**LOADED, "expires_at": None, **fields}], NOW))
    assert until in table


def test_a_refusal_is_shown(server: TalkingServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 503
    assert run_command(ps, "--url", server.url) == 1
    assert capsys.readouterr().err.startswith(f"{server.url}/v1/models answers 503: ")
