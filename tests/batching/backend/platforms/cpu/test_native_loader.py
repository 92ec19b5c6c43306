"""The native kernels are built where they can be, loaded where they fit, and else missed aloud."""

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import mlx_cpu_kernels as package
import pytest
from mlx_cpu_kernels import build
from mlx_lm.models import llama
from mlx_lm.utils import save_model

from batching.backend import engine_builder, packed_model
from batching.backend.engine_builder import build_engine
from batching.backend.platforms.cpu import native_loader as extension
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.model import use_kernels
from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native, weight_bytes
from batching.backend.processor.cores import Cores, usable_cores
from batching.config import CpuPrecision, EngineConfig
from batching.errors import ModelLoadError
from scripts.server_process import ROOT, Server
from tests.support.model_zoo import make_tiny, tiny_config

MODULE: Final = "mlx_cpu_kernels._native"

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Have the module looked for in a folder that is empty, and return what puts a file there."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    # Set and deleted, so that in the end whatever is there now is restored.
    monkeypatch.setitem(sys.modules, MODULE, package)
    del sys.modules[MODULE]
    extension._load.cache_clear()

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    yield write
    extension._load.cache_clear()


def reason(mode: str = "auto") -> str:
    found = load_native(mode)
    assert isinstance(found, NoNative)
    return found.reason


def module_for(mlx_version: str, isa: str, missing_isa: str = "", num_threads: int = 3) -> str:
    return "\n".join(
        [
            f"mlx_version = {mlx_version!r}",
            f"isa = lambda: {isa!r}",
            "set_num_threads = lambda num_threads, nodes: None",
            f"num_threads = lambda: {num_threads}",
            "weight_bytes = lambda: 0",
            "min_input_bits = lambda: 32",
            "supports_two_levels = lambda: False",
            "supports_bfloat16 = lambda: False",
            f"missing_isa = lambda: {missing_isa!r}",
        ]
    )


def test_kernels_that_are_switched_off_are_not_looked_for(install: Install) -> None:
    install("_native.py", "raise AssertionError")
    assert str(load_native("off")) == "off: switched off"


def test_a_module_that_fits_is_used(install: Install) -> None:
    install("_native.py", module_for(importlib.metadata.version("mlx"), "sse9"))
    for mode in ("auto", "require"):
        assert str(load_native(mode)) == f"sse9, 3 threads on {usable_cores()}"


def test_it_is_said_what_the_processor_has_and_was_not_built(install: Install) -> None:
    install("_native.py", module_for(importlib.metadata.version("mlx"), "sse9", "sse11"))
    used = f"sse9 (built without sse11), 3 threads on {usable_cores()}"
    assert str(load_native("auto")) == used


@pytest.mark.parametrize(
    ("num_threads", "hardware_threads", "quota", "lends_core"),
    [(2, 4, None, False), (4, 4, None, True), (4, 8, 4.5, True), (1, 1, None, False)],
)
def test_a_core_is_lent_where_the_threads_take_all(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int,
    hardware_threads: int,
    quota: float | None,
    lends_core: bool,
) -> None:
    cores = Cores(num_threads, hardware_threads, (), quota)
    monkeypatch.setattr(extension, "usable_cores", lambda: cores)
    version = importlib.metadata.version("mlx")
    install("_native.py", module_for(version, "sse9", num_threads=num_threads))
    found = load_native("auto")
    assert isinstance(found, Native)
    assert found.lends_core is lends_core


def test_the_threads_of_a_loaded_model_stay(native: Native) -> None:
    """It may compute meanwhile, in another engine's thread."""
    weights = native.module.pack(mx.zeros((32, 32)))
    num_threads = native.module.num_threads()
    other = load_native("require", 1 if num_threads > 1 else 2)
    assert isinstance(other, Native)
    assert weights.nbytes > 0
    assert other.num_threads == native.module.num_threads() == num_threads


def test_without_a_module_it_is_said_how_to_get_one(install: Install) -> None:
    assert reason() == ("the extension is not built; python -m mlx_cpu_kernels.build says why")


