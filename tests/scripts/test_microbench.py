"""What the microbenchmarks print and write; never how long anything took."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from batching.backend.platforms.cpu.native_loader import NoNative, load_native
from kernels.microbench.__main__ import main as time_kernels
from scripts.microbench.__main__ import main
from scripts.microbench.timing import Pace, compare

ENTRY_KEYS = {"name", "seconds", "p10", "p90"}


def test_without_a_model_all_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["scheduler", "blocks", "sampler", "attention"]
    path = tmp_path / "times.json"
    assert main([*names, "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert list(report) == ["machine", *names, "shares"]
    printed = capsys.readouterr().out
    for name in names:
        assert f"\n{name}\n" in printed
        for entry in report[name]:
            assert entry.keys() == ENTRY_KEYS
            assert 0 < entry["p10"] <= entry["seconds"] <= entry["p90"]
            assert entry["name"] in printed
    assert [entry["name"] for entry in report["scheduler"]] == [
        "256 rows, pool of 1,024",
        "256 rows, pool of 8,192",
        "256 rows, pool of 65,536",
        "256 rows, pool of 8,192, 256 requests later",
    ]


@pytest.mark.slow
def test_the_products_and_the_steps_are_the_bundled_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["products", "constraints", "steps", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "  1 rows" in printed
    assert " GB/s, " in printed
    assert "half of them constrained" in printed
    assert "  2 rows, context 128 " in printed


@pytest.mark.slow
@pytest.mark.skipif(isinstance(load_native("auto"), NoNative), reason="no native kernels")
def test_the_native_kernels_are_held_against_the_roofline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert time_kernels(["--quick"]) == 0
    printed = capsys.readouterr().out
    for name in ("float32, 1 rows", "4 bits, 4 rows", "attention, 8 bits, 1 rows x 128"):
        assert name in printed
    assert re.search(r"\d+ of \d+ GFLOP/s, \d+ of \d+ GB/s", printed)


@pytest.mark.skipif(isinstance(load_native("auto"), NoNative), reason="no native kernels")
def test_the_graph_of_a_step_is_built_and_not_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    assert main(["graph", "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [entry["name"] for entry in report["graph"]] == ["1 rows", "1 rows, kept"]
    assert sum(report["shares"].values()) == pytest.approx(100)
    printed, errors = capsys.readouterr()
    assert " µs a layer" in printed
    assert not errors


def test_cases_take_turns_and_the_first_call_of_a_turn_does_not_count() -> None:
    calls: list[str] = []
    timings = compare({name: partial(_slow, calls, name) for name in "ab"}, Pace(2, 3))
    assert "".join(calls) == "aaaabbbbaaaabbbb"
    assert [t.name for t in timings] == ["a", "b"]


def test_an_unknown_name_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stepz"])
    assert "no stepz; there are steps, products" in capsys.readouterr().err


def _slow(calls: list[str], name: str) -> None:
    """Take longer than the least a sample takes, so that each sample is one call."""
    calls.append(name)
    sum(range(100_000))
