"""Replicas, and what cannot be used of a router; `make test-routers` has the rest."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.cluster import router
from scripts.cluster.__main__ import main
from scripts.cluster.cluster import num_cores
from scripts.cluster.ports import HOST, free_port, is_free
from scripts.cluster.replica import Replica, share_signing_key
from scripts.server_process import ServerFailed, environment_settings
from tests.support.small_model import small_model


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server((HOST, free_port())) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the developer's own variables out, and give back the signals that the command takes."""
    for name in environment_settings():
        monkeypatch.delenv(f"MLX_SERVER_{name.upper()}", raising=False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_replica_keeps_its_port_and_its_data(tmp_path: Path) -> None:
    settings = {"model": str(small_model()), "cpu_threads": "1"}
    with Replica("1", tmp_path, settings) as replica:
        replica.log.write_text("of an earlier run\n", encoding="utf-8")
        assert replica.stop() is replica.kill() is replica.pid is None
        assert not replica.is_ready()
        replica.start()
        first = replica.pid
        replica.start()
        assert replica.pid == first
        assert replica.kill() == -signal.SIGKILL
        assert replica.exit_status == -signal.SIGKILL
        replica.start()
        replica.wait_until_ready()
        assert not is_free(replica.port)
        assert replica.get("/v1/models")["data"][0]["id"] == "small"
        assert replica.get("/nothing") is None
        assert (replica.data / "signing.key").exists()
        replica.pause()
        replica.resume()
        assert replica.stop() == 0
    assert replica.log.read_text(encoding="utf-8").startswith("of an earlier run\n")


def test_a_replica_that_does_not_start_says_why(tmp_path: Path) -> None:
    with Replica("1", tmp_path, {"max_num_seqs": "none"}) as replica:
        replica.start()
        with pytest.raises(ServerFailed, match="MAX_NUM_SEQS"):
            replica.wait_until_ready()
        assert replica.exit_status == 2


def test_replicas_get_the_key_of_the_first_one_that_has_one(tmp_path: Path) -> None:
    replicas = [Replica(name, tmp_path) for name in "123"]
    replicas[1].data.mkdir()
    (replicas[1].data / "signing.key").write_bytes(b"k" * 32)
    share_signing_key(replicas)
    files = [replica.data / "signing.key" for replica in replicas]
    assert {file.read_bytes() for file in files} == {b"k" * 32}
    assert {files[i].stat().st_mode & 0o777 for i in (0, 2)} == {0o600}


def test_ports_differ_from_those_in_use(used_port: int) -> None:
    assert not is_free(used_port)
    assert is_free(free_port())
    assert num_cores() > 0


def test_a_port_is_handed_out_once() -> None:
    assert len({free_port() for _ in range(200)}) == 200


def test_a_port_in_use_is_one_line(
    used_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: name)
    assert main(["--port", str(used_port)]) == 2
    assert capsys.readouterr().err == f"port {used_port} is in use\n"


@pytest.mark.parametrize("name", router.ROUTERS)
def test_a_router_that_is_not_installed_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router, "PATH", "/nowhere")
    assert main(["--router", name]) == 2
    assert capsys.readouterr().err.startswith(f"{name} is not installed: ")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_that_makes_no_sense_is_rejected(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--replicas={number}"])
    assert f"'{number}' is not a number of at least 1" in capsys.readouterr().err


def test_a_port_that_does_not_exist_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--port=70000"])
    assert "'70000' is no port: they end at 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("MLX_SERVER_PORT", "MLX_SERVER_PORT is each server's own; see --port"),
        ("MLX_SERVER_DATA_DIR", "MLX_SERVER_DATA_DIR is each server's own; see --data"),
        ("MLX_SERVER_API_KEYS_FILE", "smg needs one of the servers' keys: set MLX_SERVER_API_KEYS"),
    ],
)
def test_a_setting_that_all_servers_cannot_have_is_rejected(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "8001")
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err.endswith(f"error: {fault}\n")
