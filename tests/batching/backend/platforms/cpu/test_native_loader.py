"""The native kernels are loaded where they fit, and else missed aloud."""

import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import save_model

from batching.backend.builder import platforms
from batching.backend.builder.engine import build_engine
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu import native_loader as extension, packed_model
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.model import use_kernels
from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native
from batching.backend.processor.cores import usable_cores
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from scripts.server_process import ROOT, Server
from tests.support.model_zoo import make_tiny, tiny_config
from tests.support.weekly import weekly

PACKAGE: Final = "mlx_cpu_kernels"
MLX_VERSION: Final = importlib.metadata.version("mlx")
NOT_LOADED: Final = "raise AssertionError"

Install = Callable[..., Path]


def plant(
    folder: Path,
    module: str,
    *,
    interface: int | None = extension.INTERFACE_VERSION,
    mlx_version: str = MLX_VERSION,
    name: str = "_native.py",
) -> Path:
    """Write the package into a folder, with the source of a module in place of the extension."""
    package = folder / PACKAGE
    package.mkdir()
    versions = [f"MLX_VERSION = {mlx_version!r}"]
    if interface is not None:
        versions.append(f"INTERFACE_VERSION = {interface}")
    (package / "__init__.py").write_text("\n".join(versions), encoding="utf-8")
    (package / name).write_text(module, encoding="utf-8")
    return package / name


