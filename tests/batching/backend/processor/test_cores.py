"""Threads are no more than what the system lets the process use."""

import os
from pathlib import Path

import pytest

from batching.backend.processor.cores import Cores, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def test_without_control_groups_there_are_all_cores(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path)
    assert cores == Cores(available=8, hardware_threads=8, nodes=(), quota=None)
    assert str(cores) == "8 cores"


@pytest.mark.parametrize(
    ("quota", "expected", "num_threads"),
    [
        ("max 100000", None, 7),
        ("700000 100000", 7, 7),
        ("200000 100000", 2, 2),
        ("150000 100000", 1.5, 1),
        ("5000 100000", 0.05, 1),
        ("1600000 100000", 16, 7),
        ("?", None, 7),
        ("1 0", None, 7),
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
    assert usable_cores(tmp_path).quota is None
    write(folder / "cpu.cfs_quota_us", "250000\n")
    assert usable_cores(tmp_path).count == 2


def write_processors(root: Path, siblings: list[str], nodes: list[str]) -> None:
    for thread, cores in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{thread}/topology"
        write(folder / "thread_siblings_list", f"{cores}\n")
    for node, processors in enumerate(nodes):
        write(root / f"sys/devices/system/node/node{node}/cpulist", f"{processors}\n")


def test_a_core_of_two_hardware_threads_computes_in_one(tmp_path: Path) -> None:
    """The other one is there for the event loop, so that all cores compute."""
    write_processors(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, ["0-7"])
    cores = usable_cores(tmp_path)
    assert (cores.available, cores.count, cores.max_threads) == (4, 4, 8)
    assert str(cores) == "4 cores with 8 hardware threads"


def test_eight_cores_of_two_hardware_threads_all_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    write_processors(tmp_path, [f"{n},{n + 8}" for n in range(8)] * 2, [])
    assert usable_cores(tmp_path).count == 8
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "800000 100000")
    assert usable_cores(tmp_path).count == 7


def test_threads_that_one_numa_node_has_no_room_for_are_divided(tmp_path: Path) -> None:
    # Of the third node the process may use nothing.
    write_processors(tmp_path, [], ["0-3,9", "4-5,6-7", "8,10-15", ""])
    cores = usable_cores(tmp_path)
    assert str(cores) == "8 cores on 2 NUMA nodes"
    assert cores.nodes_of(5) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cores.nodes_of(4) == ()


def test_threads_of_a_single_node_run_anywhere(tmp_path: Path) -> None:
    write_processors(tmp_path, [], ["0-7"])
    cores = usable_cores(tmp_path)
    assert cores.nodes_of(8) == ()
    assert str(cores) == "8 cores"
