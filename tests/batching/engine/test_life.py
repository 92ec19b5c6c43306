"""An engine that is closed gives everything back, and so do models that take turns."""

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
NUM_SWAPS = 500
# Blocks of a MiB that are read again, and what the process may grow by, in MiB.
NUM_READ = 1000
MOST_GROWTH = 32.0
# Bytes that one of the tiny models and its pool have at most, when the next one begins to load.
MOST_LEFT = 1 << 10


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.timeout(900)
def test_swaps_under_load_leave_nothing_and_fail_no_request(tmp_path: Path) -> None:
    models = [str(write_model(tmp_path / name, seed)) for seed, name in enumerate("ab")]
    command = [sys.executable, "-m", "tests.support.model_swaps", *models, str(NUM_SWAPS)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    loads, resident, held, threads, files, failed = zip(*lines, strict=True)
    assert loads[-1] == NUM_SWAPS
    assert set(failed) == {0}
    assert max(held) < MOST_LEFT
    assert len(set(threads)) == len(set(files)) == 1
    growth = (resident[-1] - resident[1]) / (loads[-1] - loads[1])
    assert growth < MOST, f"{growth:.3f} MiB a load: {[round(each) for each in resident]}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.timeout(600)
def test_no_memory_is_left_of_blocks_that_are_evicted_and_read_again(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    model = write_model(tmp_path / "model", max_position_embeddings=1024, **heads)
    command = [sys.executable, "-m", "tests.support.stored_cycles"]
    command += [str(model), str(tmp_path / "store"), str(NUM_READ)]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    num_read, num_written, evicted, left, resident = zip(
        *map(json.loads, run.stdout.splitlines()), strict=True
    )
    assert num_read[-1] >= NUM_READ
    assert evicted[-1] >= NUM_READ
    # Old ones have made room on disk, too.
    assert num_written[-1] > 2 * max(left)
    first = next(i for i, num in enumerate(num_read) if num >= NUM_READ // 5)
    assert max(resident[first:]) - resident[first] < MOST_GROWTH, [round(each) for each in resident]
