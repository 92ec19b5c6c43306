"""Each target takes its corpus within its limits, and each kind of fault is found and named."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS, corpus_of
from tests.fuzz.supervisor import Finding, run
from tests.fuzz.worker import Engine
from tests.support.rows import rows


def planted(folder: Path, data: bytes) -> dict[str, list[Path]]:
    path = folder / "input"
    path.write_bytes(data)
    return {"tests.fuzz.planted": [path]}


def test_each_target_takes_its_corpus_within_its_limits(tmp_path: Path) -> None:
    corpora = {f"tests.fuzz.targets.{target}": corpus_of(target) for target in TARGETS}
    done = run(corpora, "replay", tmp_path)
    assert not isinstance(done, Finding), done


@rows("target", TARGETS)
def test_a_corpus_is_small(target: str) -> None:
    assert 0 < sum(path.stat().st_size for path in corpus_of(target)) < 1 << 14


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"loops", "it takes too much time"),
        (b"fills the memory", "it raises"),
        (b"dies", "it ends by SIGABRT"),
        (b"ends", "it raises"),
        (b"waits", "it waits for ever"),
        (b"a fault", "it raises"),
    ],
)
def test_a_fault_is_named_with_its_input(data: bytes, reason: str, tmp_path: Path) -> None:
    grace = 5.0 if data == b"waits" else 60.0
    found = run(planted(tmp_path, data), "replay", tmp_path, grace=grace)
    assert isinstance(found, Finding)
    assert (found.data, found.reason) == (data, reason)


@pytest.mark.parametrize("engine", ["mutations", "atheris"])
def test_each_engine_finds_what_is_made_of_two_words(engine: Engine, tmp_path: Path) -> None:
    if not find_spec(engine) and engine == "atheris":
        pytest.skip("atheris is installed by make fuzz")
    found = run(planted(tmp_path, b"a"), engine, tmp_path, seconds=20)
    assert isinstance(found, Finding)
    assert b"fault" in found.data


def test_what_has_no_fault_ends_in_time(tmp_path: Path) -> None:
    done = run(planted(tmp_path, b""), "mutations", tmp_path)
    assert done == "tests.fuzz.planted\n0 inputs\n"


def test_a_target_that_cannot_begin_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named"):
        run({"tests.fuzz.targets.none": []}, "replay", tmp_path)
