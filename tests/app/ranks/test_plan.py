"""What a process is among the ranks, and which settings do not go with ranks."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from app.ranks.plan import divided_model, rank_plan
from app.settings import Settings, SettingsError
from batching import ModelLoadError
from tests.support.rank_servers import free_ports, hosts


def settings(**fields: Any) -> Settings:
    return Settings(_env_file=None, ranks=hosts("mac0", "mac1", "mac2"), **fields)


@pytest.mark.parametrize(
    ("variable", "rank", "launches"), [("", 0, True), ("0", 0, False), ("2", 2, False)]
)
def test_a_supervisor_says_which_rank_it_is(variable: str, rank: int, *, launches: bool) -> None:
    plan = rank_plan(settings(ranks_port=7000), {"MLX_RANK": variable})
    assert (plan.rank, plan.launches, plan.num_ranks) == (rank, launches, 3)
    assert plan.host == f"mac{rank}"
    assert plan.control_address == ("127.0.0.1", 7000)
    assert plan.mlx_environment().variables == {"MLX_RANK": str(rank)}


def test_the_first_rank_may_have_another_address_for_the_others() -> None:
    plan = rank_plan(settings(ranks_host="mac0.local", ranks_port=7000), {})
    assert plan.control_address == ("mac0.local", 7000)


@pytest.mark.parametrize("variable", ["3", "-1", "x", "1" * 5000, "²"])
def test_a_number_that_is_no_ranks_is_named(variable: str) -> None:
    with pytest.raises(SettingsError, match="MLX_RANK must be a number from 0 to 2, not "):
        rank_plan(settings(), {"MLX_RANK": variable})


@pytest.mark.parametrize(
    ("of_file", "fields", "backend", "mlx_backend"),
    [
        ("", {}, "ring", "ring"),
        ("nccl", {}, "nccl", "nccl"),
        ("nccl", {"ranks_backend": "ring"}, "ring", "ring"),
        ("", {"ranks_backend": "jaccl-ring"}, "jaccl-ring", "jaccl"),
    ],
)
def test_the_setting_outranks_the_backend_of_the_file(
    of_file: str, fields: dict[str, Any], backend: str, mlx_backend: str
) -> None:
    listed = [
        {"ssh": "mac0", "ips": ["10.0.0.1"], "rdma": [None, "en2"]},
        {"ssh": "mac1", "ips": ["10.0.0.2"], "rdma": ["en2", None]},
    ]
    ranks = json.dumps({"hosts": listed, "backend": of_file})
    plan = rank_plan(Settings(_env_file=None, ranks=ranks, **fields), {})
    assert (plan.backend, plan.mlx_backend) == (backend, mlx_backend)
    assert plan.load_silence == (5.0 if backend == "ring" else 60.0)
    if backend != "ring":
        plan.check_ports()


def test_a_backend_that_is_none_is_named() -> None:
    ranks = json.dumps({"hosts": json.loads(hosts("mac0", "mac1")), "backend": "mpi"})
    with pytest.raises(SettingsError, match="backend must be one of ring, jaccl, jaccl-ring, nccl"):
        rank_plan(Settings(_env_file=None, ranks=ranks), {})


def test_what_is_wrong_at_any_rank_is_found_by_each() -> None:
    with pytest.raises(SettingsError, match="no device"):
        rank_plan(settings(ranks_backend="jaccl"), {"MLX_RANK": "1"})


@pytest.mark.parametrize(
    "fields",
    [
        {"models": "other.gguf"},
        {"models_file": Path("models.toml")},
        {"models_dir": Path("models")},
        {"serve_hub_cache": True},
        {"idle_unload": 60.0},
        {"max_memory_gib": 8.0},
        {"adapters": "a=b"},
        {"allow_runtime_adapters": True},
    ],
)
def test_a_setting_that_does_not_go_with_ranks_is_named(fields: dict[str, Any]) -> None:
    name = f"MLX_SERVER_{next(iter(fields)).upper()}"
    with pytest.raises(SettingsError, match=f"{name} is not served with MLX_SERVER_RANKS"):
        rank_plan(settings(**fields), {})


def test_the_model_is_never_unloaded() -> None:
    assert divided_model(settings(adapters="", serve_hub_cache=False)).is_pinned
    with pytest.raises(ModelLoadError, match="MLX_SERVER_KV_HOST_GIB is not served over several"):
        divided_model(settings(kv_host_gib=1.0))


def test_a_port_of_the_ring_that_is_taken_is_found_before_mlx_needs_it() -> None:
    port = free_ports(4)
    plan = rank_plan(settings(ranks_port=port), {"MLX_RANK": "1"})
    plan.check_ports()
    with socket.create_server(("127.0.0.2", port + 2)):
        plan.of(2).check_ports()
        with pytest.raises(ModelLoadError, match=f"cannot listen on 127.0.0.2 port {port + 2}"):
            plan.check_ports()
