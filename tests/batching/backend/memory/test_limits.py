"""Limits of what MLX keeps on a GPU, set through a fake of MLX's functions."""

import logging
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from batching.backend.builder import opening, platforms, startup_lines
from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.memory.device import MIB
from batching.backend.memory.limits import GpuMemory
from batching.backend.self_check.check import check_model
from batching.backend.self_check.checked_model import CheckedModel
from batching.config import EngineConfig
from batching.errors import ModelLoadError

MOST: Final = 1000


class FakeControls:
    """MLX on a GPU of 1,000 MiB, of which some are in use; it refuses what MLX refuses."""

    def __init__(self, used_mib: int = 0, **info: Any) -> None:
        self.cache: int | None = None
        self.limit: int | None = None
        self.wired: int | None = None
        self.used = used_mib * MIB
        working_set = {"max_recommended_working_set_size": MOST * MIB}
        self.info = {"device_name": "Apple M4 Max"} | working_set | info

    def set_cache_limit(self, limit: int) -> int:
        self.cache = limit
        return 0

    def set_memory_limit(self, limit: int) -> int:
        self.limit = limit
        return 0

    def set_wired_limit(self, limit: int) -> int:
        if limit > self.info["max_recommended_working_set_size"]:
            raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than ...")
        self.wired = limit
        return 0

    def get_active_memory(self) -> int:
        return self.used

    def device_info(self) -> dict[str, Any]:
        return self.info


def test_the_cache_of_freed_buffers_is_limited_on_both_kinds() -> None:
    for gpu in Gpu:
        controls = FakeControls()
        GpuMemory(gpu, 1024, controls=controls).prepare()
        assert (controls.cache, controls.wired) == (1024 * MIB, None)


def test_a_mac_waits_for_its_gpu_rather_than_exceed_what_it_may_use() -> None:
    for gpu, limit in ((Gpu.METAL, MOST * MIB), (Gpu.CUDA, None)):
        controls = FakeControls()
        GpuMemory(gpu, 1024, controls=controls).prepare()
        assert controls.limit == limit


@pytest.mark.parametrize(("wired_mib", "limit"), [(None, 300), (0, None), (200, 200), (MOST, MOST)])
def test_weights_and_pool_are_wired_unless_something_else_is_set(
    wired_mib: int | None, limit: int | None
) -> None:
    controls = FakeControls(used_mib=300)
    memory = GpuMemory(Gpu.METAL, 64, wired_mib, controls)
    memory.prepare()
    wired = memory.wire()
    assert wired == (limit or 0) * MIB
    assert controls.wired == (None if limit is None else wired)
    assert memory.limits_line(wired) == (
        f"MLX keeps at most 64 MiB of freed buffers, wired limit {limit or 0} MiB"
    )


def test_nothing_is_wired_for_cuda_or_where_the_system_does_not_say_how_much() -> None:
    for memory in (
        GpuMemory(Gpu.CUDA, 64, 10**9, FakeControls(300)),
        GpuMemory(Gpu.METAL, 64, None, FakeControls(300, max_recommended_working_set_size=None)),
    ):
        memory.prepare()
        assert memory.wire() == 0
        assert isinstance(memory.controls, FakeControls)
        assert memory.controls.wired is None
    assert "wired" not in GpuMemory(Gpu.CUDA, 64).limits_line(0)


def test_more_than_the_system_wires_is_refused_before_a_model_is_loaded() -> None:
    controls = FakeControls()
    with pytest.raises(ModelLoadError) as caught:
        GpuMemory(Gpu.METAL, 64, MOST + 1, controls).prepare()
    assert str(caught.value) == (
        "MLX_SERVER_WIRED_LIMIT_MIB=1001 is more than the 1000 MiB that macOS lets a GPU wire: set at most that, "
        "or first sudo sysctl iogpu.wired_limit_mb=1001"
    )


def test_weights_that_are_more_are_wired_in_part_and_one_line_says_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controls = FakeControls(used_mib=1500)
    assert GpuMemory(Gpu.METAL, 64, None, controls).wire() == MOST * MIB
    assert controls.wired == MOST * MIB
    [record] = caplog.records
    assert record.getMessage() == (
        "weights and KV cache take 1500 MiB, and macOS lets a GPU wire 1000 MiB of them, so that it may move the "
        "rest: set fewer blocks (MLX_SERVER_NUM_BLOCKS), or sudo sysctl iogpu.wired_limit_mb=1500"
    )


def test_a_refusal_of_mlx_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise RuntimeError("not on this system")

    controls = FakeControls(used_mib=300)
    monkeypatch.setattr(controls, "set_wired_limit", refuse)
    assert GpuMemory(Gpu.METAL, 64, None, controls).wire() == 0
    assert "MLX_SERVER_WIRED_LIMIT_MIB=0 asks for none: not on this system" in caplog.text


@pytest.mark.parametrize("gpu", Gpu)
def test_a_server_on_a_gpu_says_which_and_what_its_limits_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: Gpu
) -> None:
    """All that the server does there but computing on it."""
    controls = FakeControls(device_name="Some GPU", max_recommended_working_set_size=2 << 30)
    monkeypatch.setattr(platforms, "select_device", lambda _: gpu)
    monkeypatch.setattr(startup_lines, "device_memory", lambda: 2 << 30)
    for name in ("set_cache_limit", "set_wired_limit", "device_info"):
        monkeypatch.setattr(mx, name, getattr(controls, name))
    checks: list[dict[str, Any]] = []

    def watched(*arguments: Any, **options: Any) -> CheckedModel:
        checks.append(options)
        return check_model(*arguments, **options)

    monkeypatch.setattr(opening, "check_model", watched)
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=64, native="off")
    with caplog.at_level(logging.WARNING):
        loaded = build_engine(config)
    lines = loaded.startup_lines
    assert controls.cache == 1 << 30
    [device] = [line for line in lines if line.startswith("device")]
    assert device == f"device    Some GPU ({gpu}), weights as stored"
    [memory] = [line for line in lines if line.startswith("memory")]
    assert "MiB in use of 2048 MiB; MLX keeps at most 1024 MiB of freed buffers" in memory
    if gpu is Gpu.METAL:
        assert controls.wired is not None
        assert abs(controls.wired - mx.get_active_memory()) < MIB
        assert memory.endswith(f", wired limit {controls.wired // MIB} MiB")
    else:
        assert controls.wired is None
    [options] = checks
    assert options["max_model_len"] == loaded.model.max_model_len
    assert not [r for r in caplog.records if "logits" in r.getMessage()]
