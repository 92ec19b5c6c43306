"""Which server a command talks to, and which key it sends there."""

import argparse
from pathlib import Path

import pytest

from app.commands.errors import CommandError
from app.commands.server.server_address import Server, add_server_arguments, find_server
from tests.support.rows import rows


def found(*arguments: str) -> Server:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return find_server(parser.parse_args(arguments))


def test_without_any_setting_it_is_the_default_address() -> None:
    assert found() == Server("http://127.0.0.1:8000")


@rows(
    ("host", "url"),
    [
        ("192.168.1.5", "http://192.168.1.5:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
    ],
)
def test_settings_of_the_server_lead_to_it(
    host: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_HOST", host)
    Path(".env").write_text("MLX_SERVER_PORT=81\n")
    assert found() == Server(url)


@rows(
    ("given", "url"),
    [
        ("10.0.0.1:81", "http://10.0.0.1:81"),
        ("https://models.example.org/v1/", "https://models.example.org"),
        ("http://[::1]:81/", "http://[::1]:81"),
    ],
)
def test_a_url_may_be_short_or_that_of_clients(given: str, url: str) -> None:
    assert found("--url", given) == Server(url)


@rows("url", ["ftp://host", "http://", "http://host:x", "http://[", "http://me@host", "host?a=b"])
def test_what_is_no_url_is_rejected(url: str) -> None:
    with pytest.raises(CommandError, match=r"^--url must be like http://127\.0\.0\.1:8000, not "):
        found("--url", url)


def test_the_key_of_a_flag_outranks_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEY", "variable")
    assert found("--api-key", "flag").api_key == "flag"
    assert found("--url", "host").api_key == "variable"
    assert "variable" not in repr(found())


@rows(
    ("keys", "key"),
    [
        ({"API_KEYS": "one,two", "ADMIN_KEYS": "root"}, "one"),
        ({"ADMIN_KEYS": "root"}, "root"),
        ({"API_KEYS_FILE": "keys"}, "filed"),
    ],
)
def test_a_key_of_the_settings_is_sent_to_their_address_only(
    keys: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("keys").write_text("filed\n")
    with monkeypatch.context() as variables:
        for name, value in keys.items():
            variables.setenv(f"MLX_SERVER_{name}", value)
        assert found().api_key == key
        assert found("--url", "http://127.0.0.1:8000").api_key is None


def test_a_key_of_openai_is_sent_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert found().api_key is None


def test_a_key_that_no_header_can_carry_is_rejected() -> None:
    with pytest.raises(CommandError, match=r"^a key must be visible ASCII"):
        found("--api-key", "schlüssel")


def test_bad_settings_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_PORT", "x")
    monkeypatch.setenv("MLX_SERVER_NUM_BLOCKS", "y")
    with pytest.raises(CommandError, match=r"^MLX_SERVER_\w+ must be .*; MLX_SERVER_\w+ must be "):
        found()


def test_any_free_port_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_PORT", "0")
    with pytest.raises(CommandError, match="--url must say which"):
        found()
