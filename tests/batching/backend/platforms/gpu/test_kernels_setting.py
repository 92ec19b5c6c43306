"""`MLX_SERVER_GPU_KERNELS`: the kernels are used where they are right, and one line says why they are not."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from batching.backend.builder import platforms, startup_lines
from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.execution_mode import ExecutionMode
from batching.backend.paged.layout import LayerShape
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache
from batching.backend.platforms.gpu.kernels.sources import Target
from batching.backend.platforms.gpu.pool_kernels import PoolKernels
from batching.backend.platforms.gpu.source_kernels import SourceKernels, load_kernels
from batching.backend.runner.executor import Executor
from batching.backend.runner.mlx_runner import MLXRunner
from batching.config import EngineConfig, GpuKernelsMode
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from tests.support.cpu_kernels import cpu_kernels
from tests.support.host_kernels import HostKernels
from tests.support.platforms import check_model, why_none
from tests.support.requests import make_request
from tests.support.tiny_models import VOCAB_SIZE, insist_on_own_caches, tiny_model

DOES_NOT_COMPILE: Final = (
    "Unable to build metal library from source\nline 7: error:\n  no such thing"
)


def no_compiler(*_: Any) -> Any:
    raise RuntimeError(DOES_NOT_COMPILE)


class Wrong(HostKernels):
    """Wrong for contexts of more than so many keys."""

    most: int = 0

    def decode(self, *args: Any, **options: Any) -> tuple[mx.array, mx.array]:
        queries, rows, *_ = args
        output, token = super().decode(*args, **options)
        is_long = (rows.ranges[: len(queries), 1] > self.most)[:, None, None]
        return mx.where(is_long, -output, output), token


class Unable(HostKernels):
    def why_not(self, shape: LayerShape) -> str:
        return "they keep no such keys"


class WrongWhenLong(Wrong):
    most = 256


class WrongIfKept(HostKernels):
    """Wrong in graphs that are kept, or not to be traced."""

    is_traceable: bool = True

    def decode(self, *args: Any, **options: Any) -> tuple[mx.array, mx.array]:
        _, rows, *_ = args
        output, token = super().decode(*args, **options)
        try:
            rows.ranges.tolist()
        except ValueError:
            if not self.is_traceable:
                raise
            output = -output
        return output, token


class Untraceable(WrongIfKept):
    is_traceable = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A server on a GPU, but that the CPU computes."""
    monkeypatch.setattr(platforms, "select_device", lambda _: Gpu.CUDA)
    monkeypatch.setattr(startup_lines, "device_memory", lambda: 2 << 30)
    for name in ("set_cache_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda _: 0)
    return Gpu.CUDA


def build(
    directory: Path, mode: GpuKernelsMode, monkeypatch: pytest.MonkeyPatch, kernels: PoolKernels
) -> LoadedEngine:
    monkeypatch.setattr(platforms, "load_kernels", lambda _: kernels)
    return build_engine(
        EngineConfig(
            model=str(directory),
            model_id="tiny",
            num_blocks=64,
            native="off",
            dtype="float32",
            gpu_kernels=mode,
            max_num_seqs=4,
        )
    )


def line_of(loaded: LoadedEngine, name: str) -> str:
    [line] = [line for line in loaded.startup_lines if line.startswith(name)]
    return line


def runner_of(loaded: LoadedEngine) -> MLXRunner:
    executor = loaded.engine._runner
    assert isinstance(executor, Executor)
    return executor.runner


def layers_of(loaded: LoadedEngine) -> set[type]:
    return {type(layer) for layer in runner_of(loaded).cache.layers}


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_kernels_that_are_right_are_used(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
    mode: GpuKernelsMode,
) -> None:
    kernels = cpu_kernels(native)
    with caplog.at_level(logging.WARNING):
        loaded = build(directory, mode, monkeypatch, kernels)
    assert layers_of(loaded) == {KernelLayerCache}
    assert line_of(loaded, "kernels") == "kernels   of the KV cache: on, for cpu"
    assert not caplog.records
    # Steps are queued; and what they need was compiled at the start.
    assert loaded.engine._pipeline is not None
    num_made = len(kernels._made)
    request = make_request(0, [1, 2, 3], max_tokens=5)
    loaded.engine.add(request)
    while loaded.engine.has_work:
        loaded.engine.step()
    assert len(request.output_token_ids) == 5
    assert len(kernels._made) == num_made


@pytest.mark.parametrize("kind", [WrongIfKept, Untraceable])
def test_where_kept_graphs_are_wrong_each_step_is_built(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
    kind: type[WrongIfKept],
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = build(directory, "auto", monkeypatch, kind(native))
    assert layers_of(loaded) == {KernelLayerCache}
    assert runner_of(loaded)._graphs is None
    assert [record.getMessage() for record in caplog.records] == [
        "tiny: the graph of each decode step is built each time: kept ones are not right"
    ]


REASONS: Final[list[tuple[Callable[[Native], PoolKernels], str]]] = [
    (
        lambda _: SourceKernels(Target.CPU, no_compiler),
        "they do not run (RuntimeError: Unable to build metal library from source line 7: error: no such thing)",
    ),
    (lambda native: Unable(native), "they keep no such keys"),
]


@pytest.mark.parametrize(("kernels", "reason"), REASONS)
def test_with_auto_one_line_says_why_they_are_not_used(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
    kernels: Callable[[Native], PoolKernels],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = build(directory, "auto", monkeypatch, kernels(native))
    assert KernelLayerCache not in layers_of(loaded)
    assert line_of(loaded, "kernels") == f"kernels   of the KV cache: off: {reason}"
    [record] = caplog.records
    assert record.getMessage() == f"tiny: the GPU kernels are off: {reason}"
    assert record.exc_info is None


@pytest.mark.parametrize(("kernels", "reason"), REASONS)
def test_with_require_the_server_does_not_start_without_them(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    native: Native,
    kernels: Callable[[Native], PoolKernels],
    reason: str,
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        build(directory, "require", monkeypatch, kernels(native))
    assert str(caught.value) == (
        f"the GPU kernels are required, and {reason}: "
        "set MLX_SERVER_GPU_KERNELS=auto to start without them"
    )


def test_off_is_off(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: Gpu,
    native: Native,
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = build(directory, "off", monkeypatch, HostKernels(native))
    assert KernelLayerCache not in layers_of(loaded)
    assert line_of(loaded, "kernels") == "kernels   of the KV cache: off: switched off"
    assert not caplog.records


def test_on_a_cpu_they_cannot_be_required(directory: Path) -> None:
    config = EngineConfig(
        model=str(directory), model_id="tiny", device="cpu", gpu_kernels="require"
    )
    with pytest.raises(
        ModelLoadError, match="required, and MLX computes on the CPU: set MLX_SERVER_G"
    ):
        build_engine(config)


def test_where_mlx_has_no_such_gpu_the_check_finds_it_out() -> None:
    kernels = load_kernels(Gpu.METAL)
    checked = check_model(tiny_model("qwen3"), VOCAB_SIZE, gpu=Gpu.METAL, kernels=kernels)
    assert checked.mode is ExecutionMode.RAGGED
    assert why_none(checked) == (
        "they do not run (RuntimeError: [metal_kernel] No Metal back-end.)"
    )


@pytest.mark.parametrize("kind", [Wrong, WrongWhenLong])
def test_kernels_that_are_wrong_are_found(native: Native, kind: type[Wrong]) -> None:
    """Over any context, and over a long one only."""
    checked = check_model(tiny_model("qwen3"), VOCAB_SIZE, gpu=Gpu.METAL, kernels=kind(native))
    assert (checked.mode, checked.reason) == (ExecutionMode.RAGGED, "")
    assert why_none(checked).startswith("they change the logits by")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "no layer's attention is over keys and values that only the pool reads"),
        ("stablelm", "no layer's attention is over keys and values that only the pool reads"),
    ],
)
def test_models_without_such_attention_have_a_reason(
    native: Native, family: str, reason: str
) -> None:
    checked = check_model(
        tiny_model(family), VOCAB_SIZE, gpu=Gpu.METAL, kernels=HostKernels(native)
    )
    assert why_none(checked) == reason


def test_a_model_on_caches_of_its_own_has_a_reason(native: Native) -> None:
    model = tiny_model("llama")
    insist_on_own_caches(model)
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.METAL, kernels=HostKernels(native))
    assert checked.mode is ExecutionMode.OWN
    assert why_none(checked) == "the model runs on caches of its own"
