"""`serve --ranks`, up to what keeps it from serving: one line, and the status 2."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.ranks.first_rank import FirstRank
from batching import RankLost, agree_with_leader, join_ranks
from tests.support.rank_links import Ends
from tests.support.rank_servers import free_ports, hosts
from tests.support.small_model import small_model


@pytest.fixture(autouse=True)
def _no_env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_RANK", raising=False)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    port = free_ports(3)
    return [
        "serve",
        f"--ranks={hosts('mac0', 'mac1')}",
        f"--ranks-port={port}",
        f"--model={small_model()}",
        f"--data-dir={tmp_path}",
        "--port=0",
        "--device=cpu",
        "--ranks-timeout=30",
    ]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--ranks=hosts.json", "--ranks: hosts.json cannot be read: No such file or directory"),
        ("--ranks=[]", "--ranks: at least 2 hosts are needed, not 0"),
        ("--models=b", "--models is not served with --ranks: one model is divided among them"),
        (
            "--kv-host-gib=1",
            "--kv-host-gib is not served over several ranks: each has a part of the keys and values",
        ),
    ],
)
def test_what_is_wrong_with_the_settings_is_one_line(
    flags: list[str], flag: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, flag]) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_files_of_requests_have_no_ranks(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run-batch", "a", "b", *flags[1:]]) == 2
    assert capsys.readouterr().err == "--ranks is for serve, not for run-batch\n"


def test_a_rank_that_finds_no_first_one_is_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_RANK", "1")
    assert main([*flags, "--ranks-timeout=0.2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 0 (mac0) at 127.0.0.1 port ")


def joining(flags: list[str], then: Callable[[Any], None]) -> threading.Thread:
    """Join as the rank 1 of these flags, in a thread."""
    port = int(flags[2].partition("=")[2])

    def run() -> None:
        ends = Ends()
        member = join_ranks(("127.0.0.1", port), ["mac0", "mac1"], 1, 30, ends)
        then(member)
        ends.wait()
        member.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_rank_that_differs_is_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(member: Any) -> None:
        with pytest.raises(RankLost):
            agree_with_leader(member, {})

    monkeypatch.setenv("MLX_RANK", "0")
    thread = joining(flags, differ)
    assert main(flags) == 2
    thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "waiting for 1 other ranks ..."
    assert lines[-1].startswith("rank 1 (mac1) has mlx-batch-server none, rank 0 has ")


def test_what_the_first_rank_ends_for_is_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RankLost(0, "cannot compute a step with the others")

    monkeypatch.setattr(FirstRank, "build", fail)
    monkeypatch.setenv("MLX_RANK", "0")
    thread = joining(flags, lambda member: None)
    assert main([*flags, "--host=0.0.0.0"]) == 1
    thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: every client that reaches 0.0.0.0")
    assert lines[-1] == "rank 0 cannot compute a step with the others"


def test_the_first_rank_ends_as_its_server_does(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.run", lambda settings, manager: 0)
    monkeypatch.setenv("MLX_RANK", "0")
    thread = joining(flags, lambda member: None)
    assert main(flags) == 0
    thread.join()
