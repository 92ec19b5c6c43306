"""Storage as the settings describe it: in a folder that is set, in the platform's, or in memory."""

from contextlib import closing
from pathlib import Path

import pytest

from app.settings import Settings, SettingsError
from app.settings.storage import open_storage, store_limits
from app.storage.responses.limits import StoreLimits
from app.storage.responses.store import StoredResponse


def test_what_outlives_the_server_is_in_the_folder_that_is_set(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path / "a", max_stored_responses=1, max_stored_mib=2, stored_response_ttl=60
    )
    with closing(open_storage(settings)) as storage:
        storage.responses.put("o", "r", StoredResponse("{}", "[]", True))
        sealed = storage.sealer.seal("p", "text")
    with closing(open_storage(settings)) as again:
        assert again.responses.get("o", "r") is not None
        assert again.sealer.unseal("p", sealed) == "text"
    assert store_limits(settings) == StoreLimits(1, 60, 2 << 20)


def test_responses_in_memory_end_with_the_server_and_the_key_does_not(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, response_store="memory")
    with closing(open_storage(settings)) as storage:
        storage.responses.put("o", "r", StoredResponse("{}", "[]", True))
        sealed = storage.sealer.seal("p", "text")
    with closing(open_storage(settings)) as again:
        assert again.responses.get("o", "r") is None
        assert again.sealer.unseal("p", sealed) == "text"
    assert {path.name for path in tmp_path.iterdir()} == {"batches", "server.lock", "signing.key"}


def test_a_folder_that_is_set_and_cannot_be_used_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match="MLX_SERVER_DATA_DIR cannot be used: "):
        open_storage(Settings(data_dir=file / "a"))
    path = tmp_path / "responses.sqlite"
    path.write_text("no database" * 100, encoding="ascii")
    with pytest.raises(SettingsError) as rejected:
        open_storage(Settings(data_dir=tmp_path))
    fault = f"{path}: file is not a database; move the file away, and a new one is made"
    assert str(rejected.value) == f"MLX_SERVER_DATA_DIR cannot be used: {fault}"
    path.unlink()
    open_storage(Settings(data_dir=tmp_path)).close()


@pytest.mark.parametrize("is_set", [False, True])
def test_a_folder_of_another_server_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    """The platform's folder, too: without it batches would end with the server."""
    monkeypatch.setattr("app.settings.storage.default_data_dir", lambda: tmp_path)
    settings = Settings(data_dir=tmp_path) if is_set else Settings()
    with closing(open_storage(settings)):
        with pytest.raises(SettingsError) as rejected:
            open_storage(settings)
        fault = f"another server uses {tmp_path}; each server needs a folder of its own"
        assert str(rejected.value) == f"MLX_SERVER_DATA_DIR: {fault}"


def test_a_key_that_could_be_guessed_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "signing.key").touch()
    with pytest.raises(SettingsError, match=r"cannot be used: .*/signing\.key has 0 bytes"):
        open_storage(Settings(data_dir=tmp_path))


def test_without_a_home_directory_all_is_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a user id that a container was started with."""
    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)
    with closing(open_storage(Settings())):
        assert "what is stored ends with the server" in caplog.text


def test_without_a_folder_that_can_be_written_all_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr("app.settings.storage.default_data_dir", lambda: file)
    with closing(open_storage(Settings())) as storage:
        storage.responses.put("o", "r", StoredResponse("{}", "[]", True))
        assert storage.responses.get("o", "r") is not None
    assert "what is stored ends with the server" in caplog.text