def forget_package(forget: Callable[[str], object]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        forget(name)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return what installs a package in place of the real one, which is found again after the test."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    forget_package(partial(monkeypatch.delitem, sys.modules))
    monkeypatch.syspath_prepend(tmp_path)
    extension._load.cache_clear()
    yield partial(plant, tmp_path)
    extension._load.cache_clear()
    forget_package(sys.modules.pop)


def reason(mode: str = "auto") -> str:
    found = load_native(mode)
    assert isinstance(found, NoNative)
    return found.reason


def module_of(isa: str, missing_isa: str = "", num_threads: int = 3) -> str:
    return "\n".join(
        [
            f"isa = lambda: {isa!r}",
            "set_num_threads = lambda num_threads, nodes: None",
            f"num_threads = lambda: {num_threads}",
            "weight_bytes = lambda: 0",
            "min_input_bits = lambda: 32",
            "supports_bfloat16 = lambda: False",
            f"missing_isa = lambda: {missing_isa!r}",
        ]
    )


def test_kernels_that_are_switched_off_are_not_looked_for(install: Install) -> None:
    install(NOT_LOADED)
    assert str(load_native("off")) == "off: switched off"


def test_a_module_that_fits_is_used(install: Install) -> None:
    install(module_of("sse9"))
    for mode in ("auto", "require"):
        assert str(load_native(mode)) == f"sse9, 3 threads on {usable_cores()}"


def test_it_is_said_what_the_processor_has_and_was_not_built(install: Install) -> None:
    install(module_of("sse9", "sse11"))
    used = f"sse9 (built without sse11), 3 threads on {usable_cores()}"
    assert str(load_native("auto")) == used


def test_the_threads_of_a_loaded_model_stay(native: Native) -> None:
    """It may compute meanwhile, in another engine's thread."""
    weights = native.module.pack(mx.zeros((32, 32)))
    num_threads = native.module.num_threads()
    other = load_native("require", 1 if num_threads > 1 else 2)
    assert isinstance(other, Native)
    assert weights.nbytes > 0
    assert other.num_threads == native.module.num_threads() == num_threads


def test_without_the_package_it_is_said_how_to_get_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    assert reason() == "mlx-cpu-kernels is not installed: pip install ./kernels"


@pytest.mark.parametrize("interface", [None, 0, extension.INTERFACE_VERSION + 1])
def test_a_package_of_another_interface_is_not_loaded(
    install: Install, interface: int | None
) -> None:
    install(NOT_LOADED, interface=interface)
    here = extension.INTERFACE_VERSION
    assert reason() == f"mlx-cpu-kernels has interface {interface}, and this server needs {here}"


def test_a_package_for_another_mlx_is_not_loaded(install: Install) -> None:
    install(NOT_LOADED, mlx_version="0.1.2")
    assert reason() == f"mlx-cpu-kernels was built for mlx 0.1.2, and mlx {MLX_VERSION} is here"


def test_a_processor_without_the_instruction_sets_is_reported(install: Install) -> None:
    install(module_of(""))
    assert reason() == "mlx-cpu-kernels was built for none of this processor's instruction sets"


def test_a_file_that_is_no_extension_is_rejected_with_its_reason(install: Install) -> None:
    path = install("I am text", name=f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    assert reason().startswith("mlx-cpu-kernels cannot be loaded: ")
    assert str(path) in reason()
    assert "\n" not in reason()


def test_kernels_that_do_not_fit_leave_the_slower_path(install: Install, directory: Path) -> None:
    install(NOT_LOADED, mlx_version="0.1.2")
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=8, device="cpu")
    assert f"kernels   off: {reason()}" in build_engine(config).startup_lines


def test_a_change_of_the_interface_is_noticed() -> None:
    """Once a server with this number is published, a change needs another number, and else the new digest."""
    stub = (ROOT / "kernels" / PACKAGE / "_native.pyi").read_bytes()
    declared = hashlib.sha256(stub).hexdigest()[:16]
    assert {extension.INTERFACE_VERSION: declared} == {4: "9f2d5f66d02e38e7"}


def test_the_installed_kernels_have_the_interface_that_is_called(native: Native) -> None:
    package = importlib.import_module(PACKAGE)
    assert (package.INTERFACE_VERSION, package.MLX_VERSION) == (
        extension.INTERFACE_VERSION,
        MLX_VERSION,
    )


def test_the_installed_kernels_find_no_instruction_set(native: Native) -> None:
    """As on a processor without AVX2, in a process of its own: one has room for one extension."""
    load = "from batching.backend.platforms.cpu.native_loader import load_native"
    done = subprocess.run(
        [sys.executable, "-c", f"import batching.backend; {load}; print(load_native('auto'))"],
        cwd=ROOT,
        env=os.environ | {"NATIVE_ISA": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("off: mlx-cpu-kernels was built for none of this processor's ")


def test_a_gpu_needs_no_kernels(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(NOT_LOADED)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert reason() == "MLX computes on a GPU"


def test_required_kernels_that_do_not_fit_are_an_error_in_one_line(install: Install) -> None:
    install(NOT_LOADED, interface=None)
    with pytest.raises(ModelLoadError) as caught:
        load_native("require")
    assert str(caught.value) == f"the native kernels are required, and {reason()}"
    assert "\n" not in str(caught.value)


def reach_into_a_linear_layer(self: llama.MLP, x: mx.array) -> mx.array:
    return self.down_proj(self.up_proj(x) * (self.gate_proj.weight.size > 0))


def test_a_model_that_does_not_run_on_the_kernels_is_served_without_them(
    directory: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(directory), model_id="tiny", num_blocks=8, device="cpu", cpu_precision="exact"
    )
    assert f"kernels   {native}" in build_engine(config).startup_lines
    monkeypatch.setattr(llama.MLP, "__call__", reach_into_a_linear_layer)
    lines = build_engine(config).startup_lines
    assert "kernels   off: the model does not run on them" in lines
    with pytest.raises(ModelLoadError, match=r"^cannot run .*: AttributeError: .*weight"):
        build_engine(replace(config, native="require"))


def test_the_start_says_what_is_rounded(
    directory: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=8, device="cpu")
    used: list[int] = []

    def use_kernels_and_tell(*args: Any, packing: Packing, changes: Changes) -> nn.Module:
        used.append(packing.input_bits)
        return use_kernels(*args, packing=packing, changes=changes)

    def line(**has: Any) -> str:
        """Return the line of a processor that has something else; all weights stay as they are packed."""
        monkeypatch.setattr(platforms, "load_native", lambda *_: replace(native, **has))
        lines = build_engine(config).startup_lines
        assert ", bfloat16)" in "".join(lines)
        (found,) = [line for line in lines if line.startswith("kernels ")]
        return found

    monkeypatch.setattr(packed_model, "use_kernels", use_kernels_and_tell)
    if native.min_input_bits < 32:
        what = "auto: weights and activations are multiplied in bfloat16"
        assert line(supports_bfloat16=True) == f"kernels   {native}; {what}"
        what = "auto: quantized weights are multiplied with activations of 16 bits"
        if native.min_input_bits == 8:
            what += ", 4-bit ones with 8 bits, scaled by channel"
        assert line(supports_bfloat16=False) == f"kernels   {native}; {what}"
        assert used == [16, 16]
    what = "auto: this processor multiplies no integers, activations are not rounded"
    assert line(supports_bfloat16=False, min_input_bits=32) == f"kernels   {native}; {what}"
    assert used[-1] == 32


@pytest.mark.parametrize("mode", weekly(["off", "auto"], 1))
def test_the_start_says_which_kernels_compute(mode: str, directory: Path) -> None:
    with Server(native=mode, model=str(directory)) as server:
        server.wait_for_line("^serving ")
        assert server.stop() == 0
    assert f"kernels   {load_native(mode)}" in server.log


def test_a_server_that_requires_kernels_that_do_not_fit_says_so_and_ends(tmp_path: Path) -> None:
    plant(tmp_path, NOT_LOADED, mlx_version="0.1.2")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    required = {"MLX_SERVER_NATIVE": "require", "MLX_SERVER_DEVICE": "cpu", "MLX_SERVER_PORT": "0"}
    places = {"MLX_SERVER_DATA_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "app"],
        cwd=ROOT,
        env=environment | required | places,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [loading, reason] = done.stderr.splitlines()
    assert loading.startswith("loading ")
    assert reason.startswith("the native kernels are required, and mlx-cpu-kernels was built for ")


def test_a_model_whose_attention_is_its_own_code_is_not_rounded_by_default(
    directory: Path, native: Native, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its last bits, which depend on who else is in a step, would decide on tokens."""
    save_model(directory, make_tiny("stablelm"))
    written = tiny_config("stablelm")
    del written["rope_scaling"]
    (directory / "config.json").write_text(json.dumps(written))
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=8, device="cpu")
    gc.collect()
    weight_bytes = native.module.weight_bytes
    before = weight_bytes()
    built = build_engine(config)
    assert f"kernels   {native}" in built.startup_lines
    assert "float32), prefix cache on" in "".join(built.startup_lines)
    assert "tiny is computed as with MLX_SERVER_CPU_PRECISION=exact" in caplog.text
    used = weight_bytes() - before
    caplog.clear()
    exact = build_engine(replace(config, cpu_precision="exact"))
    assert not caplog.text
    # The first try left nothing.
    assert weight_bytes() - before <= 2 * used
    del built, exact
