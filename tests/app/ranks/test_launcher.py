"""The processes of the other ranks: real ones, of a program that stands for the server or for ssh."""

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from app.ranks.launcher import Launcher, member_variables
from app.ranks.plan import rank_plan
from app.settings import Settings
from batching import CannotJoin
from tests.support.rank_servers import hosts

# Stands for ssh, and runs its command here.
_SSH = 'echo "$@" > "$0.log"; while [ "$1" != -- ]; do shift; done; exec sh -c "$3"'
# Stand for the server.
_PRINTS = 'echo "rank $MLX_RANK of $MLX_SERVER_RANKS"; exec sleep 60'
_TELLS = 'echo "$HF_TOKEN, $MLX_SERVER_DTYPE"; exec sleep 60'
_FAILS = "echo one; echo two >&2; exit 3"


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


class Launched(Launcher):
    """Is closed even where a test fails."""

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()


def launcher(*names: str, envs: Sequence[str] = (), **fields: Any) -> Launched:
    listed = json.loads(hosts("localhost", *names))
    ranks = json.dumps({"hosts": listed, "envs": [*envs]})
    settings = Settings(_env_file=None, ranks=ranks, **fields)
    return Launched(rank_plan(settings, {}), settings)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "ssh", _SSH)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # It stands for one that a client must not see.
    monkeypatch.setenv("MLX_SERVER_API_KEYS", "secret")


def serve_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "a server", script)))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> "SimpleQueue[str]":
    """The lines that are printed; a thread prints those of each process."""
    lines: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr("app.ranks.launcher.print_stderr", lines.put)
    return lines


def wait_for(said: "SimpleQueue[str]", *beginnings: str) -> None:
    """Wait for lines, in any order."""
    missing = set(beginnings)
    while missing:
        line = said.get(timeout=30)
        missing -= {each for each in missing if line.startswith(each)}


def test_ranks_are_started_here_and_by_ssh_and_end_when_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: "SimpleQueue[str]"
) -> None:
    serve_with(monkeypatch, tmp_path, _PRINTS)
    with launcher("127.0.0.1", "mac2", socket.gethostname()) as started:
        started.start()
        wait_for(said, *(f'rank {n}: rank {n} of {{"hosts": [{{"ssh":' for n in (1, 2, 3)))
        started.check()
        options, _, line = (tmp_path / "ssh.log").read_text().partition(" -- mac2 ")
        assert options == "-o BatchMode=yes -o ConnectTimeout=10"
        assert line.startswith(f"cd {Path.cwd()} && exec sh -c ")
        assert "secret" not in line
        started.kill()
    assert all(each.process.returncode == -9 for each in started._started)


def test_variables_of_the_hosts_file_are_in_no_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: "SimpleQueue[str]"
) -> None:
    serve_with(monkeypatch, tmp_path, _TELLS)
    with launcher("127.0.0.1", "mac2", envs=["HF_TOKEN=of=hub x", "MLX_SERVER_DTYPE=b"]) as started:
        started.start()
        wait_for(said, *(f"rank {n}: of=hub x, b" for n in (1, 2)))
        assert "of=hub" not in (tmp_path / "ssh.log").read_text()


def test_one_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: "SimpleQueue[str]"
) -> None:
    serve_with(monkeypatch, tmp_path, _PRINTS)
    monkeypatch.setattr("app.ranks.launcher._END_SECONDS", 0.01)
    with launcher("127.0.0.1") as started:
        started.start()
        wait_for(said, "rank 1: rank 1 of")
        started.close()
        assert started._started[0].process.returncode == -9


def test_one_whose_rank_0_is_gone_reads_the_end_of_its_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: "SimpleQueue[str]"
) -> None:
    serve_with(monkeypatch, tmp_path, 'cat; echo "$MLX_RANK_LAUNCHED: the end"')
    with launcher("127.0.0.1", "mac2") as started:
        started.start()
        for each in started._started:
            assert each.process.stdin is not None
            assert each.process.poll() is None
            # As the system does when the process has ended.
            each.process.stdin.close()
        wait_for(said, "rank 1: 1: the end", "rank 2: 1: the end")


def test_one_that_ends_is_named_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: "SimpleQueue[str]"
) -> None:
    serve_with(monkeypatch, tmp_path, _FAILS)
    with launcher("mac1") as started:
        started.start()
        started._started[0].process.wait()
        with pytest.raises(CannotJoin) as error:
            started.check()
        assert str(error.value) == "rank 1 (mac1) has ended with status 3: two"
        wait_for(said, "rank 1: one", "rank 1: two")


def test_one_that_ends_without_a_word_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_with(monkeypatch, tmp_path, "exit 0")
    with launcher("mac1") as started:
        started.start()
        started._started[0].process.wait()
        with pytest.raises(CannotJoin) as error:
            started.check()
        assert str(error.value) == "rank 1 (mac1) has ended with status 0"


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with launcher("mac1") as started, pytest.raises(CannotJoin) as error:
        started.start()
    assert str(error.value) == "rank 1 (mac1) cannot be started: ssh: No such file or directory"


def test_other_ranks_get_the_settings_of_the_model_and_no_secrets() -> None:
    settings = Settings(
        _env_file=None,
        ranks=hosts("mac0", "mac1"),
        model="models/large",
        num_blocks="auto",
        enable_prefix_cache=False,
        max_model_len=None,
        trust_remote_code=True,
        log_format="json",
        port=9000,
        data_dir=Path("data"),
        api_keys="secret",
        admin_keys="secret",
        api_keys_file=Path("secrets"),
        ranks_timeout=5,
    )
    plan = rank_plan(settings, {})
    variables = member_variables(settings, plan, 1)
    assert variables.pop("PYTHONPATH") == str(Path(__file__).parents[3])
    assert variables == {
        "MLX_RANK": "1",
        "MLX_RANK_LAUNCHED": "1",
        "MLX_SERVER_RANKS": plan.hostfile.to_json(),
        "MLX_SERVER_RANKS_BACKEND": "ring",
        "MLX_SERVER_RANKS_HOST": "127.0.0.1",
        "MLX_SERVER_RANKS_PORT": "32322",
        "MLX_SERVER_RANKS_TIMEOUT": "5.0",
        "MLX_SERVER_MODEL": "models/large",
        "MLX_SERVER_NUM_BLOCKS": "auto",
        "MLX_SERVER_ENABLE_PREFIX_CACHE": "false",
        "MLX_SERVER_TRUST_REMOTE_CODE": "true",
        "MLX_SERVER_LOG_FORMAT": "json",
    }
    # It finds the same in them.
    environment = {k: v for k, v in variables.items() if k.startswith("MLX_SERVER_")}
    fields: dict[str, Any] = {
        name.removeprefix("MLX_SERVER_").lower(): v for name, v in environment.items()
    }
    theirs = Settings(_env_file=None, **fields)
    assert rank_plan(theirs, {"MLX_RANK": "1"}) == replace(plan, rank=1, launches=False)
