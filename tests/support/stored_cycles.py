"""Evicts blocks from a small pool, and reads them again from disk, in one process; prints what the process holds.

    python -m tests.support.stored_cycles MODEL FOLDER NUM_ENTRIES

The prompts of a round do not fit in the pool, so that each is read from the folder; a new one in each round has old ones
evicted there.  A line of JSON after each round: how many entries were read and written, blocks evicted, files that are
left, and resident MiB.
"""

import gc
import json
import os
import sys
from itertools import count
from pathlib import Path
from threading import Event
from typing import Final

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from scripts.server_process import resident_bytes

_MIB: Final = 1 << 20
_BLOCK_SIZE: Final = 64
_NUM_PROMPTS: Final = 4
_NUM_BLOCKS: Final = 10
# One prompt and its answer fit.
_POOL_BLOCKS: Final = 12
# As do the prompts of a round, and a few others, on disk.
_MAX_GIB: Final = (_NUM_PROMPTS + 2) * _NUM_BLOCKS * 1.05 / 1024


def _prompt(number: int) -> tuple[int, ...]:
    return tuple((number * 7 + i * (number % 5 + 1)) % 37 for i in range(_NUM_BLOCKS * _BLOCK_SIZE))


def _serve(loaded: LoadedEngine, number: int, has_read: Event) -> None:
    """Serve a prompt, and store what is new of it."""
    engine = loaded.engine
    sampling = SamplingParams(temperature=0)
    spec = SequenceSpec(prompt=_prompt(number), max_tokens=1, sampling=sampling)
    engine.add(BatchRequest(number, spec))
    while engine.has_work or engine.can_step:
        if not engine.can_step:
            assert has_read.wait(60)
            has_read.clear()
            engine.go_on()
        engine.step()
    assert loaded.store is not None
    loaded.store.flush()


def main(model: str, folder: Path, num_entries: int) -> None:
    config = EngineConfig(
        model=model,
        model_id="m",
        block_size=_BLOCK_SIZE,
        num_blocks=_POOL_BLOCKS,
        cpu_precision="exact",
        weights_cache_gib=0,
        kv_cache_dir=folder,
        kv_cache_gib=_MAX_GIB,
    )
    loaded, has_read = build_engine(config), Event()
    store = loaded.store
    assert store is not None
    store.call_when_read(has_read.set)
    new = count(_NUM_PROMPTS)
    while store.stats.num_read < num_entries:
        for number in [*range(_NUM_PROMPTS), next(new)]:
            _serve(loaded, number, has_read)
        gc.collect()
        stats, evicted = store.stats, loaded.engine.stats().num_evictions
        resident = resident_bytes(os.getpid()) / _MIB
        line = [stats.num_read, stats.num_written, evicted, store.num_entries, resident]
        sys.stdout.write(json.dumps(line) + "\n")
    loaded.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
