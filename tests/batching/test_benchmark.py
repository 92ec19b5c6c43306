import json

import pytest

from batching.benchmark import main
from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from tests.support.fakes import ByteTokenizer, loaded_engine

ARGUMENTS = ["--model", "m", "--max-tokens", "5", "--requests", "6", "--batch-size", "3"]


def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
    limits = config.scheduler_config(num_blocks=64, model_context=512)
    return loaded_engine(limits, ByteTokenizer(), model_id=config.model_id)


def test_both_runs_serve_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json"], build) == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("sequential", "batched"):
        run = report[name]
        assert (run["num_requests"], run["num_output_tokens"]) == (6, 30)
        assert run["throughput"] == pytest.approx(30 / run["duration"])
        assert 0 < run["latency_p50"] <= run["latency_p99"] <= run["duration"]
    ratio = report["batched"]["throughput"] / report["sequential"]["throughput"]
    assert report["speedup"] == pytest.approx(ratio)


def test_a_person_gets_a_table_and_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS, build) == 0
    out, err = capsys.readouterr()
    assert "sequential    batch of 3" in out
    assert "output tokens" in out
    assert "speedup" in out
    assert "30/30" in err


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def reject(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        raise ModelLoadError(f"no {config.model}")

    assert main(ARGUMENTS, reject) == 2
    assert capsys.readouterr().err == "no m\n"


def test_a_count_below_one_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--requests", "0"])
    assert "0 is not a count" in capsys.readouterr().err
