"""How ranks start and end together, and what keeps them from it: one line, and the status 2 for all."""

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import select

import pytest

from scripts.server_process import ServerProcess
from tests.support.rank_servers import ask, ended, free_ports, hosts, rank, settings, url_of
from tests.support.small_model import small_model

pytestmark = pytest.mark.ranks
# For a start on a busy machine, and the time-outs of MLX.
_START_SECONDS = 60.0
_SSH = """#!/bin/sh
# Runs what it is told to on this machine, as a host would that is another one.
echo "$@" >> "$0.log"
# What it runs has its number.
echo $$ > "$0.pid"
while [ "$1" != -- ]; do shift; done
[ "$2" = silent ] && exec cat
[ "$2" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
[ -p "$0.open" ] && exec 9>"$0.open"
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$3"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """A program that stands for ssh; `environment` finds it."""
    program = tmp_path / "ssh"
    program.write_text(_SSH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def path_with(program: Path) -> str:
    return f"{program.parent}:{os.environ['PATH']}"


def failed(*processes: ServerProcess) -> list[str]:
    """Wait until ranks have ended with the status 2; return the last line of each."""
    assert ended(*processes, within=_START_SECONDS) == [2] * len(processes), [
        process.log for process in processes
    ]
    return [process.log.strip().splitlines()[-1] for process in processes]


@pytest.mark.parametrize("other", ["127.0.0.1", "mac1"])
def test_the_first_rank_starts_the_others_and_ends_them(other: str, ssh: Path) -> None:
    listed = {"hosts": json.loads(hosts("127.0.0.1", other)), "envs": ["HF_TOKEN=secret-3"]}
    changed = {"ranks": json.dumps(listed), "api_keys": "secret-1"}
    with rank(settings(**changed), PATH=path_with(ssh), HF_TOKEN="secret-2") as first:
        answer = ask(
            url_of(first), lambda: first.send_signal(signal.SIGTERM), num_tokens=20, key="secret-1"
        )
        assert answer.is_done
        assert ended(first) == [0], first.log
    if other == "mac1":
        said = Path(f"{ssh}.log").read_text()
        assert "BatchMode=yes" in said
        assert "MLX_RANK=1" in said
        assert "secret" not in said


def test_a_rank_that_is_killed_ends_all_and_they_serve_when_the_first_is_started_again(
    ssh: Path,
) -> None:
    shared = settings(ranks=hosts("127.0.0.1", "mac1"), port=free_ports(1))
    with rank(shared, PATH=path_with(ssh)) as first:
        answer = ask(
            url_of(first), lambda: os.kill(int(Path(f"{ssh}.pid").read_text()), signal.SIGKILL)
        )
        assert answer.error is not None
        assert answer.error["message"].startswith("rank 1 (mac1) is gone")
        assert ended(first) == [1]
    # As a supervisor does, at the same ports.
    with rank(shared, PATH=path_with(ssh)) as first:
        assert ask(url_of(first), num_tokens=5).is_done
        assert first.exit_status is None


def test_no_rank_outlives_a_first_one_that_is_killed_before_all_are_there(ssh: Path) -> None:
    is_open = Path(f"{ssh}.open")
    os.mkfifo(is_open)
    shared = settings(ranks=hosts("127.0.0.1", "mac1", "silent"), ranks_port=free_ports(4))
    with rank(shared, PATH=path_with(ssh)) as first, is_open.open("rb") as held_by_second:
        first.wait_for_line("waiting for 2 other ranks")
        first.kill()
        assert select([held_by_second], [], [], _START_SECONDS / 2)[0]
        assert held_by_second.read() == b""


def test_a_host_that_is_not_there_is_one_line(ssh: Path) -> None:
    with rank(settings(ranks=hosts("127.0.0.1", "nowhere")), PATH=path_with(ssh)) as first:
        assert failed(first) == [
            "rank 1 (nowhere) has ended with status 255: ssh: Could not resolve hostname nowhere"
        ]


@contextmanager
def two(
    first: dict[str, object], second: dict[str, object], **of_second: str
) -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(rank(first, 0)),
            stack.enter_context(rank(second, 1, **of_second)),
        ]


def test_another_version_is_named_by_both(tmp_path: Path) -> None:
    package = tmp_path / "mlx-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.1\n")
    shared = settings()
    with two(shared, shared, PYTHONPATH=str(tmp_path)) as processes:
        lines = failed(*processes)
    assert lines[0] == lines[1]
    assert lines[0].startswith("rank 1 (mac1) has MLX 0.1, rank 0 has ")


def test_other_settings_are_named_by_both() -> None:
    shared = settings()
    with two(shared, {**shared, "dtype": "float16"}) as processes:
        lines = failed(*processes)
    assert lines == ["rank 1 (mac1) has MLX_SERVER_DTYPE float16, rank 0 has auto"] * 2


def test_another_model_is_named_by_both(tmp_path: Path) -> None:
    model = tmp_path / "small"
    model.mkdir()
    for path in small_model().iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    shared = settings()
    with two(shared, {**shared, "model": model}) as processes:
        lines = failed(*processes)
    assert lines[0] == lines[1]
    assert lines[0].startswith("rank 1 (mac1) has a model with the digest ")


def test_a_model_whose_heads_do_not_divide_is_named() -> None:
    shared = settings(model="smollm2-135m-instruct")
    with two(shared, shared) as processes:
        lines = failed(*processes)
    assert all(
        "the model cannot be divided among 2 ranks: n_heads is 9" in line for line in lines
    ), lines


@pytest.mark.parametrize("of_ring", [False, True])
def test_a_port_in_use_is_named(*, of_ring: bool) -> None:
    port = free_ports(3)
    shared = settings(ranks_port=port)
    taken = ("127.0.0.1", port + 1) if of_ring else ("127.0.0.1", port)
    with (
        socket.create_server(taken),
        two({**shared, "ranks_timeout": 5}, {**shared, "ranks_timeout": 5}) as processes,
    ):
        if of_ring:
            lines = failed(*processes)
            assert all(
                f"cannot listen on 127.0.0.1 port {port + 1}: Address already in use" in line
                for line in lines
            ), lines
        else:
            [line] = failed(processes[0])
            assert line == f"cannot listen on 127.0.0.1 port {port}: Address already in use"
            processes[1].kill()


def test_ranks_that_do_not_find_each_other_end() -> None:
    for number, line in (
        (0, "not connected within 1 s: rank 1 (mac1)"),
        (1, "rank 0 (mac0) at 127.0.0.1 port "),
    ):
        with rank(settings(ranks_timeout=1), number) as alone:
            assert failed(alone)[0].startswith(line)
