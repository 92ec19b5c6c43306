"""Threads are no more than what the system lets the process use."""

import os
from pathlib import Path

import pytest

from batching.backend.cores import Cores, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def test_without_control_groups_there_are_all_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == Cores(8, None)
    assert str(Cores(8, None)) == "8 cores"


@pytest.mark.parametrize(
    ("quota", "expected", "num_threads"),
    [
        ("max 100000", None, 8),
        ("200000 100000", 2, 2),
        ("150000 100000", 1.5, 1),
        ("5000 100000", 0.05, 1),
        ("1600000 100000", 16, 8),
        ("?", None, 8),
        ("1 0", None, 8),
    ],
)
def test_a_container_gets_threads_for_its_part_of_the_cores(
    tmp_path: Path, quota: str, expected: float | None, num_threads: int
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", quota)
    cores = usable_cores(tmp_path)
    assert (cores.quota, cores.count) == (expected, num_threads)


def test_the_least_of_the_groups_around_the_process_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/server.service\n")
    write(tmp_path / "sys/fs/cgroup/system.slice/cpu.max", "300000 100000")
    write(tmp_path / "sys/fs/cgroup/system.slice/server.service/cpu.max", "400000 100000")
    cores = usable_cores(tmp_path)
    assert cores.count == 3
    assert str(cores) == "8 cores, of which the control group has 3"


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpuset:/\n3:cpu,cpuacct:/docker/1\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/cpu"
    # A container sees its own group at the root.
    write(folder / "cpu.cfs_quota_us", "-1\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path).count == 8
    write(folder / "cpu.cfs_quota_us", "250000\n")
    assert usable_cores(tmp_path).count == 2
