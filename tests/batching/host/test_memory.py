"""What the system says of its memory, in files of a folder that stands for its root."""

from pathlib import Path

import pytest

from batching.host.memory import available_memory, memory_limit

GIB = 1 << 30
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


class Root:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")

    def write_group(self, folder: str, limit: str, used: int, inactive: int = 0) -> None:
        """Write a group's files as both versions call them."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            self.write(f"{folder}/{name}", f"{limit}\n")
        for name in ("memory.current", "memory.usage_in_bytes"):
            self.write(f"{folder}/{name}", f"{used}\n")
        key = "total_inactive_file" if folder.startswith(V1) else "inactive_file"
        self.write(f"{folder}/memory.stat", f"anon 1\n{key} {inactive}\nactive_file 5\n")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path)
    root.write("proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:    8388608 kB\n")
    root.write("proc/self/cgroup", "0::/\n")
    return root


def test_without_a_limit_it_is_what_the_machine_has_left(root: Root) -> None:
    root.write_group(V2, "max", used=GIB)
    assert available_memory(root.path) == 8 * GIB
    assert memory_limit(root.path) is None


def test_a_containers_limit_counts_less_what_it_uses(root: Root) -> None:
    root.write_group(V2, str(6 * GIB), used=2 * GIB)
    assert available_memory(root.path) == 4 * GIB
    assert memory_limit(root.path) == 6 * GIB


def test_what_is_kept_of_files_is_free(root: Root) -> None:
    root.write_group(V2, str(6 * GIB), used=5 * GIB, inactive=3 * GIB)
    assert available_memory(root.path) == 4 * GIB


def test_the_machine_may_have_less_than_the_limit_leaves(root: Root) -> None:
    root.write_group(V2, str(20 * GIB), used=0)
    assert available_memory(root.path) == 8 * GIB


def test_every_group_around_the_process_limits_it(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/system.slice/server.service\n")
    root.write_group(f"{V2}/system.slice/server.service", str(7 * GIB), used=GIB)
    root.write_group(f"{V2}/system.slice", str(6 * GIB), used=3 * GIB)
    assert available_memory(root.path) == 3 * GIB
    assert memory_limit(root.path) == 6 * GIB


def test_version_1_says_the_same_in_other_files(root: Root) -> None:
    root.write("proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/docker/b\n0::/\n")
    root.write_group(V1, str(4 * GIB), used=3 * GIB, inactive=GIB)
    assert available_memory(root.path) == 2 * GIB
    assert memory_limit(root.path) == 4 * GIB


def test_a_group_that_is_over_its_limit_has_nothing_left(root: Root) -> None:
    root.write_group(V2, str(GIB), used=2 * GIB)
    assert available_memory(root.path) == 0


def test_a_system_without_such_files_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert memory_limit(tmp_path) is None
