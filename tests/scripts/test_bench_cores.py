"""The table of threads, against servers with canned answers."""

import json
import sys
from pathlib import Path

import pytest

from scripts.bench.cores import default_counts, main, options_for
from scripts.bench.load.servers import ServerSpec
from tests.support import fake_server

FEW = ["--rounds", "1", "--requests", "1", "--max-tokens", "3", "--warmup", "0", "--clients", "2"]


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (1, [1]),
        (2, [1, 2]),
        (4, [1, 2, 3, 4]),
        (6, [1, 2, 3, 4, 6]),
        (16, [1, 2, 3, 4, 8, 16]),
        (40, [1, 2, 3, 4, 8, 16, 32, 40]),
    ],
)
def test_all_small_numbers_are_measured_and_then_twice_as_many(
    most: int, counts: list[int]
) -> None:
    assert default_counts(most) == counts


def test_each_server_has_its_threads_and_room_for_all_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLX_SERVER_BATCH_MAX_BATCH_SIZE", raising=False)
    specs = options_for([1, 4], []).servers
    assert [spec.name for spec in specs] == ["1 thread", "4 threads"]
    assert [spec.environment["MLX_SERVER_CPU_THREADS"] for spec in specs] == ["1", "4"]
    assert {spec.environment["MLX_SERVER_BATCH_MAX_BATCH_SIZE"] for spec in specs} == {"16"}


def test_the_environment_says_how_large_batches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVER_BATCH_MAX_BATCH_SIZE", "32")
    (spec,) = options_for([2], ["--clients", "32"]).servers
    assert spec.environment["MLX_SERVER_BATCH_MAX_BATCH_SIZE"] == "32"


@pytest.mark.parametrize("words", [["--url", "http://a"], ["--vs", "http://a"]])
def test_other_servers_are_not_compared(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        options_for([1], words)


@pytest.mark.parametrize(
    "words", [["--threads", "0"], ["--threads", "two"], ["--threads", "1", "--json", "-"]]
)
def test_a_command_line_that_makes_no_sense_is_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2


def test_the_table_has_a_row_for_each_number_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = (sys.executable, fake_server.__file__, "{port}")
    ours = ServerSpec("ours", command=fake)
    monkeypatch.setattr("scripts.bench.cli.our_server", lambda model: ours)
    file = tmp_path / "results.json"
    assert main(["--threads", "2,1", *FEW, "--json", str(file)]) == 0
    *_, one, two = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("|")] for row in (one, two)]
    assert [row[2] for row in cells] == ["1", "2"]
    assert cells[0][-2] == "1.00"
    assert float(cells[1][-2]) > 0
    results = json.loads(file.read_text())["results"]
    assert [result["server"] for result in results] == ["1 thread", "2 threads"]


def test_a_server_that_does_not_start_is_an_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ServerSpec("ours", command=(sys.executable, "-c", "raise SystemExit(3)", "{port}"))
    monkeypatch.setattr("scripts.bench.cli.our_server", lambda model: broken)
    assert main(["--threads", "1", *FEW]) == 1
    assert "ended with status 3" in capsys.readouterr().err
