"""What MLX reads of the environment, as its own launcher sets it."""

import json
import os
from pathlib import Path

import pytest

from app.ranks.hostfile import Host
from app.ranks.mlx_environment import mlx_environment
from app.settings import SettingsError

NAMES = ("mac0", "mac1", "mac1")
HOSTS = [
    Host("mac0", ["10.0.0.1", "10.0.1.1"], [None, "en2", ["en3", "en4"]]),
    Host("mac1", ["10.0.0.2"], ["en2", None, "en3"]),
    Host("mac1", ["10.0.0.2"], ["en2", "en3", None]),
]


def test_a_ring_has_a_port_for_each_address_of_each_rank() -> None:
    found = mlx_environment("ring", HOSTS, 1, 7000)
    assert found.variables == {"MLX_RANK": "1"}
    assert json.loads(found.files["MLX_HOSTFILE"]) == [
        ["10.0.0.1:7000", "10.0.1.1:7001"],
        ["10.0.0.2:7002"],
        ["10.0.0.2:7003"],
    ]


def test_jaccl_has_devices_and_a_coordinator() -> None:
    found = mlx_environment("jaccl", HOSTS, 2, 7000)
    assert found.variables == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}
    assert json.loads(found.files["MLX_IBV_DEVICES"]) == [host.rdma for host in HOSTS]


def test_a_ring_of_jaccl_needs_devices_for_its_neighbours_alone() -> None:
    hosts = [
        Host(f"mac{index}", [f"10.0.0.{index}"], rdma)
        for index, rdma in enumerate(
            [
                [None, "en2", None, "en3"],
                ["en2", None, "en3", None],
                [None, "en2", None, "en3"],
                ["en2", None, "en3", None],
            ]
        )
    ]
    assert mlx_environment("jaccl-ring", hosts, 0, 7000).variables["MLX_JACCL_RING"] == "1"
    with pytest.raises(SettingsError, match=r'host 0 \(mac0\) has no device in "rdma" for host 2'):
        mlx_environment("jaccl", hosts, 0, 7000)


def test_hosts_without_devices_have_no_jaccl() -> None:
    hosts = [Host("mac0", ["10.0.0.1"], []), Host("mac1", ["10.0.0.2"], [])]
    with pytest.raises(SettingsError, match=r'host 0 \(mac0\) has no device in "rdma" for host 1'):
        mlx_environment("jaccl", hosts, 0, 7000)


def test_nccl_gives_each_rank_of_a_host_a_gpu_of_its_own() -> None:
    common = {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "7000", "MLX_WORLD_SIZE": "3"}
    found = [mlx_environment("nccl", HOSTS, rank, 7000).variables for rank in range(3)]
    assert found == [
        {"MLX_RANK": "0", **common},
        {"MLX_RANK": "1", **common, "CUDA_VISIBLE_DEVICES": "0"},
        {"MLX_RANK": "2", **common, "CUDA_VISIBLE_DEVICES": "1"},
    ]


def test_there_must_be_enough_ports() -> None:
    with pytest.raises(SettingsError, match="MLX_SERVER_RANKS_PORT: too few ports follow it"):
        mlx_environment("ring", HOSTS, 0, 65533)


def test_the_variables_and_files_are_there_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "7")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    found = mlx_environment("ring", HOSTS, 1, 7000)
    with found.entered():
        path = Path(os.environ["MLX_HOSTFILE"])
        assert path.read_text() == found.files["MLX_HOSTFILE"]
        assert os.environ["MLX_RANK"] == "1"
    assert not path.exists()
    assert os.environ["MLX_RANK"] == "7"
    assert "MLX_HOSTFILE" not in os.environ
