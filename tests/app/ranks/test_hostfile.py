"""The file of hosts: what `mlx.distributed_config` writes, and one line for what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.ranks.hostfile import Host, read_hostfile
from app.settings import SettingsError

TWO: list[dict[str, Any]] = [
    {"ssh": "mac0", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
    {"ssh": "me@mac1.local", "ips": ["10.0.0.2", "10.0.1.2"]},
]


def test_a_list_of_hosts_is_read_from_a_file_or_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(TWO))
    for setting in (str(path), json.dumps(TWO), f"\n {json.dumps(TWO)}"):
        found = read_hostfile(setting)
        assert found.hosts == [
            Host("mac0", ["10.0.0.1"], [None, "rdma_en2"]),
            Host("me@mac1.local", ["10.0.0.2", "10.0.1.2"], []),
        ]
        assert (found.names, found.backend) == (["mac0", "me@mac1.local"], "")
        assert read_hostfile(found.to_json()).hosts == found.hosts


def test_an_object_has_a_backend_and_variables_as_well() -> None:
    found = read_hostfile(
        json.dumps({"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1", "A=b=c"], "hosts": TWO})
    )
    assert (found.backend, found.variables) == (
        "jaccl",
        {"MLX_METAL_FAST_SYNCH": "1", "A": "b=c"},
    )


def test_a_host_may_have_several_ranks() -> None:
    assert len(read_hostfile(json.dumps([TWO[0], TWO[0]])).hosts) == 2


def host(**changed: Any) -> str:
    return json.dumps([{**TWO[0], **changed}, TWO[1]])


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nowhere.json", "nowhere.json cannot be read: No such file or directory"),
        ("~no-such-user-9/hosts", "~no-such-user-9/hosts cannot be read: Could not determine home"),
        ("[", "no JSON: Expecting value"),
        ("[" * 100_000, "no JSON: maximum recursion depth"),
        ("{}", "no list of hosts"),
        ('{"hosts": 2}', "no list of hosts"),
        ("[]", "at least 2 hosts are needed, not 0"),
        (json.dumps(TWO[:1]), "at least 2 hosts are needed, not 1"),
        ("[1, 2]", "host 0 is no object"),
        (host(ssh=None), 'host 0 has no name in "ssh"'),
        (host(ssh="-oProxyCommand=x"), 'host 0 has no name in "ssh"'),
        (host(ssh="mac0\n"), 'host 0 has no name in "ssh"'),
        (host(ssh="mac 0"), 'host 0 has no name in "ssh"'),
        (host(ips=[]), 'host 0 (mac0) has no address in "ips"'),
        (host(ips="10.0.0.1"), 'host 0 (mac0) has no address in "ips"'),
        (host(ips=["mac0"]), "host 0 (mac0) has 'mac0' in \"ips\", which is no IPv4 address"),
        (host(ips=["::1"]), "host 0 (mac0) has '::1' in \"ips\", which is no IPv4 address"),
        (host(ips=[1]), 'host 0 (mac0) has 1 in "ips", which is no IPv4 address'),
        (host(ips=["10.0.1.2"]), "mac0 and me@mac1.local have the same address, 10.0.1.2"),
        (host(rdma="en2"), 'host 0 (mac0) has no list of devices in "rdma"'),
        (host(rdma=[1]), 'host 0 (mac0) has no list of devices in "rdma"'),
        (host(rdma=[[]]), 'host 0 (mac0) has no list of devices in "rdma"'),
        (json.dumps({"hosts": TWO, "backend": 1}), "backend must be a text"),
        (json.dumps({"hosts": TWO, "envs": {}}), '"envs" is no list'),
        (json.dumps({"hosts": TWO, "envs": ["A"]}), "'A' in \"envs\" is not NAME=value"),
        (json.dumps({"hosts": TWO, "envs": ["A=1\nB=2"]}), "'A=1\\nB=2' in \"envs\" is not"),
        (json.dumps({"hosts": TWO, "envs": [1]}), '1 in "envs" is not NAME=value'),
    ],
)
def test_what_is_wrong_is_one_line(setting: str, reason: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_hostfile(setting)
    line = str(error.value)
    assert line.startswith(f"MLX_SERVER_RANKS: {reason}")
    assert "\n" not in line


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        read_hostfile(str(tmp_path))
