"""`python -m app` as a process of its own: what it prints before there is a server."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from huggingface_hub import constants

from app.cli import _load, main, make_manager
from app.settings import Settings, SettingsError
from batching import AdapterError, AdapterFile, ModelTooLarge, SchedulerManager
from tests.support.served_adapters import LAYERS, write_adapter
from tests.support.small_model import small_model
from tests.support.speaker import MODEL_ID, speaking_manager

ROOT: Final = Path(__file__).parents[2]


def run(*arguments: str, options: tuple[str, ...] = (), **settings: str) -> tuple[int, str, str]:
    """Return status, standard output and standard error."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    named = {f"MLX_SERVER_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, *options, "-m", "app", *arguments],
        cwd=ROOT,
        env=environment | named,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_help_comes_without_the_model_and_without_mlx() -> None:
    status, out, imports = run("serve", "--help", options=("-X", "importtime"))
    assert status == 0
    assert out.startswith("usage: mlx-batch-server [serve] [flags]")
    imported = set(re.findall(r"\| +([\w.]+)$", imports, re.MULTILINE))
    assert "app.settings" in imported
    assert not {"mlx", "mlx.core", "transformers"} & imported
    headings = re.findall(r"^(\w.*):$", out, re.MULTILINE)
    assert headings[:2] == ["options", "Model"]
    # Each stands above a setting.
    assert len(headings) == 15
    assert len(re.findall(r"^  --", out, re.MULTILINE)) == len(Settings.model_fields) + 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--prot=1"], "mlx-batch-server: unknown flag --prot; did you mean --port?\n"),
        (["--port=x"], "--port must be a valid integer, not 'x'\n"),
        (
            ["--kv-events=tcp://127.0.0.1:65536"],
            "--kv-events must be an endpoint like tcp://127.0.0.1:5557, not 'tcp://127.0.0.1:65536'\n",
        ),
        (
            ["--kv-events=tcp://127.0.0.1"],
            "--kv-events must be an endpoint like tcp://127.0.0.1:5557, not 'tcp://127.0.0.1'\n",
        ),
        (
            ["--kv-events-replay=ipc://a", "--port=0", "--data-dir={here}"],
            "--kv-events-replay needs MLX_SERVER_KV_EVENTS\n",
        ),
        (
            ["--kv-events=ipc://a", "--enable-prefix-cache=false"],
            "--kv-events needs --enable-prefix-cache\n",
        ),
        # One rule over two settings, of which one comes by flag.
        (
            ["--max-num-batched-tokens=4"],
            "--max-num-batched-tokens (4) must be at least MLX_SERVER_MAX_NUM_SEQS (5)",
        ),
        (["--port=9", "--api-keys-file", "{here}"], "--api-keys-file cannot be read: {here}: Is a"),
        (["--warm-file={here}"], "--warm-file cannot be read: {here}: it is no file\n"),
    ],
)
def test_a_bad_value_is_reported_by_what_has_set_it(
    flags: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_SERVER_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("MLX_SERVER_DEVICE", "cpu")
    assert main([flag.format(here=tmp_path) for flag in flags]) == 2
    assert capsys.readouterr().err.startswith(line.format(here=tmp_path))


@pytest.mark.timeout(240)
def test_a_pool_that_does_not_fit_is_rejected_by_what_has_set_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--num-blocks=99999999", "--port=0", "--device=cpu"]
    flags += ["--model", str(small_model())]
    assert main([*flags, f"--data-dir={tmp_path}"]) == 2
    assert re.fullmatch(
        r"--num-blocks: a KV pool of 99999999 blocks needs \d+ MiB; "
        r"\d+ MiB are free, which hold \d+ blocks",
        capsys.readouterr().err.splitlines()[-1],
    )


def test_a_dtype_of_the_cache_that_needs_kernels_is_rejected_by_what_has_set_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--kv-cache-dtype=INT8", "--native=off", "--port=0", "--device=cpu"]
    flags += ["--model", str(small_model())]
    assert main([*flags, f"--data-dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "--kv-cache-dtype: int8 needs the native kernels, which are off: switched off"
    )


def models_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **fields: Any) -> SchedulerManager:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-hub"))
    return make_manager(Settings(_env_file=None, device="cpu", **fields))


def test_models_of_folders_are_named_if_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("no model")
    manager = models_of(monkeypatch, tmp_path, models_dir=tmp_path, serve_hub_cache=True)
    assert manager.model_ids == ("smollm2-135m-instruct", "a", "b")
    assert [model.config.model for model in manager.models[1:]] == [
        str(tmp_path / "a.gguf"),
        str(tmp_path / "b"),
    ]
    with pytest.raises(SettingsError, match="MLX_SERVER_MODELS_DIR: cannot read"):
        models_of(monkeypatch, tmp_path, models_dir=tmp_path / "none")


def test_the_memory_of_all_models_is_what_the_machine_and_the_operator_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited = models_of(monkeypatch, tmp_path, max_memory_gib=0.05)
    with pytest.raises(ModelTooLarge, match=r"needs \d+ MiB, and 51 MiB are there for it"):
        limited.get("smollm2-135m-instruct")
    limited.close()


def test_pinned_models_that_do_not_fit_together_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.toml"
    model = "model = 'smollm2-135m-instruct'\npinned = true\n"
    file.write_text(f"[models.a]\n{model}[models.b]\n{model}")
    flags = ["--models-file", str(file), "--max-memory-gib=0.2", "--device=cpu", "--port=0"]
    assert main([*flags, f"--data-dir={tmp_path}"]) == 2
    assert re.fullmatch(
        r"the model 'b' needs \d+ MiB, and \d+ MiB are there for it beside \d+ MiB of pinned models",
        capsys.readouterr().err.splitlines()[-1],
    )


def test_a_mistake_in_a_file_of_models_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "models.toml"
    file.write_text("[models.a]\nmodle = 'm'\nmodel = 'm'\n")
    assert main(["--models-file", str(file), "--device=cpu"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"--models-file: {file}, line 2: models.a.modle is not a setting of a model; did you mean model?"
    )


def test_only_what_is_to_be_loaded_at_the_start_is(capsys: pytest.CaptureFixture[str]) -> None:
    manager = speaking_manager(model_ids=("a", "b"))
    assert _load(manager) == ["a speaker"]
    assert [engine.model.model_id for engine in manager.engines.loaded] == ["a"]
    assert capsys.readouterr().err == "loading a ...\n"
    manager.close()


def test_adapters_of_the_settings_are_opened_and_those_of_the_file_of_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [write_adapter(tmp_path / name) for name in "ab"]
    file = tmp_path / "models.toml"
    file.write_text(
        f"[models.other]\nmodel = 'x.gguf'\naliases = ['too']\n[models.other.adapters]\nb = '{folders[1]}'\n"
    )
    fields = {"model": "m.gguf", "models_file": file, "adapters": f"a={folders[0]}"}
    manager = models_of(monkeypatch, tmp_path, **fields)
    a, b = (manager.adapter(name) for name in "ab")
    assert a is not None and b is not None
    assert (a.base, b.base) == ("m", "other")
    assert manager.adapter("too:b") is b and manager.adapter("m:b") is None
    assert manager.resolve("other:b") == manager.resolve("b") == "other"
    assert [model.config.max_adapters for model in manager.models] == [8, 8]


@pytest.mark.parametrize(
    ("adapters", "line"),
    [
        ("a={here}/none", "there is no folder {here}/none"),
        ("a={here}", "adapter_config.json"),
        ("a:b={here}/a", "'a:b' cannot be the name of an adapter"),
        ("smollm2-135m-instruct={here}/a", "two models or adapters are named"),
        ("a={here}/a,a={here}/a", "--adapters: two adapters are named 'a'"),
        ("{here}/a", "--adapters: '{here}/a' lacks a name or a folder"),
    ],
)
def test_an_adapter_that_cannot_be_served_ends_the_start_with_one_line(
    adapters: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "a")
    assert main([f"--adapters={adapters.format(here=tmp_path)}", "--device=cpu"]) == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert line.format(here=tmp_path) in found


def test_an_adapter_that_does_not_fit_the_model_of_the_start_ends_it(tmp_path: Path) -> None:
    manager = speaking_manager(adapters=LAYERS)
    for name, inputs in (("fits", 8), ("wide", 9)):
        file = AdapterFile(write_adapter(tmp_path / name, inputs=inputs), name)
        manager.adapters.add(name, MODEL_ID, file, source="")
    with pytest.raises(AdapterError, match="the adapter wide does not fit the model"):
        _load(manager)
    manager.close()
