"""An engine that is closed gives everything back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batching.backend.loader import BUNDLED_MODEL
from tests.support.model_files import write_model

NUM_CYCLES = 20
# Before that, caches of libraries fill.
NUM_FIRST = 3
# Of MiB a cycle.
MOST = 1.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_bundled", [False, True])
def test_no_memory_and_no_thread_is_left_of_engines_that_were_closed(
    tmp_path: Path, is_bundled: bool
) -> None:
    model = BUNDLED_MODEL if is_bundled else str(write_model(tmp_path))
    command = [sys.executable, "-m", "tests.support.engine_cycles", model, str(NUM_CYCLES)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    resident, threads, held = zip(*map(json.loads, run.stdout.splitlines()), strict=True)
    assert len(resident) == NUM_CYCLES
    # One that serves the next engine.
    assert all(names == ["MainThread", "mlx"] for names in threads)
    assert len(set(held[NUM_FIRST:])) == 1
    growth = (resident[-1] - resident[NUM_FIRST]) / (NUM_CYCLES - NUM_FIRST - 1)
    assert growth < MOST, f"{growth:.2f} MiB a cycle: {[round(each) for each in resident]}"
