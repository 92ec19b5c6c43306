"""API keys from variables and from a file."""

from pathlib import Path

import pytest

from app.settings import SettingsError, load_settings
from app.settings.keys import client_keys


def keys() -> list[str]:
    return client_keys(load_settings())


def rejection() -> str:
    with pytest.raises(SettingsError) as caught:
        keys()
    return str(caught.value)


def test_there_are_no_keys_by_default() -> None:
    assert keys() == []


def test_keys_come_from_a_variable_and_from_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", " key-1, key-2 ,")
    (tmp_path / "keys").write_text("# of the team\nkey-3\n\n")
    monkeypatch.setenv("MLX_SERVER_API_KEYS_FILE", "keys")
    assert keys() == ["key-1", "key-2", "key-3"]
    assert "key-" not in repr(load_settings())


def test_a_file_that_lost_its_keys_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS_FILE", "keys")
    reason = "MLX_SERVER_API_KEYS_FILE cannot be read: keys: "
    assert rejection() == f"{reason}No such file or directory"
    (tmp_path / "keys").write_bytes(b"\xff")
    assert rejection() == f"{reason}it is no text"
    (tmp_path / "keys").write_text("# nothing\n")
    assert rejection() == "MLX_SERVER_API_KEYS_FILE holds no key"


def test_a_key_that_no_header_can_carry_is_rejected_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "good,secr\u00e9t")
    message = rejection()
    assert message.startswith("MLX_SERVER_API_KEYS: key 2: ")
    assert "secr" not in message


@pytest.mark.parametrize("field", ["api_keys", "admin_keys"])
@pytest.mark.parametrize("text", [",", " ", ", ,"])
def test_a_list_that_lost_its_keys_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, field: str, text: str
) -> None:
    monkeypatch.setenv(variable := f"MLX_SERVER_{field}".upper(), text)
    assert rejection() == f"{variable} holds no key"


def test_a_key_in_a_list_is_no_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "a,#b")
    assert keys() == ["a", "#b"]
