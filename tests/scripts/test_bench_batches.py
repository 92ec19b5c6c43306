"""`python -m scripts.bench.batches` with the bundled model and little to do."""

import json
from pathlib import Path

import pytest

from scripts.bench.batches import main


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_ways_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_CPU_PRECISION", "exact")
    report = tmp_path / "report.json"
    words = ["--lines=6", "--max-tokens=4", "--rounds=1", "--requests=3", "--rate=20"]
    peer = "--vs-command=copy=cp {input} {output}"
    assert main([*words, peer, f"--json={report}"]) == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert set(found["seconds"]) == {"engine", "http", "batch", "run-batch", "copy"}
    assert set(found["live"]) == {"alone", "beside a batch"}
    shown = capsys.readouterr().out
    for name in ("engine", "http", "batch", "run-batch", "copy", "ttft_p99_ms", "e2e_p99_ms"):
        assert f"\n{name} " in shown