def test_a_module_for_another_mlx_is_rejected(install: Install) -> None:
    install("_native.py", module_for("0.1.2", "sse9"))
    here = importlib.metadata.version("mlx")
    assert reason() == f"it was built for mlx 0.1.2, and mlx {here} is here"


def test_a_processor_without_the_instruction_sets_is_reported(install: Install) -> None:
    install("_native.py", module_for(importlib.metadata.version("mlx"), ""))
    assert reason() == "this processor has none of the instruction sets that they need"


def test_a_file_that_is_no_extension_is_rejected_with_its_reason(install: Install) -> None:
    path = install(build.NAME, "I am text")
    assert reason().startswith("the extension cannot be loaded: ")
    assert str(path) in reason()
    assert "\n" not in reason()


def test_a_gpu_needs_no_kernels(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("_native.py", "raise AssertionError")
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert reason() == "MLX computes on a GPU"


def test_required_kernels_that_are_missing_are_an_error_in_one_line(install: Install) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_native("require")
    assert str(caught.value) == f"the native kernels are required, and {reason()}"
    assert "\n" not in str(caught.value)


@pytest.fixture
def buildable() -> None:
    if (why := build.why_not()) is not None:
        pytest.skip(why)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build in a folder whose build fails, beside an extension from before."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    text = 'cmake_minimum_required(VERSION 3.25)\nmessage(FATAL_ERROR "there is no such thing (${NATIVE_ISAS})")\n'
    (tmp_path / "CMakeLists.txt").write_text(text, encoding="utf-8")
    (tmp_path / build.PACKAGE).mkdir()
    (tmp_path / build.PACKAGE / build.NAME).write_text("old", encoding="utf-8")
    return tmp_path


def test_a_mac_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build.why_not() == "they are for Linux; on a Mac MLX computes on the GPU"


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux only")
def test_without_a_compiler_nothing_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build.why_not() == "there is no C++ compiler (/nowhere/c++)"
    assert build.main() == 0
    assert capsys.readouterr().out == f"no native CPU kernels: {build.why_not()}\n"
    assert (folder / build.PACKAGE / build.NAME).read_text(encoding="utf-8") == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="built on Linux only")
