"""The table of published shapes, against servers with canned answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.models import main, options_for
from scripts.make_model.write import write_gguf
from tests.support.fake_server import FakeServer, Reply, canned, fake_server
from tests.support.tiny_shapes import tiny_shape

FEW = ["--rounds", "1", "--requests", "1", "--max-tokens", "3", "--warmup", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has a model already, so that none is made."""
    folder = tmp_path_factory.mktemp("models")
    write_gguf(tiny_shape("mixture"), folder / "mixture.gguf")
    return folder


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


def test_each_server_has_a_row(
    folder: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = ["--url", f"ours={server.url}", "--vs", f"peer={server.url}"]
    file = tmp_path / "results.json"
    words = [str(folder), "--shape", "mixture", *servers, *FEW, "--json", str(file)]
    assert main(words) == 0
    head, _, ours, peer = capsys.readouterr().out.splitlines()[-4:]
    cells = [cell.strip() for cell in ours.split("|")]
    assert cells[1:3] == ["mixture, 1 layers, 0.0 GiB", "ours"]
    assert all(float(cell) >= 0 for cell in cells[3:7])
    assert len(cells) == len(head.split("|")) == len(peer.split("|"))
    results = json.loads(file.read_text())
    titles = [result["load"]["label"] for result in results["mixture"]["results"]]
    assert titles == ["1 client"] * 2 + ["8 clients"] * 2 + ["1 client"] * 2
    assert {body["ignore_eos"] for body in server.bodies} == {True}


def test_a_failed_request_is_an_exit_status_and_a_dash(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_long(body: dict[str, object]) -> Reply:
        return Reply(("{}",), status=500) if len(str(body)) > 2000 else canned(body)

    with fake_server(fail_long) as server:
        words = [str(folder), "--shape", "mixture", "--url", server.url, "--vs", f"b={server.url}"]
        assert main([*words, *FEW]) == 1
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("| - |")
    assert "HTTP 500" in captured.err


def test_a_server_that_does_not_start_fails_its_shape_only(
    folder: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", server.url, "--vs-command", "no-such-command {model} {port}", *FEW]
    assert main([str(folder), "--shape", "mixture", *words]) == 1
    assert "mixture: no-such-command cannot be started" in capsys.readouterr().err


def test_every_server_gets_the_file_and_ours_drafts_nothing() -> None:
    ours, peer = options_for(Path("m.gguf"), ["--vs-command", "x=peer {model} {port}"]).servers
    assert ours.environment["MLX_SERVER_MODEL"] == "m.gguf"
    assert ours.environment["MLX_SERVER_MAX_DRAFT_TOKENS"] == "0"
    assert peer.command == ("peer", "m.gguf", "{port}")
