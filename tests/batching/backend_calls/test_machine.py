"""What a machine has for a model, on machines that stand in."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from typing import Any

import pytest

from batching.backend_calls import machine
from batching.backend_calls.machine import (
    Machine,
    host_memory,
    may_have_gpu,
    report_backend,
    this_machine,
)
from batching.config import EngineConfig
from batching.fit.weights import Compute
from batching.host.backend_report import BackendReport
from tests.support.rows import rows

CONFIG = EngineConfig(model="m", model_id="m")
GIB = 1 << 30


def install(monkeypatch: pytest.MonkeyPatch, *packages: str, platform: str = "linux") -> None:
    """Let a machine have these packages and no others that matter."""

    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: find_spec("os") if name in packages else None
    )
    monkeypatch.setattr(sys, "platform", platform)


def test_what_is_missing_is_what_exceeds_the_memory() -> None:
    found = Machine(Compute.STORED, 8 * GIB, None)
    assert (found.missing(8 * GIB), found.missing(9 * GIB)) == (0, GIB)


@rows(
    ("packages", "platform", "may"),
    [((), "linux", False), (("mlx-cuda-13",), "linux", True), ((), "darwin", True)],
)
def test_a_gpu_is_possible_on_a_mac_or_with_its_package(
    packages: tuple[str, ...], platform: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *packages, platform=platform)
    assert may_have_gpu() is may


@rows(
    ("packages", "native", "compute"),
    [
        ((), "auto", Compute.FLOATS),
        (("mlx_cpu_kernels",), "auto", Compute.KERNELS),
        (("mlx_cpu_kernels",), "off", Compute.FLOATS),
    ],
)
def test_without_a_gpu_the_system_says_what_there_is(
    packages: tuple[str, ...], native: Any, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *packages)
    monkeypatch.setattr(machine, "available_memory", lambda: 5 * GIB)
    found = this_machine(EngineConfig(model="m", model_id="m", native=native))
    assert found == Machine(compute, host_memory(), 5 * GIB)


def test_a_limit_of_this_process_is_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: 1000)
    assert host_memory() == 1000
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    assert host_memory() > 1000


@pytest.mark.parametrize("memory", [None, (20 * GIB, 15 * GIB)])
def test_mlx_is_asked_where_there_may_be_a_gpu(
    memory: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "may_have_gpu", lambda: True)
    monkeypatch.setattr("batching.backend.builder.report.gpu_memory", lambda: memory)
    found = this_machine(CONFIG)
    if memory is None:
        assert found.compute is not Compute.STORED
    else:
        assert found == Machine(Compute.STORED, *memory)
    assert this_machine(EngineConfig(model="m", model_id="m", device="cpu")) != Machine(
        Compute.STORED, 20 * GIB, 15 * GIB
    )


def test_the_backend_reports_on_itself() -> None:
    found = report_backend(EngineConfig(model="m", model_id="m", device="cpu"))
    assert isinstance(found, BackendReport)
    assert found.device.startswith("cpu")
    assert found.memory == host_memory()
    assert found.wired is None
    off = report_backend(EngineConfig(model="m", model_id="m", device="cpu", native="off"))
    assert (off.has_kernels, off.kernels) == (False, "off: switched off")