def test_without_cmake_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # it is there, that is all
    monkeypatch.setattr(build, "_path", lambda: "")
    monkeypatch.setattr(build, "_is_importable", lambda package: package != "cmake")
    assert build.why_not() == "there is no cmake: pip install -r requirements/native.txt"


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize(("arguments", "isas"), [([], ""), (["--host"], "fastest;avx2")])
def test_a_build_that_fails_says_why_and_leaves_the_old_one(
    folder: Path, arguments: list[str], isas: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(arguments) == 0
    printed = capsys.readouterr()
    assert f"there is no such thing ({isas})" in printed.err
    assert printed.out == "no native CPU kernels: the build failed, see above\n"
    assert (folder / build.PACKAGE / build.NAME).read_text(encoding="utf-8") == "old"
    assert [path.name for path in (folder / build.PACKAGE).iterdir()] == [build.NAME]


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


@pytest.mark.parametrize(("precision", "num_bits"), [("auto", 16), ("fast", 16), ("fastest", 8)])
def test_the_start_says_what_is_rounded(
    directory: Path,
    native: Native,
    monkeypatch: pytest.MonkeyPatch,
    precision: CpuPrecision,
    num_bits: int,
) -> None:
    config = EngineConfig(
        model=str(directory),
        model_id="tiny",
        num_blocks=8,
        device="cpu",
        cpu_precision=precision,
    )
    used: list[int] = []

    def use_kernels_and_tell(*args: Any, packing: Packing) -> nn.Module:
        used.append(packing.input_bits)
        return use_kernels(*args, packing=packing)

    monkeypatch.setattr(packed_model, "use_kernels", use_kernels_and_tell)
    if native.min_input_bits < 32 and precision != "fast":
        # Without a matrix unit, all weights stay as they are.
        with_unit = replace(native, supports_bfloat16=True)
        monkeypatch.setattr(engine_builder, "load_native", lambda *_: with_unit)
        what = f"{precision}: weights and activations are multiplied in bfloat16"
        assert f"kernels   {native}; {what}" in build_engine(config).startup_lines
        assert used == [16]
    in_integers = replace(native, supports_bfloat16=False)
    monkeypatch.setattr(engine_builder, "load_native", lambda *_: in_integers)
    num_bits = max(num_bits, native.min_input_bits)
    if num_bits < 32:
        what = f"{precision}: quantized weights are multiplied with activations of {num_bits} bits"
        if native.min_input_bits == 8 and precision != "fast":
            what += ", 4-bit ones with 8 bits, scaled by channel"
        elif native.supports_two_levels and precision == "fastest":
            what += ", those of up to 6 bits with 8 bits, in two levels of scales"
        assert f"kernels   {native}; {what}" in build_engine(config).startup_lines
        assert used[-1] == num_bits
    kv_dtype = "bfloat16" if precision == "auto" else "float32"
    assert f", {kv_dtype})" in "".join(build_engine(config).startup_lines)
    without = replace(in_integers, min_input_bits=32, supports_two_levels=False)
    monkeypatch.setattr(engine_builder, "load_native", lambda *_: without)
    name = "fast" if precision == "auto" else precision
    why = f"this processor has no {name} mode, inputs of products are not rounded"
    assert f"kernels   {native}; {why}" in build_engine(config).startup_lines
    assert used[-1] == 32


# The other modules of the package are imported by then.
LOAD_FROM: Final = """
import sys
import batching.backend.engine_builder
import mlx_cpu_kernels as package
package.__path__ = sys.argv[1:]
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it builds, for all instruction sets
@pytest.mark.usefixtures("buildable")
def test_what_is_built_can_be_loaded_and_names_no_place_of_this_machine(
    tmp_path: Path, native: Native
) -> None:
    error = build.build(tmp_path)
    assert error is None, error
    # In a process of its own: one has room for one such module.
    load = "from batching.backend.platforms.cpu.native_loader import load_native; print(load_native('auto'))"
    done = subprocess.run(
        [sys.executable, "-c", LOAD_FROM + load, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{native}\n"
    content = (tmp_path / build.NAME).read_bytes()
    for place in (ROOT, tmp_path, sys.prefix, sys.base_prefix):
        assert f"{place}/".encode() not in content


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_the_start_says_which_kernels_compute(mode: str) -> None:
    with Server(native=mode) as server:
        server.wait_for_line("^serving ")
        assert server.stop() == 0
    assert f"kernels   {load_native(mode)}" in server.log


def test_a_server_that_requires_missing_kernels_says_so_and_ends(tmp_path: Path) -> None:
    serve = "from app.cli import main; sys.exit(main())"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    required = {"MLX_SERVER_NATIVE": "require", "MLX_SERVER_DEVICE": "cpu", "MLX_SERVER_PORT": "0"}
    data = {"MLX_SERVER_DATA_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_FROM + serve],
        cwd=ROOT,
        env=environment | required | data,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [loading, reason] = done.stderr.splitlines()
    assert loading.startswith("loading ")
    assert reason.startswith("the native kernels are required, and the extension is not built; ")


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
    before = weight_bytes()
    built = build_engine(config)
    assert f"kernels   {native}" in built.startup_lines
    assert "float32), prefix cache on" in "".join(built.startup_lines)
    assert "tiny is computed as with MLX_SERVER_CPU_PRECISION=exact" in caplog.text
    used = weight_bytes() - before
    caplog.clear()
    rounded = build_engine(replace(config, cpu_precision="fast"))
    assert rounded.startup_lines != built.startup_lines
    assert not caplog.text
    # The first try left nothing.
    assert weight_bytes() - before <= 2 * used
    del built, rounded
